"""The course of a step: at each entry of a scope, what to gather, to release and to reduce, alike on every rank."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import nn

from gemini_ddp._errors import ZeroDDPError
from gemini_ddp._gradients import Gradients, any_of, chosen, length, to_numbers
from gemini_ddp._ranks import Ranks
from gemini_ddp._recording import Recorded, make_trace
from gemini_ddp._schedule import Entry, RecordedTrace, Schedule, plan_text
from gemini_ddp._scopes import Scope
from gemini_ddp.interfaces import ChunkStore, Phase, Plan, Planner

ChunkT = TypeVar("ChunkT", bound=Hashable)

Mode = tuple[bool, bool]  # whether the model trains, whether gradients are recorded

_Key = tuple[Scope, Phase]
# What a rank says in the place of the scope it enters, odd as for a backward.
_END = -1  # that it is at the end of a pass
_LOCAL = -3  # that gradients stay local from here on
_WORDS = {_END: "came to the end", _LOCAL: "entered no_sync"}


@dataclass(slots=True)
class _Run(Generic[ChunkT]):
    """A step under way: its mode or None, and the schedule it follows or the trace it records, or neither.

    ``holds`` tells that what it gathers stays, as far as there is room; ``is_incomplete``, that forward called what the
    schedule has no backward of; ``has_backward``, that its mode records gradients.
    """

    mode: Mode | None
    schedule: Schedule[_Key, ChunkT] | None = None
    recording: list[Recorded[ChunkT]] | None = None
    holds: bool = False
    is_incomplete: bool = False
    has_backward: bool = field(init=False)

    def __post_init__(self) -> None:
        self.has_backward = self.mode is not None and self.mode[1]


class BackwardUses(Protocol):
    """What the engine does for its course."""

    def hold(self, scope: Scope) -> None:
        """Use a scope's parameters, which are gathered or on their way, as long as other ranks' backwards need them."""

    def end(self, scope: Scope) -> None:
        """End the use of a scope's parameters for its backward."""

    def give_back(self) -> bool:
        """End the use of something that may be gathered again; return whether there was any."""

    def in_use(self) -> Iterable[tuple[Scope, Phase]]:
        """Return what is in use: calls under way, and backwards that are not over."""


