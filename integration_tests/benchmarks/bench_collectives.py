"""What gloo's own collectives take beside ours, by size and number of ranks: the table of ``gemini_chunk._exchange``.

    python integration_tests/benchmarks/bench_collectives.py

Every way takes its turn in each round. For each it prints median milliseconds, and processor time of one rank.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from gemini_chunk import ProcessGroupCollectives
from ranks import run_ranks

_MIB = 2**18  # fp32 elements
SIZES_MIB = (1 / 16, 1 / 4, 1, 8, 32)
WORLDS = (2, 4)
WARM_UP = 3


def measure(rank: int, world_size: int, size_mib: float) -> dict[str, tuple[float, float]]:
    """Return median seconds and median processor seconds of each way; runs on every rank."""
    del rank
    warnings.simplefilter("ignore")  # torch 2.13 renamed two of them, and warns of the names that older ones know
    ours = ProcessGroupCollectives()
    full = torch.ones(int(size_mib * _MIB) // world_size * world_size)
    shard = torch.ones(full.numel() // world_size)
    arrived = torch.empty_like(full)

    def all_to_all_and_sum() -> None:
        dist.all_to_all_single(arrived, full)
        torch.sum(arrived.view(world_size, -1), 0, out=shard)

    ways: dict[str, Callable[[], object]] = {
        "all-gather": lambda: dist.all_gather_into_tensor(full, shard),
        "ours ": lambda: ours.all_gather(full, shard).wait(),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(shard, full),
        "all-reduce": lambda: dist.all_reduce(arrived),
        "all-to-all, sum": all_to_all_and_sum,
        "ours": lambda: ours.reduce_scatter(shard, full).wait(),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(WARM_UP + (40 if size_mib < 4 else 12)):
        for name, way in ways.items():
            full.fill_(1.0)
            dist.barrier()
            start, host = time.perf_counter(), time.process_time()
            way()
            taken[name].append((time.perf_counter() - start, time.process_time() - host))
    return {
        name: (statistics.median(t[0] for t in times[WARM_UP:]), statistics.median(t[1] for t in times[WARM_UP:]))
        for name, times in taken.items()
    }


def main() -> None:
    """Print the table."""
    table = Table(title="milliseconds, processor time of one rank")
    rows: list[list[str]] = []
    for world_size in WORLDS:
        for size in SIZES_MIB:
            measured: dict[str, tuple[float, float]] = run_ranks(measure, world_size, size, timeout_s=120.0)[0]
            if not rows:
                for column in ("ranks", "MiB", *measured):
                    table.add_column(column, justify="right")
            cells = [f"{step_s * 1e3:.2f}, {host_s * 1e3:.2f}" for step_s, host_s in measured.values()]
            rows.append([str(world_size), f"{size:g}", *cells])
            table.add_row(*rows[-1])
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
