"""Several models in one manager, equal or unlike values over ranks, any dtype, one tensor at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini_chunk import (
    ChunkManager,
    LocalCollectives,
    ProcessGroupCollectives,
    TierFullError,
    device_tier,
    disk_tier,
    host_tier,
)
from gemini_chunk.testing import CountingCollectives
from ranks import run_ranks

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.bool,
]


def named(prefix: str, module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(f"{prefix}.{name}", tensor) for name, tensor in module.state_dict(keep_vars=True).items()]


def seeded(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def check_same_everywhere(rank: int, world_size: int) -> None:
    for synchronise in ("broadcast", "check", None):
        model = seeded(0)
        manager = ChunkManager(device=device_tier("cpu"))
        manager.register(named("m", model), 16, rest="host", synchronise=synchronise)  # type: ignore[arg-type]
        for (_, tensor), (_, value) in zip(named("m", model), named("m", seeded(0)), strict=True):
            assert torch.equal(manager.full_value(tensor), value)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_equal_values_pass_every_way_of_synchronising(world_size: int) -> None:
    run_ranks(check_same_everywhere, world_size)


def check_unlike(rank: int, world_size: int) -> None:
    model = seeded(0)
    with torch.no_grad():
        if rank == 1:
            model[0].bias[2] = float("nan")
        if rank == world_size - 1:
            model[2].weight[0, 1] += 1
    manager = ChunkManager(device=device_tier("cpu"))
    with pytest.raises(ValueError, match=r"would start from values that differ") as caught:
        manager.register(named("m", model), 64, synchronise="check")
    last = world_size - 1
    assert f"'m.0.bias' on ranks [1]; 'm.2.weight' on ranks [{last}]." in str(caught.value)
    assert (manager.chunks, manager.tiers["device"].used) == ((), 0)
    assert not torch.isnan(model[2].weight).any(), "the tensors are as they were"


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_value_that_differs_is_named_on_every_rank(world_size: int) -> None:
    run_ranks(check_unlike, world_size)


def check_unlike_shapes(rank: int, world_size: int) -> None:
    manager = ChunkManager(device=device_tier("cpu"))
    tensor = torch.zeros(2 + rank // 2)
    with pytest.raises(ValueError, match=r"Ranks \[2\] put other tensors into chunk 0 than rank 0.*a \(\d,\)"):
        manager.register([("a", tensor)], 12, synchronise="check")


@pytest.mark.distributed
def test_ranks_with_unlike_shapes_are_named_before_values_meet() -> None:
    run_ranks(check_unlike_shapes, 3)


def check_left_alone(rank: int, world_size: int) -> None:
    param = nn.Parameter(torch.full((4,), float(rank)))
    manager = ChunkManager(device=device_tier("cpu"))
    manager.register([("a", param)], 4, synchronise=None)
    assert manager.full_value(param).tolist() == [0.0, 0.0, 1.0, 1.0], "each rank keeps its own part"


@pytest.mark.distributed
def test_without_synchronising_each_rank_keeps_its_own_values() -> None:
    run_ranks(check_left_alone, 2)


def check_memory_not_written(rank: int, world_size: int) -> None:
    shared = torch.full((6,), float(rank))
    param = nn.Parameter(shared.view(2, 3))
    ChunkManager(device=device_tier("cpu")).register([("a", param)], 6)
    assert torch.equal(shared, torch.full((6,), float(rank)))


@pytest.mark.distributed
def test_a_broadcast_leaves_memory_that_others_see_alone() -> None:
    run_ranks(check_memory_not_written, 2)


def test_an_unknown_way_of_synchronising_is_refused() -> None:
    manager = ChunkManager(device=device_tier("cpu"))
    with pytest.raises(ValueError, match='"broadcast", "check" or None, got True'):
        manager.register([("a", torch.zeros(3))], 4, synchronise=True)  # type: ignore[arg-type] # the point


def check_dtypes(rank: int, world_size: int) -> None:
    for dtype in DTYPES:
        generator = torch.Generator().manual_seed(3)
        value = (torch.rand(7, generator=generator) * 3).to(dtype)
        tensors = [value.clone() if rank == 0 else torch.zeros_like(value), torch.ones(3, dtype=dtype)]
        manager = ChunkManager(device=device_tier("cpu"))
        (chunk,) = manager.register([("a", tensors[0]), ("b", tensors[1])], 12, rest="host", trainable=True)
        assert chunk.trainable == (dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1))
        assert chunk.shard.dtype is dtype
        assert torch.equal(manager.full_value(tensors[0]).view(torch.uint8), value.view(torch.uint8))
        manager.gather(chunk)
        assert torch.equal(tensors[0].view(torch.uint8), value.view(torch.uint8))
        if chunk.trainable:
            for tensor in tensors:
                manager.take_gradient(tensor, torch.full_like(tensor, world_size * (rank + 1)))
            manager.finish_backward()
            assert chunk.gradient is not None
            wanted = sum(range(1, world_size + 1))
            assert torch.allclose(
                chunk.gradient[: chunk.valid_numel].abs().double(), torch.tensor(float(wanted)).double()
            )
            assert not chunk.gradient[chunk.valid_numel :].any()


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_dtype_is_sharded_gathered_and_where_it_can_reduced(world_size: int) -> None:
    run_ranks(check_dtypes, world_size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_wide_dtypes_have_master_weights_and_gradients_as_wide(dtype: torch.dtype) -> None:
    value = torch.full((3,), 1 / 3, dtype=dtype)
    param = nn.Parameter(value.clone())
    manager = ChunkManager(device=device_tier("cpu"))
    (chunk,) = manager.register([("a", param)], 3, rest="host", master="device")
    assert chunk.master is not None
    assert torch.equal(chunk.master, value)
    assert chunk.optim_bytes == 3 * dtype.itemsize * 3
    for _ in range(2):
        manager.take_gradient(param, value)
        manager.finish_backward()
        manager.gather(chunk)
        manager.release(chunk)
    assert chunk.gradient is not None
    assert torch.equal(chunk.gradient, value + value)


def test_two_models_share_the_tiers_and_are_told_apart() -> None:
    teacher, student = seeded(0), seeded(1)
    inputs = torch.randn(3, 4)
    wanted = teacher.eval()(inputs), student.eval()(inputs)
    manager = ChunkManager(device=device_tier("cpu"))
    manager.register(named("teacher", teacher), 32, rest="host", trainable=False, group="teacher")
    manager.register(named("student", student), 32, rest="host", group="student")
    assert [chunk.trainable for chunk in manager.group("teacher")] == [False] * 3
    assert {chunk.trainable for chunk in manager.group("student")} == {True, False}
    assert (*manager.group("teacher"), *manager.group("student")) == manager.chunks == tuple(manager)
    with pytest.raises(KeyError, match=r"no group 'critic' here, only \['student', 'teacher'\]"):
        manager.group("critic")
    for chunk in manager:
        manager.gather(chunk)
    assert all(torch.equal(a, b) for a, b in zip((teacher(inputs), student(inputs)), wanted, strict=True))
    before = manager.tiers["host"].used
    freed = sum(chunk.shard_bytes for chunk in manager.group("teacher"))
    for chunk in manager.group("teacher"):
        manager.remove(chunk)
    assert manager.tiers["host"].used == before - freed
    assert teacher[0].weight not in manager
    assert torch.isnan(teacher[0].weight).all()
    assert torch.equal(student(inputs), wanted[1])
    names = [chunk.name for chunk in manager]
    (chunk,) = manager.register([("new", nn.Parameter(torch.ones(2)))], 2)
    assert chunk.name not in names
    with pytest.raises(ValueError, match="not managed here"):
        manager.remove(ChunkManager(device=device_tier("cpu")).register([("x", torch.ones(2))], 2)[0])


def test_dtypes_and_frozen_tensors_that_alternate_are_packed_by_kind_in_order() -> None:
    tensors = [(str(i), torch.ones(2, dtype=[torch.float32, torch.int64][i % 2])) for i in range(6)]
    tensors += [("p", nn.Parameter(torch.ones(2))), ("q", torch.ones(2)), ("r", nn.Parameter(torch.ones(2)))]
    manager = ChunkManager(device=device_tier("cpu"))
    chunks = manager.register(tensors, 10)
    assert [[info.name for info in chunk.tensors] for chunk in chunks] == [
        ["0", "2", "4", "q"],
        ["1", "3", "5"],
        ["p", "r"],
    ]


def check_reading(rank: int, world_size: int) -> None:
    params = [nn.Parameter(torch.arange(4.0) + 10 * index) for index in range(4)]
    counting = CountingCollectives(ProcessGroupCollectives() if world_size > 1 else LocalCollectives())
    manager = ChunkManager(device=device_tier("cpu"), collectives=counting)
    (chunk,) = manager.register([(str(i), p) for i, p in enumerate(params)], 16, rest="host", synchronise=None)
    counting.calls.clear()
    local = [chunk.local_value(info) for info in chunk.tensors]
    assert [value is not None for value in local] == [
        True if world_size == 1 else index // (4 // world_size) == rank for index in range(4)
    ]
    assert counting.calls == []
    for index, info in enumerate(chunk.tensors):
        assert torch.equal(chunk.read(info), torch.arange(4.0) + 10 * index)
    assert chunk.gathers == 0
    assert sum(call.numel for call in counting.calls) == (0 if world_size == 1 else 4 * 4 * world_size)
    chunk.load(chunk.tensors[2], torch.full((4,), 7.0))
    assert torch.equal(chunk.read(chunk.tensors[2]), torch.full((4,), 7.0))
    assert (chunk.generation, chunk.gathers) == (1, 0)
    if world_size > 1:
        orders = [None] * world_size
        dist.all_gather_object(orders, [c.name for c in manager])
        assert orders == [orders[0]] * world_size


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_one_tensor_is_read_and_written_without_gathering_its_chunk(world_size: int) -> None:
    run_ranks(check_reading, world_size)


def check_reading_under_a_gradient(rank: int, world_size: int) -> None:
    for keep in (False, True):
        params = [nn.Parameter(torch.arange(6.0) + index) for index in range(2)]
        manager = ChunkManager(device=device_tier("cpu"))
        (chunk,) = manager.register([(str(i), p) for i, p in enumerate(params)], 12, keep_gathered=keep)
        manager.remove(chunk)
        chunk = manager.add_chunk(
            [(str(i), p) for i, p in enumerate(params)],
            dtype=torch.bfloat16,
            sources={str(i): lambda i=i: torch.arange(6.0) + i for i in range(2)},
        )
        manager.close(chunk, master="host", keep_gathered=keep)
        for param in params:
            manager.take_gradient(param, torch.ones(6))
        manager.finish_backward()
        assert chunk.gradient is chunk.shard, "the gradient takes the place of the parameters"
        assert torch.equal(manager.full_value(params[1]), (torch.arange(6.0) + 1).bfloat16())
        assert chunk.gradient is chunk.shard


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_are_read_while_a_gradient_is_in_their_place(world_size: int) -> None:
    run_ranks(check_reading_under_a_gradient, world_size)


def test_a_tensor_stands_for_its_chunk() -> None:
    params = [nn.Parameter(torch.full((4,), float(index))) for index in range(2)]
    manager = ChunkManager(device=device_tier("cpu"))
    first, second = manager.register([(str(i), p) for i, p in enumerate(params)], 4, rest="host")
    manager.start_gather(params[1])
    manager.gather(params[1])
    assert (first.is_gathered, second.is_gathered) == (False, True)
    manager.release(params[1])
    assert not second.is_gathered
    manager.move(params[1], "device")
    manager.start_move(params[1], "host").wait()
    assert (first.tier, second.tier) == ("host", "host")
    manager.take_gradient(params[1], torch.ones(4))
    manager.start_reduce(params[1])
    manager.finish_backward(unused={params[0]})
    assert second.gradient is not None
    assert torch.equal(second.gradient, torch.ones(4))
    for call in (manager.gather, manager.release, manager.start_reduce):
        with pytest.raises(KeyError, match="not managed here"):
            call(torch.ones(2))


def test_a_tensor_that_changes_its_chunk_is_used_in_the_new_one() -> None:
    param = nn.Parameter(torch.ones(4))
    manager = ChunkManager(device=device_tier("cpu"))
    (old,) = manager.register([("weight", param)], 4, rest="host")
    manager.begin_use([param])
    manager.end_use([param], in_backward=False)
    value = manager.full_value(param)
    manager.remove(old)
    with pytest.raises(KeyError, match="not managed here"):
        manager.begin_use([param])
    param.data = value
    (new,) = manager.register([("weight", param)], 4, rest="host")
    manager.begin_use([param])
    assert (new.users, old.users) == (1, 0)
    assert torch.equal(param.detach(), torch.ones(4))


@pytest.mark.parametrize("name", ["device", "host", "disk"])
def test_any_tier_may_compute(name: str, tmp_path: Path) -> None:
    made = {"device": device_tier("cpu", 32), "host": host_tier(32), "disk": disk_tier(tmp_path, 32)}
    params = [nn.Parameter(torch.full((4,), float(index))) for index in range(3)]
    manager = ChunkManager(device=made[name], host=host_tier())
    chunks = manager.register([(str(i), p) for i, p in enumerate(params)], 4, rest="host")
    manager.begin_use(params[:2])
    assert manager.memory_usage()["device"] == {"used": 32, "peak": 32, "capacity": 32}
    assert [p.sum().item() for p in params[:2]] == [0.0, 4.0]
    with pytest.raises(TierFullError, match=f"The {name} tier cannot hold 16 more bytes"):
        manager.gather(chunks[2])
    manager.end_use(params[:2], in_backward=False)
    manager.rest()
    manager.move(chunks[2], "device")
    assert {tier: usage["used"] for tier, usage in manager.memory_usage().items()} == {"device": 16, "host": 32}


def test_describe_tells_where_two_chunks_rest(tmp_path: object) -> None:
    manager = ChunkManager(device=device_tier("cpu"), host=host_tier(), disk=disk_tier(str(tmp_path)))
    manager.register([("a", nn.Parameter(torch.ones(3)))], 8, rest="disk")
    manager.register([("b", torch.ones(3))], 8, rest="device")
    rows = [line.split() for line in manager.describe().splitlines()[1:]]
    assert [(row[:2], row[-3:]) for row in rows] == [
        (["chunk", "0"], ["disk", "released", "a"]),
        (["chunk", "1"], ["gathered,", "frozen", "b"]),
    ]
