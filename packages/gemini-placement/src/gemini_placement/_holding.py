"""Which chunks stay gathered between their uses, for the memory that there is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic

from gemini_placement.interfaces import ChunkT, Phase

# Few gaps are searched for the best choice; of many, a simple choice comes near enough.
_SEARCHED = 40
_LOOKED_AT = 20_000


@dataclass(frozen=True, slots=True)
class _Gap(Generic[ChunkT]):
    """The accesses between two uses of a chunk, over which it may stay gathered; what that saves, and what it takes."""

    chunk: ChunkT
    start: int
    end: int
    saves: int
    num_bytes: int

    @property
    def between(self) -> range:
        return range(self.start + 1, self.end)


class _Holding(Generic[ChunkT]):
    """A choice of gaps, with the bytes left free at each access."""

    def __init__(self, loads: Sequence[int], limits: Sequence[int]) -> None:
        self.gaps: dict[_Gap[ChunkT], None] = {}
        self._free = [limit - load for load, limit in zip(loads, limits, strict=True)]

    @property
    def saves(self) -> int:
        return sum(gap.saves for gap in self.gaps)

    def fits(self, gap: _Gap[ChunkT]) -> bool:
        return min(self._free[gap.start + 1 : gap.end]) >= gap.num_bytes

    def add(self, gap: _Gap[ChunkT]) -> None:
        self.gaps[gap] = None
        self._give(gap, -gap.num_bytes)

    def remove(self, gap: _Gap[ChunkT]) -> None:
        del self.gaps[gap]
        self._give(gap, gap.num_bytes)

    def _give(self, gap: _Gap[ChunkT], num_bytes: int) -> None:
        between = slice(gap.start + 1, gap.end)
        self._free[between] = [free + num_bytes for free in self._free[between]]

    def fill(self, gaps: Sequence[_Gap[ChunkT]]) -> None:
        """Add what still fits, in the order given."""
        for gap in gaps:
            if gap not in self.gaps and self.fits(gap):
                self.add(gap)


def hold_over_short_gaps(
    uses: Sequence[Sequence[ChunkT]], phases: Sequence[Phase], kept: set[ChunkT], *, max_held: int = 0
) -> list[list[ChunkT]]:
    """Return, for each access, the chunks that stay gathered over it though it does not use them.

    A layer's small parameters often lie in one chunk and are used before and after those of others; without this,
    that chunk would be gathered again for each of them. Gaps within forward and within backward are bridged, the
    shortest first. With what an access uses itself, no more bytes are gathered than two of the largest chunks have, or
    than the access that uses most needs. Beyond that, ``max_held`` chunks stay from forward to backward: those that
    forward uses last, and backward first.
    """
    loads = _loads(uses, kept)
    gaps: list[_Gap[ChunkT]] = []
    turns: list[_Gap[ChunkT]] = []
    for gap in _gaps(uses, kept, lambda _: 1):
        (gaps if phases[gap.start] == phases[gap.end] else turns).append(gap)
    largest = max((chunk.full_bytes for use in uses for chunk in use if chunk not in kept), default=0)
    holding = _Holding[ChunkT](loads, [max([2 * largest, *loads])] * len(loads))
    holding.fill(sorted(gaps, key=lambda gap: (gap.end - gap.start, gap.start, gap.chunk.name)))
    for gap in sorted(turns, key=lambda gap: (gap.end - gap.start, gap.start, gap.chunk.name))[:max_held]:
        holding.add(gap)
    return _by_access(holding, len(uses))


def hold_in_room(
    uses: Sequence[Sequence[ChunkT]],
    kept: set[ChunkT],
    room: Sequence[int | None],
    saves: Callable[[ChunkT], int],
) -> list[list[ChunkT]]:
    """Return, for each access, the chunks that stay gathered over it though it does not use them.

    Where memory is short the chunk whose next use is farthest is given up. That is best for chunks of equal size;
    for others, what serves most per byte and access is tried too. Where gaps are few, the best choice is searched for.

    Args:
        uses: chunks of each access.
        kept: chunks that stay gathered anyhow.
        room: bytes for full buffers at each access, None without a limit.
        saves: what one gather of a chunk costs.
    """
    loads = _loads(uses, kept)
    all_bytes = sum(chunk.full_bytes for chunk in {chunk for use in uses for chunk in use})
    limits = [all_bytes if limit is None else limit for limit in room]
    gaps = list(_gaps(uses, kept, saves))
    best = sorted(gaps, key=lambda gap: (-gap.saves / (gap.num_bytes * len(gap.between)), gap.start, gap.chunk.name))
    farthest = _give_up_farthest(gaps, loads, limits)
    farthest.fill(best)
    densest = _Holding[ChunkT](loads, limits)
    densest.fill(best)
    holding = max(farthest, densest, key=lambda choice: choice.saves)
    if len(gaps) <= _SEARCHED:
        holding = _search(holding, gaps, _Holding[ChunkT](loads, limits))
    return _by_access(holding, len(uses))


def _loads(uses: Sequence[Sequence[ChunkT]], kept: set[ChunkT]) -> list[int]:
    return [sum(chunk.full_bytes for chunk in use if chunk not in kept) for use in uses]


def _gaps(
    uses: Sequence[Sequence[ChunkT]], kept: set[ChunkT], saves: Callable[[ChunkT], int]
) -> Iterator[_Gap[ChunkT]]:
    last: dict[ChunkT, int] = {}
    for index, use in enumerate(uses):
        for chunk in use:
            start = last.get(chunk, index)
            if chunk not in kept and index - start > 1:
                yield _Gap(chunk, start, index, saves(chunk), chunk.full_bytes)
            last[chunk] = index


def _give_up_farthest(gaps: Sequence[_Gap[ChunkT]], loads: Sequence[int], limits: Sequence[int]) -> _Holding[ChunkT]:
    """Hold everything for its next use, and where that is too much, give up what is used last."""
    starting: dict[int, list[_Gap[ChunkT]]] = {}
    for gap in gaps:
        starting.setdefault(gap.start, []).append(gap)
    open_gaps: list[_Gap[ChunkT]] = []
    holding = _Holding[ChunkT](loads, limits)
    for index, load in enumerate(loads):
        open_gaps = [gap for gap in open_gaps if gap.end > index]
        total = load + sum(gap.num_bytes for gap in open_gaps)
        if total > limits[index]:
            open_gaps.sort(key=lambda gap: (gap.end, gap.num_bytes, gap.chunk.name))
        while total > limits[index] and open_gaps:
            given_up = open_gaps.pop()
            total -= given_up.num_bytes
            holding.remove(given_up)
        for gap in starting.get(index, ()):
            open_gaps.append(gap)
            holding.add(gap)
    return holding


def _search(incumbent: _Holding[ChunkT], gaps: Sequence[_Gap[ChunkT]], empty: _Holding[ChunkT]) -> _Holding[ChunkT]:
    """Return the choice that saves most, found by branch and bound, or the best of those looked at."""
    order = sorted(gaps, key=lambda gap: (-gap.saves, len(gap.between), gap.start, gap.chunk.name))
    to_come = [*itertools.accumulate((gap.saves for gap in reversed(order)), initial=0)][::-1]
    best, best_saves = list(incumbent.gaps), incumbent.saves
    looked_at = itertools.count()

    def branch(number: int, saves: int) -> None:
        nonlocal best, best_saves
        if saves > best_saves:
            best, best_saves = list(empty.gaps), saves
        if saves + to_come[number] <= best_saves or next(looked_at) >= _LOOKED_AT:
            return
        gap = order[number]
        if empty.fits(gap):
            empty.add(gap)
            branch(number + 1, saves + gap.saves)
            empty.remove(gap)
        branch(number + 1, saves)

    branch(0, 0)
    for gap in best:
        empty.add(gap)
    return empty


def _by_access(holding: _Holding[ChunkT], count: int) -> list[list[ChunkT]]:
    held: list[list[ChunkT]] = [[] for _ in range(count)]
    for gap in holding.gaps:
        for index in gap.between:
            held[index].append(gap.chunk)
    return held
