"""Where chunks rest: exact shares for the static policy, capacities for the automatic one."""

import dataclasses
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini_placement import (
    AccessStats,
    AutoPlacementPolicy,
    ChunkPlacement,
    MemStats,
    Placement,
    PlacementError,
    StaticPlacementPolicy,
)
from gemini_placement.interfaces import TierName
from gemini_placement.testing import UNLIMITED, PaperChunk, paper_chunks, there_and_back


def real_chunks(params_per_chunk: int, *, world_size: int, count: int = 24) -> list[PaperChunk]:
    """Chunks as a manager makes them: parameters of uneven sizes, the last chunk short."""
    chunks = []
    for index in range(count):
        params = params_per_chunk if index < count - 1 else -(-params_per_chunk // 2)
        numel = sum(64 * world_size * (1 + (index + param) % 5) for param in range(params))
        shard = 2 * numel // world_size
        chunks.append(
            PaperChunk(
                name=f"chunk {index}",
                full_bytes=2 * numel,
                shard_bytes=shard,
                optim_bytes=0 if index % 7 == 3 else 6 * shard,
                trainable=index % 7 != 3,
            )
        )
    return chunks


FRACTIONS = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 1.0]))


@st.composite
def chunk_lists(draw: st.DrawFn) -> tuple[list[PaperChunk], int]:
    world_size = draw(st.integers(1, 5))
    chunks = []
    for index in range(draw(st.integers(0, 8))):
        trainable = draw(st.booleans())
        shard = draw(st.integers(1, 50))
        full = shard * world_size + draw(st.integers(0, 3))
        optim = draw(st.integers(1, 300)) if trainable else 0
        chunks.append(
            PaperChunk(name=f"c{index}", full_bytes=full, shard_bytes=shard, optim_bytes=optim, trainable=trainable)
        )
    return chunks, world_size


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.integers(2, 5), FRACTIONS, FRACTIONS)
def test_shares_are_met_within_one_chunk(params_per_chunk, world_size, shard, optim) -> None:
    chunks = real_chunks(params_per_chunk, world_size=world_size)
    policy = StaticPlacementPolicy(shard_param_frac=shard, offload_optim_frac=optim)
    placement = policy.place(chunks, capacities=UNLIMITED, world_size=world_size)
    released = sum(c.full_bytes for c in chunks if not placement.of(c).keep_gathered)
    away = sum(c.optim_bytes for c in chunks if placement.of(c).optim_tier == "host")
    total, largest = sum(c.full_bytes for c in chunks), max(c.full_bytes for c in chunks)
    assert shard * total - 0.5 <= released < shard * total + largest
    total, largest = sum(c.optim_bytes for c in chunks), max(c.optim_bytes for c in chunks)
    assert optim * total - 0.5 <= away < optim * total + largest
    assert all(placement.of(c).param_tier == "device" for c in chunks)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), *[FRACTIONS] * 5)
def test_every_combination_of_shares_is_met_within_one_chunk(
    params_per_chunk, world_size, shard, param, disk_param, optim, disk_optim
) -> None:
    chunks = real_chunks(params_per_chunk, world_size=world_size)
    disk_param, disk_optim = min(disk_param, 1 - param), min(disk_optim, 1 - optim)
    policy = StaticPlacementPolicy(
        shard_param_frac=shard,
        offload_param_frac=param,
        disk_param_frac=disk_param,
        offload_optim_frac=optim,
        disk_optim_frac=disk_optim,
    )
    placement = policy.place(chunks, capacities=UNLIMITED, world_size=world_size)
    places = [placement.of(chunk) for chunk in chunks]
    for amounts, tiers, host, disk in (
        ([c.shard_bytes for c in chunks], [place.param_tier for place in places], param, disk_param),
        ([c.optim_bytes for c in chunks], [place.optim_tier for place in places], optim, disk_optim),
    ):
        total, largest = sum(amounts), max(amounts)
        on_host, on_disk = (
            sum(amount for amount, tier in zip(amounts, tiers, strict=True) if tier == wanted)
            for wanted in ("host", "disk")
        )
        assert disk * total - 0.5 <= on_disk < disk * total + largest
        assert abs(on_host - host * total) <= largest
        assert (host + disk) * total - 0.5 <= on_host + on_disk < (host + disk) * total + largest
    if world_size > 1:
        released = sum(c.full_bytes for c, place in zip(chunks, places, strict=True) if not place.keep_gathered)
        total, largest = sum(c.full_bytes for c in chunks), max(c.full_bytes for c in chunks)
        share = max(shard, param + disk_param)
        assert share * total - largest <= released < share * total + largest


