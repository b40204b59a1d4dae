"""Following a plan: where in the recorded order a run is, and what may stay gathered there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gemini_ddp._scopes import Scope
from gemini_ddp.interfaces import Phase, Plan

ChunkT = TypeVar("ChunkT", bound=Hashable)
KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RecordedAccess(Generic[ChunkT]):
    """One entry of a scope, as the first step recorded it; its attributes are those of `interfaces.Access`."""

    phase: Phase
    chunks: tuple[ChunkT, ...]
    gradients: tuple[ChunkT, ...] = ()
    held: tuple[ChunkT, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedTrace(Generic[ChunkT]):
    """The order in which one step entered scopes."""

    accesses: tuple[RecordedAccess[ChunkT], ...]


def plan_text(trace: RecordedTrace[ChunkT], plan: Plan[ChunkT]) -> str:
    """Return what a plan does in words that ranks can compare: chunks are numbered in the order of the trace."""
    numbers = {chunk: number for number, chunk in enumerate(dict.fromkeys(c for a in trace.accesses for c in a.chunks))}
    return repr(
        [
            [[numbers.get(chunk, -1) for chunk in part] for part in (step.prefetch, step.fetch, step.release)]
            for step in plan.steps
        ]
    )


class Schedule(Generic[KeyT, ChunkT]):
    """A plan and the position in it.

    Args:
        keys: what identifies each access of the trace, in order.
        trace: the trace.
        plan: one step for each access; None gathers on demand.
        due: for each access, the chunks that were complete on every rank when it began.
        ended: for each access, whose backward was over on every rank when it began.

    Attributes:
        has_plan: whether there is a plan, or only a trace.
        deviations: accesses that came out of the recorded order so far.

    Raises:
        ValueError: the plan has another number of steps than the trace has accesses.
    """

    def __init__(
        self,
        keys: Sequence[KeyT],
        trace: RecordedTrace[ChunkT],
        plan: Plan[ChunkT] | None,
        due: Sequence[tuple[ChunkT, ...]],
        ended: Sequence[tuple[Scope, ...]],
    ) -> None:
        if plan is not None and len(plan.steps) != len(trace.accesses):
            raise ValueError(f"The plan has {len(plan.steps)} steps for {len(trace.accesses)} accesses.")
        self.has_plan = plan is not None
        self.deviations = 0
        self._keys = list(keys)
        self._due = list(due)
        self._ended = list(ended)
        self._places: dict[KeyT, list[int]] = {}
        for index, key in enumerate(keys):
            self._places.setdefault(key, []).append(index)
        self._prefetch: list[tuple[ChunkT, ...]] = [()] * len(self._keys)
        self._fetch: list[tuple[ChunkT, ...]] = [()] * len(self._keys)
        self._drops: list[tuple[ChunkT, ...]] = [()] * len(self._keys)
        self._resident: list[frozenset[ChunkT]] = [frozenset()] * len(self._keys)
        self._is_quiet = [False] * len(self._keys)
        if plan is not None:
            self._prefetch = [tuple(step.prefetch) for step in plan.steps]
            self._fetch = [tuple(step.fetch) for step in plan.steps]
            resident: set[ChunkT] = set()
            for index, (access, step) in enumerate(zip(trace.accesses, plan.steps, strict=True)):
                self._is_quiet[index] = resident.issuperset(access.chunks) and not (
                    step.prefetch or step.fetch or self._due[index] or self._ended[index]
                )
                kept = (resident | {*access.chunks, *step.prefetch}) - {*step.release}
                self._drops[index] = tuple(chunk for chunk in resident if chunk not in kept | {*access.chunks})
                self._is_quiet[index] = self._is_quiet[index] and not self._drops[index]
                resident = kept
                self._resident[index] = frozenset(kept)
        self._cursor = -1
        self._on_course = True

    def rewind(self) -> None:
        """Return to before the first access."""
        self._cursor = -1
        self._on_course = True

    def skip_to(self, key: KeyT | None) -> Iterator[KeyT]:
        """Move to just before the next access of ``key`` ahead, where there is one, or to the end if it is None.

        Yields:
            Each access that is skipped, when the position is there.
        """
        target = len(self._keys)
        if key is not None:
            places = self._places.get(key, [])
            place = bisect_right(places, self._cursor)
            target = places[place] if place < len(places) else 0
        while self._cursor + 1 < target:
            self._cursor += 1
            self.deviations += 1
            yield self._keys[self._cursor]

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def follows(self, key: KeyT) -> bool:
        """Move to the next access if that is one of ``key``; return whether it is."""
        expected = self._cursor + 1
        if expected < len(self._keys) and self._keys[expected] == key:
            self._cursor = expected
            self._on_course = True
            return True
        return False

    def jump_to(self, key: KeyT) -> None:
        """Move to an access out of order, which does not invalidate the rest.

        The position moves to the next access of that key, around the end if need be, or stays where there is none.
        """
        self.deviations += 1
        places = self._places.get(key)
        self._on_course = places is not None
        if places is not None:
            self._cursor = places[bisect_right(places, self._cursor) % len(places)]

    @property
    def prefetch(self) -> tuple[ChunkT, ...]:
        """What to gather ahead at the current position."""
        return self._prefetch[self._cursor] if self._on_course else ()

    @property
    def fetch(self) -> tuple[ChunkT, ...]:
        """What to fetch ahead of its gather at the current position."""
        return self._fetch[self._cursor] if self._on_course else ()

    @property
    def drops(self) -> tuple[ChunkT, ...]:
        """What stayed gathered until the current position, and no longer."""
        return self._drops[self._cursor]

    @property
    def is_quiet(self) -> bool:
        """Whether there is nothing to do at the current position: what it uses has stayed gathered."""
        return self._is_quiet[self._cursor]

    @property
    def position(self) -> int:
        """The place of the current access in the trace."""
        return self._cursor

    @property
    def ended(self) -> tuple[Scope, ...]:
        """Whose backward is over at the current position."""
        return self._ended[self._cursor]

    def ends_next(self, scope: Scope) -> bool:
        """Whether a scope's backward is over at the next position."""
        return self._on_course and self._cursor + 1 < len(self._keys) and scope in self._ended[self._cursor + 1]

    @property
    def due(self) -> tuple[ChunkT, ...]:
        """The chunks to reduce at the current position."""
        return self._due[self._cursor]

    def keeps(self, chunk: ChunkT, *, before: bool = False) -> bool:
        """Whether an idle chunk stays gathered at the current position, or the one before."""
        position = self._cursor - before
        return self._on_course and position >= 0 and chunk in self._resident[position]
