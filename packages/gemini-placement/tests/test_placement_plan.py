"""Plans: obeyed on paper, every access is served and nothing is left behind."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini_placement import (
    AccessStats,
    ChunkPlacement,
    MemStats,
    Placement,
    StaticPlacementPolicy,
)
from gemini_placement.testing import (
    UNLIMITED,
    PaperAccess,
    PaperTrace,
    check_plan,
    paper_chunks,
    there_and_back,
)

CHUNKS = tuple(replace(chunk, full_bytes=100 + 7 * index) for index, chunk in enumerate(paper_chunks(7)))
TRACES = st.lists(st.lists(st.sampled_from(CHUNKS), max_size=3), max_size=25).map(
    lambda uses: PaperTrace(tuple(PaperAccess("forward", tuple(use)) for use in uses))
)


def placed(kept: int) -> Placement:
    """Keep the chunks whose bit is set in ``kept``."""
    return Placement(
        CHUNKS,
        [
            ChunkPlacement(keep_gathered=bool(kept >> index & 1), param_tier="device", optim_tier="device")
            for index in range(len(CHUNKS))
        ],
    )


@settings(max_examples=600, deadline=None)
@given(TRACES, st.integers(0, 127), st.integers(0, 4))
def test_any_trace_is_served_within_the_prefetch_bound(trace, kept, max_prefetch) -> None:
    plan = StaticPlacementPolicy(max_prefetch=max_prefetch).schedule(trace, placed(kept))
    check_plan(plan, trace, placed(kept), max_prefetch=max_prefetch)


@settings(max_examples=300, deadline=None)
@given(TRACES, st.integers(0, 127))
def test_without_prefetch_a_chunk_stays_for_its_next_use_alone(trace, kept) -> None:
    plan = StaticPlacementPolicy().schedule(trace, placed(kept))
    uses = [set(access.chunks) for access in trace.accesses]
    assert len(plan.steps) == len(uses)
    stays = {chunk for index, chunk in enumerate(CHUNKS) if kept >> index & 1}
    for index, (use, step) in enumerate(zip(uses, plan.steps, strict=True)):
        assert step.prefetch == ()
        following = uses[index + 1] if index + 1 < len(uses) else set()
        phase = trace.accesses[index].phase
        held = use - following - stays - set(step.release)
        for chunk in held:  # only over a gap within one phase
            back = next(i for i in range(index + 1, len(uses)) if chunk in uses[i])
            assert trace.accesses[back].phase == phase


def test_a_chunk_is_held_over_a_short_gap_within_a_phase() -> None:
    norm, first, second, third = CHUNKS[:4]
    order = [(norm,), (first,), (norm,), (second,), (third,), (norm,)]
    trace = PaperTrace(tuple(PaperAccess("forward", use) for use in order))
    plan = StaticPlacementPolicy().schedule(trace, placed(kept=0))
    assert plan.gathers == 4
    assert [step.release for step in plan.steps] == [(), (first,), (), (second,), (third,), (norm,)]
    two = PaperTrace(tuple(PaperAccess("forward", use) for use in [(norm,), (first,), (second,), (norm,), (first,)]))
    crossing = StaticPlacementPolicy().schedule(two, placed(kept=0))
    assert crossing.gathers == 4, "only one chunk is held at a time"


@settings(max_examples=300, deadline=None)
@given(TRACES, st.integers(0, 127), st.integers(1, 4))
def test_prefetch_never_costs_gathers(trace, kept, max_prefetch) -> None:
    without = StaticPlacementPolicy().schedule(trace, placed(kept))
    plan = StaticPlacementPolicy(max_prefetch=max_prefetch).schedule(trace, placed(kept))
    assert plan.gathers <= without.gathers


def plan_names(plan) -> list[tuple[str, str, str]]:
    return [
        tuple("".join(chunk.name[-1] for chunk in part) for part in (step.chunks, step.prefetch, step.release))
        for step in plan.steps
    ]


def test_chain_gathers_each_chunk_twice_but_the_last_one_once() -> None:
    chunks = paper_chunks(3)
    policy = StaticPlacementPolicy()
    plan = policy.schedule(there_and_back(chunks), policy.place(chunks, capacities=UNLIMITED, world_size=2))
    assert plan_names(plan) == [
        ("0", "", "0"),
        ("1", "", "1"),
        ("2", "", ""),
        ("2", "", "2"),
        ("1", "", "1"),
        ("0", "", "0"),
    ]
    assert plan.gathers == 5
    assert plan.peak_gathered_bytes == 4096


def test_prefetch_starts_the_next_chunk_and_keeps_what_it_would_start_again() -> None:
    chunks = paper_chunks(4)
    policy = StaticPlacementPolicy(max_prefetch=1)
    plan = policy.schedule(there_and_back(chunks), policy.place(chunks, capacities=UNLIMITED, world_size=2))
    assert plan_names(plan) == [
        ("0", "1", "0"),
        ("1", "2", "1"),
        ("2", "3", ""),
        ("3", "", ""),
        ("3", "", "3"),
        ("2", "1", "2"),
        ("1", "0", "1"),
        ("0", "", "0"),
    ]
    assert plan.gathers == 6
    assert plan.peak_gathered_bytes == 2 * 4096


def test_kept_chunks_are_gathered_once_and_never_released() -> None:
    chunks = paper_chunks(3)
    policy = StaticPlacementPolicy(shard_param_frac=0.0, max_prefetch=1)
    plan = policy.schedule(there_and_back(chunks), policy.place(chunks, capacities=UNLIMITED, world_size=2))
    assert plan.gathers == 3
    assert [step.prefetch for step in plan.steps] == [(chunks[1],), (chunks[2],), (), (), (), ()]
    assert not any(step.release for step in plan.steps)
    assert plan.peak_gathered_bytes == 3 * 4096


def test_kept_chunks_that_are_there_take_no_prefetch_slot() -> None:
    first, second, third = CHUNKS[:3]
    trace = PaperTrace(tuple(PaperAccess("forward", (chunk,)) for chunk in (first, second, first, third)))
    plan = StaticPlacementPolicy(max_prefetch=1).schedule(trace, placed(kept=1))
    assert [step.prefetch for step in plan.steps] == [(second,), (third,), (), ()]


def test_plan_refuses_a_chunk_that_was_not_placed() -> None:
    policy = StaticPlacementPolicy()
    placement = policy.place(paper_chunks(2), capacities=UNLIMITED, world_size=2)
    with pytest.raises(KeyError, match="chunk 2 is not one of the 2 chunks"):
        policy.schedule(there_and_back(paper_chunks(3)), placement)


def test_plan_digest_and_description_follow_the_steps() -> None:
    chunks = paper_chunks(3)
    policy = StaticPlacementPolicy()
    placement = policy.place(chunks, capacities=UNLIMITED, world_size=2)
    plan = policy.schedule(there_and_back(chunks), placement)
    ahead = replace(policy, max_prefetch=1).schedule(there_and_back(chunks), placement)
    assert plan == policy.schedule(there_and_back(chunks), placement)
    assert plan.digest != ahead.digest
    lines = ahead.describe().splitlines()
    assert lines[0].startswith("6 accesses, 4 gathers, at most 8,192 bytes gathered")
    assert lines[1] == "bytes at the peak: device 59,392, host 0, disk 0"
    assert lines[2] == "bytes moved in a step: ranks 14,336"
    assert lines[5].split() == ["0", "chunk", "0", "chunk", "1", "chunk", "0"]


def test_planning_looks_at_each_access_once_however_long_the_trace() -> None:
    chunks = paper_chunks(2)
    policy = StaticPlacementPolicy(max_prefetch=2)
    placement = policy.place(chunks, capacities=UNLIMITED, world_size=2)
    looked_up = 0

    class Counted(tuple):
        def __iter__(self):
            nonlocal looked_up
            looked_up += 1
            return super().__iter__()

    trace = PaperTrace(tuple(PaperAccess("forward", Counted(chunks[i % 2 :])) for i in range(5_000)))
    plan = policy.schedule(trace, placement)
    assert plan.gathers == 2
    assert looked_up <= 2 * len(trace.accesses)


STATS = MemStats(
    accesses=(
        AccessStats(phase="forward", params=("embed", "wq"), non_model_bytes=10),
        AccessStats(phase="forward", params=("embed",), non_model_bytes=40),
        AccessStats(phase="backward", params=("wq", "norm"), non_model_bytes=30),
    )
)


def test_stats_answer_what_was_used_when_and_how_much_more_was_taken() -> None:
    assert STATS.param_order == ("embed", "wq", "norm")
    assert STATS.accesses_of("embed") == (0, 1)
    assert STATS.accesses_of("wq") == (0, 2)
    assert STATS.accesses_of("unknown") == ()
    assert STATS.non_model_bytes == (10, 40, 30)
    assert STATS.max_non_model_bytes == 40
    assert MemStats(accesses=()).max_non_model_bytes == 0


def test_stats_come_back_from_json_and_from_a_file(tmp_path) -> None:
    assert MemStats.from_json(STATS.to_json()) == STATS
    STATS.save(tmp_path / "stats.json")
    assert MemStats.load(tmp_path / "stats.json") == STATS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "Expecting"),
        ("[]", "not a record of format 2"),
        ('{"format": 3, "accesses": []}', "not a record of format 2"),
        ('{"format": 2}', "damaged"),
        ('{"format": 2, "accesses": [{"phase": "forward"}]}', "damaged"),
        (STATS.to_json().replace('"backward"', '"x"'), "the phase 'x'"),
        (STATS.to_json().replace("40", "-1"), "use 0 or more"),
        (STATS.to_json().replace("40", '"many"'), "damaged"),
    ],
)
def test_stats_refuse_what_is_no_record(text, says) -> None:
    with pytest.raises(ValueError, match=says):
        MemStats.from_json(text)
