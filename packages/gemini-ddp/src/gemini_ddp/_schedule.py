"""Following a plan: where in the recorded order a run is, and what may stay gathered there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gemini_ddp.interfaces import Phase, Plan

ChunkT = TypeVar("ChunkT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RecordedAccess(Generic[ChunkT]):
    """One entry of a scope, as the first step recorded it."""

    phase: Phase
    chunks: tuple[ChunkT, ...]


@dataclass(frozen=True, slots=True)
class RecordedTrace(Generic[ChunkT]):
    """The order in which one step entered scopes."""

    accesses: tuple[RecordedAccess[ChunkT], ...]


class Schedule(Generic[ChunkT]):
    """A plan and the position in it.

    Args:
        keys: what identifies each access of the trace, in order.
        trace: the trace.
        plan: one step for each access.

    Raises:
        ValueError: the plan has another number of steps than the trace has accesses.
    """

    def __init__(self, keys: Sequence[Hashable], trace: RecordedTrace[ChunkT], plan: Plan[ChunkT]) -> None:
        if len(plan.steps) != len(trace.accesses):
            raise ValueError(f"The plan has {len(plan.steps)} steps for {len(trace.accesses)} accesses.")
        self.deviations = 0
        self._keys = list(keys)
        self._places: dict[Hashable, list[int]] = {}
        for index, key in enumerate(keys):
            self._places.setdefault(key, []).append(index)
        self._prefetch = [tuple(step.prefetch) for step in plan.steps]
        self._resident: list[frozenset[ChunkT]] = []
        resident: set[ChunkT] = set()
        for access, step in zip(trace.accesses, plan.steps, strict=True):
            resident |= {*access.chunks, *step.prefetch}
            resident -= {*step.release}
            self._resident.append(frozenset(resident))
        self._cursor = -1
        self._on_course = True

    def rewind(self) -> None:
        """Return to before the first access."""
        self._cursor = -1
        self._on_course = True

    def advance(self, key: Hashable) -> tuple[ChunkT, ...] | None:
        """Move to the access that ``key`` names and return what to prefetch there.

        An access out of order does not invalidate the rest: the position moves to the next access of that key, around
        the end if need be. For a key that the trace does not have, the answer is None.
        """
        expected = self._cursor + 1
        if expected < len(self._keys) and self._keys[expected] == key:
            self._cursor = expected
            self._on_course = True
            return self._prefetch[expected]
        self.deviations += 1
        places = self._places.get(key)
        if places is None:
            self._on_course = False
            return None
        self._cursor = places[bisect_right(places, self._cursor) % len(places)]
        self._on_course = True
        return self._prefetch[self._cursor]

    def keeps(self, chunk: ChunkT) -> bool:
        """Whether an idle chunk stays gathered at the current position."""
        return self._on_course and self._cursor >= 0 and chunk in self._resident[self._cursor]