def test_a_quarter_of_eight_equal_chunks_is_two() -> None:
    chunks = paper_chunks(8)
    policy = StaticPlacementPolicy(shard_param_frac=0.25, offload_optim_frac=0.25)
    placement = policy.place(chunks, capacities=UNLIMITED, world_size=2)
    assert [placement.of(c).keep_gathered for c in chunks] == [True] * 6 + [False] * 2
    assert [placement.of(c).optim_tier for c in chunks] == ["device"] * 6 + ["host"] * 2


def test_rounding_of_fractions_takes_no_extra_chunk() -> None:
    chunks = paper_chunks(10)
    policy = StaticPlacementPolicy(shard_param_frac=0.1 + 0.2, offload_optim_frac=0.1 + 0.2)
    placement = policy.place(chunks, capacities=UNLIMITED, world_size=2)
    assert sum(not placement.of(c).keep_gathered for c in chunks) == 3
    assert sum(placement.of(c).optim_tier == "host" for c in chunks) == 3


def test_one_rank_keeps_gathered_what_rests_on_the_device() -> None:
    chunks = paper_chunks(4, world_size=1)
    on_device = StaticPlacementPolicy().place(chunks, capacities=UNLIMITED, world_size=1)
    assert all(on_device.of(c).keep_gathered for c in chunks)
    policy = StaticPlacementPolicy(offload_optim_frac=1.0, offload_param_frac=0.5)
    half = policy.place(chunks, capacities=UNLIMITED, world_size=1)
    assert [half.of(c).keep_gathered for c in chunks] == [True, True, False, False]
    assert [half.of(c).param_tier for c in chunks] == ["device", "device", "host", "host"]


def test_the_first_chunks_stay_and_the_last_go_farthest() -> None:
    chunks = paper_chunks(8)
    policy = StaticPlacementPolicy(
        shard_param_frac=0.75,
        offload_param_frac=0.25,
        disk_param_frac=0.25,
        offload_optim_frac=0.5,
        disk_optim_frac=0.125,
    )
    places = [policy.place(chunks, capacities=UNLIMITED, world_size=2).of(chunk) for chunk in chunks]
    assert [place.keep_gathered for place in places] == [True] * 2 + [False] * 6
    assert [place.param_tier for place in places] == ["device"] * 4 + ["host"] * 2 + ["disk"] * 2
    assert [place.optim_tier for place in places] == ["device"] * 3 + ["host"] * 4 + ["disk"]


def test_what_rests_off_the_device_is_released_though_nothing_is_to_be_sharded() -> None:
    chunks = paper_chunks(4)
    policy = StaticPlacementPolicy(shard_param_frac=0.0, disk_param_frac=0.5)
    places = [policy.place(chunks, capacities=UNLIMITED, world_size=2).of(chunk) for chunk in chunks]
    assert [place.keep_gathered for place in places] == [True, True, False, False]


@pytest.mark.parametrize("part", ["param", "optim"])
def test_shares_of_host_and_disk_beyond_all_are_refused(part) -> None:
    with pytest.raises(ValueError, match=f"offload_{part}_frac=0.7 and disk_{part}_frac=0.4 are shares of the same"):
        StaticPlacementPolicy(**{f"offload_{part}_frac": 0.7, f"disk_{part}_frac": 0.4})
    StaticPlacementPolicy(**{f"offload_{part}_frac": 0.7, f"disk_{part}_frac": 0.3})


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), "0.5", None, True])
@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (StaticPlacementPolicy, "shard_param_frac"),
        (StaticPlacementPolicy, "offload_optim_frac"),
        (StaticPlacementPolicy, "offload_param_frac"),
        (StaticPlacementPolicy, "disk_optim_frac"),
        (StaticPlacementPolicy, "disk_param_frac"),
        (AutoPlacementPolicy, "warmup_non_model_data_ratio"),
        (AutoPlacementPolicy, "steady_cuda_cap_ratio"),
    ],
)
def test_fractions_outside_zero_to_one_are_refused_by_name(policy, field, value) -> None:
    with pytest.raises(ValueError, match=rf"{field} must be a number in \[0, 1\], got"):
        policy(**{field: value})


