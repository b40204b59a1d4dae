"""The collectives that chunks need, and the only place that touches ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gemini_chunk._exchange import GlooExchange, Transfers, all_gather_single, as_bytes, reduce_scatter_single


class Handle(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when its result may be used on the current stream; raise what the operation raised."""


class Collectives(Protocol):
    """What a chunk asks of a group of ranks.

    Every rank of the group makes the same calls in the same order. Tensors are contiguous and flat, and stay alive and
    untouched until the handle's ``wait`` has returned.
    """

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""

    def all_gather(self, full: Tensor, shard: Tensor) -> Handle:
        """Start to fill ``full``, shape ``(world_size * n,)``, from each rank's ``shard``, shape ``(n,)``.

        ``shard`` may be this rank's own slice of ``full``.
        """

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Handle:
        """Start to write into ``shard``, shape ``(n,)``, the sum over ranks of this rank's slice of ``full``.

        The two do not overlap. The same values give the same bits in every run.
        """

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with rank 0's."""


class Done:
    """The handle of an operation that has nothing left to do."""

    def wait(self) -> None:
        """Return at once."""


class Waiting:
    """The handle of an operation that somebody else may have waited for already."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Finish the operation, unless that is done."""
        self._finish()


class LocalCollectives:
    """A group of one: no process group is needed."""

    rank = 0
    world_size = 1

    def all_gather(self, full: Tensor, shard: Tensor) -> Handle:
        """Copy the only shard."""
        if full.data_ptr() != shard.data_ptr():
            full.copy_(shard)
        return Done()

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Handle:
        """Copy: the sum over one rank."""
        shard.copy_(full)
        return Done()

    def broadcast(self, tensor: Tensor) -> None:
        """Leave rank 0's tensor as it is."""


class ProcessGroupCollectives:
    """The collectives of a ``torch.distributed`` process group: one call of the backend, or for gloo what is quicker.

    Args:
        process_group: the group; None is the default group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        on_gloo = self.world_size > 1 and "cpu:gloo" in dist.get_backend_config(process_group)
        self._exchange = GlooExchange(process_group) if on_gloo else None

    def all_gather(self, full: Tensor, shard: Tensor) -> Handle:
        """Start an all-gather, in bytes."""
        if self._exchange is not None and full.device.type == "cpu":
            return self._exchange.all_gather(full, shard)
        return Transfers(all_gather_single(as_bytes(full), as_bytes(shard), group=self._group, async_op=True))

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Handle:
        """Start a reduce-scatter with a sum."""
        if full.is_complex():  # the same sum, and backends know real numbers
            shard, full = torch.view_as_real(shard).flatten(), torch.view_as_real(full).flatten()
        if self._exchange is not None and full.device.type == "cpu":
            return self._exchange.reduce_scatter(shard, full)
        return Transfers(reduce_scatter_single(shard, full, op=dist.ReduceOp.SUM, group=self._group, async_op=True))

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast from the group's rank 0, in bytes."""
        dist.broadcast(as_bytes(tensor), group=self._group, group_src=0)


def make_collectives(process_group: dist.ProcessGroup | None) -> Collectives:
    """Return the collectives of ``process_group``, or of a group of one where none is initialised."""
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return LocalCollectives()
    if dist.get_world_size(process_group) == 1:
        return LocalCollectives()
    return ProcessGroupCollectives(process_group)
