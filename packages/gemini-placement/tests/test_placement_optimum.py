"""Automatic placement against exhaustive search: capacities kept, accesses served, traffic near the optimum."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini_placement import AutoPlacementPolicy, ChunkPlacement, Placement, PlacementError
from gemini_placement.testing import PaperAccess, PaperChunk, PaperTrace, paper_chunks, there_and_back

TIERS = ("device", "host", "disk")
COSTS = {"disk->device": 4, "device->disk": 4, "disk->host": 4, "host->disk": 4}


def cost(traffic) -> int:
    """Bytes, each as often as it takes longer on a disk's link than on the host's."""
    return sum(amount * COSTS.get(link, 1) for link, amount in traffic.items())


@st.composite
def some_chunks(draw: st.DrawFn, most: int) -> tuple[list[PaperChunk], int]:
    world_size = draw(st.integers(1, 3))
    chunks = []
    for index in range(draw(st.integers(1, most))):
        shard = draw(st.integers(1, 40))
        trainable = draw(st.booleans())
        chunks.append(
            PaperChunk(
                name=f"c{index}",
                full_bytes=shard * world_size,
                shard_bytes=shard,
                optim_bytes=6 * shard if trainable else 0,
                trainable=trainable,
            )
        )
    return chunks, world_size


def placements(chunks, world_size, tiers):
    """Every choice of places there is."""
    params = [("device", True), ("device", False), ("host", False), ("disk", False)]
    options = []
    for chunk in chunks:
        places = [
            ChunkPlacement(keep_gathered=keep, param_tier=param, optim_tier=optim)
            for (param, keep), optim in itertools.product(params, TIERS if chunk.optim_bytes else ("device",))
            if param in tiers and optim in tiers and (world_size > 1 or keep == (param == "device"))
        ]
        options.append(places)
    return itertools.product(*options)


def fits(placement, capacities) -> bool:
    return all(
        needed == 0 or (tier in capacities and (capacities[tier] is None or needed <= capacities[tier]))
        for tier, needed in placement.needed_bytes.items()
    )


@settings(max_examples=120, deadline=None)
@given(some_chunks(3), st.integers(0, 700), st.integers(0, 300), st.sampled_from([None, 0, 100, 300]))
def test_places_are_near_the_optimum_and_only_the_impossible_is_refused(facts, device, host, disk) -> None:
    chunks, world_size = facts
    capacities = {"device": device, "host": host, **({} if disk is None else {"disk": disk})}
    policy = AutoPlacementPolicy()
    trace = there_and_back(chunks)
    best = None
    for places in placements(chunks, world_size, capacities):
        candidate = Placement(chunks, places, world_size=world_size)
        if fits(candidate, capacities):
            moved = cost(policy.schedule(trace, candidate).traffic)
            best = moved if best is None else min(best, moved)
    try:
        placement = policy.place(chunks, capacities=capacities, world_size=world_size)
    except PlacementError:
        assert best is None, "there was a choice that fits"
        return
    assert fits(placement, capacities)
    plain = Placement(chunks, [placement.of(chunk) for chunk in chunks], world_size=world_size)
    assert best is not None
    assert cost(policy.schedule(trace, plain).traffic) <= 1.1 * best


SIZES = st.sampled_from([1, 2, 3, 5, 8, 40])


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[PaperChunk], PaperTrace]:
    chunks = [
        PaperChunk(name=f"c{index}", full_bytes=size, shard_bytes=size, optim_bytes=0, trainable=False)
        for index, size in enumerate(draw(st.lists(SIZES, min_size=2, max_size=6)))
    ]
    uses = draw(st.lists(st.lists(st.sampled_from(chunks), min_size=1, max_size=2, unique=True), max_size=14))
    return chunks, PaperTrace(tuple(PaperAccess("forward", tuple(use)) for use in uses))


def least_gathered_bytes(trace: PaperTrace, room: int) -> int:
    """The bytes of gathers if between accesses any set of chunks may stay for which there is room: all are tried."""
    states: dict[frozenset[PaperChunk], int] = {frozenset(): 0}
    for access in trace.accesses:
        use = frozenset(access.chunks)
        following: dict[frozenset[PaperChunk], int] = {}
        for held, moved in states.items():
            paid = moved + sum(chunk.full_bytes for chunk in use - held)
            others = sorted(held - use, key=lambda chunk: chunk.name)
            for count in range(len(others) + 1):
                for stay in itertools.combinations(others, count):
                    now = use | frozenset(stay)
                    if sum(chunk.full_bytes for chunk in now) <= max(room, sum(chunk.full_bytes for chunk in use)):
                        following[now] = min(paid, following.get(now, paid))
        states = following
    return min(states.values())


@settings(max_examples=400, deadline=None)
@given(traces(), st.integers(0, 60))
def test_held_chunks_never_exceed_the_room_and_gathers_are_near_the_optimum(facts, room) -> None:
    chunks, trace = facts
    away = ChunkPlacement(keep_gathered=False, param_tier="host", optim_tier="host")
    busiest = max((sum(chunk.full_bytes for chunk in access.chunks) for access in trace.accesses), default=0)
    room = max(room, busiest)
    placement = Placement(chunks, [away] * len(chunks), device_capacity=room)
    plan = AutoPlacementPolicy().schedule(trace, placement)
    assert plan.peak_bytes["device"] <= room
    gathered: set[PaperChunk] = set()
    moved = 0
    for step, access in zip(plan.steps, trace.accesses, strict=True):
        moved += sum(chunk.full_bytes for chunk in set(access.chunks) - gathered)
        gathered |= set(access.chunks)
        assert sum(chunk.full_bytes for chunk in gathered) <= room
        gathered -= set(step.release)
    assert plan.traffic.get("host->device", 0) == moved
    assert moved <= 1.1 * least_gathered_bytes(trace, room)


def test_the_chunk_whose_next_use_is_farthest_is_given_up() -> None:
    first, second, third = paper_chunks(3, full_bytes=100, world_size=1)
    order = [first, second, third, first, third, second]
    trace = PaperTrace(tuple(PaperAccess("forward", (chunk,)) for chunk in order))
    away = ChunkPlacement(keep_gathered=False, param_tier="host", optim_tier="host")
    placement = Placement((first, second, third), [away] * 3, device_capacity=200)
    plan = AutoPlacementPolicy().schedule(trace, placement)
    assert [step.release for step in plan.steps] == [(), (second,), (), (first,), (third,), (second,)]
    assert plan.gathers == 4


def test_a_smaller_room_gives_up_more_and_never_fails() -> None:
    chunks = paper_chunks(8, full_bytes=100, world_size=1)
    trace = there_and_back(chunks)
    away = ChunkPlacement(keep_gathered=False, param_tier="host", optim_tier="host")
    gathers = []
    for room in range(300, 1100, 100):
        placement = Placement(chunks, [away] * 8, device_capacity=room + 200)  # and a gradient buffer with its shard
        plan = AutoPlacementPolicy().schedule(trace, placement)
        assert plan.peak_bytes["device"] <= room + 200
        gathers.append(plan.gathers)
    assert gathers == [13, 12, 11, 10, 9, 8, 8, 8]


@pytest.mark.parametrize(("ratio", "on_device"), [(0.0, 0), (0.5, 4), (1.0, 8)])
def test_optimizer_states_take_their_share_of_what_parameters_leave(ratio, on_device) -> None:
    chunks = paper_chunks(8, full_bytes=100)
    working = 3 * 100 + 150
    policy = AutoPlacementPolicy(gpu_margin_mem_ratio=ratio)
    capacities = {"device": working + 8 * 50 + 8 * 300, "host": None}
    placement = policy.place(chunks, capacities=capacities, world_size=2)
    assert sum(placement.of(chunk).optim_tier == "device" for chunk in chunks) == on_device
