"""Making a chunk's full buffer valid: the shard is fetched from where it rests, then gathered over the ranks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gemini_chunk._collectives import Done, Handle, Waiting
from gemini_chunk._errors import ChunkError
from gemini_chunk._full import FullBuffer
from gemini_chunk._tiers import fill_with_poison

if TYPE_CHECKING:
    from gemini_chunk._chunk import Chunk


class Gathering:
    """The fetch and the gather of a chunk that are under way, and the gather's handle; fills the chunk's buffers.

    [Note: Fetching ahead of a gather]
    A shard that rests off the compute device is fetched first, without the other ranks: into memory of the shard's
    size, or with a single rank, whose shard is all of the chunk, straight into the full buffer. The gather then finds
    it on the device. A fetch is no promise: whatever changes or moves the shard forgets it, and so does a release.

    Attributes:
        is_under_way: whether something was fetched or a gather was started that has not been waited for.
    """

    def __init__(self, chunk: Chunk) -> None:
        self.is_under_way = False
        self._chunk = chunk
        self._running: Handle | None = None
        self._fetching: Handle | None = None
        self._fetched: Tensor | None = None
        self._is_staged = False

    @property
    def is_fetched(self) -> bool:
        """Whether the shard is on the device, or on its way there, for a gather that has not started."""
        return self._fetched is not None and self._running is None

    @property
    def can_fetch(self) -> bool:
        """Whether a fetch would bring something: the parameters rest elsewhere, and nothing has fetched them yet.

        Where a gradient lies in their place (see `Reduction`), or is about to, the gather has to put that right.
        """
        chunk = self._chunk
        is_there = chunk.is_gathered or chunk._full_valid or self.is_under_way
        return not is_there and chunk.rest is not chunk._device and not chunk._reduction.takes_place

    # -- fetching -----------------------------------------------------------------------------------------------------

    def start_fetch(self) -> Handle:
        """See `Chunk.start_fetch`."""
        chunk = self._chunk
        chunk._mover.finish()
        if not self.can_fetch:
            return Done()
        is_staged = chunk.world_size > 1
        if is_staged:
            target = chunk._device.allocate(chunk.shard_numel, chunk.dtype, f"{chunk.name} fetched shard")
        else:
            assert chunk._full is not None, "a closed chunk has a full buffer"
            chunk._full.take()
            target = chunk._full.own
        try:
            self._fetch_into(target, is_staged=is_staged)
        except Exception as error:
            self.forget_fetched()
            raise self._error("Fetching", error) from error
        return Waiting(lambda: self._wait_fetched(target))

    def _fetch_into(self, target: Tensor, *, is_staged: bool) -> None:
        chunk = self._chunk
        self._fetched, self._is_staged = target, is_staged
        self.is_under_way = True
        self._fetching = chunk.rest.outgoing.start(target, chunk._shard)
        chunk._device.receive(chunk.rest, chunk.shard_bytes)

    def _finish_fetch(self) -> None:
        if self._fetching is not None:
            self._fetching.wait()
            self._fetching = None
            self._chunk.rest.page_out(self._chunk._shard)

    def _wait_fetched(self, target: Tensor) -> None:
        if target is not self._fetched:
            return  # a gather has used it, or something has made it worthless
        try:
            self._finish_fetch()
        except Exception as error:
            self.forget_fetched()
            raise self._error("Fetching", error) from error

    def forget_fetched(self) -> None:
        """Give back what was fetched for a gather that has not started."""
        if self.is_fetched:
            self._drop_fetched()

    def _drop_fetched(self) -> None:
        if self._fetching is not None:
            with contextlib.suppress(Exception):  # nobody needs what it would have brought
                self._fetching.wait()
        fetched, self._fetched, self._fetching = self._fetched, None, None
        self.is_under_way = False
        if fetched is not None and self._is_staged:
            self._chunk._device.free(fetched)
        elif fetched is not None:
            self._chunk._drop_full()

    # -- gathering ----------------------------------------------------------------------------------------------------

    def start(self) -> Handle:
        """See `Chunk.start_gather`."""
        chunk = self._chunk
        if chunk.is_gathered:
            return Done()
        if self._running is None:
            chunk._need_closed()
            if chunk._mover.is_under_way:
                chunk._mover.finish()
            if chunk._reduction.takes_place:
                chunk._reduction.wait()
                chunk._reduction.give_place_back()
            if chunk._full_valid:
                chunk._show()
                return Done()
            self._running = self._begin()
            self.is_under_way = True
            chunk.gathers += 1
            chunk.sent_bytes += chunk.shard_bytes * (chunk.world_size - 1)
        return self

    def _begin(self) -> Handle:
        chunk = self._chunk
        full = chunk._full
        assert full is not None, "a closed chunk has a full buffer"
        full.take()
        try:
            if chunk.rest is chunk._device:
                return self._all_gather(full, chunk._shard)
            if self._fetched is None:
                self._fetch_into(full.own, is_staged=False)
            if chunk.world_size == 1:  # no other rank waits for this one
                return Waiting(lambda: self._gather_alone(full))
            self._use_fetched(full.own)
            return self._all_gather(full, full.own)
        except BaseException as error:
            self._give_up()
            if isinstance(error, Exception):
                raise self._error("Gathering", error) from error
            raise

    @torch.no_grad()
    def _use_fetched(self, own: Tensor) -> None:
        """Wait until this rank's part of the full buffer holds the shard; give staging memory back."""
        self._finish_fetch()
        fetched, self._fetched = self._fetched, None
        if fetched is not None and self._is_staged:
            own.copy_(fetched)
            self._chunk._device.free(fetched)

    def _gather_alone(self, full: FullBuffer) -> None:
        self._use_fetched(full.own)
        self._all_gather(full, full.own).wait()

    def _all_gather(self, full: FullBuffer, source: Tensor) -> Handle:
        chunk = self._chunk
        if chunk.keeps_gathered and chunk._device.poisons:
            first = chunk.rank * chunk.shard_numel
            fill_with_poison(full.travelling[:first])
            fill_with_poison(full.travelling[first + chunk.shard_numel :])
        return chunk._collectives.all_gather(full.travelling, source) if chunk.shard_numel else Done()

    def wait(self) -> None:
        """Finish the gather that was started, unless that is done."""
        if self._running is None:
            return
        chunk = self._chunk
        try:
            self._running.wait()
        except Exception as error:
            self._give_up()
            raise self._error("Gathering", error) from error
        self._running = None
        self.is_under_way = False
        chunk._full_valid = True
        chunk._show()
        if chunk.rest.has_pages:
            chunk.rest.page_out(chunk._shard)

    def settle(self) -> None:
        """Finish the gather that was started, or give back what was fetched for one that was not."""
        if self._running is not None:
            self.wait()
        else:
            self._drop_fetched()

    def abandon(self) -> None:
        """Forget what is under way in an interrupted step."""
        if self._running is not None:
            with contextlib.suppress(Exception):  # it was, or will be, reported where it is waited for
                self._running.wait()
            self._give_up()
        self.forget_fetched()

    def _give_up(self) -> None:
        self._running = None
        self._drop_fetched()
        self._chunk._drop_full()

    def _error(self, what: str, error: Exception) -> ChunkError:
        chunk = self._chunk
        return ChunkError(f"{what} {chunk.name} failed on rank {chunk.rank}: {error}")
