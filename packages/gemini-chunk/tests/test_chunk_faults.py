"""What goes wrong in the middle of a call leaves values, bytes and states as they were, or at rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from gemini_chunk import (
    Chunk,
    ChunkError,
    ChunkManager,
    LocalCollectives,
    ProcessGroupCollectives,
    TensorState,
    TierFullError,
    device_tier,
    disk_tier,
    host_tier,
)
from gemini_chunk.testing import Call, CountingCollectives, DelayedCollectives, FailingCollectives, LateCopier
from ranks import run_ranks


def parameters(count: int = 3, numel: int = 6, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(numel, generator=generator).to(dtype)) for _ in range(count)]


def named(params: list[nn.Parameter]) -> list[tuple[str, Tensor]]:
    return [(f"p{index}", param) for index, param in enumerate(params)]


def open_chunk(params: list[nn.Parameter], capacity: int | None = None) -> Chunk:
    chunk = Chunk(64, torch.bfloat16, device=device_tier("cpu", capacity))
    for name, param in named(params):
        chunk.append(param, name)
    return chunk


def take_ones(manager: ChunkManager, params: list[nn.Parameter]) -> None:
    for param in params:
        manager.take_gradient(param, torch.ones(6))
    manager.finish_backward()


def used(manager: ChunkManager) -> dict[str, int]:
    return {name: tier.used for name, tier in manager.tiers.items()}


# -- closing ----------------------------------------------------------------------------------------------------------


def bad_value() -> Tensor:
    raise OSError("the file of p1 is gone")


@pytest.mark.parametrize(
    ("source", "error", "sentence"),
    [
        (bad_value, OSError, "file of p1 is gone"),
        (lambda: torch.zeros(7), ValueError, r"'p1' has shape \(6,\); its value has \(7,\)"),
        (lambda: torch.zeros(6, device="meta"), ValueError, "'p1' is on the meta device"),
    ],
)
def test_a_chunk_that_could_not_close_is_open_and_its_tensors_have_their_values(
    source: Callable[[], Tensor], error: type[Exception], sentence: str
) -> None:
    params = parameters()
    host = host_tier()
    chunk = Chunk(18, torch.float32, device=device_tier("cpu"))
    for (name, param), given in zip(named(params), [None, source, None], strict=True):
        chunk.append(param, name, given)
    with pytest.raises(error, match=sentence):
        chunk.close(host, master=host)
    assert (host.used, chunk.is_closed) == (0, False)
    assert all(torch.equal(param, value) for param, value in zip(params, parameters(), strict=True))
    with pytest.raises(ChunkError, match="chunk 0 is open"):
        chunk.gather()


@pytest.mark.parametrize("host_bytes", [0, 35, 36, 36 + 71])
def test_a_tier_too_small_for_shard_or_master_leaves_the_chunk_open(host_bytes: int) -> None:
    params = parameters()
    chunk, host = open_chunk(params), host_tier(host_bytes)
    with pytest.raises(TierFullError):
        chunk.close(host, master=host)
    assert host.used == 0
    assert all(torch.equal(param, value) for param, value in zip(params, parameters(), strict=True))
    host.capacity = 36 + 72
    chunk.close(host, master=host)
    assert host.used == 108


def test_what_was_registered_before_a_tier_was_full_is_managed_and_the_rest_is_not() -> None:
    params = parameters()
    manager = ChunkManager(device=device_tier("cpu"), host=host_tier(capacity=50))
    with pytest.raises(TierFullError):
        manager.register(named(params), 6, rest="host")
    assert ([param in manager for param in params], used(manager)["host"]) == ([True, True, False], 48)
    assert torch.equal(params[2], parameters()[2])
    assert torch.equal(manager.full_value(params[1]), parameters()[1])
    manager.register(named(params[2:]), 6, rest="device")


def test_a_tensor_is_appended_once_and_dense_and_has_memory() -> None:
    chunk, tensor = Chunk(64, torch.float32, device=device_tier("cpu")), torch.zeros(3)
    chunk.append(tensor, "a")
    with pytest.raises(ValueError, match="'b' is in chunk 0 already, as 'a'"):
        chunk.append(tensor, "b")
    with pytest.raises(TypeError, match=r"'c' has layout torch\.sparse_coo"):
        chunk.append(torch.zeros(3).to_sparse(), "c")
    with pytest.raises(TypeError, match="'d' is on the meta device"):
        chunk.append(torch.zeros(3, device="meta"), "d", source=lambda: torch.zeros(3))
    with torch.inference_mode():
        made_there = torch.zeros(3)
    with pytest.raises(TypeError, match=r"'e' was made under torch\.inference_mode\(\)"):
        chunk.append(made_there, "e")
    assert chunk.used_numel == 3
    with pytest.raises(ValueError, match="as 'a'"):
        ChunkManager(device=device_tier("cpu")).register([("a", tensor), ("b", tensor)], 64)


# -- late, failing and counted collectives ----------------------------------------------------------------------------


def train(manager: ChunkManager, params: list[nn.Parameter], steps: int = 3) -> None:
    """Prefetch, use, take gradients, reduce and update, as a training loop would."""
    for step in range(steps):
        chunks = manager.chunks
        for index, chunk in enumerate(chunks):
            manager.start_gather(chunk)
            if index + 1 < len(chunks):
                manager.start_gather(chunks[index + 1])
            tensors = [info.tensor for info in chunk.tensors]
            manager.begin_use(tensors)
            assert not any(torch.isnan(tensor).any() for tensor in tensors)
            manager.end_use(tensors, in_backward=True)
        for param in params:
            manager.take_gradient(param, torch.full_like(param, float(manager.collectives.rank + step)))
        manager.finish_backward()
        for chunk in chunks:
            assert chunk.gradient is not None
            assert chunk.master is not None
            chunk.master.sub_(chunk.gradient)
            chunk.commit()


def trained(manager: ChunkManager, params: list[nn.Parameter], **places: object) -> list[Tensor]:
    manager.register(named(params), 12, **places)  # type: ignore[arg-type] # where chunks rest
    train(manager, params)
    return [manager.full_value(param) for param in params]


def check_late(rank: int, world_size: int) -> None:
    for places in ({"rest": "host"}, {"rest": "device"}, {"keep_gathered": True, "master": "host"}):
        plain = trained(ChunkManager(device=device_tier("cpu")), parameters(), **places)
        late = DelayedCollectives(ProcessGroupCollectives() if world_size > 1 else LocalCollectives())
        params = parameters()
        manager = ChunkManager(device=device_tier("cpu"), collectives=late, debug=True)
        found = trained(manager, params, **places)
        assert (late.faults, late.open) == ([], 0)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_late_collectives_read_and_write_memory_that_is_still_theirs(world_size: int) -> None:
    run_ranks(check_late, world_size)


def test_a_late_collective_reports_memory_that_was_freed_or_overwritten() -> None:
    late = DelayedCollectives(LocalCollectives())
    full, shard = torch.zeros(4), torch.ones(4)
    handle = late.all_gather(full, shard)
    assert torch.isnan(full).all()
    shard.zero_()
    with pytest.raises(AssertionError, match="source of an open all_gather was overwritten"):
        handle.wait()
    handle = late.all_gather(full, shard)
    full.untyped_storage().resize_(0)
    with pytest.raises(AssertionError, match="memory of an open all_gather was freed"):
        handle.wait()
    assert (len(late.faults), late.open) == (2, 0)


INTERRUPTIONS: dict[str, Callable[[Chunk], object]] = {
    "release": lambda chunk: chunk.release(),
    "move": lambda chunk: chunk.move(host_tier()),
    "commit": lambda chunk: chunk.commit(),
    "load": lambda chunk: chunk.load(chunk.tensors[0], torch.zeros(6)),
    "read": lambda chunk: chunk.read(chunk.tensors[0]),
    "reset": lambda chunk: chunk.reset(),
    "discard": lambda chunk: chunk.discard(),
    "gather": lambda chunk: chunk.gather(),
    "free": lambda chunk: chunk.free(),
}


@pytest.mark.parametrize("name", INTERRUPTIONS)
def test_whatever_comes_after_a_started_gather_waits_for_it(name: str) -> None:
    late, copier = DelayedCollectives(LocalCollectives()), LateCopier()
    params = parameters()
    device, host = device_tier("cpu"), host_tier()
    host.outgoing = copier
    chunk = Chunk(18, torch.float32, device=device, collectives=late)
    for param in params:
        chunk.append(param)
    chunk.close(host)
    handle = chunk.start_gather()
    assert copier.open == 1
    INTERRUPTIONS[name](chunk)
    assert (late.open, copier.open, late.faults, copier.faults) == (0, 0, [], [])
    handle.wait()  # over already: nothing happens
    assert device.used == (72 if chunk.is_gathered else 0)


@pytest.mark.parametrize("when", ["start", "wait"])
def test_a_gather_that_fails_names_the_chunk_and_can_be_repeated(when: Literal["start", "wait"]) -> None:
    failing = FailingCollectives(LocalCollectives(), {0}, when=when)
    params = parameters()
    manager = ChunkManager(device=device_tier("cpu"), collectives=failing)
    (chunk,) = manager.register(named(params), 18, rest="host")
    before = used(manager)
    with pytest.raises(ChunkError, match="Gathering chunk 0 failed on rank 0: all_gather of 18 elements was told"):
        manager.gather(chunk)
    assert used(manager) == before
    assert all(torch.isnan(param).all() for param in params)
    manager.gather(chunk)
    assert all(torch.equal(param, value) for param, value in zip(params, parameters(), strict=True))


def check_failed_reduction(rank: int, world_size: int, when: Literal["start", "wait"], keep: bool) -> None:
    params = parameters(dtype=torch.bfloat16)
    failing = FailingCollectives(ProcessGroupCollectives(), (), when=when)
    manager = ChunkManager(device=device_tier("cpu"), collectives=failing)
    (chunk,) = manager.register(named(params), 20, master="host", keep_gathered=keep)
    before = used(manager)
    manager.gather(chunk)
    failing.at = {failing.started}
    with pytest.raises(ChunkError, match=rf"Reducing chunk 0 failed on rank {rank}: reduce_scatter of 18"):
        take_ones(manager, params)
    manager.reset()
    assert (used(manager), chunk.gradient) == (before, None)
    assert {info.state for info in chunk.tensors} == {TensorState.HOLD if keep else TensorState.FREE}
    manager.gather(chunk)  # the shard, which the failed reduction was writing to, has its values
    for param, value in zip(params, parameters(dtype=torch.bfloat16), strict=True):
        assert torch.equal(param, value)
    take_ones(manager, params)
    assert chunk.gradient is not None
    assert torch.equal(chunk.gradient[: chunk.valid_numel].float(), torch.ones(chunk.valid_numel))


@pytest.mark.distributed
@pytest.mark.parametrize("when", ["start", "wait"])
def test_a_reduction_that_fails_gives_the_parameters_back(when: str) -> None:
    for keep in (False, True):
        run_ranks(check_failed_reduction, 2, when, keep)


def test_collectives_carry_the_elements_in_use_and_no_more() -> None:
    counting = CountingCollectives(LocalCollectives())
    params = parameters()
    manager = ChunkManager(device=device_tier("cpu"), collectives=counting)
    (chunk,) = manager.register(named(params), 1000, rest="host")
    manager.gather(chunk)
    manager.gather(chunk)
    assert counting.calls == [Call("all_gather", 18, torch.float32)]
    assert counting.counts == {"all_gather": 1}


# -- room -------------------------------------------------------------------------------------------------------------


def test_a_use_that_does_not_fit_leaves_nothing_in_use_and_nothing_gathered() -> None:
    params = parameters()
    manager = ChunkManager(device=device_tier("cpu", capacity=60))
    manager.register(named(params), 6, rest="host")
    manager.begin_use(params[:1])
    with pytest.raises(TierFullError):
        manager.begin_use(params)
    assert [chunk.users for chunk in manager] == [1, 0, 0]
    assert [chunk.is_gathered for chunk in manager] == [True, False, False]
    with pytest.raises(KeyError):
        manager.begin_use([params[1], torch.zeros(2)])
    assert [chunk.is_gathered for chunk in manager] == [True, False, False]
    with pytest.raises(ChunkError, match="'p1' ended more often"):
        manager.end_use([params[0], params[1]], in_backward=False)
    assert [chunk.users for chunk in manager] == [0, 0, 0]


def check_full_after_reduction(rank: int, world_size: int) -> None:
    shard_bytes = 72 // world_size
    params = parameters()
    manager = ChunkManager(device=device_tier("cpu"), host=host_tier(capacity=shard_bytes))
    (chunk,) = manager.register(named(params), 18, rest="host")
    with pytest.raises(TierFullError, match="chunk 0 gradient"):
        take_ones(manager, params)
    manager.tiers["host"].capacity = None
    manager.finish_backward()
    assert chunk.gradient is not None
    assert torch.equal(chunk.gradient, torch.ones(18 // world_size))
    assert used(manager) == {"device": 0, "host": 2 * shard_bytes}
    chunk.discard()
    assert used(manager) == {"device": 0, "host": shard_bytes}


def test_a_gradient_that_finds_its_tier_full_waits_until_there_is_room() -> None:
    check_full_after_reduction(0, 1)


def test_a_reduction_that_found_no_room_is_made_up_for_at_the_end_of_backward() -> None:
    params = parameters()
    manager = ChunkManager(device=device_tier("cpu"), host=host_tier(capacity=72))
    (chunk,) = manager.register(named(params), 18, rest="host")
    manager.take_gradients([(param, torch.ones(6)) for param in params])
    with pytest.raises(TierFullError, match="chunk 0 gradient"):
        manager.start_reduce(chunk)
    manager.tiers["host"].capacity = None
    manager.finish_backward()
    assert chunk.gradient is not None
    assert torch.equal(chunk.gradient, torch.ones(18))


@pytest.mark.distributed
def test_a_reduced_gradient_is_not_lost_where_its_tier_is_full() -> None:
    run_ranks(check_full_after_reduction, 2)


def check_set_aside(rank: int, world_size: int) -> None:
    params = parameters(6)
    manager = ChunkManager(device=device_tier("cpu"), debug=True)
    chunks = manager.register(named(params), 12, rest="host")
    device, host = manager.tiers["device"], manager.tiers["host"]
    resting = host.used
    buffer_bytes = chunks[0].full_bytes
    device.capacity = 2 * buffer_bytes  # a chunk in use and one buffer, or one buffer and what is reduced
    for step in range(2):
        for first in (1, 0):  # the second gradient of each chunk comes when other chunks have theirs, or never
            for param in params[first::2][: 3 if first else 2]:
                manager.begin_use([param])
                manager.end_use([param], in_backward=True)
                manager.release(param)
                manager.take_gradient(param, torch.full((6,), 1.0 + rank + step))
                assert device.used <= device.capacity
        if step == 0:  # what is set aside is given up with the rest
            assert host.used > resting
            assert manager.traffic()["device->host"] > 0
            manager.reset()
            assert used(manager) == {"device": 0, "host": resting}
    manager.finish_backward()
    mean = 2.0 + (world_size - 1) / 2
    expected = torch.full((3, 2, 6), mean)
    expected[2, 0] = 0.0
    for chunk, whole in zip(chunks, expected, strict=True):
        shard_numel = 12 // world_size
        assert chunk.gradient is not None
        assert torch.equal(chunk.gradient, whole.flatten()[rank * shard_numel :][:shard_numel])
        chunk.discard()
    assert used(manager) == {"device": 0, "host": resting}


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_wait_for_others_are_set_aside_where_the_device_is_full(world_size: int) -> None:
    run_ranks(check_set_aside, world_size)


def test_a_full_device_is_an_error_where_no_other_tier_takes_what_waits() -> None:
    params = parameters(4)
    manager = ChunkManager(device=device_tier("cpu"), host=host_tier())
    chunks = manager.register(named(params), 12, rest="host")
    manager.tiers["device"].capacity = chunks[0].full_bytes
    manager.tiers["host"].capacity = manager.tiers["host"].used
    manager.take_gradient(params[0], torch.ones(6))
    with pytest.raises(TierFullError, match="device tier cannot hold 48 more bytes for gradient buffers"):
        manager.take_gradient(params[2], torch.ones(6))
    manager.tiers["host"].capacity = None
    manager.take_gradient(params[2], torch.ones(6))
    manager.reset()
    assert manager.tiers["device"].used == 0


def test_a_gradient_of_another_shape_or_for_a_frozen_chunk_is_refused() -> None:
    params = parameters()
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    manager = ChunkManager(device=device_tier("cpu"))
    chunks = manager.register([*named(params), ("frozen", frozen)], 18)
    assert [chunk.trainable for chunk in chunks] == [True, False]
    with pytest.raises(ValueError, match=r"'p0' has shape \(6,\).*its gradient has \(2, 3\)"):
        manager.take_gradient(params[0], torch.ones(2, 3))
    with pytest.raises(ChunkError, match="chunk 1 is frozen"):
        manager.take_gradient(frozen, torch.ones(3))
    with pytest.raises(ChunkError, match="no master weights"):
        chunks[1].full_master(chunks[1].tensors[0])
    assert not chunks[0].has_local_gradient


def test_a_gradient_with_a_graph_is_taken_without_it() -> None:
    (param,) = params = parameters(count=1)
    manager = ChunkManager(device=device_tier("cpu"))
    (chunk,) = manager.register(named(params), 6)
    (gradient,) = torch.autograd.grad((param**3).sum(), param, create_graph=True)
    manager.take_gradient(param, gradient)
    manager.finish_backward()
    assert chunk.gradient is not None
    assert not chunk.gradient.requires_grad


# -- moving -----------------------------------------------------------------------------------------------------------


def test_both_tiers_hold_a_shard_on_its_way(tmp_path: object) -> None:
    params = parameters()
    manager = ChunkManager(device=device_tier("cpu"), disk=disk_tier(str(tmp_path)))
    (chunk,) = manager.register(named(params), 18, rest="host")
    handle = manager.start_move(chunk, "disk")
    assert (used(manager), chunk.tier) == ({"device": 0, "host": 72, "disk": 72}, "host")
    handle.wait()
    assert (used(manager), chunk.tier) == ({"device": 0, "host": 0, "disk": 72}, "disk")
    manager.start_move(chunk, "host")
    assert chunk.shard.sum() == sum(value.sum() for value in parameters())  # whoever looks waits
    assert chunk.tier == "host"


def test_a_move_that_does_not_fit_leaves_the_shard_where_it_is() -> None:
    params = parameters()
    manager = ChunkManager(device=device_tier("cpu", capacity=60), host=host_tier())
    (chunk,) = manager.register(named(params), 18, rest="host")
    with pytest.raises(TierFullError):
        manager.move(chunk, "device")
    assert (used(manager), chunk.tier) == ({"device": 0, "host": 72}, "host")
    assert torch.equal(manager.full_value(params[1]), parameters()[1])


# -- debug mode -------------------------------------------------------------------------------------------------------


def test_debug_mode_fills_freed_and_unfilled_memory_with_nan() -> None:
    params = parameters()
    manager = ChunkManager(device=device_tier("cpu"), debug=True)
    (chunk,) = manager.register(named(params), 20, rest="host")
    shard = chunk.shard
    manager.gather(chunk)
    full = torch.empty(0).set_(params[0].detach().untyped_storage())
    assert (torch.isnan(full[:18]).any(), torch.isnan(full[18:]).all()) == (False, True), "nobody fills the padding"
    memory = manager.tiers["host"].allocate(4, torch.float32, "test")
    assert torch.isnan(memory).all()
    manager.move(chunk, "device")
    assert torch.isnan(shard).all(), "whoever kept the freed shard reads no parameters"


def test_debug_mode_is_on_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, wanted in [("1", True), ("0", False), ("", False)]:
        monkeypatch.setenv("GEMINI_DEBUG", value)
        assert ChunkManager(device=device_tier("cpu")).debug is wanted
    assert ChunkManager(device=device_tier("cpu"), debug=True).debug


def test_debug_mode_finds_a_step_between_forward_and_backward() -> None:
    params = parameters()
    manager = ChunkManager(device=device_tier("cpu"), debug=True)
    (chunk,) = manager.register(named(params), 18)
    manager.begin_use(params)
    manager.end_use(params, in_backward=False)
    manager.begin_use(params)
    manager.end_use(params, in_backward=True)
    manager.rest()
    manager.begin_use(params)
    manager.end_use(params, in_backward=False)
    chunk.commit()
    manager.begin_use(params)
    with pytest.raises(ChunkError, match=r"'p0' was changed between the forward.*generation 1, forward saw 0"):
        manager.end_use(params, in_backward=True)
    manager.reset()
    assert chunk.users == 0
