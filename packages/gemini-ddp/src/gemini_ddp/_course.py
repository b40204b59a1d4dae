"""The course of a step: at each entry of a scope, what to gather, to release and to reduce, alike on every rank."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import nn

from gemini_ddp._errors import ZeroDDPError
from gemini_ddp._gradients import Gradients
from gemini_ddp._ranks import Ranks
from gemini_ddp._schedule import RecordedAccess, RecordedTrace, Schedule
from gemini_ddp._scopes import Scope
from gemini_ddp.interfaces import ChunkStore, Phase, Planner

ChunkT = TypeVar("ChunkT", bound=Hashable)

Mode = tuple[bool, bool]  # whether the model trains, whether gradients are recorded

_Key = tuple[Scope, Phase]
_END = -1  # what a rank says that is at the end of a pass, in the place of the scope it enters


@dataclass(slots=True)
class _Recorded(Generic[ChunkT]):
    """An access of a step that is being recorded, and the chunks that were due at it."""

    key: _Key
    due: tuple[ChunkT, ...]


@dataclass(slots=True)
class _Run(Generic[ChunkT]):
    """A step under way: its mode or None, the schedule it follows or the trace it records."""

    mode: Mode | None
    schedule: Schedule[_Key, ChunkT] | None = None
    recording: list[_Recorded[ChunkT]] | None = None


class Course(Generic[ChunkT]):
    """Where steps are, and what that means for the store.

    [Note: Ranks stay together]
    Gathers and reductions are collectives, so all ranks must come to them in one order. Where they follow a plan that
    they recorded together, they do so without a word. Everywhere else, that is in the first step of each mode and
    where a step leaves the plan, they tell each other at each entry of a scope which one it is.

    In forward another one is an error: a rank cannot enter what its data did not choose. In backward it may be that the
    loss of a rank follows from other results of the same modules. There each rank goes along with what others enter,
    in the order in which backward would: it gathers and releases. What only some ranks entered is in the plan of all.

    Args:
        store: holds the parameters.
        planner: turns the first step's trace into a plan; None gathers on demand and releases at the next scope.
        ranks: who else runs the model.
        gradients: those of the backward under way.
        scopes: all scopes, by their index.
        give_back: ends the use of something that is gathered and may be gathered again; returns whether there was any.
        scatter_after_inference: whether a pass without gradients leaves nothing gathered.
        debug: let the ranks compare where they are at each entry of a scope, on the plan as well.
    """

    def __init__(
        self,
        store: ChunkStore[ChunkT],
        planner: Planner[ChunkT] | None,
        ranks: Ranks,
        gradients: Gradients[ChunkT],
        scopes: Sequence[Scope],
        give_back: Callable[[], bool],
        *,
        scatter_after_inference: bool = True,
        debug: bool = False,
    ) -> None:
        self._store = store
        self._planner = planner
        self._ranks = ranks
        self._gradients = gradients
        self._scopes = scopes
        self._give_back = give_back
        self._scatters = scatter_after_inference
        self._debug = debug
        self._needs: dict[Phase, list[tuple[ChunkT, ...]]] = {}
        self._idle: dict[ChunkT, None] = {}
        self._schedules: dict[Mode, Schedule[_Key, ChunkT]] = {}
        self._run: _Run[ChunkT] = _Run(None)
        self._suspended: _Run[ChunkT] | None = None
        self._calls = 0
        self._at: _Key | None = None
        self.find_needs()
        reference = weakref.ref(self)
        ranks.place = lambda: "gone" if (course := reference()) is None else course.place

    @property
    def deviations(self) -> int:
        """Accesses that came out of the recorded order so far."""
        return sum(schedule.deviations for schedule in self._schedules.values())

    @property
    def is_recording(self) -> bool:
        """Whether the pass under way is the first in its mode."""
        return self._run.recording is not None

    @property
    def place(self) -> str:
        """The scope that was entered last, in words."""
        if self._at is None:
            return "between steps"
        scope, phase = self._at
        needs = ", ".join(map(str, self._needs[phase][scope.index])) or "no chunk"
        return f"{phase} of {scope.name or 'the model'!r} with {needs}"

    def find_needs(self) -> None:
        """Note which chunks each scope needs; called again when a scope was seen to need others."""
        chunk_of = self._store.chunk_of
        forward = [tuple(dict.fromkeys(map(chunk_of, scope.params))) for scope in self._scopes]
        backward = [
            chunks if scope.value_in_backward else () for scope, chunks in zip(self._scopes, forward, strict=True)
        ]
        self._needs = {"forward": forward, "backward": backward}

    # -- passes -------------------------------------------------------------------------------------------------------

    def start_pass(self, mode: Mode) -> None:
        """Begin a forward of the model, which may be one of several in a step."""
        if mode[1] and self._run.mode is None:
            self._release_idle(())  # what inference has left
        if self._run.mode is None or not mode[1]:
            if self._run.mode is not None:  # an evaluation between a step's forward and its backward
                self._suspended = self._run
            schedule = self._schedules.get(mode)
            if schedule is not None:
                schedule.rewind()
            self._run = _Run(mode, schedule, [] if schedule is None else None)

    def finish_pass(self, *, failed: bool) -> None:
        """End the model's forward; without gradients, or after an error, that is the end of the step."""
        run, held = self._run, self._holds
        if failed:
            run.recording = None
        if failed or run.mode is None or not run.mode[1]:
            try:
                if run.recording is not None:
                    self._agree_on_end(self._gradients.complete)
                self._finish_run()
            except Exception as error:
                self._ranks.explain(error)
                self.give_up()
                raise
            if failed or not held:
                self._idle.clear()
                self._store.rest()
            if not failed:
                self._at = None

    def finish_backward(self) -> None:
        """Reduce what is left, bring all chunks to rest, and plan the next step if this one was recorded."""
        try:
            self._go_along(None)
            late = self._gradients.finish(self._agree_on_end(self._gradients.remains))
            self._idle.clear()
            self._finish_run(late)
        except Exception as error:
            self._ranks.explain(error)
            raise
        self._at = None
        for scope in self._scopes:
            scope.last_call = 0
            scope.reaches_backward = False

    def give_up(self) -> None:
        """Let the step that is under way be over without a plan."""
        self._run, self._suspended = _Run(None), None

    def reset(self) -> None:
        """Forget the step under way."""
        for scope in self._scopes:
            scope.last_call = 0
            scope.reaches_backward = False
        self._idle.clear()
        self._at = None
        self.give_up()
        self._gradients.forget()

    def _finish_run(self, late: Collection[ChunkT] = ()) -> None:
        """Make a plan of what was recorded, and be ready for the next step.

        Args:
            late: chunks that were reduced too early; from now on they wait for the end of backward.
        """
        run = self._run
        if run.recording and run.mode is not None:
            if run.mode[1] and self._ranks.world_size > 1:
                self._add_what_backward_may_enter(run.recording)
            keys = [recorded.key for recorded in run.recording]
            accesses = [RecordedAccess(phase, self._needs[phase][scope.index]) for scope, phase in keys]
            trace = RecordedTrace(tuple(accesses))
            plan = None if self._planner is None else self._planner.schedule(trace)
            due = [tuple(chunk for chunk in recorded.due if chunk not in late) for recorded in run.recording]
            self._schedules[run.mode] = Schedule(keys, trace, plan, due)
        self._run, self._suspended = self._suspended or _Run(None), None

    def _add_what_backward_may_enter(self, recording: list[_Recorded[ChunkT]]) -> None:
        """Add scopes that no rank's backward entered: another step's may on some ranks, so all must have them."""
        entered = {recorded.key[0] for recorded in recording if recorded.key[1] == "backward"}
        left = [scope for scope in self._scopes if scope.reaches_backward and scope not in entered]
        for scope in sorted(left, key=lambda scope: -scope.last_call):
            later = (
                place
                for place, recorded in enumerate(recording)
                if recorded.key[1] == "backward" and recorded.key[0].last_call < scope.last_call
            )
            recording.insert(next(later, len(recording)), _Recorded((scope, "backward"), ()))
        names = [(scope.index, phase) for scope, phase in (recorded.key for recorded in recording)]
        digest = int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:7])
        if len({numbers[0] for numbers in self._ranks.exchange([digest])}) > 1:
            raise ZeroDDPError(
                "The first step called the same modules on every rank, but their results need gradients on some ranks "
                "only, so that the ranks cannot agree on a plan. Let every rank compute with gradients alike."
            )

    # -- entries ------------------------------------------------------------------------------------------------------

    def enter(self, scope: Scope, phase: Phase, params: Sequence[nn.Parameter]) -> None:
        """Begin the use of a scope's parameters, where the plan is, or all ranks are, at this entry."""
        self._at = (scope, phase)
        try:
            self._arrive(scope, phase)
            self._store.begin_use(params)
        except Exception as error:  # another rank may be why it came
            self._ranks.explain(error)
            raise

    def _arrive(self, scope: Scope, phase: Phase) -> None:
        """Gather what a scope needs, start what the plan wants early, and release what is in the way."""
        run, key = self._run, (scope, phase)
        schedule = run.schedule
        if phase == "forward" and run.mode is not None and run.mode[1]:
            self._calls += 1
            scope.last_call = self._calls
        on_course = schedule is not None and schedule.follows(key)
        if not on_course:
            if phase == "backward":
                self._go_along(key)
            on_course = schedule is not None and schedule.follows(key)
            if schedule is not None and not on_course:
                schedule.jump_to(key)
        if schedule is None or not on_course:
            due = self._agree(scope, phase)
        else:
            due = schedule.due
            if self._debug:
                self._agree(scope, phase)
        if run.recording is not None:
            run.recording.append(_Recorded(key, due))
        if due:
            self._gradients.reduce(due)
        chunks = self._needs[phase][scope.index]
        if schedule is None or not on_course or not schedule.has_plan:
            self._gather(chunks, () if schedule is None else schedule.prefetch)
            return
        idle = self._idle
        for chunk in () if self._holds else schedule.drops:
            if chunk in idle:
                self._store.release(chunk)
                del idle[chunk]
        self._start_gathers(chunks, schedule.prefetch)

    def keep_gathered(self, chunk: ChunkT) -> None:
        """Note that a chunk is in use, and not idle."""
        self._idle.pop(chunk, None)

    def leave(self, scope: Scope, phase: Phase) -> None:
        """Release the chunks of a use that is over, or leave them idle where the next access may want them."""
        self._release_or_keep(self._needs[phase][scope.index])

    def _release_or_keep(self, chunks: Iterable[ChunkT]) -> None:
        schedule = self._run.schedule
        for chunk in chunks:
            if self._holds or schedule is None or not schedule.has_plan or schedule.keeps(chunk):
                self._idle[chunk] = None
            else:
                self._store.release(chunk)

    def _gather(self, chunks: tuple[ChunkT, ...], prefetch: tuple[ChunkT, ...]) -> None:
        schedule = self._run.schedule
        for chunk in [] if self._holds else [idle for idle in self._idle if idle not in chunks]:
            if schedule is None or not schedule.keeps(chunk):
                self._store.release(chunk)
                del self._idle[chunk]
        self._start_gathers(chunks, prefetch)

    @property
    def _holds(self) -> bool:
        """Whether what a pass without gradients has gathered stays, as far as there is room."""
        return not self._scatters and self._run.mode is not None and not self._run.mode[1]

    def _start_gathers(self, chunks: tuple[ChunkT, ...], prefetch: tuple[ChunkT, ...]) -> None:
        if not self._store.has_room(chunks + prefetch if prefetch else chunks):
            prefetch = ()
            self._make_room(chunks)
        for chunk in chunks:
            self._store.start_gather(chunk)
            self._idle.pop(chunk, None)
        for chunk in prefetch:
            self._store.start_gather(chunk)
            self._idle.setdefault(chunk)

    def _make_room(self, chunks: tuple[ChunkT, ...]) -> None:
        """Give back what is gathered ahead of its use, and then what recompute holds for the backward that follows.

        That is safe, for backward enters such a scope once more and gathers again; it costs those gathers.
        """
        self._release_idle(chunks)
        while not self._store.has_room(chunks) and self._give_back():
            self._release_idle(chunks)

    def _release_idle(self, chunks: tuple[ChunkT, ...]) -> None:
        for chunk in [idle for idle in self._idle if idle not in chunks]:
            self._store.release(chunk)
            del self._idle[chunk]

    # -- ranks --------------------------------------------------------------------------------------------------------

    def _go_along(self, key: _Key | None) -> None:
        """Enter in backward what this rank does not need but others may: all that the plan has before ``key``."""
        schedule = self._run.schedule
        if schedule is not None:
            for (scope, phase), due in schedule.skip_to(key):
                if self._debug and phase == "backward" and scope.last_call:
                    self._agree(scope, phase)
                self._gradients.reduce(due)
                if phase == "backward" and scope.last_call:
                    self._help(scope)

    def _help(self, scope: Scope) -> None:
        """Take part in gathering what other ranks need for a scope's backward."""
        if self._ranks.world_size > 1:
            chunks = self._needs["backward"][scope.index]
            self._gather(chunks, ())
            self._release_or_keep(chunks)

    def _agree(self, scope: Scope, phase: Phase) -> tuple[ChunkT, ...]:
        """Return, once all ranks enter the same scope, the chunks that are complete on all of them.

        Raises:
            ZeroDDPError: they enter different scopes in forward; every rank raises.
        """
        code = 2 * scope.index + (phase == "backward")
        while True:
            everyones = self._ranks.exchange([code, *self._gradients.complete])
            leader = self._leader([numbers[0] for numbers in everyones])
            if leader is None:
                return self._gradients.complete_on_all([numbers[1:] for numbers in everyones])
            if leader is scope:
                return ()
            self._take_part(leader)

    def _agree_on_end(self, remains: Sequence[int]) -> list[list[int]]:
        """Return what is left on every rank, once all ranks are at the end of the pass."""
        while True:
            everyones = self._ranks.exchange([_END, *remains])
            leader = self._leader([numbers[0] for numbers in everyones])
            if leader is None:
                return [numbers[1:] for numbers in everyones]
            self._take_part(leader)

    def _take_part(self, scope: Scope) -> None:
        if self._run.recording is not None:
            self._run.recording.append(_Recorded((scope, "backward"), ()))
        self._help(scope)

    def _leader(self, codes: Sequence[int]) -> Scope | None:
        """Return the scope that all ranks enter first, or None if they are at the same."""
        if len(set(codes)) == 1:
            return None
        if not all(code % 2 for code in codes):  # of a forward
            raise ZeroDDPError(self._diverged(codes))
        entered = {self._scopes[code // 2]: None for code in codes if code != _END}
        return max(entered, key=lambda scope: scope.last_call)

    def _diverged(self, codes: Sequence[int]) -> str:
        places = [
            f"rank {rank} came to the end"
            if code == _END
            else f"rank {rank} {self._scopes[code // 2].name or 'the model'!r} in {('forward', 'backward')[code % 2]}"
            for rank, code in enumerate(codes)
        ]
        return (
            f"The ranks entered different modules: {', '.join(places)}. Every rank must call the same modules in the "
            "same order, for each gathers the parameters with all others. Name a module that chooses among its "
            "children by its data (a mixture of experts, say) in leaf_modules: it is gathered as one."
        )