@pytest.mark.parametrize("policy", [StaticPlacementPolicy, AutoPlacementPolicy])
@pytest.mark.parametrize("depth", ["max_prefetch", "max_fetch"])
def test_depths_must_be_numbers_of_chunks(policy, depth) -> None:
    with pytest.raises(ValueError, match=f"{depth} must not be negative, got -1"):
        policy(**{depth: -1})
    with pytest.raises(TypeError, match=f"{depth} must be an int"):
        policy(**{depth: 1.0})


@pytest.mark.parametrize(
    ("capacities", "world_size", "error", "says"),
    [
        ({}, 2, ValueError, "capacities must name the device"),
        ({"host": 1}, 2, ValueError, "capacities must name the device"),
        ({"device": 1, "nvme": 2}, 2, ValueError, "names the tier 'nvme'; tiers are device, host, disk"),
        ({"device": -1}, 2, ValueError, "capacity of device must not be negative, got -1"),
        ({"device": 1.5}, 2, TypeError, "capacity of device must be an int in bytes"),
        (UNLIMITED, 0, ValueError, "world_size must be at least 1"),
        (UNLIMITED, 2.0, TypeError, "world_size must be an int"),
    ],
)
@pytest.mark.parametrize("policy", [StaticPlacementPolicy(), AutoPlacementPolicy()])
def test_arguments_of_place_are_checked(policy, capacities, world_size, error, says) -> None:
    with pytest.raises(error, match=says):
        policy.place(paper_chunks(2), capacities=capacities, world_size=world_size)


@pytest.mark.parametrize("policy", [StaticPlacementPolicy(), AutoPlacementPolicy()])
def test_two_chunks_of_one_name_are_refused(policy) -> None:
    with pytest.raises(ValueError, match="Two chunks are named 'chunk 0'"):
        policy.place(paper_chunks(1) * 2, capacities=UNLIMITED, world_size=2)


def test_static_counts_shards_states_kept_buffers_and_the_working_set() -> None:
    chunks = paper_chunks(4, full_bytes=100)
    policy = StaticPlacementPolicy(shard_param_frac=0.5, offload_optim_frac=0.5)
    # Two kept buffers, two shards, two optimizer states, the two released buffers, one gradient buffer and its shard.
    exact = 2 * 100 + 2 * 50 + 2 * 300 + 2 * 100 + 150
    capacities = {"device": exact, "host": 600}
    assert policy.place(chunks, capacities=capacities, world_size=2).needed_bytes == {**capacities, "disk": 0}
    for tier in ("device", "host"):
        with pytest.raises(PlacementError) as refusal:
            policy.place(chunks, capacities={**capacities, tier: capacities[tier] - 1}, world_size=2)
        assert refusal.value.needed == {**capacities, "disk": 0}


def test_prefetched_buffers_belong_to_the_working_set() -> None:
    chunks = paper_chunks(4, full_bytes=100)
    needed = {
        prefetch: StaticPlacementPolicy(max_prefetch=prefetch)
        .place(chunks, capacities=UNLIMITED, world_size=2)
        .needed_bytes["device"]
        for prefetch in (0, 1, 2, 9)
    }
    assert needed == {0: 1850, 1: 1950, 2: 1950, 9: 1950}


def test_fetched_shards_belong_to_the_working_set_and_a_single_rank_fetches_full_buffers() -> None:
    for world_size, fetched in ((1, 100), (2, 50)):
        chunks = paper_chunks(6, full_bytes=100, world_size=world_size)
        needed = {
            fetch: StaticPlacementPolicy(offload_param_frac=0.5, offload_optim_frac=1.0, max_fetch=fetch)
            .place(chunks, capacities=UNLIMITED, world_size=world_size)
            .needed_bytes["device"]
            for fetch in (0, 1, 2, 9)
        }
        assert [needed[fetch] - needed[0] for fetch in (1, 2, 9)] == [fetched, 2 * fetched, 3 * fetched]


