"""The memory that a chunk has, and whether its tensors show it."""

from __future__ import annotations

import torch
from torch import Tensor

from gemini_chunk._errors import ChunkError
from gemini_chunk._full import FullBuffer, accept_writes, hide, is_written, refuse_writes, show
from gemini_chunk._tiers import Tier, TierName
from gemini_chunk._uses import UsedLayout


class HeldLayout(UsedLayout):
    """A chunk's tensors with the memory that holds them: shard, master weights and full buffer.

    [Note: Bytes held once]
    A chunk that stays gathered, and a chunk of a single rank that rests on the compute device, hold their bytes once:
    the shard is this rank's slice of the full buffer.
    """

    def _start_empty(self, device: Tier) -> None:
        """Begin without memory; `device` is the tier that computes."""
        self._device = device
        self._set_empty()

    def _set_empty(self) -> None:
        self._rest = self._device
        self._keep = self._aliased = self._closed = self._visible = self._full_valid = False
        self._shard = torch.empty(0, dtype=self.dtype)
        self._master: Tensor | None = None
        self._master_tier: Tier | None = None
        self._full: FullBuffer | None = None

    @property
    def tier(self) -> TierName:
        """Where the shard rests."""
        return self._rest.name

    @property
    def rest(self) -> Tier:
        """The tier where the shard rests."""
        return self._rest

    @property
    def is_gathered(self) -> bool:
        """Whether the tensors may be read now."""
        return self._visible

    @property
    def keeps_gathered(self) -> bool:
        """Whether release keeps the full buffer."""
        return self._aliased

    @property
    def can_release(self) -> bool:
        """Whether the full buffer is there and nobody uses it."""
        return self._visible and not self._aliased and self.users == 0

    @property
    def missing_bytes(self) -> int:
        """Bytes of the compute device that a gather would take now."""
        return 0 if self._full is not None and self._full.is_held else self.full_bytes

    def _need_closed(self) -> None:
        if not self._closed:
            raise ChunkError(f"{self.name} is open: close it first.")

    def _allocate(self, rest: Tier, keep_gathered: bool, master: Tier | None) -> None:
        self._rest, self._keep = rest, keep_gathered
        self._full = FullBuffer(self.numel, self.dtype, self._device, f"{self.name} full buffer", self.tensors)
        if keep_gathered or (self._world_size == 1 and rest is self._device):
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
        with torch.inference_mode(False):  # an optimizer will write to this view
            self._shard = self._own_part(self._full.data)
        self._aliased = True

    def _own_part(self, full: Tensor) -> Tensor:
        return full.narrow(0, self._rank * self.shard_numel, self.shard_numel)

    def _travelling(self, buffer: Tensor) -> Tensor:
        """The part of a full buffer that collectives carry: elements in use, rounded up to the world size."""
        return buffer.narrow(0, 0, self.shard_numel * self._world_size)

    def _free_memory(self) -> None:
        if self._full is not None:
            if not self._aliased:
                self._rest.free(self._shard)
            self._full.free()
        if self._master is not None and self._master_tier is not None:
            self._master_tier.free(self._master)
        self._set_empty()

    def _drop_full(self) -> None:
        self._full_valid = False
        if not self._aliased and self._full is not None:
            self._full.free()

    def _show(self) -> None:
        if not self._visible and (lost := [info for info in self.tensors if is_written(info)]):
            if self._full is not None:
                self._full.restore_placeholders()
            hide(lost)
            accept_writes(lost)
            refuse_writes(lost, self.name)
        self._visible = True
        show(self.tensors)

    def _show_again(self) -> None:
        """Show what was hidden for a gradient in the parameters' place, and is valid."""
        if self._aliased and self._full_valid and not self._visible:
            self._show()

    def _hide(self) -> None:
        if self._keeps_writes:
            accept_writes(self.tensors)
        self._visible = False
        hide(self.tensors)

    @property
    def _keeps_writes(self) -> bool:
        """Whether what is written to the full buffer lasts, for neither master weights nor other ranks change it."""
        return self._aliased and self._master is None and (self._world_size == 1 or not self.trainable)

    def page_in(self, *, master: bool = False) -> None:
        """Tell that the shard, and maybe the master weights, are needed soon: from the disk they are read ahead."""
        self._rest.page_in(self._shard)
        if master and self._master is not None and self._master_tier is not None:
            self._master_tier.page_in(self._master)

    def _page_out(self) -> None:
        self._rest.page_out(self._shard)
        if self._master is not None and self._master_tier is not None:
            self._master_tier.page_out(self._master)
