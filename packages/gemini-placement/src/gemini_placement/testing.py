"""A contract kit: what every placement policy must keep, ours and yours.

Subclass `PlacementPolicyContract` in a test module, name the subclass ``Test...`` and implement `make_policy`.
Plain asserts; no test framework is imported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gemini_placement._placement import Placement, PlacementError
from gemini_placement._plan import Plan
from gemini_placement.interfaces import ChunkFacts, ChunkT, Phase, PlacementPolicy, TierName, Trace

UNLIMITED: Mapping[TierName, int | None] = {"device": None, "host": None, "disk": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperChunk:
    """Facts of a chunk that exists only on paper; sizes in bytes."""

    name: str
    full_bytes: int
    shard_bytes: int
    optim_bytes: int
    trainable: bool = True
    padding_bytes: int = 0
    sum_bytes: int = 0
    is_own_master: bool = False
    stages_gradient: bool = True


@dataclass(frozen=True, slots=True)
class PaperAccess:
    """One access of a trace on paper."""

    phase: Phase
    chunks: tuple[PaperChunk, ...]
    gradients: tuple[PaperChunk, ...] = ()

    @property
    def held(self) -> tuple[PaperChunk, ...]:
        """All chunks: none is known to be over early."""
        return self.chunks


@dataclass(frozen=True, slots=True)
class PaperTrace:
    """A trace on paper."""

    accesses: tuple[PaperAccess, ...]


def paper_chunks(count: int, *, full_bytes: int = 4096, world_size: int = 2) -> tuple[PaperChunk, ...]:
    """Return chunks of 16-bit parameters under Adam: 12 bytes of optimizer states for 2 of parameters."""
    shard_bytes = full_bytes // world_size
    return tuple(
        PaperChunk(
            name=f"chunk {index}",
            full_bytes=full_bytes,
            shard_bytes=shard_bytes,
            optim_bytes=6 * shard_bytes,
        )
        for index in range(count)
    )


def there_and_back(chunks: Sequence[PaperChunk]) -> PaperTrace:
    """Return the trace of a chain of layers, one chunk each: forward in order, backward in reverse."""
    forward = tuple(PaperAccess("forward", (chunk,)) for chunk in chunks)
    backward = tuple(
        PaperAccess("backward", (chunk,), (chunk,) if chunk.trainable else ()) for chunk in reversed(chunks)
    )
    return PaperTrace(forward + backward)


def check_plan(
    plan: Plan[ChunkT],
    trace: Trace[ChunkT],
    placement: Placement[ChunkT],
    *,
    max_prefetch: int,
    max_fetch: int = 0,
    max_held: int = 0,
) -> None:
    """Obey a plan on paper and assert that it is sound.

    Every access finds its chunks gathered; nothing is gathered twice or released while ahead or needed next; the first
    access starts all chunks that stay gathered; beyond those and what an access uses, at most ``max_prefetch`` chunks
    are gathered ahead of their use, ``max_held`` held from forward to backward and one largest chunk's bytes held over,
    or what the busiest access needs; at most ``max_fetch`` chunks are fetched and not gathered, each of them rests off
    the device and is gathered later; only kept chunks remain; the predicted numbers are right.
    """
    assert len(plan.steps) == len(trace.accesses), "A plan has one step for each access."
    kept = {chunk for chunk in placement.chunks if placement.of(chunk).keep_gathered}
    gathered: set[ChunkT] = set()
    gathers = 0
    peak_bytes = sum(chunk.full_bytes for chunk in kept)
    released = {chunk for access in trace.accesses for chunk in access.chunks if chunk not in kept}
    largest = max((chunk.full_bytes for chunk in released), default=0)
    busiest = max((sum(c.full_bytes for c in set(access.chunks) - kept) for access in trace.accesses), default=0)
    ahead: set[ChunkT] = set()
    fetched: set[ChunkT] = set()
    for index, (step, access) in enumerate(zip(plan.steps, trace.accesses, strict=True)):
        use = set(access.chunks)
        assert set(step.chunks) == use, f"Step {index} must gather what its access uses."
        assert len(step.chunks) == len(use), f"Step {index} names a chunk twice."
        there = gathered | kept
        gathers += len(use - gathered)
        gathered |= use
        ahead -= use
        assert not gathered & set(step.prefetch), f"Step {index} prefetches what is there already."
        gathers += len(step.prefetch)
        gathered |= set(step.prefetch)
        ahead |= set(step.prefetch) - kept
        assert not kept.intersection(step.prefetch) or index == 0, f"Step {index} is late with what stays gathered."
        assert len(ahead) <= max_prefetch, f"Step {index} holds {len(ahead)} chunks ahead of their use."
        held_bytes = sum(chunk.full_bytes for chunk in gathered - kept)
        assert held_bytes <= max(busiest, 2 * largest) + (max_prefetch + max_held) * largest, (
            f"Step {index} holds {held_bytes} bytes."
        )
        for chunk in dict.fromkeys((*step.chunks, *step.prefetch)):
            # The full buffer comes before what was fetched goes, unless that was fetched into the full buffer.
            there = there | {chunk}
            staged = fetched if placement.world_size > 1 else fetched - {chunk}
            peak_bytes = max(peak_bytes, _device_bytes(there, staged, placement.world_size))
            fetched.discard(chunk)
        for chunk in step.fetch:
            assert placement.of(chunk).param_tier != "device", f"Step {index} fetches {chunk.name}, which is there."
            assert chunk not in gathered | fetched, f"Step {index} fetches {chunk.name}, which is there already."
            fetched.add(chunk)
        assert len(fetched) <= max_fetch, f"Step {index} holds {len(fetched)} chunks ahead of their gather."
        peak_bytes = max(peak_bytes, _device_bytes(gathered | kept, fetched, placement.world_size))
        assert use >= set(step.release), f"Step {index} releases what it does not use."
        assert not kept & set(step.release), f"Step {index} releases a chunk that stays gathered."
        gathered -= set(step.release)
        later = {chunk for other in trace.accesses[index + 1 :] for chunk in other.chunks}
        assert gathered <= later | kept, f"Step {index} keeps what nobody uses any more."
    assert gathered <= kept, "A step ends with kept chunks alone."
    assert not fetched, "A step fetches what it does not gather."
    assert plan.gathers == gathers, f"The plan counts {plan.gathers} gathers; obeying it takes {gathers}."
    assert plan.peak_gathered_bytes == peak_bytes, (
        f"The plan predicts {plan.peak_gathered_bytes} bytes at most; obeying it takes {peak_bytes}."
    )


def _device_bytes(gathered: Iterable[ChunkFacts], fetched: Iterable[ChunkFacts], world_size: int) -> int:
    fetched_bytes = sum(chunk.full_bytes if world_size == 1 else chunk.shard_bytes for chunk in fetched)
    return sum(chunk.full_bytes for chunk in gathered) + fetched_bytes


class PlacementPolicyContract(ABC):
    """Tests that any policy must pass; see the module's docstring."""

    max_prefetch: int = 0
    """How many chunks the policy under test gathers ahead; override it together with `make_policy`."""
    max_fetch: int = 0
    """How many it fetches ahead of their gather, likewise."""

    @abstractmethod
    def make_policy(self) -> PlacementPolicy:
        """Return a new policy; each call returns an equal one."""

    def _check(self, plan: Plan[ChunkT], trace: Trace[ChunkT], placement: Placement[ChunkT]) -> None:
        check_plan(plan, trace, placement, max_prefetch=self.max_prefetch, max_fetch=self.max_fetch)

    def test_every_chunk_is_placed_where_it_was_given(self) -> None:
        """All chunks come back in order, and none is kept gathered off the device."""
        chunks = paper_chunks(7)
        placement = self.make_policy().place(chunks, capacities=UNLIMITED, world_size=2)
        assert placement.chunks == chunks
        for chunk in chunks:
            place = placement.of(chunk)
            assert place.param_tier == "device" or not place.keep_gathered

    def test_equal_arguments_give_equal_digests(self) -> None:
        """Ranks decide alone and must agree; a policy keeps nothing from call to call."""
        chunks = paper_chunks(7)
        policy = self.make_policy()
        placements = [
            each.place(chunks, capacities=UNLIMITED, world_size=2) for each in (policy, self.make_policy(), policy)
        ]
        assert len({placement.digest for placement in placements}) == 1
        trace = there_and_back(chunks)
        assert len({policy.schedule(trace, placement).digest for placement in placements}) == 1

    def test_plan_serves_every_access_and_leaves_nothing(self) -> None:
        """A chain of layers there and back, and one that comes back to its first chunk in between."""
        chunks = paper_chunks(6)
        policy = self.make_policy()
        placement = policy.place(chunks, capacities=UNLIMITED, world_size=2)
        chain = there_and_back(chunks)
        tied = PaperTrace((*chain.accesses[:6], PaperAccess("forward", chunks[:2]), *chain.accesses[6:]))
        for trace in (chain, tied, PaperTrace(())):
            self._check(policy.schedule(trace, placement), trace, placement)

    def test_turn_from_forward_to_backward_gathers_nothing(self) -> None:
        """The last chunk of forward is the first of backward and stays."""
        chunks = paper_chunks(4)
        policy = self.make_policy()
        placement = policy.place(chunks, capacities=UNLIMITED, world_size=2)
        plan = policy.schedule(there_and_back(chunks), placement)
        assert chunks[-1] not in plan.steps[3].release

    def test_frozen_chunks_are_placed_too(self) -> None:
        """A chunk without optimizer states or gradients is planned like the rest."""
        frozen = PaperChunk(name="frozen", full_bytes=64, shard_bytes=32, optim_bytes=0, trainable=False)
        chunks = (frozen, *paper_chunks(2))
        policy = self.make_policy()
        placement = policy.place(chunks, capacities=UNLIMITED, world_size=2)
        trace = there_and_back(chunks)
        self._check(policy.schedule(trace, placement), trace, placement)

    def test_capacities_are_kept(self) -> None:
        """A placement that is returned fits; one that cannot fit is refused with the numbers."""
        chunks = paper_chunks(5)
        refusals: list[PlacementError] = []
        for device in range(0, 120_000, 4_000):
            capacities: dict[TierName, int | None] = {"device": device, "host": 50_000}
            try:
                placement = self.make_policy().place(chunks, capacities=capacities, world_size=2)
            except PlacementError as error:
                refusals.append(error)
                continue
            assert placement.needed_bytes["device"] <= device
            assert placement.needed_bytes["host"] <= 50_000
            assert placement.needed_bytes["disk"] == 0
        assert refusals, "A device without any room must be refused."
        for refusal in refusals:
            lacking = [tier for tier in refusal.needed if refusal.needed[tier] > (refusal.available.get(tier) or 0)]
            assert lacking, "A refusal names a tier that needs more than it has."
