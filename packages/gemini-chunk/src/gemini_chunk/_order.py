"""The one order in which all ranks reduce their chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemini_chunk._chunk import Chunk
from gemini_chunk._collectives import Collectives


class ReduceOrder:
    """Which chunk is reduced next, and what this backward has completed.

    [Note: Order of reductions]
    A collective must be the same call on every rank, but gradients need not complete in the same order everywhere: one
    rank may not use a parameter at all. So there is one order, last registered first, until `adopt` takes over the
    order in which rank 0 completed its chunks. A chunk waits for those before it; what is left at the end of backward
    is reduced with zeros.

    Args:
        chunks: all chunks, in the order they were added; its owner changes it and calls `change`.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._order: list[Chunk] | None = None
        self._completed: dict[Chunk, None] = {}
        self._complete: set[Chunk] = set()
        self._next = 0

    @property
    def sequence(self) -> Sequence[Chunk]:
        """The trainable chunks, first to reduce first."""
        if self._order is None:
            self._order = [chunk for chunk in reversed(self._chunks) if chunk.trainable]
        return self._order

    @property
    def left(self) -> Sequence[Chunk]:
        """Chunks whose turn is to come in this backward."""
        return self.sequence[self._next :]

    @property
    def ready(self) -> Chunk | None:
        """The chunk whose turn it is, if it has its gradients."""
        order = self.sequence
        if self._next < len(order) and order[self._next] in self._complete:
            return order[self._next]
        return None

    def complete(self, chunk: Chunk) -> None:
        """Note that a chunk has all of its gradients."""
        self._complete.add(chunk)
        self._completed[chunk] = None

    def advance(self) -> None:
        """Go on to the next turn."""
        self._next += 1

    def end_backward(self) -> None:
        """Let turns start again."""
        self._next = 0
        self._complete.clear()

    def start_backward(self) -> None:
        """Forget in which order the last backward completed its chunks."""
        self._completed.clear()

    def adopt(self, collectives: Collectives, device: torch.device) -> None:
        """Take over the order in which rank 0 completed its chunks in its last backward."""
        trainable = [chunk for chunk in reversed(self._chunks) if chunk.trainable]
        place = {chunk: index for index, chunk in enumerate(self._chunks)}
        index = torch.tensor([place[chunk] for chunk in {**self._completed, **dict.fromkeys(trainable)}], device=device)
        if index.numel():
            collectives.broadcast(index)
        self._order = [self._chunks[i] for i in index.tolist()]

    def change(self) -> None:
        """Note that chunks were added or removed."""
        self._order = None
        known = set(self._chunks)
        self._completed = {chunk: None for chunk in self._completed if chunk in known}
        self._complete &= known
