"""The reference's search written out naively: every candidate, every tensor. Slow, and obviously right."""

from __future__ import annotations

import math


def swept_chunk_numel(
    sizes: list[int],
    world_size: int,
    *,
    hidden_dim: int,
    search_range_m: float,
    min_chunk_size_m: float,
    filter_exlarge_params: bool,
) -> int:
    usual = [numel for numel in sizes if numel]
    if filter_exlarge_params:
        mean = sum(usual) / len(usual)
        deviation = math.sqrt(sum((numel - mean) ** 2 for numel in usual) / len(usual))
        usual = [numel for numel in usual if numel <= mean + 3 * deviation + 1e-9 * mean]
    start = math.ceil(max(round(min_chunk_size_m * 2**20), *usual, 0) / hidden_dim) * hidden_dim
    best_numel, best_waste = 0, -1
    for numel in range(start, start + round(search_range_m * 2**20) + 1, hidden_dim):
        waste, left = 0, 0
        for size in usual:
            if size > left:
                waste += left
                left = numel
            left -= size
        waste += left
        if best_waste < 0 or waste < best_waste:
            best_numel, best_waste = numel, waste
    return math.ceil(best_numel / world_size) * world_size


def real_waste(sizes: list[int], chunk_numel: int, world_size: int) -> int:
    """Pack as the reference's chunk manager does, and count the padding of every full buffer."""
    waste, left = 0, 0
    for size in sizes:
        if size > left:
            waste += left
            left = math.ceil(size / world_size) * world_size if size > chunk_numel else chunk_numel
        left -= size
    return waste + left
