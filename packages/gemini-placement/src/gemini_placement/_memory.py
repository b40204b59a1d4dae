"""What a step takes on the device: resting bytes, full buffers, and the gradients on their way to the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic

from gemini_placement._placement import TIERS, Placement, has_master
from gemini_placement._traffic import gradient_tier
from gemini_placement.interfaces import ChunkT, TierName, Trace

# Fewer bytes of a reduced gradient go to the host at once; more, and all that go to the disk, in the background.
_AT_ONCE_BYTES = 2**18


def step_peaks(
    trace: Trace[ChunkT],
    placement: Placement[ChunkT],
    starting: Sequence[int],
    held: Sequence[int],
    early: Sequence[int],
) -> Mapping[TierName, int]:
    """Return the most bytes of model states per tier during a training step, once the optimizer has made its states.

    Args:
        trace: the accesses of the step.
        placement: where its chunks rest.
        starting: the most bytes of full buffers and fetched shards, beyond chunks that stay gathered, while each access
            begins.
        held: those bytes once it has begun.
        early: how many of them are given back before the access's gradients come.
    """
    resting = dict(placement.resting_bytes)
    for chunk in placement.chunks:
        resting[placement.of(chunk).optim_tier] -= chunk.padding_bytes
    memory = _GradientMemory(placement, resting["device"])
    peak = memory.used
    left = 0
    for index, access in enumerate(trace.accesses):
        memory.reduce_all_but(access.gradients)
        # A result that has no place yet comes beside all buffers, whatever is given back for the access.
        peak = max(peak, memory.used + min(left, starting[index]))
        memory.make_room(starting[index])
        peak = max(peak, memory.used + starting[index])
        left = held[index] - early[index]
        for chunk in access.gradients:
            memory.take(chunk, left)
        peak = max(peak, memory.used + left)
        if index + 1 == len(trace.accesses):
            peak = max(peak, memory.finish() + left)
    return {tier: max(peak, memory.used) if tier == "device" else resting[tier] for tier in TIERS}


class _GradientMemory(Generic[ChunkT]):
    """The device's bytes but for full buffers, as gradients come and go.

    A chunk borrows a buffer for its gradient until that is reduced: with several ranks, until the next reduction
    begins, for one runs at a time. Buffers that came back are lent again, or freed when they are too small for what is
    asked for. A result on its way to another tier is gone when the next but one reduction begins, or where memory is
    asked for that is not there. The result takes the place of the parameters where they have master weights beside
    them. Otherwise it stays in memory of its own until the optimizer has used it; with one rank that is the buffer.
    A sum of several backwards is among the bytes that rest, and each result on its way to it.

    Attributes:
        used: bytes now.
    """

    def __init__(self, placement: Placement[ChunkT], resting_bytes: int) -> None:
        self._placement = placement
        # Resting places have room for gradients in memory of their own, but those are not there when a step begins.
        waits = [chunk.shard_bytes for chunk in placement.chunks if self._stays(chunk)]
        self.used = resting_bytes - sum(waits)
        self._idle: list[tuple[bool, int]] = []
        self._lent: dict[ChunkT, int] = {}
        self._running: tuple[bool, int, int] | None = None
        self._leaving = self._leaves_next = 0

    def _stays(self, chunk: ChunkT) -> bool:
        """Whether the reduced gradient stays on the device in memory of its own."""
        place = self._placement.of(chunk)
        stays = chunk.trainable and place.param_tier == "device" and not has_master(chunk, place)
        return stays and not chunk.sum_bytes

    def take(self, chunk: ChunkT, gathered_bytes: int) -> None:
        """Lend a chunk a buffer, unless it has one."""
        if chunk in self._lent or self._take_idle(chunk):
            return
        self._land()
        self._free_idle()
        if not self._fits(gathered_bytes + chunk.full_bytes):
            self._wait()
            if self._take_idle(chunk):
                return
            self._free_idle()
        self._lent[chunk] = chunk.full_bytes
        self.used += chunk.full_bytes

    def _take_idle(self, chunk: ChunkT) -> bool:
        for index, (kind, num_bytes) in enumerate(self._idle):
            if kind == chunk.is_own_master and num_bytes >= chunk.full_bytes:
                self._lent[chunk] = self._idle.pop(index)[1]
                return True
        return False

    def _free_idle(self) -> None:
        self.used -= sum(num_bytes for _, num_bytes in self._idle)
        self._idle.clear()

    def _fits(self, more_bytes: int) -> bool:
        capacity = self._placement.device_capacity
        return capacity is None or self.used + more_bytes <= capacity

    def make_room(self, gathered_bytes: int) -> None:
        """Give back what is not needed if full buffers have no room beside it."""
        if not self._fits(gathered_bytes):
            self._wait()
            self._land()
            self._free_idle()

    def reduce_all_but(self, waiting: Sequence[ChunkT]) -> None:
        """Reduce the gradients of all chunks but those that wait for more."""
        for chunk in [chunk for chunk in self._lent if chunk not in waiting]:
            self._reduce(chunk)

    def _reduce(self, chunk: ChunkT) -> None:
        self._land()
        self._wait()
        place, buffer = self._placement.of(chunk), self._lent.pop(chunk)
        tier = gradient_tier(chunk, place)
        if self._placement.world_size == 1:
            if not self._stays(chunk):
                self._idle.append((chunk.is_own_master, buffer))
            return
        staged = 0
        if self._stays(chunk):
            self.used += chunk.shard_bytes
        elif chunk.sum_bytes or (tier != "device" and (chunk.stages_gradient or not has_master(chunk, place))):
            staged = chunk.shard_bytes
        self.used += staged
        self._running = (chunk.is_own_master, buffer, staged)
        leaves = tier == "disk" or (tier != "device" and staged >= _AT_ONCE_BYTES)
        self._leaves_next = staged if leaves else 0

    def _wait(self) -> None:
        if self._running is not None:
            kind, buffer, staged = self._running
            self._running = None
            self._idle.append((kind, buffer))
            self._leaving += self._leaves_next
            self.used -= staged - self._leaves_next

    def _land(self) -> None:
        self.used -= self._leaving
        self._leaving = 0

    def finish(self) -> int:
        """Reduce what is left and free all buffers; return the most bytes on the way."""
        most = self.used
        for chunk in list(self._lent):
            self._reduce(chunk)
            most = max(most, self.used)
        self._wait()
        self._land()
        self._free_idle()
        return most
