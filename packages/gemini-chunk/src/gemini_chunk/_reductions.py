"""The reductions of many chunks: one under way at a time, and results on their way to where they wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gemini_chunk._buffers import GradientBuffers
from gemini_chunk._chunk import Chunk
from gemini_chunk._collectives import Handle
from gemini_chunk._reduction import Reduction
from gemini_chunk._tiers import Tier


class Reductions:
    """Starts the reductions of a manager's chunks, and finishes each before the next one starts.

    So one buffer is filled while one is being reduced: more would only hold memory.

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
        self._running: Reduction | None = None
        self._landing: list[Reduction] = []

    def start(self, chunk: Chunk) -> Handle:
        """Start a chunk's reduction, and release the chunk."""
        if self._landing:
            self.land()
        if self._running is not None:
            self._finish_running()
        reduction = chunk._reduction
        reduction.start(self.buffers)
        if chunk.world_size > 1:
            self._running = reduction
        elif reduction.carrying is not None:
            self._landing.append(reduction)
        self._release(chunk)
        return reduction

    def finish(self) -> None:
        """Wait until all are over and their results have landed."""
        self._finish_running()
        self.land()

    def _finish_running(self) -> None:
        if (running := self._running) is not None:
            running.wait()  # it stays where its tier is full: another wait goes on from there
            self._running = None
            if running.carrying is not None:
                self._landing.append(running)

    def land(self) -> None:
        """Wait for gradients on their way to host or disk: no more than one chunk's takes memory of the device."""
        while self._landing:
            self._landing.pop().land()

    def forget(self, chunk: Chunk) -> None:
        """Forget a chunk that is about to be given up."""
        if self._running is chunk._reduction:
            self._running = None
        self._landing = [other for other in self._landing if other is not chunk._reduction]

    def forget_all(self) -> None:
        """Forget what is under way, for the chunks have, and free the buffers that nobody has borrowed."""
        self._running = None
        self._landing.clear()
        self.buffers.clear()

    def _release_unused(self) -> None:
        for chunk in self._chunks:
            if chunk.is_closed:
                self._release(chunk)

    def _set_aside(self) -> bool:
        """Bring off the device the gradients of one chunk that waits for others, the one that has waited longest."""
        return any(chunk.set_gradient_aside(tier) for chunk in reversed(self._chunks) for tier in self._others)
