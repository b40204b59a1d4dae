"""Plans: obeyed on paper, every access is served and nothing is left behind."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini_placement import (
    AccessStats,
    AutoPlacementPolicy,
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
DEPTHS = st.fixed_dictionaries(
    {"max_prefetch": st.integers(0, 4), "max_fetch": st.integers(0, 3), "max_held": st.integers(0, 4)}
)


def placed(kept: int, away: int = 0, **settings) -> Placement:
    """Keep the chunks whose bit is set in ``kept``; of the others, let those of ``away`` rest on the host."""
    return Placement(
        CHUNKS,
        [
            ChunkPlacement(
                keep_gathered=bool(kept >> index & 1),
                param_tier="host" if away & ~kept & 1 << index else "device",
                optim_tier="device",
            )
            for index in range(len(CHUNKS))
        ],
        **settings,
    )


@settings(max_examples=600, deadline=None)
@given(TRACES, st.integers(0, 127), st.integers(0, 127), st.integers(1, 2), DEPTHS)
def test_any_trace_is_served_within_the_bounds(trace, kept, away, world_size, depths) -> None:
    placement = placed(kept, away, world_size=world_size)
    plan = StaticPlacementPolicy(**depths).schedule(trace, placement)
    check_plan(plan, trace, placement, **depths)


@pytest.mark.parametrize("max_prefetch", [0, 2])
def test_each_held_chunk_saves_a_gather_as_long_as_there_are_chunks(max_prefetch) -> None:
    chunks = paper_chunks(12)
    placement = StaticPlacementPolicy().place(chunks, capacities=UNLIMITED, world_size=2)
    trace = there_and_back(chunks)
    plans = [
        StaticPlacementPolicy(max_prefetch=max_prefetch, max_held=held).schedule(trace, placement) for held in range(14)
    ]
    # The chunk that is used on both sides needs no holding, and those ahead of their use stay anyhow.
    assert [plan.gathers for plan in plans] == [24 - min(12, 1 + max(max_prefetch, held)) for held in range(14)]
    shares = {plan.traffic["ranks"] - plan.gathers * chunks[0].shard_bytes for plan in plans}
    assert len(shares) == 1, "all chunks are alike, so traffic falls with the gathers"


@settings(max_examples=300, deadline=None)
@given(TRACES, st.integers(0, 127), st.integers(0, 2), st.integers(1, 3), st.integers(1, 2))
def test_fetches_change_neither_gathers_nor_traffic(trace, away, max_prefetch, max_fetch, world_size) -> None:
    placement = placed(0, away, world_size=world_size)
    without = StaticPlacementPolicy(max_prefetch=max_prefetch).schedule(trace, placement)
    plan = StaticPlacementPolicy(max_prefetch=max_prefetch, max_fetch=max_fetch).schedule(trace, placement)
    parts = [[(step.chunks, step.prefetch, step.release) for step in each.steps] for each in (plan, without)]
    assert parts[0] == parts[1]
    assert (plan.gathers, plan.traffic) == (without.gathers, without.traffic)


@settings(max_examples=300, deadline=None)
@given(TRACES, st.integers(0, 127), st.integers(0, 2), st.integers(0, 3), st.integers(1, 2), st.integers(0, 2_500))
def test_held_and_fetched_chunks_keep_within_the_room(trace, away, max_prefetch, max_fetch, world_size, room) -> None:
    depths = {"max_prefetch": max_prefetch, "max_fetch": max_fetch}
    unlimited = placed(0, away, world_size=world_size, **depths)
    least = StaticPlacementPolicy(**depths).schedule(trace, unlimited).peak_bytes["device"]
    capacity = max(room, least, unlimited.needed_bytes["device"])
    placement = placed(0, away, world_size=world_size, device_capacity=capacity, **depths)
    plan = AutoPlacementPolicy(**depths).schedule(trace, placement)
    check_bounds = {"max_prefetch": len(CHUNKS), "max_fetch": max_fetch}  # held chunks have no bound of their own
    check_plan(plan, trace, placement, **check_bounds)
    assert plan.peak_bytes["device"] <= capacity


@settings(max_examples=300, deadline=None)
@given(TRACES, st.integers(0, 127))
def test_without_prefetch_a_chunk_stays_for_its_next_use_alone(trace, kept) -> None:
    plan = StaticPlacementPolicy().schedule(trace, placed(kept))
    uses = [set(access.chunks) for access in trace.accesses]
    assert len(plan.steps) == len(uses)
    stays = {chunk for index, chunk in enumerate(CHUNKS) if kept >> index & 1}
    for index, (use, step) in enumerate(zip(uses, plan.steps, strict=True)):
        assert set(step.prefetch) == (set().union(*uses[1:]) & stays - use if index == 0 else set())
        following = uses[index + 1] if index + 1 < len(uses) else set()
        phase = trace.accesses[index].phase
        held = use - following - stays - set(step.release)
        for chunk in held:  # only over a gap within one phase
            back = next(i for i in range(index + 1, len(uses)) if chunk in uses[i])
            assert trace.accesses[back].phase == phase


def test_the_first_access_starts_what_stays_gathered_in_the_order_of_use() -> None:
    first, second, third, fourth, unused = CHUNKS[:5]
    uses = [(first,), (third,), (second,), (fourth,)]
    trace = PaperTrace(tuple(PaperAccess("forward", use) for use in uses))
    plan = StaticPlacementPolicy(max_prefetch=1).schedule(trace, placed(kept=0b10110))  # second, third and unused
    assert [step.prefetch for step in plan.steps] == [(third, second, fourth), (), (), ()]
    assert unused not in plan.steps[0].prefetch


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


@pytest.mark.parametrize("world_size", [1, 2])
def test_fetches_are_the_next_chunks_off_the_device_beyond_those_prefetched(world_size: int) -> None:
    chunks = paper_chunks(6, full_bytes=4096, world_size=world_size)
    policy = StaticPlacementPolicy(offload_param_frac=1.0, max_prefetch=1, max_fetch=2)
    placement = policy.place(chunks, capacities=UNLIMITED, world_size=world_size)
    plan = policy.schedule(there_and_back(chunks), placement)
    fetches = ["".join(chunk.name[-1] for chunk in step.fetch) for step in plan.steps]
    assert fetches == ["23", "4", "5", "2", "3", "", "", "1", "0", "", "", ""]
    # The full buffers of two chunks, and two shards; a single rank fetches into full buffers.
    assert plan.peak_gathered_bytes == 2 * 4096 + 2 * (4096 if world_size == 1 else 2048)


def test_chunks_that_rest_on_the_device_take_no_fetch_slot() -> None:
    trace = PaperTrace(tuple(PaperAccess("forward", (chunk,)) for chunk in CHUNKS))
    plan = StaticPlacementPolicy(max_fetch=1).schedule(trace, placed(kept=0, away=0b1000100))
    assert [step.fetch for step in plan.steps] == [(CHUNKS[2],), (), (CHUNKS[6],), (), (), (), ()]


def test_kept_chunks_are_gathered_once_and_never_released() -> None:
    chunks = paper_chunks(3)
    policy = StaticPlacementPolicy(shard_param_frac=0.0, max_prefetch=1)
    plan = policy.schedule(there_and_back(chunks), policy.place(chunks, capacities=UNLIMITED, world_size=2))
    assert plan.gathers == 3
    assert [step.prefetch for step in plan.steps] == [(chunks[1], chunks[2]), (), (), (), (), ()]
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
    assert lines[5].split() == ["0", "chunk", "0", "chunk", "1", "-", "chunk", "0"]
    away = replace(policy, offload_param_frac=1.0)
    placement = away.place(chunks, capacities=UNLIMITED, world_size=2)
    fetching = replace(away, max_fetch=1).schedule(there_and_back(chunks), placement)
    assert fetching.digest != away.schedule(there_and_back(chunks), placement).digest
    assert fetching.describe().splitlines()[5].split() == ["0", "chunk", "0", "-", "chunk", "1", "chunk", "0"]


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
