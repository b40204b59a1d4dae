"""The memory that a chunk has, and whether its tensors show it."""

from __future__ import annotations

import torch
from torch import Tensor

from gemini_chunk._errors import ChunkError
from gemini_chunk._full import FullBuffer, accept_writes, hide, refuse_writes, show, written
from gemini_chunk._tiers import Tier, TierName
from gemini_chunk._uses import UsedLayout


class HeldLayout(UsedLayout):
    """A chunk's tensors with the memory that holds them: shard, master weights and full buffer.

    [Note: Bytes held once]
    A chunk that stays gathered, and a chunk of a single rank that rests on the compute device, hold their bytes once:
    the shard is this rank's slice of the full buffer.

    Attributes:
        rest: the tier where the shard rests.
        is_gathered: whether the tensors may be read now.
        keeps_gathered: whether release keeps the full buffer.
    """

    def _start_empty(self, device: Tier) -> None:
        """Begin without memory; `device` is the tier that computes."""
        self._device = device
        self._set_empty()

    def _set_empty(self) -> None:
        self.rest = self._device
        self.is_closed = self.is_gathered = self.keeps_gathered = False
        self._keep = self._full_valid = False
        self._shard = torch.empty(0, dtype=self.dtype)
        self._master: Tensor | None = None
        self._master_tier: Tier | None = None
        self._full: FullBuffer | None = None

    @property
    def tier(self) -> TierName:
        """Where the shard rests."""
        return self.rest.name

    @property
    def can_release(self) -> bool:
        """Whether the full buffer is there and nobody uses it."""
        return self.is_gathered and not self.keeps_gathered and self.users == 0

    def _need_closed(self) -> None:
        if not self.is_closed:
            raise ChunkError(f"{self.name} is open: close it first.")

    def _allocate(self, rest: Tier, keep_gathered: bool, master: Tier | None) -> None:
        self.rest, self._keep = rest, keep_gathered
        self._full = FullBuffer(self, self._device)
        if keep_gathered or (self.world_size == 1 and rest is self._device):
            self._alias()
        else:
            self._shard = rest.allocate(self.shard_numel, self.dtype, f"{self.name} parameters")
        if master is not None and self.trainable and (self.dtype != self.master_dtype or master is not rest):
            self._master_tier = master
            self._master = master.allocate(self.shard_numel, self.master_dtype, f"{self.name} master weights")
            self._master[self.valid_numel :] = 0
        self._shard[self.valid_numel :] = 0

    def _alias(self) -> None:
        """Let the shard be a slice of the full buffer from now on."""
        assert self._full is not None
        self._full.take()
        # Padding between the used elements and the next multiple of the world size travels in collectives.
        self._full.data[self.used_numel :] = 0
        self._shard = self._full.own
        self.keeps_gathered = True

    def _free_memory(self) -> None:
        if self._full is not None:
            if not self.keeps_gathered:
                self.rest.free(self._shard)
            self._full.free()
        if self._master is not None and self._master_tier is not None:
            self._master_tier.free(self._master)
        self._set_empty()

    def _drop_full(self) -> None:
        self._full_valid = False
        if not self.keeps_gathered and self._full is not None:
            self._full.free()

    def _show(self) -> None:
        if not self.is_gathered and (lost := written(self.tensors)):
            if self._full is not None:
                self._full.restore_placeholders()
            hide(lost)
            accept_writes(lost)
            refuse_writes(lost, self.name)
        self.is_gathered = True
        show(self.tensors)

    def _show_again(self) -> None:
        """Show what was hidden for a gradient in the parameters' place, and is valid."""
        if self.keeps_gathered and self._full_valid and not self.is_gathered:
            self._show()

    def _hide(self) -> None:
        if self._keeps_writes:
            accept_writes(self.tensors)
        self.is_gathered = False
        hide(self.tensors)

    @property
    def _keeps_writes(self) -> bool:
        """Whether what is written to the full buffer lasts, for neither master weights nor other ranks change it."""
        return self.keeps_gathered and self._master is None and (self.world_size == 1 or not self.trainable)

    def page_in(self, *, master: bool = False) -> None:
        """Tell that the shard, and maybe the master weights, are needed soon: from the disk they are read ahead."""
        self.rest.page_in(self._shard)
        if master and self._master is not None and self._master_tier is not None:
            self._master_tier.page_in(self._master)

    def _page_out(self) -> None:
        if self.rest.has_pages:
            self.rest.page_out(self._shard)
        if self._master is not None and self._master_tier is not None:
            self._master_tier.page_out(self._master)