class Course(Generic[ChunkT]):
    """Where steps are, and what that means for the store.

    [Note: Ranks stay together]
    Gathers and reductions are collectives, so all ranks must come to them in one order. Where they follow a plan that
    they recorded together, they do so without a word. Everywhere else, that is in the first step of each mode and
    where a step leaves the plan, they tell each other at each entry of a scope which one it is.

    In forward another one is an error: a rank cannot enter what its data did not choose. In backward it may be that the
    loss of a rank follows from other results of the same modules. There each rank goes along with what others enter,
    in the order in which backward would: it gathers, and holds what it gathered as long as they. So the backward of a
    scope ends, like the reductions start, where all ranks are at the same entry, and not when gradients come.

    Args:
        store: holds the parameters.
        planner: turns the first step's trace into a plan; None gathers on demand and releases at the next scope.
        ranks: who else runs the model.
        gradients: those of the backward under way.
        scopes: all scopes, by their index.
        uses: begins and ends the uses of scopes in backward.
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
        uses: BackwardUses,
        *,
        scatter_after_inference: bool = True,
        debug: bool = False,
    ) -> None:
        self._store = store
        self._planner = planner
        self._ranks = ranks
        self._gradients = gradients
        self._scopes = scopes
        self._uses = uses
        self._scatters = scatter_after_inference
        self._debug = debug
        self._needs: dict[Phase, list[tuple[ChunkT, ...]]] = {}
        self._idle: dict[ChunkT, None] = {}
        self._schedules: dict[Mode, Schedule[_Key, ChunkT]] = {}
        self._run: _Run[ChunkT] = _Run(None)
        self._suspended: _Run[ChunkT] | None = None
        self._calls = 0
        self._is_late = False
        self._first_held = 2 + len(gradients.complete)
        self._num_facts = length(scopes) + len(gradients.remains)
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
            holds = not self._scatters and not mode[1]
            self._run = _Run(mode, schedule, [] if schedule is None else None, holds)

    def finish_pass(self, *, failed: bool) -> None:
        """End the model's forward; without gradients, or after an error, that is the end of the step."""
        run = self._run
        if failed:
            run.recording = None
        if failed or not run.has_backward:
            try:
                if run.recording is not None:
                    self._agree_on_end(())
                self._finish_run()
            except Exception as error:
                self._ranks.explain(error)
                self.give_up()
                raise
            if failed or not run.holds:
                self._idle.clear()
                self._store.rest()
            if not failed:
                self._at = None

    def finish_backward(self) -> None:
        """Reduce what is left, bring all chunks to rest, and plan the next step if this one was recorded."""
        try:
            self._go_along(None)
            if self._run.schedule is not None:
                self._gradients.begin_to_finish()
            late = self._gradients.finish(self._agree_on_end(self._gradients.remains))
            self._idle.clear()
            self._finish_run(late)
        except Exception as error:
            self._ranks.explain(error)
            raise
        self._at = None
        for scope in self._scopes:
            scope.num_calls = scope.last_call = 0
            scope.reaches_backward = False

    def agree_on_no_sync(self) -> None:
        """Make sure that gradients stay local on all ranks, or on none.

        Raises:
            ZeroDDPError: another rank does something else; every rank raises that comes to hear of it.
        """
        codes = [numbers[0] for numbers in self._tell(_LOCAL, ())]
        if set(codes) != {_LOCAL}:
            raise ZeroDDPError(self._diverged(codes))

    def give_up(self) -> None:
        """Let the step that is under way be over without a plan."""
        self._run, self._suspended = _Run(None), None

    def reset(self) -> None:
        """Forget the step under way."""
        for scope in self._scopes:
            scope.num_calls = scope.last_call = 0
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
            if run.has_backward and self._ranks.world_size > 1:
                self._prepare_for_other_losses(run.recording)
            keys = [recorded.key for recorded in run.recording]
            trace = make_trace(run.recording, self._needs, late, alone=self._ranks.world_size == 1)
            plan = None if self._planner is None else self._plan(self._planner, trace)
            due = [tuple(chunk for chunk in recorded.due if chunk not in late) for recorded in run.recording]
            ended = [recorded.ended for recorded in run.recording]
            self._schedules[run.mode] = Schedule(keys, trace, plan, due, ended)
        self._run, self._suspended = self._suspended or _Run(None), None

    def _plan(self, planner: Planner[ChunkT], trace: RecordedTrace[ChunkT]) -> Plan[ChunkT]:
        """Return a plan that is the same on every rank.

        Raises:
            ZeroDDPError: the ranks' plans differ; on every rank.
        """
        try:
            plan = planner.schedule(trace)
        except Exception:
            self._same_on_all("no plan")  # the others must hear of it before they gather by theirs
            raise
        if not self._same_on_all(plan_text(trace, plan)):
            raise ZeroDDPError(
                "The ranks' plans for this model differ, or one rank could not make its plan. A plan may depend on "
                "the trace and on what is the same on every rank, such as settings and capacities, only."
            )
        return plan

    def _same_on_all(self, text: str) -> bool:
        """Whether every rank has the same text; all ranks ask together."""
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
        return len({numbers[0] for numbers in self._ranks.exchange([digest])}) == 1

    def _prepare_for_other_losses(self, recording: list[Recorded[ChunkT]]) -> None:
        """Let the plan hold for backwards from other results of the same modules, which some ranks may come to have.

        Scopes that no rank's backward entered are added where it would. A scope that was called several times may be
        entered from another of its calls: it comes first where the last one is, and is over at the end of backward.
        """
        entered = {recorded.key[0] for recorded in recording if recorded.key[1] == "backward"}
        left = [scope for scope in self._scopes if scope.reaches_backward and scope not in entered]
        several = [scope for scope in entered if scope.num_calls > 1]
        for recorded in recording:
            recorded.ended = tuple(scope for scope in recorded.ended if scope.num_calls <= 1)
        for scope in sorted(left + several, key=lambda scope: (-scope.last_call, scope.index)):
            place = next(
                (
                    place
                    for place, recorded in enumerate(recording)
                    if recorded.key[1] == "backward"
                    and (recorded.key[0] is scope or recorded.key[0].last_call < scope.last_call)
                ),
                len(recording),
            )
            if place < len(recording) and recording[place].key[0] is scope:
                continue
            within = recording[place].within if place < len(recording) else ()
            recording.insert(place, Recorded((scope, "backward"), within=within))
            if scope.is_simple and scope.num_calls == 1 and place + 1 < len(recording):
                recording[place + 1].ended += (scope,)  # others may read a parameter until the end, for all we know
        names = [(scope.index, phase) for scope, phase in (recorded.key for recorded in recording)]
        if not self._same_on_all(repr(names)):
            raise ZeroDDPError(
                "The first step called the same modules on every rank, but their results need gradients on some ranks "
                "only, so that the ranks cannot agree on a plan. Let every rank compute with gradients alike."
            )

    # -- entries ------------------------------------------------------------------------------------------------------

    def enter(self, scope: Scope, phase: Phase, params: Sequence[nn.Parameter]) -> None:
        """Begin the use of a scope's parameters, where the plan is, or all ranks are, at this entry."""
        self._at = (scope, phase)
        try:
            self._arrive(self._at)
            self._store.begin_use(params)
        except Exception as error:  # another rank may be why it came
            self._ranks.explain(error)
            raise

    def _arrive(self, key: _Key) -> None:
        """Gather what a scope needs, start what the plan wants early, and release what is in the way."""
        run, (scope, phase) = self._run, key
        if phase == "forward":
            scope.num_calls += run.has_backward
        elif run.is_incomplete and self._ranks.world_size > 1:
            run.schedule = None
        schedule = run.schedule
        entry = None if schedule is None else schedule.follow(key)
        if entry is not None and entry.is_quiet and not self._debug:
            self._end(entry.ended)
            chunks, idle = self._needs[phase][scope.index], self._idle
            if idle.keys() >= {*chunks}:
                for chunk in chunks:
                    del idle[chunk]
                return
        if entry is None:
            if phase == "backward":
                self._go_along(key)
            elif schedule is not None and run.has_backward and (scope, "backward") not in schedule:
                run.is_incomplete = True  # the backwards of some ranks may come to it, where the plan has nothing
            entry = None if schedule is None else schedule.follow(key)
            if schedule is not None and entry is None:
                schedule.jump_to(key)
        if entry is not None:
            if self._debug:
                self._agree(scope, phase)
            due, ended = entry.due, entry.ended
        else:
            due, ended = self._agree(scope, phase)
        if run.recording is not None:
            run.recording.append(Recorded(key, due, ended, self._in_use(ended)))
        self._perform(scope, phase, due, ended, entry)

    def _in_use(self, ended: tuple[Scope, ...]) -> tuple[_Key, ...]:
        return tuple(key for key in self._uses.in_use() if key[1] == "forward" or key[0] not in ended)

    def note_end_of_call(self, scope: Scope) -> None:
        """Hear that a scope's call in forward is over. Backward first comes to the one that was over last."""
        if self._run.has_backward:
            self._calls += 1
            scope.last_call = self._calls

    def note_gradient(self, chunk: ChunkT) -> None:
        """Hear that a gradient of a chunk is about to be taken."""
        if self._run.recording:
            self._run.recording[-1].note_gradient(chunk)

    def _perform(
        self,
        scope: Scope,
        phase: Phase,
        due: tuple[ChunkT, ...],
        ended: tuple[Scope, ...],
        entry: Entry[_Key, ChunkT] | None = None,
    ) -> None:
        """Do what an entry stands for, the same on a rank that needs it and on one that goes along.

        Args:
            scope: is entered, or would be.
            phase: in which.
            due: chunks to reduce.
            ended: scopes whose backward is over.
            entry: what the plan has for it; None off the plan.
        """
        self._end(ended)
        if due:
            self._gradients.reduce(due)
        chunks, run = self._needs[phase][scope.index], self._run
        if entry is None or run.schedule is None or not run.schedule.has_plan:
            if run.recording is None and self._ranks.world_size > 1:
                # Where a use ended on some ranks before they left the plan, others have it still.
                self._release_idle(())
            self._gather(chunks)
            return
        idle = self._idle
        for chunk in () if run.holds else entry.drops:
            if chunk in idle:
                self._store.release(chunk)
                del idle[chunk]
        self._start_gathers(chunks, entry.prefetch, entry.fetch)

    def _end(self, scopes: Iterable[Scope]) -> None:
        """End the uses of scopes as it would have been done before this entry, by what the plan keeps there."""
        for scope in scopes:
            if scope.in_backward:
                self._is_late = True
                try:
                    self._uses.end(scope)
                finally:  # what it raises must not change where later chunks are kept
                    self._is_late = False

    def done(self, scope: Scope) -> None:
        """Hear that nothing of a scope's backward is left on this rank; end it as soon as no other rank can tell."""
        scope.is_done = True
        schedule = self._run.schedule
        if self._ranks.world_size == 1 or (schedule is not None and schedule.ends_next(scope)):
            self._uses.end(scope)

    def keep_gathered(self, chunk: ChunkT) -> None:
        """Note that a chunk is in use, and not idle."""
        self._idle.pop(chunk, None)

    def leave(self, scope: Scope, phase: Phase) -> None:
        """Release the chunks of a use that is over, or leave them idle where the next access may want them."""
        chunks, run = self._needs[phase][scope.index], self._run
        schedule, kept = run.schedule, frozenset(chunks)
        if schedule is not None and schedule.has_plan and not run.holds:
            kept = schedule.resident(before=self._is_late)
        for chunk in chunks:
            if chunk in kept:
                self._idle[chunk] = None
            else:
                self._store.release(chunk)

    def _gather(self, chunks: tuple[ChunkT, ...]) -> None:
        run = self._run
        if not run.holds:
            self._release_idle(chunks if run.schedule is None else run.schedule.resident().union(chunks))
        self._start_gathers(chunks)

    def _start_gathers(
        self, chunks: tuple[ChunkT, ...], prefetch: tuple[ChunkT, ...] = (), fetch: tuple[ChunkT, ...] = ()
    ) -> None:
        if not self._store.has_room(chunks + prefetch if prefetch else chunks):
            prefetch = fetch = ()
            self._make_room(chunks)
        for chunk in chunks:
            self._store.start_gather(chunk)
            self._idle.pop(chunk, None)
        for chunk in prefetch:
            self._store.start_gather(chunk)
            self._idle.setdefault(chunk)
        for chunk in fetch:
            self._store.start_fetch(chunk)

    def _make_room(self, chunks: tuple[ChunkT, ...]) -> None:
        """Give back what is gathered ahead of its use, and then what recompute holds for the backward that follows.

        That is safe, for backward enters such a scope once more and gathers again; it costs those gathers.
        """
        self._release_idle(chunks)
        while not self._store.has_room(chunks) and self._uses.give_back():
            self._release_idle(chunks)

    def _release_idle(self, chunks: Collection[ChunkT]) -> None:
        """Release all idle chunks but these."""
        for chunk in [idle for idle in self._idle if idle not in chunks]:
            self._store.release(chunk)
            del self._idle[chunk]

    # -- ranks --------------------------------------------------------------------------------------------------------

    def _go_along(self, key: _Key | None) -> None:
        """Enter in backward what this rank does not need but others may: all that the plan has before ``key``."""
        schedule = self._run.schedule
        if schedule is not None:
            for scope, phase in schedule.skip_to(key):
                called = phase == "backward" and scope.last_call > 0
                if self._debug and called:
                    self._agree(scope, phase)
                entry = schedule.current
                self._help(scope if called else None, entry.due, entry.ended, entry)

    def _help(
        self,
        scope: Scope | None,
        due: tuple[ChunkT, ...],
        ended: tuple[Scope, ...],
        entry: Entry[_Key, ChunkT] | None = None,
    ) -> None:
        """Enter a scope's backward for the sake of other ranks; None for one that no rank can enter in this step."""
        if scope is None or self._ranks.world_size == 1:
            self._end(ended)
            self._gradients.reduce(due)
        else:
            self._perform(scope, "backward", due, ended, entry)
            if not scope.in_backward:
                self._uses.hold(scope)

    def _agree(self, scope: Scope, phase: Phase) -> tuple[tuple[ChunkT, ...], tuple[Scope, ...]]:
        """Let all ranks come to the same entry.

        Ranks may enter other scopes in backward than this one, for their losses may follow from other results of the
        same modules. Then all first take part in the one that was called last in forward, as backward would.

        Returns:
            The chunks that are complete on all ranks, and the scopes whose backward is over on all.

        Raises:
            ZeroDDPError: they enter different scopes in forward; every rank raises.
        """
        code = 2 * scope.index + (phase == "backward")
        while True:
            everyones = self._tell(code, [*self._gradients.complete, *self._held()])
            ended = self._over(everyones)
            leader = self._leader([numbers[0] for numbers in everyones])
            if leader is None:
                return self._gradients.complete_on_all([numbers[2:] for numbers in everyones]), ended
            if leader is scope:
                return (), ended
            self._take_part(leader, ended)

    def _agree_on_end(self, remains: Sequence[int]) -> list[list[int]]:
        """Return what is left on every rank, once all ranks are at the end of the pass."""
        while True:
            everyones = self._tell(_END, remains)
            leader = self._leader([numbers[0] for numbers in everyones])
            if leader is None:
                return [numbers[2:] for numbers in everyones]
            self._take_part(leader, self._over(everyones))

    def _tell(self, code: int, facts: Sequence[int]) -> list[list[int]]:
        """Exchange where this rank is and what it knows; where ranks are apart, leave the plan for this step.

        What ranks tell has one length: a rank may be at the end of backward while others are at an entry.
        """
        schedule = self._run.schedule
        position = -1 if schedule is None else schedule.position
        everyones = self._ranks.exchange([code, position, *facts, *[0] * (self._num_facts - len(facts))])
        if schedule is not None and len({tuple(numbers[:2]) for numbers in everyones}) > 1:
            self._run.schedule = None
            self._release_idle(())
        return everyones

    def _held(self) -> list[int]:
        return to_numbers([scope.in_backward and not scope.is_done for scope in self._scopes], self._scopes)

    def _over(self, everyones: Sequence[Sequence[int]]) -> tuple[Scope, ...]:
        """Return the scopes in backward that are over on every rank; at the end, a rank needs none."""
        last = self._first_held + length(self._scopes)
        needed = [numbers[self._first_held : last] for numbers in everyones if numbers[0] != _END]
        held = set(chosen(self._scopes, map(any_of, zip(*needed, strict=True)))) if needed else set()
        return tuple(scope for scope in self._scopes if scope.in_backward and scope not in held)

    def _take_part(self, scope: Scope, ended: tuple[Scope, ...]) -> None:
        if self._run.recording is not None:
            self._run.recording.append(Recorded((scope, "backward"), (), ended, self._in_use(ended)))
        self._help(scope, (), ended)

    def _leader(self, codes: Sequence[int]) -> Scope | None:
        """Return the scope that all ranks enter first, or None if they are at the same."""
        if len(set(codes)) == 1:
            return None
        if _LOCAL in codes or not all(code % 2 for code in codes):  # of a forward
            raise ZeroDDPError(self._diverged(codes))
        entered = {self._scopes[code // 2]: None for code in codes if code != _END}
        return max(entered, key=lambda scope: scope.last_call)

    def _diverged(self, codes: Sequence[int]) -> str:
        places = [
            f"rank {rank} {_WORDS[code]}"
            if code in _WORDS
            else f"rank {rank} {self._scopes[code // 2].name or 'the model'!r} in {('forward', 'backward')[code % 2]}"
            for rank, code in enumerate(codes)
        ]
        return (
            f"The ranks are at different places: {', '.join(places)}. Every rank must call the same modules in the "
            "same order, for each gathers the parameters with all others. Name a module that chooses among its "
            "children by its data (a mixture of experts, say) in leaf_modules: it is gathered as one."
        )