def advised(message: str) -> StaticPlacementPolicy:
    found = re.search(r"nearest that fits: (.*)\.$", message)
    assert found, message
    words = dict(word.split("=") for word in found[1].split(", "))
    depths = {name: int(words.pop(name)) for name in ("max_prefetch", "max_fetch") if name in words}
    return StaticPlacementPolicy(**depths, **{name: float(value) for name, value in words.items()})


@settings(max_examples=100, deadline=None)
@given(
    chunk_lists(),
    st.integers(0, 3000),
    st.one_of(st.none(), st.integers(0, 3000)),
    st.sampled_from([{}, {"disk": None}, {"disk": 500}]),
    FRACTIONS,
    st.integers(0, 2),
    st.integers(0, 2),
)
def test_settings_named_by_a_static_refusal_do_fit(facts, device, host, disk, fraction, prefetch, fetch) -> None:
    chunks, world_size = facts
    capacities = {"device": device, "host": host, **disk}
    policy = StaticPlacementPolicy(
        offload_param_frac=fraction, offload_optim_frac=fraction, max_prefetch=prefetch, max_fetch=fetch
    )
    try:
        placement = policy.place(chunks, capacities=capacities, world_size=world_size)
    except PlacementError as error:
        if "No shares fit" not in str(error):
            advised(str(error)).place(chunks, capacities=capacities, world_size=world_size)
    else:
        assert placement.needed_bytes["device"] <= device
        assert host is None or placement.needed_bytes["host"] <= host


def test_static_refuses_a_host_that_does_not_exist() -> None:
    with pytest.raises(PlacementError, match=r"host needs .* has none \(the tier is not available\)"):
        StaticPlacementPolicy(offload_optim_frac=1.0).place(paper_chunks(3), capacities={"device": None}, world_size=2)


@settings(max_examples=300, deadline=None)
@given(
    chunk_lists(),
    st.integers(0, 3000),
    st.one_of(st.none(), st.integers(0, 1500), st.just(-1)),
    st.one_of(st.none(), st.integers(0, 1500), st.just(-1)),
    st.integers(0, 2),
    st.integers(0, 2),
)
def test_auto_keeps_every_capacity_or_says_what_would_do(facts, device, host, disk, prefetch, fetch) -> None:
    chunks, world_size = facts
    capacities = {"device": device, "host": host, "disk": disk}
    capacities = {tier: capacity for tier, capacity in capacities.items() if capacity != -1}
    policy = AutoPlacementPolicy(max_prefetch=prefetch, max_fetch=fetch)
    refusal = None
    try:
        placement = policy.place(chunks, capacities=capacities, world_size=world_size)
    except PlacementError as error:
        refusal = error
    if refusal is None:
        for tier, needed in placement.needed_bytes.items():
            capacity = capacities.get(tier, 0)
            assert capacity is None or needed <= capacity
    elif found := re.search(r"A (host|disk) capacity of ([\d,]+) bytes would fit", str(refusal)):
        wider = {**capacities, found[1]: int(found[2].replace(",", ""))}
        policy.place(chunks, capacities=wider, world_size=world_size)
        # It is the nearest: one byte less is refused again.
        with pytest.raises(PlacementError):
            policy.place(chunks, capacities={**wider, found[1]: wider[found[1]] - 1}, world_size=world_size)
    else:
        assert refusal.needed["device"] > device
        if found := re.search(r"max_prefetch=(\d)(?:, max_fetch=(\d))? would fit", str(refusal)):
            lower = AutoPlacementPolicy(max_prefetch=int(found[1]), max_fetch=int(found[2] or 0))
            lower.place(chunks, capacities={"device": device, "host": None}, world_size=world_size)


@settings(max_examples=100, deadline=None)
@given(chunk_lists(), st.integers(0, 2000), st.integers(0, 400))
def test_more_room_on_the_device_never_means_a_refusal(facts, device, more) -> None:
    chunks, world_size = facts
    policy = AutoPlacementPolicy()
    try:
        policy.place(chunks, capacities={"device": device, "host": None}, world_size=world_size)
    except PlacementError:
        return
    policy.place(chunks, capacities={"device": device + more, "host": None}, world_size=world_size)


