"""What changes a chunk's shard in the background: a move to another tier, and new weights."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from gemini_chunk._collectives import Done, Handle, Waiting
from gemini_chunk._errors import ChunkError
from gemini_chunk._tiers import Tier

if TYPE_CHECKING:
    from gemini_chunk._chunk import Chunk


class Mover:
    """The move or update of a chunk's shard that is under way, if there is one; reads and sets the chunk's buffers.

    Attributes:
        is_under_way: whether there is one, which `finish` would wait for.
    """

    def __init__(self, chunk: Chunk) -> None:
        self.is_under_way = False
        self._chunk = chunk
        self._tier: Tier | None = None
        self._target = torch.empty(0)
        self._copying: Handle = Done()
        self._starts = 0
        self._updating: Handle | None = None
        self._is_outdated = False
        self._updated = Waiting(self.finish_update)

    @torch.no_grad()
    def start(self, tier: Tier) -> Handle:
        """See `Chunk.start_move`."""
        chunk = self._chunk
        self.finish()
        if tier is chunk.rest:
            return Done()
        if chunk._keep or chunk.users:
            raise ChunkError(f"{chunk.name} cannot move: it {'keeps gathered' if chunk._keep else 'is in use'}.")
        chunk.wait_reduce()
        if chunk.gradient is not None:
            raise ChunkError(f"{chunk.name} cannot move: it holds a gradient.")
        chunk._finish_transfers()
        if chunk.world_size == 1 and tier is chunk._device:
            chunk.gather()
            old, rest = chunk._shard, chunk.rest
            chunk._alias()
            chunk.rest = tier
            rest.free(old)
            return Done()
        target = tier.allocate(chunk.shard_numel, chunk.dtype, f"{chunk.name} parameters")
        try:
            copier = chunk.rest.outgoing if tier is chunk._device else tier.incoming
            self._copying = copier.start(target, chunk._shard)
        except BaseException:
            tier.free(target)
            raise
        self._tier, self._target = tier, target
        self.is_under_way = True
        self._starts += 1
        number = self._starts
        return Waiting(lambda: self.finish() if self._starts == number else None)

    @torch.no_grad()
    def start_update(self) -> Handle:
        """Start to take the master weights over into the shard; the handle waits as `finish_update` does."""
        self._is_outdated = self.is_under_way = True
        with contextlib.suppress(Exception):  # who waits tries again
            self._updating = self._update()
        return self._updated

    def _update(self) -> Handle:
        chunk = self._chunk
        assert chunk._master is not None, "there are master weights to take over"
        assert chunk._master_tier is not None, "they rest somewhere"
        if chunk.keeps_gathered or chunk.rest is chunk._master_tier is chunk._device:
            chunk._shard.copy_(chunk._master)  # who reads the full buffer asks nobody
            return Done()
        copier = chunk._master_tier.outgoing if chunk.rest is chunk._device else chunk.rest.incoming
        return copier.start(chunk._shard, chunk._master)

    def finish_update(self) -> None:
        """Wait until the shard has the new weights.

        Raises:
            ChunkError: copying failed; it is tried again when the shard is needed next.
        """
        if not self._is_outdated:
            return
        try:
            updating, self._updating = self._updating or self._update(), None
            updating.wait()
        except Exception as error:
            chunk = self._chunk
            raise ChunkError(
                f"Taking new weights over into {chunk.name}, which rests on the {chunk.tier} tier, failed: {error}"
            ) from error
        self._is_outdated = self.is_under_way = False  # no move starts before an update is over, nor the other way
        self._chunk._page_out()

    def finish(self) -> None:
        """Wait for what is under way; after a move its copy is the shard.

        Raises:
            ChunkError: copying failed; the shard is where it was.
        """
        if self._is_outdated:
            self.finish_update()
        if self._tier is None:
            return
        chunk, tier, target = self._chunk, self._tier, self._target
        failed: Exception | None = None
        try:
            self._copying.wait()
        except Exception as error:
            failed = error
        self._tier, self._target, self._copying = None, torch.empty(0), Done()
        self.is_under_way = False
        if failed is not None:
            tier.free(target)
            raise ChunkError(f"Moving {chunk.name} to the {tier.name} tier failed: {failed}") from failed
        if chunk.keeps_gathered:  # a single rank's chunk that leaves the compute tier
            chunk._hide()
            chunk.keeps_gathered = False
            chunk._drop_full()
        else:
            chunk.rest.free(chunk._shard)
        tier.receive(chunk.rest, target.nbytes)
        chunk._shard, chunk.rest = target, tier
        chunk._page_out()
