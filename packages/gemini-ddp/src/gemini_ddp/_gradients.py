"""What a backward has of each chunk's gradients, and which chunks it has given to be reduced."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor, nn

from gemini_ddp._scopes import Scope
from gemini_ddp.interfaces import ChunkStore

ChunkT = TypeVar("ChunkT", bound=Hashable)

_BITS = 62  # of a number that ranks exchange

# Gradients of this many bytes are handed over together: one at a time, small ones cost more than their bytes.
_HELD_BYTES = 2**20


@dataclass(slots=True, eq=False)
class Slot(Generic[ChunkT]):
    """A trainable parameter and what became of its gradient.

    Attributes:
        param: the parameter.
        chunk: its chunk.
        key: its id, by which scopes expect it.
        num_bytes: of the gradient.
        users: scopes whose backward waits for the gradient.
        seen: whether the gradient, or a part of it, came in this backward.
        arrived: whether it came since the last backward that was reduced.
    """

    param: nn.Parameter
    chunk: ChunkT
    users: list[Scope] = field(default_factory=list)
    seen: bool = False
    arrived: bool = False
    key: int = field(init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.key = id(self.param)
        self.num_bytes = self.param.numel() * self.param.element_size()


class Gradients(Generic[ChunkT]):
    """The gradients of one backward after another.

    [Note: When chunks are reduced]
    A reduction must be started at the same point on every rank, but gradients need not come at the same point, or at
    all: one rank may not use a parameter. So no gradient starts a reduction; the next entry of a module in backward
    does, and at that the ranks are alike. Where they follow a plan, it says which chunks to reduce there; elsewhere
    the ranks exchange which chunks are complete and reduce those that are complete on all. What is left is reduced at
    the end of backward, where the ranks also exchange which parameters have no gradient on any of them, and which
    chunks were reduced before their last gradient had come. It is reduced in one order, so a rank that has the first
    of those complete starts it before it has heard from the others. No more than one: another may have to wait for it,
    and a rank that does not have it complete waits to hear.

    Args:
        store: takes the gradients.
        params: all managed parameters, in an order that is the same on every rank.

    Attributes:
        slots: one for each trainable parameter, in order.
    """

    def __init__(self, store: ChunkStore[ChunkT], params: Iterable[nn.Parameter]) -> None:
        self._store = store
        self.slots = [Slot(param, store.chunk_of(param)) for param in params if param.requires_grad]
        self._chunks = tuple(dict.fromkeys(slot.chunk for slot in reversed(self.slots)))
        self._held: list[tuple[Tensor, Tensor]] = []
        self._held_bytes = 0
        self._begun: set[ChunkT] = set()
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
        for slot in self.slots:
            if slot.param.requires_grad:  # it may have been frozen since
                self._missing[slot.chunk] += 1

    def forget(self, *, arrived: bool = True) -> None:
        """Forget the last backward, and which parameters have gradients."""
        for slot in self.slots:
            slot.seen = False
            slot.arrived = slot.arrived and not arrived
        self._held.clear()
        self._held_bytes = 0
        self._begun.clear()
        self._missing.clear()
        self._complete.clear()
        self._reduced.clear()
        self._late.clear()

    def take(self, slot: Slot[ChunkT], gradient: Tensor) -> None:
        """Take this rank's gradient of a parameter, or a part of it."""
        self._held.append((slot.param, gradient))
        self._held_bytes += slot.num_bytes
        chunk = slot.chunk
        if self._held_bytes >= _HELD_BYTES or chunk not in self._begun:  # the first brings the store to make room
            self._begun.add(chunk)
            self._hand_over()
        if chunk in self._reduced:
            self._late.add(chunk)
        elif not slot.seen:
            self._missing[chunk] -= 1
            if self._missing[chunk] == 0:
                self._complete.add(chunk)
        slot.seen = slot.arrived = True

    def _hand_over(self) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        if held:
            self._store.take_gradients(held)

    def reduce(self, chunks: Iterable[ChunkT]) -> None:
        """Let these chunks be reduced, those that have not been; gradients that did not come count as zero."""
        self._hand_over()
        for chunk in chunks:
            if chunk not in self._reduced:
                self._reduced.add(chunk)
                self._complete.discard(chunk)
                if not self._keeps_local:
                    self._store.start_reduce(chunk)

    def begin_to_finish(self) -> None:
        """At the end of backward, let the chunk be reduced that is to be reduced next, if it is known to be."""
        first = next((chunk for chunk in self._chunks if chunk not in self._reduced), None)
        if first is not None and first in self._complete:
            self.reduce((first,))

    @property
    def complete(self) -> list[int]:
        """Which chunks have all gradients on this rank and wait to be reduced, in numbers that ranks exchange."""
        return to_numbers([chunk in self._complete for chunk in self._chunks] if self._complete else (), self._chunks)

    def complete_on_all(self, everyones: Iterable[Sequence[int]]) -> tuple[ChunkT, ...]:
        """Return the chunks that are complete on every rank, from what begins with every rank's `complete`."""
        columns = list(zip(*everyones, strict=True))
        return tuple(chosen(self._chunks, map(_all, columns[: length(self._chunks)])))

    @property
    def remains(self) -> list[int]:
        """Which chunks were reduced too early, and which parameters have no gradient, in such numbers."""
        late = to_numbers([chunk in self._late for chunk in self._chunks] if self._late else (), self._chunks)
        return late + to_numbers([not slot.arrived for slot in self.slots], self.slots)

    def finish(self, everyones: Sequence[Sequence[int]]) -> set[ChunkT]:
        """Reduce what is left and let the store finish.

        Args:
            everyones: what begins with every rank's `remains`.

        Returns:
            Chunks that were reduced before their last gradient had come, on any rank.
        """
        self._hand_over()
        columns = list(zip(*everyones, strict=True))
        split = length(self._chunks)
        columns = columns[: split + length(self.slots)]
        late = dict.fromkeys(chosen(self._chunks, map(any_of, columns[:split])))
        unused = {slot.param for slot in chosen(self.slots, map(_all, columns[split:]))}
        if self._keeps_local:
            self._store.finish_backward(keep_local=True)
        else:
            used = {slot.chunk for slot in self.slots if slot.param not in unused}
            self.reduce(chunk for chunk in self._chunks if chunk in used)
            for chunk in late:
                self._store.start_reduce(chunk)
            self._store.finish_backward(unused)
        self.forget(arrived=not self._keeps_local)
        return set(late)


def length(items: Sequence[object]) -> int:
    """Return how many numbers hold a flag for each item."""
    return -(-len(items) // _BITS)


def to_numbers(flags: Iterable[bool], items: Sequence[object]) -> list[int]:
    """Pack a flag for each item into numbers; missing ones are False."""
    numbers = [0] * length(items)
    for index, flag in enumerate(flags):
        if flag:
            numbers[index // _BITS] |= 1 << index % _BITS
    return numbers


_ItemT = TypeVar("_ItemT")


def chosen(items: Sequence[_ItemT], numbers: Iterable[int]) -> Iterable[_ItemT]:
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


def any_of(numbers: Iterable[int]) -> int:
    """Return the flags that are set in any of the numbers."""
    first, *others = numbers
    for number in others:
        first |= number
    return first
