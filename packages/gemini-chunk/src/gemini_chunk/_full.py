"""The full buffer of a chunk: its storage, its account, and what the tensors are while it is there or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch

from gemini_chunk._errors import ChunkError
from gemini_chunk._layout import Layout
from gemini_chunk._pages import touch_in_huge_pages
from gemini_chunk._states import TensorInfo, TensorState
from gemini_chunk._tiers import Tier, fill_with_poison

_REPLACED = -1  # a version that no tensor has


class FullBuffer:
    """The memory of a whole chunk, taken and freed again and again under one storage object.

    [Note: The full buffer keeps its storage]
    Freeing gives the bytes of the storage back and taking brings them again, but the storage object lives as long as
    the chunk. Operators save views of a parameter for backward (a linear layer saves ``weight.t()``); those views
    become valid again with the next gather.

    Args:
        layout: what the buffer is for; its tensors get a cached view and a placeholder each.
        tier: where the bytes are taken and counted.

    Attributes:
        data: the elements, shape ``(numel,)``; without bytes while not held, like the views of it.
        own: this rank's part, shape ``(shard_numel,)``.
        travelling: what collectives carry, shape ``(world_size * shard_numel,)``.
        is_held: whether the bytes are there.
    """

    def __init__(self, layout: Layout, tier: Tier) -> None:
        dtype = layout.dtype
        self._tier = tier
        self._holder = f"{layout.name} full buffer"
        self._num_bytes = layout.full_bytes
        self.is_held = False
        with torch.inference_mode(False), torch.no_grad():
            self.data = torch.empty(layout.numel, dtype=dtype, device=tier.device)
            self.travelling = layout._travelling(self.data)
            self.own = self.data.narrow(0, layout.rank * layout.shard_numel, layout.shard_numel)
            nan = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
            self._nan = torch.full((), nan, dtype=dtype, device=tier.device)
            for info in layout.tensors:
                info.placeholder = self._nan.expand(info.shape)
                info.placeholder_address = info.placeholder.data_ptr()
                info.view = self.data.narrow(0, info.offset, info.numel).view(info.shape)
        self._storage = self.data.untyped_storage()
        self._storage.resize_(0)

    def restore_placeholders(self) -> None:
        """Make them NaN again: torch refuses most writes to an expanded tensor, but not ``fill_`` and ``zero_``."""
        with torch.no_grad():
            self._nan.fill_(float("nan") if self.data.is_floating_point() or self.data.is_complex() else 0)

    def take(self) -> None:
        """Take the bytes; their contents are undefined.

        Raises:
            TierFullError: the tier has no room; nothing has changed.
        """
        if self.is_held:
            return
        self._tier.charge(self._holder, self._num_bytes)
        try:
            self._storage.resize_(self._num_bytes)
            touch_in_huge_pages(self.data)
        except BaseException:
            self._tier.discharge(self._holder, self._num_bytes)
            raise
        self.is_held = True
        if self._tier.poisons:
            fill_with_poison(self.data)

    def free(self) -> None:
        """Give the bytes back."""
        if not self.is_held:
            return
        if self._tier.poisons:
            fill_with_poison(self.data)
        self._storage.resize_(0)
        self._tier.discharge(self._holder, self._num_bytes)
        self.is_held = False


def show(tensors: Iterable[TensorInfo]) -> None:
    """Let tensors be views of the full buffer."""
    for info in tensors:
        info.tensor.data = info.view
        info.address = info.view.data_ptr()
        if info.state is TensorState.FREE:  # legal by the table; thousands of tensors pass here in a step
            info.state = TensorState.HOLD


def hide(tensors: Iterable[TensorInfo]) -> None:
    """Let tensors be placeholders. What was written to them is not forgotten: `written` tells of it."""
    for info in tensors:
        if info.tensor.data_ptr() != info.address:
            info.version = _REPLACED
        info.tensor.data = info.placeholder
        info.address = info.placeholder_address
        if info.state is TensorState.HOLD:
            info.state = TensorState.FREE


def written(tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Return the tensors that somebody wrote to in place, or whose ``.data`` was assigned, if it is not known yet.

    Neither a write by way of ``.data``, nor one to the full buffer, counts as one.
    """
    return [info for info in tensors if info.tensor._version != info.version or info.tensor.data_ptr() != info.address]


def accept_writes(tensors: Iterable[TensorInfo]) -> None:
    """Let what was written in place to tensors so far be known."""
    for info in tensors:
        info.version = info.tensor._version


def refuse_writes(lost: Sequence[TensorInfo], chunk: str) -> NoReturn:
    """Tell of writes that are lost.

    Args:
        lost: the tensors that were written to.
        chunk: name of the chunk.

    Raises:
        ChunkError: always.
    """
    raise ChunkError(
        f"{[info.name for info in lost]} of {chunk} were written to, in place or by assigning .data. That is lost, for "
        "their values lie in shards. Let a module compute with a changed weight (weight.clamp(...), say) instead of "
        "changing its own (as Embedding(max_norm=...) does), and overwrite values between steps with load(), or "
        "load_state_dict() of the wrapped model."
    )
