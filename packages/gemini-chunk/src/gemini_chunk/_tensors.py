"""Reading, writing and comparing one tensor of a chunk without gathering it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gemini_chunk._layout import held_by_rank
from gemini_chunk._states import TensorInfo

if TYPE_CHECKING:
    from gemini_chunk._chunk import Chunk


@torch.no_grad()
def write(chunk: Chunk, info: TensorInfo, value: Tensor) -> None:
    """Take this rank's part of a tensor's full value into the shard and the master weights."""
    flat = value.reshape(-1)
    part = chunk._slice_of(info)
    if chunk.keeps_gathered:
        info.view.copy_(value)
    elif part is not None:
        chunk._shard[part.in_shard].copy_(flat[part.in_tensor])
    if chunk._master is not None and part is not None:
        chunk._master[part.in_shard].copy_(flat[part.in_tensor])


@torch.no_grad()
def local_value(chunk: Chunk, info: TensorInfo) -> Tensor | None:
    """Return a copy of one tensor's value if this rank has all of its bytes, else None."""
    if chunk.is_gathered:
        return info.view.clone()
    part = chunk._slice_of(info)
    if info.numel and (part is None or part.numel < info.numel):
        return None
    value = torch.empty(info.shape, dtype=chunk.dtype, device=chunk._device.device)
    if part is not None:
        value.view(-1).copy_(resting_values(chunk)[part.in_shard])
        chunk._page_out()
    return value


def resting_values(chunk: Chunk) -> Tensor:
    """Return this rank's slice of the working parameters, maybe in the dtype of the master weights."""
    in_place = chunk.gradient is chunk._shard
    return chunk._master if in_place and chunk._master is not None else chunk._shard


@torch.no_grad()
def assemble(chunk: Chunk, info: TensorInfo, source: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one tensor from every rank's slice of it.

    Args:
        chunk: the tensor's chunk.
        info: the tensor.
        source: this rank's shard to read from, shape ``(shard_numel,)``.
        dtype: of what is returned.

    Returns:
        New memory on the compute device, shape of the tensor.
    """
    width = min(chunk.shard_numel, info.numel)
    mine = torch.zeros(width, dtype=dtype, device=chunk._device.device)
    part = chunk._slice_of(info)
    if part is not None:
        mine[: part.numel].copy_(source[part.in_shard])
    parts = mine.new_empty(chunk.world_size * width)
    if width:
        chunk._collectives.all_gather(parts, mine).wait()
    rows = parts.view(chunk.world_size, width)
    held = held_by_rank(info, chunk.world_size, chunk.shard_numel)
    chunk._page_out()
    return torch.cat([row[:numel] for row, numel in zip(rows, held, strict=True)]).view(info.shape)


def same_bits(value: Tensor, other: Tensor) -> bool:
    """Whether two tensors, the second contiguous, have the same elements in the same dtype; NaN is like itself."""
    flat = value.detach().to(other.device).contiguous().reshape(-1)
    return value.dtype == other.dtype and torch.equal(flat.view(torch.uint8), other.reshape(-1).view(torch.uint8))
