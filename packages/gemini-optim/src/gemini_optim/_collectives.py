"""The only module that touches ``torch.distributed``. A group of None is one rank, and nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "all_gather_objects",
    "all_reduce_numbers",
    "broadcast",
    "group_rank",
    "group_size",
    "receive",
    "send",
    "sum_",
]


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks in ``group``."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """Return the index of this rank within ``group``."""
    return 0 if group is None else dist.get_rank(group)


def all_reduce_numbers(
    numbers: Sequence[float], op: Literal["sum", "max"], group: dist.ProcessGroup | None
) -> list[float]:
    """Reduce a few float64 numbers over ``group`` in one collective; every rank gets the same bits."""
    if group_size(group) == 1:
        return list(numbers)
    tensor = torch.tensor(numbers, dtype=torch.float64, device=_device(group))
    dist.all_reduce(tensor, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=group)
    return tensor.tolist()


def all_gather_objects(value: object, group: dist.ProcessGroup | None) -> list[object]:
    """Return what each rank of ``group`` passed, by rank. For small things: it pickles."""
    if group_size(group) == 1:
        return [value]
    values: list[object] = [None] * group_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def sum_(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Add up ``tensor`` over the ranks of ``group``, in place."""
    if group_size(group) > 1:
        dist.all_reduce(tensor, group=group)


def broadcast(tensor: Tensor, src: int, group: dist.ProcessGroup | None) -> None:
    """Fill ``tensor``, contiguous and of any device, with that of rank ``src`` of ``group``, byte for byte."""
    if group_size(group) == 1:
        return
    wire = _bytes_of(tensor).to(_device(group))
    dist.broadcast(wire, group=group, group_src=src)
    if group_rank(group) != src:
        _bytes_of(tensor).copy_(wire)


def send(tensor: Tensor, dst: int, group: dist.ProcessGroup | None) -> None:
    """Send ``tensor``, contiguous and of any device, to rank ``dst`` of ``group``, byte for byte."""
    dist.send(_bytes_of(tensor).to(_device(group)), group=group, group_dst=dst)


def receive(tensor: Tensor, src: int, group: dist.ProcessGroup | None) -> None:
    """Fill ``tensor``, contiguous, with what rank ``src`` of ``group`` sends."""
    wire = _bytes_of(tensor)
    if wire.device == _device(group):
        dist.recv(wire, group=group, group_src=src)
        return
    wire = torch.empty_like(wire, device=_device(group))
    dist.recv(wire, group=group, group_src=src)
    _bytes_of(tensor).copy_(wire)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device that the backend of ``group`` can send from."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")
