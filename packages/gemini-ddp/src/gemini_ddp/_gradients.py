"""What a backward has of each chunk's gradients, and which chunks it has given to be reduced."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from torch import Tensor, nn

from gemini_ddp.interfaces import ChunkStore

ChunkT = TypeVar("ChunkT", bound=Hashable)

_BITS = 62  # of a number that ranks exchange


class Gradients(Generic[ChunkT]):
    """The gradients of one backward after another.

    [Note: When chunks are reduced]
    A reduction must be started at the same point on every rank, but gradients need not come at the same point, or at
    all: one rank may not use a parameter. So no gradient starts a reduction; the next entry of a module in backward
    does, and at that the ranks are alike. Where they follow a plan, it says which chunks to reduce there; elsewhere
    the ranks exchange which chunks are complete and reduce those that are complete on all. What is left is reduced at
    the end of backward, where the ranks also exchange which parameters have no gradient on any of them, and which
    chunks were reduced before their last gradient had come.

    Args:
        store: takes the gradients.
        params: all managed parameters, in an order that is the same on every rank.
    """

    def __init__(self, store: ChunkStore[ChunkT], params: Iterable[nn.Parameter]) -> None:
        self._store = store
        self._params = [param for param in params if param.requires_grad]
        self._chunks = tuple(dict.fromkeys(store.chunk_of(param) for param in reversed(self._params)))
        self._arrived: set[Tensor] = set()  # since the last reduced backward
        self._seen: set[Tensor] = set()  # in this backward
        self._missing: dict[ChunkT, int] = {}
        self._complete: set[ChunkT] = set()
        self._reduced: set[ChunkT] = set()
        self._late: set[ChunkT] = set()
        self._keeps_local = False

    def start(self, *, reduces: bool) -> None:
        """Begin a backward.

        Args:
            reduces: whether it ends with reduced gradients; otherwise they stay on this rank, for the next to add to.
        """
        self._keeps_local = not reduces
        self._missing = dict.fromkeys(self._chunks, 0)
        for param in self._params:
            if param.requires_grad:  # it may have been frozen since
                self._missing[self._store.chunk_of(param)] += 1

    def forget(self, *, arrived: bool = True) -> None:
        """Forget the last backward, and which parameters have gradients."""
        if arrived:
            self._arrived.clear()
        self._seen.clear()
        self._missing.clear()
        self._complete.clear()
        self._reduced.clear()
        self._late.clear()

    def take(self, param: Tensor, gradient: Tensor) -> None:
        """Take this rank's gradient of a parameter, or a part of it."""
        self._store.take_gradient(param, gradient)
        chunk = self._store.chunk_of(param)
        if chunk in self._reduced:
            self._late.add(chunk)
        elif param not in self._seen:
            self._missing[chunk] -= 1
            if self._missing[chunk] == 0:
                self._complete.add(chunk)
        self._seen.add(param)
        self._arrived.add(param)

    def reduce(self, chunks: Iterable[ChunkT]) -> None:
        """Let these chunks be reduced, those that have not been; gradients that did not come count as zero."""
        for chunk in chunks:
            if chunk not in self._reduced:
                self._reduced.add(chunk)
                self._complete.discard(chunk)
                if not self._keeps_local:
                    self._store.start_reduce(chunk)

    # What ranks tell each other at an entry of a module has the length of what they tell at the end of backward: a rank
    # may be at the one while others are at the other.

    @property
    def complete(self) -> list[int]:
        """Which chunks have all gradients on this rank and wait to be reduced, in numbers that ranks exchange."""
        numbers = _to_numbers(
            (chunk in self._complete for chunk in self._chunks) if self._complete else (), self._chunks
        )
        return numbers + [0] * _length(self._params)

    def complete_on_all(self, everyones: Sequence[Sequence[int]]) -> tuple[ChunkT, ...]:
        """Return the chunks that are complete on every rank, from every rank's `complete`."""
        columns = list(zip(*everyones, strict=True))
        return tuple(_chosen(self._chunks, map(_all, columns[: _length(self._chunks)])))

    @property
    def remains(self) -> list[int]:
        """Which chunks were reduced too early, and which parameters have no gradient, in the same form."""
        late = _to_numbers((chunk in self._late for chunk in self._chunks), self._chunks)
        return late + _to_numbers((param not in self._arrived for param in self._params), self._params)

    def finish(self, everyones: Sequence[Sequence[int]]) -> set[ChunkT]:
        """Reduce what is left and let the store finish.

        Args:
            everyones: every rank's `remains`.

        Returns:
            Chunks that were reduced before their last gradient had come, on any rank.
        """
        columns = list(zip(*everyones, strict=True))
        split = _length(self._chunks)
        late = dict.fromkeys(_chosen(self._chunks, map(_any, columns[:split])))
        unused = set(_chosen(self._params, map(_all, columns[split:])))
        if self._keeps_local:
            self._store.finish_backward(keep_local=True)
        else:
            for chunk in late:
                self._store.start_reduce(chunk)
            self._store.finish_backward(unused)
        self.forget(arrived=not self._keeps_local)
        return set(late)


def _length(items: Sequence[object]) -> int:
    return -(-len(items) // _BITS)


def _to_numbers(flags: Iterable[bool], items: Sequence[object]) -> list[int]:
    """Pack a flag for each item into numbers; missing ones are False."""
    numbers = [0] * _length(items)
    for index, flag in enumerate(flags):
        if flag:
            numbers[index // _BITS] |= 1 << index % _BITS
    return numbers


_ItemT = TypeVar("_ItemT")


def _chosen(items: Sequence[_ItemT], numbers: Iterable[int]) -> Iterable[_ItemT]:
    """Yield the items whose flags are set."""
    for place, number in enumerate(numbers):
        while number:
            lowest = number & -number
            yield items[place * _BITS + lowest.bit_length() - 1]
            number ^= lowest


def _all(numbers: Iterable[int]) -> int:
    first, *others = numbers
    for number in others:
        first &= number
    return first


def _any(numbers: Iterable[int]) -> int:
    first, *others = numbers
    for number in others:
        first |= number
    return first