def test_auto_fills_the_device_with_shards_then_states_then_full_buffers() -> None:
    chunks = paper_chunks(6, full_bytes=100)
    working = 3 * 100 + 100 + 50  # three full buffers, a gradient buffer and the shard it is reduced to

    def parts(device: int | None) -> tuple[int, int, int]:
        capacities = {"device": device, "host": None}
        placement = AutoPlacementPolicy().place(chunks, capacities=capacities, world_size=2)
        places = [placement.of(chunk) for chunk in chunks]
        return (
            sum(place.param_tier == "device" for place in places),
            sum(place.optim_tier == "device" for place in places),
            sum(place.keep_gathered for place in places),
        )

    assert parts(working) == (0, 0, 0)
    assert parts(working + 299) == (5, 0, 0)
    assert parts(working + 300) == (6, 0, 0)
    assert parts(working + 300 + 600) == (6, 2, 0)
    assert parts(working + 300 + 1800 + 50) == (6, 6, 1)
    assert parts(None) == (6, 6, 6)


def test_auto_sends_what_the_host_cannot_take_to_the_disk() -> None:
    chunks = paper_chunks(4, full_bytes=100)
    placement = AutoPlacementPolicy().place(chunks, capacities={"device": 450, "host": 500, "disk": None}, world_size=2)
    assert placement.needed_bytes == {"device": 450, "host": 500, "disk": 900}
    assert [placement.of(c) for c in chunks] == [
        ChunkPlacement(keep_gathered=False, param_tier="host", optim_tier=tier)
        for tier in ("host", "disk", "disk", "disk")
    ]


def test_auto_refusal_names_a_lower_prefetch_that_fits() -> None:
    with pytest.raises(PlacementError, match="max_prefetch=1 would fit"):
        AutoPlacementPolicy(max_prefetch=4).place(
            paper_chunks(8, full_bytes=100), capacities={"device": 550, "host": None}, world_size=2
        )


def test_auto_leaves_the_device_to_other_data_before_and_after_measuring() -> None:
    policy = AutoPlacementPolicy(warmup_non_model_data_ratio=0.75, steady_cuda_cap_ratio=0.5)
    stats = MemStats(accesses=(AccessStats(phase="forward", params=("w",), non_model_bytes=300),))
    assert policy.model_bytes(1000) == 250
    assert policy.model_bytes(1000, stats) == 200
    assert policy.model_bytes(400, stats) == 0


@settings(max_examples=100, deadline=None)
@given(chunk_lists(), st.integers(0, 600), st.integers(0, 600))
def test_auto_places_again_within_other_capacities_what_can_be_moved(given_chunks, first: int, second: int) -> None:
    chunks, world_size = given_chunks
    policy = AutoPlacementPolicy()
    try:
        placement = policy.place(chunks, capacities={"device": first, "host": None}, world_size=world_size)
    except PlacementError:
        return
    before = [placement.of(chunk) for chunk in chunks]
    try:
        placed = policy.place_again(placement, capacities={"device": second, "host": None})
    except PlacementError:
        assert placement.needed_bytes["device"] > second
    else:
        assert placed.needed_bytes["device"] <= second
        for chunk, old in zip(chunks, before, strict=True):
            kept = world_size > 1 and old.keep_gathered
            assert placed.of(chunk).keep_gathered == kept or world_size == 1
            assert not kept or placed.of(chunk).param_tier == "device"
    for moves_params in (True, False):
        evicted = policy.evict(placement, capacities={"device": second, "host": None}, moves_params=moves_params)
        moved = [old.param_tier != evicted.of(chunk).param_tier for chunk, old in zip(chunks, before, strict=True)]
        states = [chunk for chunk in chunks if chunk.optim_bytes and evicted.of(chunk).optim_tier == "device"]
        for chunk, old in zip(chunks, before, strict=True):
            assert evicted.of(chunk).optim_tier in (old.optim_tier, "host")
            assert evicted.of(chunk).param_tier in (old.param_tier, "host")
        assert not any(moved) or (moves_params and not states), "states leave first"
        if evicted.needed_bytes["device"] > second:
            stay = [chunk for chunk in chunks if evicted.of(chunk).param_tier == "device"]
            assert not states
            assert not moves_params or all(world_size > 1 and evicted.of(chunk).keep_gathered for chunk in stay)


