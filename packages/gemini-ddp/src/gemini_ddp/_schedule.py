"""Following a plan: where in the recorded order a run is, and what may stay gathered there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class Entry(Generic[KeyT, ChunkT]):
    """What to do at one access of a plan.

    Attributes:
        key: what identifies the access; None for the one behind the last.
        due: the chunks to reduce, for they were complete on every rank when it began.
        ended: whose backward is over on every rank.
        prefetch: what to gather ahead.
        fetch: what to fetch ahead of its gather.
        drops: what stayed gathered until here, and no longer.
        resident: what stays gathered once the access is over.
        is_quiet: whether there is nothing to gather, to reduce or to release: what it uses has stayed gathered.
    """

    key: KeyT | None = None
    due: tuple[ChunkT, ...] = ()
    ended: tuple[Scope, ...] = ()
    prefetch: tuple[ChunkT, ...] = ()
    fetch: tuple[ChunkT, ...] = ()
    drops: tuple[ChunkT, ...] = ()
    resident: frozenset[ChunkT] = frozenset()
    is_quiet: bool = False


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
        position: the place of the current access in the trace, -1 before the first.
        current: what to do there.

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
        self._length = len(keys)
        self._places: dict[KeyT, list[int]] = {}
        for index, key in enumerate(keys):
            self._places.setdefault(key, []).append(index)
        self._entries: list[Entry[KeyT, ChunkT]] = [
            Entry(key, reduced, over) for key, reduced, over in zip(keys, due, ended, strict=True)
        ]
        if plan is not None:
            self._entries = list(_planned(self._entries, trace, plan))
        self._entries.append(Entry())  # behind the last, and by its index, -1, before the first
        self.rewind()

    def rewind(self) -> None:
        """Return to before the first access."""
        self._move(-1)

    def skip_to(self, key: KeyT | None) -> Iterator[KeyT]:
        """Move to just before the next access of ``key`` ahead, where there is one, or to the end if it is None.

        Yields:
            Each access that is skipped, when the position is there.
        """
        target = self._length
        if key is not None:
            places = self._places.get(key, [])
            place = bisect_right(places, self.position)
            target = places[place] if place < len(places) else 0
        while self.position + 1 < target:
            self._move(self.position + 1)
            self.deviations += 1
            assert self.current.key is not None, "only the end has none"
            yield self.current.key

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def follow(self, key: KeyT) -> Entry[KeyT, ChunkT] | None:
        """Move to the next access if that is one of ``key``, and return it."""
        entry = self._entries[self.position + 1]
        if entry.key != key:
            return None
        self.position += 1
        self.current = entry
        self._on_course = True
        return entry

    def jump_to(self, key: KeyT) -> None:
        """Move to an access out of order, which does not invalidate the rest.

        The position moves to the next access of that key, around the end if need be, or stays where there is none.
        """
        self.deviations += 1
        places = self._places.get(key)
        if places is None:
            self._on_course = False
        else:
            self._move(places[bisect_right(places, self.position) % len(places)])

    def _move(self, position: int) -> None:
        self.position = position
        self.current = self._entries[position]
        self._on_course = True

    def ends_next(self, scope: Scope) -> bool:
        """Whether a scope's backward is over at the next position."""
        return self._on_course and scope in self._entries[self.position + 1].ended

    def resident(self, *, before: bool = False) -> frozenset[ChunkT]:
        """Return what stays gathered at the current position, or the one before; nothing off the course."""
        if not self._on_course or self.position < before:
            return frozenset()
        return self._entries[self.position - 1].resident if before else self.current.resident


def _planned(
    entries: Sequence[Entry[KeyT, ChunkT]], trace: RecordedTrace[ChunkT], plan: Plan[ChunkT]
) -> Iterator[Entry[KeyT, ChunkT]]:
    """Yield each entry with what the plan has there."""
    resident: frozenset[ChunkT] = frozenset()
    for entry, access, step in zip(entries, trace.accesses, plan.steps, strict=True):
        kept = (resident | {*access.chunks, *step.prefetch}) - {*step.release}
        drops = tuple(chunk for chunk in resident if chunk not in kept | {*access.chunks})
        is_quiet = resident.issuperset(access.chunks) and not (step.prefetch or step.fetch or entry.due or drops)
        resident = kept
        yield replace(
            entry,
            prefetch=tuple(step.prefetch),
            fetch=tuple(step.fetch),
            drops=drops,
            resident=kept,
            is_quiet=is_quiet,
        )
