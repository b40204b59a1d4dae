"""The choice of resting places within capacities: a greedy one, any one at all, and a better one by exchanges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gemini_placement._placement import (
    Ahead,
    ChunkPlacement,
    fits,
    gradient_bytes,
    lacking_tiers,
    needed_bytes,
)
from gemini_placement._traffic import step_cost
from gemini_placement.interfaces import ChunkFacts, TierName

_OTHERS: Final[tuple[TierName, ...]] = ("host", "disk")
# With more chunks than this the last one that fits or not is a small share of all.
_IMPROVED: Final = 12
_TRIED: Final = 4_000
# Where so many partial choices were looked at in vain, the capacities are taken as too small.
_LOOKED_AT: Final = 10_000
# Of more parts than this each is a small share of a tier: what the greedy choice cannot fit has no room.
_SEARCHED: Final = 200


@dataclass(frozen=True, slots=True)
class Problem:
    """Chunks to be placed, and what there is for them; with several ranks, whether chunks may stay gathered."""

    chunks: Sequence[ChunkFacts]
    capacities: Mapping[TierName, int | None]
    world_size: int
    ahead: Ahead
    may_keep: bool = True

    @property
    def keeps(self) -> tuple[bool, ...]:
        """Whether a chunk that rests on the device stays gathered: with one rank, always."""
        return (True,) if self.world_size == 1 else (False, True) if self.may_keep else (False,)

    def allows(self, choice: Sequence[ChunkPlacement]) -> bool:
        """Whether a choice fits the capacities."""
        return not lacking_tiers(needed_bytes(self.chunks, choice, self.ahead), self.capacities)


class Fitting:
    """The greedy choice, one part of a chunk at a time, in the order of forward."""

    def __init__(self, problem: Problem, margin_frac: float) -> None:
        self._problem = problem
        self._margin_frac = margin_frac
        chunks = problem.chunks
        self._kept = [False] * len(chunks)
        self._param_tiers: list[TierName | None] = [None] * len(chunks)
        self._optim_tiers: list[TierName | None] = [None if c.optim_bytes else "device" for c in chunks]
        self._by_size = sorted(range(len(chunks)), key=lambda index: -chunks[index].full_bytes)
        self._used: dict[TierName, int] = {"device": gradient_bytes(chunks), "host": 0, "disk": 0}

    def fill(self) -> list[ChunkPlacement] | None:
        """Return the choice, or None if a part found no place or the working set has no room."""
        self._fill_device()
        self._fill_others()
        if not fits(self._used["device"] + self._working_bytes(), self._problem.capacities, "device"):
            return None
        choice: list[ChunkPlacement] = []
        for kept, param, optim in zip(self._kept, self._param_tiers, self._optim_tiers, strict=True):
            if param is None or optim is None:
                return None
            choice.append(ChunkPlacement(keep_gathered=kept, param_tier=param, optim_tier=optim))
        return choice

    def _fill_device(self) -> None:
        """Bring to the device what fits, in the order of what each byte saves."""
        chunks = self._problem.chunks
        for index, chunk in enumerate(chunks):
            # With one rank the shard is the whole chunk: resting on the device, it is gathered for good.
            keep = self._problem.world_size == 1
            self._param_tiers[index] = "device"
            if not self._take_device(chunk.full_bytes if keep else chunk.shard_bytes, index if keep else None):
                self._param_tiers[index] = None
        margin = self._margin_bytes()
        for index, chunk in enumerate(chunks):
            if self._optim_tiers[index] is not None or (margin is not None and chunk.optim_bytes > margin):
                continue
            if self._take_device(chunk.optim_bytes):
                self._optim_tiers[index] = "device"
                margin = None if margin is None else margin - chunk.optim_bytes
        for index, chunk in enumerate(chunks if True in self._problem.keeps else ()):
            if self._param_tiers[index] == "device" and not self._kept[index]:
                self._take_device(chunk.full_bytes - chunk.shard_bytes, index)

    def _margin_bytes(self) -> int | None:
        capacity = self._problem.capacities["device"]
        if self._margin_frac == 0:
            return 0
        if capacity is None:
            return None
        return int(self._margin_frac * (capacity - self._used["device"] - self._working_bytes()))

    def _fill_others(self) -> None:
        """Send the rest to the host and what that cannot take to the disk, parameters first."""
        for index, chunk in enumerate(self._problem.chunks):
            if self._param_tiers[index] is None:
                self._param_tiers[index] = self._take_other(chunk.shard_bytes)
        for index, chunk in enumerate(self._problem.chunks):
            if self._optim_tiers[index] is None:
                self._optim_tiers[index] = self._take_other(chunk.optim_bytes)

    def _take_device(self, amount: int, keep: int | None = None) -> bool:
        """Add bytes to the device if they fit beside the working set, which loses the chunk ``keep``."""
        if keep is not None:
            self._kept[keep] = True
        if fits(self._used["device"] + amount + self._working_bytes(), self._problem.capacities, "device"):
            self._used["device"] += amount
            return True
        if keep is not None:
            self._kept[keep] = False
        return False

    def _take_other(self, amount: int) -> TierName | None:
        capacities = self._problem.capacities
        for tier in _OTHERS:
            if tier in capacities and fits(self._used[tier] + amount, capacities, tier):
                self._used[tier] += amount
                return tier
        return None

    def _working_bytes(self) -> int:
        total = found = 0
        for index in self._by_size:
            if found == self._problem.ahead.buffers:
                break
            if not self._kept[index]:
                total += self._problem.chunks[index].full_bytes
                found += 1
        return total + self._fetched_bytes()

    def _fetched_bytes(self) -> int:
        if not self._problem.ahead.max_fetch:
            return 0
        tiers = zip(self._problem.chunks, self._param_tiers, strict=True)
        return self._problem.ahead.fetched_bytes(chunk for chunk, tier in tiers if tier != "device")


def find_any(problem: Problem) -> list[ChunkPlacement] | None:
    """Return some choice that fits, or None; for capacities so tight that it matters what goes where.

    Parameters and then optimizer states are tried from the largest on, in each tier, the fullest first.
    """
    chunks = problem.chunks
    params = sorted(range(len(chunks)), key=lambda index: (-chunks[index].shard_bytes, index))
    optims = sorted((i for i in params if chunks[i].optim_bytes), key=lambda index: (-chunks[index].optim_bytes, index))
    sizes = [chunks[index].shard_bytes for index in params] + [chunks[index].optim_bytes for index in optims]
    if len(sizes) > _SEARCHED:
        return None
    to_come = [*itertools.accumulate(reversed(sizes), initial=0)][::-1]
    left: dict[TierName, float] = {
        tier: float("inf") if capacity is None else capacity for tier, capacity in problem.capacities.items()
    }
    left["device"] -= gradient_bytes(chunks)
    places = [ChunkPlacement(keep_gathered=False, param_tier="device", optim_tier="device") for _ in chunks]
    looked_at = itertools.count()

    def enter(number: int) -> bool:
        if number != len(params):
            return place(number)
        # What is kept is known now, and with it the working set.
        placed = list(zip(chunks, places, strict=True))
        working = problem.ahead.gathered_bytes(chunk for chunk, place in placed if not place.keep_gathered)
        working += problem.ahead.fetched_bytes(chunk for chunk, place in placed if place.param_tier != "device")
        left["device"] -= working
        found = left["device"] >= 0 and place(number)
        left["device"] += working
        return found

    def place(number: int) -> bool:
        if number == len(sizes):
            return True
        if to_come[number] > sum(left.values()):
            return False
        index = (*params, *optims)[number]
        for tier in sorted(left, key=lambda tier: (left[tier], tier)):
            before = places[index]
            if number >= len(params):
                options = [replace(before, optim_tier=tier)]
            elif tier == "device":  # with one rank what rests there is kept
                options = [replace(before, keep_gathered=keep) for keep in problem.keeps]
            else:
                options = [replace(before, param_tier=tier)]
            for option in options:
                kept = number < len(params) and option.keep_gathered
                amount = chunks[index].full_bytes if kept else sizes[number]
                if amount > left[tier] or next(looked_at) >= _LOOKED_AT:
                    continue
                places[index] = option
                left[tier] -= amount
                if enter(number + 1):
                    return True
                left[tier] += amount
                places[index] = before
        return False

    return places if enter(0) else None


def improve(problem: Problem, choice: list[ChunkPlacement]) -> list[ChunkPlacement]:
    """Return a choice that moves fewer bytes in a step, if one is found.

    Where there are few, all are tried; else the places of two chunks at a time are changed as long as that helps.
    """
    chunks, world_size = problem.chunks, problem.world_size
    if len(chunks) > _IMPROVED:
        return choice
    tiers: list[TierName] = [tier for tier in ("device", *_OTHERS) if tier in problem.capacities]
    options = [
        [(step_cost(chunk, place, world_size), place) for place in _options(chunk, tiers, problem.keeps)]
        for chunk in chunks
    ]
    current = [(step_cost(chunk, place, world_size), place) for chunk, place in zip(chunks, choice, strict=True)]
    if math.prod(map(len, options)) <= _TRIED:
        candidates: Iterator[tuple[tuple[int, ChunkPlacement], ...]] = itertools.product(*options)
        return _cheapest(problem, current, candidates)
    while True:
        changed = _pairs_changed(options, current)
        better = _cheapest(problem, current, changed)
        if better == [place for _, place in current]:
            return better
        current = [(step_cost(chunk, place, world_size), place) for chunk, place in zip(chunks, better, strict=True)]


def _cheapest(
    problem: Problem,
    current: Sequence[tuple[int, ChunkPlacement]],
    candidates: Iterator[tuple[tuple[int, ChunkPlacement], ...]],
) -> list[ChunkPlacement]:
    """Return the first of the cheapest choices that fit, or what there was if none is cheaper."""
    best = [place for _, place in current]
    least = sum(cost for cost, _ in current)
    for candidate in candidates:
        total = sum(cost for cost, _ in candidate)
        if total < least and problem.allows([place for _, place in candidate]):
            best, least = [place for _, place in candidate], total
    return best


def _pairs_changed(
    options: Sequence[Sequence[tuple[int, ChunkPlacement]]], current: Sequence[tuple[int, ChunkPlacement]]
) -> Iterator[tuple[tuple[int, ChunkPlacement], ...]]:
    for first, second in itertools.combinations(range(len(current)), 2):
        for one, other in itertools.product(options[first], options[second]):
            changed = list(current)
            changed[first], changed[second] = one, other
            yield tuple(changed)


def _options(chunk: ChunkFacts, tiers: Sequence[TierName], keeps: Sequence[bool]) -> Iterator[ChunkPlacement]:
    optim_tiers: Sequence[TierName] = tiers if chunk.optim_bytes else ("device",)
    for param, optim in itertools.product(tiers, optim_tiers):
        for keep in reversed(keeps) if param == "device" else (False,):
            yield ChunkPlacement(keep_gathered=keep, param_tier=param, optim_tier=optim)