def summing(chunks: Sequence[PaperChunk]) -> tuple[PaperChunk, ...]:
    """Return the chunks as they are where gradients of several backwards are summed in fp32."""
    return tuple(
        dataclasses.replace(chunk, optim_bytes=8 * chunk.shard_bytes, sum_bytes=2 * chunk.shard_bytes)
        for chunk in chunks
    )


@pytest.mark.parametrize(("tier", "gradient"), [("host", {"device->host": 8192}), ("disk", {"device->disk": 8192})])
def test_sum_of_gradients_rests_and_travels_with_the_states(tier: TierName, gradient: dict[str, int]) -> None:
    plain = paper_chunks(4)
    sums = summing(plain)
    away = ChunkPlacement(keep_gathered=False, param_tier="device", optim_tier=tier)
    placement = Placement(sums, [away] * 4, world_size=2)
    assert placement.resting_bytes[tier] == 4 * 8 * 2048
    plan = AutoPlacementPolicy().schedule(there_and_back(sums), placement)
    states = {"disk->host": 4 * 8 * 2048, "host->disk": 4 * 6 * 2048} if tier == "disk" else {}
    assert plan.traffic == {"ranks": plan.traffic["ranks"], **gradient, "host->device": 8192, **states}
    # Parameters on the device keep their place, so a reduced gradient is beside them on its way to the sum.
    peak = AutoPlacementPolicy().schedule(there_and_back(plain), Placement(plain, [away] * 4, world_size=2)).peak_bytes
    assert plan.peak_bytes["device"] == peak["device"] + 2048


def test_chunks_that_are_their_own_master_weights_are_not_placed_again() -> None:
    chunks = [
        PaperChunk(name=f"c{i}", full_bytes=80, shard_bytes=40, optim_bytes=120, is_own_master=True) for i in range(3)
    ]
    policy = AutoPlacementPolicy()
    placement = policy.place(chunks, capacities={"device": 360, "host": None}, world_size=2)
    again = policy.place_again(placement, capacities={"device": None, "host": None})
    assert again.digest == placement.digest
    assert policy.place(chunks, capacities={"device": None, "host": None}, world_size=2).digest != again.digest


def test_placement_is_alike_in_processes_with_other_hash_seeds() -> None:
    program = (
        "from gemini_placement import AutoPlacementPolicy, StaticPlacementPolicy\n"
        "from gemini_placement.testing import UNLIMITED, paper_chunks, there_and_back\n"
        "chunks = paper_chunks(30)\n"
        "for policy, capacities in [\n"
        "    (StaticPlacementPolicy(shard_param_frac=.4, offload_optim_frac=.3, max_prefetch=3), UNLIMITED),\n"
        "    (AutoPlacementPolicy(max_prefetch=3), {'device': 250_000, 'host': None}),\n"
        "]:\n"
        "    placement = policy.place(chunks, capacities=capacities, world_size=2)\n"
        "    print(placement.digest, policy.schedule(there_and_back(chunks), placement).digest)\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(outputs) == 1


def test_digest_tells_placements_apart() -> None:
    chunks = paper_chunks(4)
    fractions = [{}, {"shard_param_frac": 0.5}, {"offload_optim_frac": 0.5}, {"offload_optim_frac": 1.0}]
    digests = {
        StaticPlacementPolicy(**each).place(chunks, capacities=UNLIMITED, world_size=2).digest for each in fractions
    }
    assert len(digests) == len(fractions)


def test_placement_describes_each_chunk_and_refuses_strangers() -> None:
    chunks = paper_chunks(2)
    placement = StaticPlacementPolicy(offload_optim_frac=0.5).place(chunks, capacities=UNLIMITED, world_size=2)
    lines = placement.describe().splitlines()
    assert lines[-2].split() == ["chunk", "0", "4,096", "in", "use", "device", "device"]
    assert lines[-1].split() == ["chunk", "1", "4,096", "in", "use", "device", "host"]
    with pytest.raises(KeyError, match="chunk 2 is not one of the 2 chunks"):
        placement.of(paper_chunks(3)[2])
    with pytest.raises(ValueError, match="chunk 0 cannot stay gathered and rest on host"):
        Placement(chunks[:1], [ChunkPlacement(keep_gathered=True, param_tier="host", optim_tier="host")])
    with pytest.raises(ValueError, match="2 chunks came with 0 placements"):
        Placement(chunks, [])
