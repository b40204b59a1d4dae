"""The reductions of many chunks: one under way at a time, and results on their way to where they wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from gemini_chunk._buffers import GradientBuffers
from gemini_chunk._chunk import Chunk
from gemini_chunk._collectives import Handle
from gemini_chunk._tiers import Tier

# One buffer is filled while one is being reduced: more would only hold memory.
_IN_FLIGHT = 1


class Reductions:
    """Starts the reductions of a manager's chunks, and finishes them in the order in which they were started.

    Args:
        chunks: the manager's own list.
        device: the tier that computes.
        others: where gradients may be set aside, the fastest first.
        release: gives a chunk's full buffer back, unless somebody uses it.

    Attributes:
        buffers: what gradients are collected in.
    """

    def __init__(
        self, chunks: Sequence[Chunk], device: Tier, others: Sequence[Tier], release: Callable[[Chunk], None]
    ) -> None:
        self.buffers = GradientBuffers(device, self.land, self.finish, self._release_unused, self._set_aside)
        self._chunks = chunks
        self._others = others
        self._release = release
        self._in_flight: deque[Chunk] = deque()
        self._landing: list[Chunk] = []

    def start(self, chunk: Chunk) -> Handle:
        """Start a chunk's reduction, and release the chunk."""
        self.land()
        while len(self._in_flight) >= _IN_FLIGHT:
            self._finish_first()
        handle = chunk.start_reduce(self.buffers)
        (self._landing if chunk.world_size == 1 else self._in_flight).append(chunk)
        self._release(chunk)
        return handle

    def finish(self) -> None:
        """Wait until all are over and their results have landed."""
        while self._in_flight:
            self._finish_first()
        self.land()

    def _finish_first(self) -> None:
        self._in_flight[0].wait_reduce()  # stays first where its tier is full: another wait goes on from there
        self._landing.append(self._in_flight.popleft())

    def land(self) -> None:
        """Wait for gradients on their way to host or disk: no more than one chunk's takes memory of the device."""
        while self._landing:
            self._landing.pop().wait_gradient()

    def forget(self, chunk: Chunk) -> None:
        """Forget a chunk that is given up."""
        self._in_flight = deque(other for other in self._in_flight if other is not chunk)
        self._landing = [other for other in self._landing if other is not chunk]

    def forget_all(self) -> None:
        """Forget what is under way, for the chunks have, and free the buffers that nobody has borrowed."""
        self._in_flight.clear()
        self._landing.clear()
        self.buffers.clear()

    def _release_unused(self) -> None:
        for chunk in self._chunks:
            if chunk.is_closed:
                self._release(chunk)

    def _set_aside(self) -> bool:
        """Bring off the device the gradients of one chunk that waits for others, the one that has waited longest."""
        return any(chunk.set_gradient_aside(tier) for chunk in reversed(self._chunks) for tier in self._others)
