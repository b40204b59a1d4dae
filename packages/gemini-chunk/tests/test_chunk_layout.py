"""A chunk of one rank: where tensors lie in it, and what they are while it is gathered or released."""

import copy
import io
import math

import pytest
import torch
from torch import nn

from gemini_chunk import (
    Chunk,
    ChunkError,
    ChunkFullError,
    ChunkManager,
    TensorState,
    TierFullError,
    device_tier,
    host_tier,
)


class ThreeRanks:
    """The layout of one rank of three, without the other two."""

    world_size = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank


def on_host(*shapes: tuple[int, ...], numel: int = 64, capacity: int | None = None) -> tuple[Chunk, list[nn.Parameter]]:
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    chunk = Chunk(numel, torch.float32, device=device_tier("cpu", capacity))
    for index, param in enumerate(params):
        chunk.append(param, f"p{index}")
    chunk.close(host_tier())
    return chunk, params


def test_tensors_lie_one_after_the_other() -> None:
    chunk, _ = on_host((3, 4), (5,), (), (0, 2), (2, 2, 2))
    assert [(info.offset, info.end) for info in chunk.tensors] == [(0, 12), (12, 17), (17, 18), (18, 18), (18, 26)]
    assert (chunk.used_numel, chunk.shard_numel) == (26, 26)


def test_a_tensor_that_does_not_fit_is_refused_and_the_chunk_is_unchanged() -> None:
    chunk = Chunk(10, torch.float32, device=device_tier("cpu"))
    chunk.append(torch.zeros(7), "a")
    with pytest.raises(ChunkFullError, match=r"'b' has 4 elements; chunk 0 has 3 of 10 left"):
        chunk.append(torch.zeros(4), "b")
    chunk.append(torch.zeros(3), "c")
    assert chunk.used_numel == 10


def test_a_dtype_that_cannot_be_cast_is_refused() -> None:
    chunk = Chunk(10, torch.bfloat16, device=device_tier("cpu"))
    with pytest.raises(TypeError, match=r"int64.*bfloat16"):
        chunk.append(torch.zeros(2, dtype=torch.int64), "ids")
    chunk.append(torch.zeros(2), "cast when closed")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_shard_covers_what_is_in_use_rounded_up_to_the_world_size(rank: int) -> None:
    chunk = Chunk(30, torch.float32, device=device_tier("cpu"), collectives=ThreeRanks(rank))  # type: ignore[arg-type]
    chunk.append(torch.arange(4.0), "a")
    chunk.append(torch.arange(4.0, 7.0), "b")
    chunk.close(synchronise=None)
    assert (chunk.shard_numel, chunk.valid_numel) == (3, [3, 3, 1][rank])
    assert chunk.shard.tolist() == [[0, 1, 2], [3, 4, 5], [6, 0, 0]][rank]
    parts = [(part.info.name, part.start, part.numel, part.param_offset) for part in chunk.slices]
    assert parts == [[("a", 0, 3, 0)], [("a", 0, 1, 3), ("b", 1, 2, 0)], [("b", 0, 1, 2)]][rank]


def test_a_rank_may_have_nothing_but_padding() -> None:
    chunk = Chunk(3, torch.float32, device=device_tier("cpu"), collectives=ThreeRanks(2))  # type: ignore[arg-type]
    chunk.append(torch.ones(2), "a")
    chunk.close(synchronise=None)
    assert (chunk.valid_numel, chunk.slices, chunk.shard.tolist()) == (0, (), [0.0])


def test_an_uneven_size_is_refused_with_the_next_even_one() -> None:
    with pytest.raises(ValueError, match=r"10 elements does not split evenly over 3 ranks\. Use 12"):
        Chunk(10, torch.float32, device=device_tier("cpu"), collectives=ThreeRanks(0))  # type: ignore[arg-type]


def test_gather_and_release_keep_values_and_identity() -> None:
    values = [torch.randn(3, 4), torch.randn(5), torch.randn(())]
    params = [nn.Parameter(value.clone()) for value in values]
    manager = ChunkManager(device=device_tier("cpu"))
    (chunk,) = manager.register([(f"p{i}", p) for i, p in enumerate(params)], 32, rest="host")
    optimizer = torch.optim.SGD(params)
    for _ in range(3):
        assert all(torch.isnan(param).all() for param in params)
        chunk.gather()
        assert all(torch.equal(param, value) for param, value in zip(params, values, strict=True))
        chunk.release()
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params, strict=True))


def test_a_released_tensor_is_safe_to_look_at_and_refuses_writes() -> None:
    _, (param,) = on_host((3, 4))
    assert (param.shape, param.dtype, param.numel()) == ((3, 4), torch.float32, 12)
    assert "nan" in repr(param)
    assert math.isnan(copy.deepcopy(param).sum().item())
    torch.save(param, io.BytesIO())
    assert torch.isnan(param @ torch.ones(4)).all()
    with pytest.raises(RuntimeError, match="single memory location"):
        param.data.add_(1.0)


def test_views_saved_for_backward_are_valid_after_another_gather() -> None:
    chunk, (weight,) = on_host((4, 4))
    chunk.gather()
    wanted = weight.detach().clone()
    inputs = torch.randn(2, 4, requires_grad=True)
    output = nn.functional.linear(inputs, weight)  # saves weight.t(), a view
    chunk.release()
    chunk.gather()
    output.sum().backward()
    assert torch.equal(inputs.grad, wanted.sum(0).expand(2, 4))  # type: ignore[arg-type] # it has a gradient


def test_bytes_are_counted_where_they_lie() -> None:
    device, host = device_tier("cpu"), host_tier()
    chunk = Chunk(64, torch.bfloat16, device=device)
    chunk.append(nn.Parameter(torch.randn(5, 10)), "a")
    chunk.close(host, master=host)
    assert (device.used, host.used) == (0, 50 * 2 + 50 * 4)
    chunk.gather()
    assert (device.used, host.used) == (64 * 2, 300)
    chunk.release()
    chunk.move(device)
    assert (device.used, host.used) == (64 * 2, 200), "a single rank's chunk on the compute device is whole"
    assert device.holders == {"chunk 0 full buffer": 128}
    chunk.move(host)
    assert (device.used, host.used) == (0, 300)


def test_master_weights_move_and_keep_their_values() -> None:
    device, host = device_tier("cpu"), host_tier()
    chunk = Chunk(64, torch.bfloat16, device=device)
    chunk.append(nn.Parameter(torch.randn(5, 10)), "a")
    chunk.close(host, master=host)
    assert chunk.master is not None
    wanted = chunk.master.clone()
    chunk.move_master(device)
    assert torch.equal(chunk.master, wanted)
    assert (device.used, host.used) == (50 * 4, 50 * 2)
    assert device.received == {"host": 50 * 4}
    with pytest.raises(TierFullError):
        chunk.move_master(host_tier(capacity=100))
    assert torch.equal(chunk.master, wanted)
    own = Chunk(8, torch.float32, device=device)
    own.append(nn.Parameter(torch.randn(8)), "b")
    own.close(host, master=host)
    own.move_master(device)
    assert own.master is own.shard, "it has none to move"


@pytest.mark.parametrize("accumulates", [False, True])
def test_sum_of_gradients_lies_beside_the_master_weights_and_moves_with_them(accumulates: bool) -> None:
    manager = ChunkManager(device=device_tier("cpu"))
    device, host = manager.tiers["device"], manager.tiers["host"]
    param = nn.Parameter(torch.randn(50).bfloat16())
    chunk = manager.add_chunk([("a", param)], numel=64, accumulates=accumulates)
    manager.close(chunk, master="host")
    resting = (device.used, host.used)
    assert resting == (64 * 2, 50 * 4)
    for _ in range(2):
        manager.gather(chunk)
        manager.take_gradient(param, torch.ones_like(param))
        manager.finish_backward()
    assert (device.used, host.used) == (resting[0], resting[1] + 50 * 4)
    chunk.move_master(device)
    assert (device.used, host.used) == (64 * 2 + 2 * 50 * 4, 0)
    full = host_tier(capacity=50 * 4)
    with pytest.raises(TierFullError):
        chunk.move_master(full)
    assert (device.used, full.used) == (64 * 2 + 2 * 50 * 4, 0)
    assert chunk.gradient is not None
    assert chunk.gradient.eq(2).all()
    assert chunk.gradient.dtype is torch.float32
    chunk.commit()
    assert device.used == 64 * 2 + 50 * 4


def test_gather_takes_the_memory_of_a_gradient_that_gives_its_place_up() -> None:
    manager = ChunkManager(device=device_tier("cpu"))
    param = nn.Parameter(torch.randn(50).bfloat16())
    chunk = manager.add_chunk([("a", param)], numel=64)
    manager.close(chunk, master="device")
    assert chunk.missing_bytes == 0
    manager.gather(chunk)
    manager.take_gradient(param, torch.ones_like(param))
    manager.finish_backward()
    used = manager.tiers["device"].used
    assert chunk.missing_bytes == 50 * 4
    manager.gather(chunk)
    assert manager.tiers["device"].used == used + 50 * 4
    assert chunk.missing_bytes == 0


def test_sum_of_gradients_is_counted_where_one_is_expected() -> None:
    chunk = Chunk(64, torch.bfloat16, device=device_tier("cpu"))
    chunk.append(nn.Parameter(torch.randn(50)), "a")
    assert (chunk.optim_bytes, chunk.sum_bytes) == (50 * 12, 0)
    chunk.sums_gradients = True
    assert (chunk.optim_bytes, chunk.sum_bytes) == (50 * 16, 50 * 4)


def test_a_chunk_that_rests_gathered_holds_its_bytes_once() -> None:
    device = device_tier("cpu")
    chunk = Chunk(64, torch.float32, device=device)
    param = nn.Parameter(torch.randn(8, 8))
    chunk.append(param, "a")
    chunk.close()
    assert device.used == 256
    assert param.data_ptr() == chunk.shard.data_ptr()
    chunk.release()
    assert not torch.isnan(param).any()
    assert chunk.master is not None
    assert chunk.master.data_ptr() == chunk.shard.data_ptr()


def test_master_weights_are_the_unrounded_values() -> None:
    values = torch.randn(40)
    chunk = Chunk(40, torch.bfloat16, device=device_tier("cpu"))
    param = nn.Parameter(values.clone())
    chunk.append(param, "a")
    chunk.close(host_tier(), master=host_tier())
    assert param.dtype == torch.bfloat16
    assert chunk.master is not None
    assert torch.equal(chunk.master, values)
    assert torch.equal(chunk.shard, values.bfloat16())


def test_a_gather_that_does_not_fit_changes_nothing() -> None:
    chunk, (param,) = on_host((8, 8), capacity=255)
    with pytest.raises(TierFullError, match="chunk 0 full buffer"):
        chunk.gather()
    assert not chunk.is_gathered
    assert torch.isnan(param).all()


def test_a_chunk_in_use_is_not_released() -> None:
    param = nn.Parameter(torch.randn(4))
    manager = ChunkManager(device=device_tier("cpu"))
    (chunk,) = manager.register([("layer.bias", param)], 8, rest="host")
    manager.begin_use([param])
    manager.begin_use([param])
    manager.end_use([param], in_backward=False)
    assert manager.info_of(param).state is TensorState.COMPUTE
    with pytest.raises(ChunkError, match=r"layer\.bias.*in use"):
        chunk.release()
    manager.release(chunk)
    assert chunk.is_gathered
    manager.end_use([param], in_backward=False)
    manager.release(chunk)
    assert manager.info_of(param).state is TensorState.FREE
    with pytest.raises(ChunkError, match=r"layer\.bias.*more often"):
        manager.end_use([param], in_backward=False)


def test_gathering_works_in_inference_mode_and_training_goes_on_after_it() -> None:
    chunk, (weight,) = on_host((4, 4))
    with torch.inference_mode():
        chunk.gather()
        assert not torch.isnan(weight).any()
        chunk.release()
    chunk.gather()
    (weight @ torch.ones(4)).sum().backward()
    assert torch.equal(weight.grad, torch.ones(4, 4))  # type: ignore[arg-type] # it has a gradient


def test_next_fit_packing_opens_a_chunk_for_what_does_not_fit() -> None:
    manager = ChunkManager(device=device_tier("cpu"))
    sizes = [6, 3, 2, 30, 1, 9]
    chunks = manager.register([(str(i), nn.Parameter(torch.ones(n))) for i, n in enumerate(sizes)], 10)
    assert [[info.numel for info in chunk.tensors] for chunk in chunks] == [[6, 3], [2], [30], [1, 9]]
    assert [chunk.numel for chunk in chunks] == [10, 10, 30, 10]


def test_a_tensor_is_registered_once() -> None:
    manager = ChunkManager(device=device_tier("cpu"))
    param = nn.Parameter(torch.ones(3))
    manager.register([("wte.weight", param)], 8)
    with pytest.raises(ValueError, match=r"'lm_head\.weight' is managed already, as 'wte\.weight'"):
        manager.register([("lm_head.weight", param)], 8)
    with pytest.raises(KeyError, match="not managed"):
        manager.chunk_of(torch.ones(2))


def test_describe_names_each_chunk() -> None:
    manager = ChunkManager(device=device_tier("cpu"))
    manager.register([("a", nn.Parameter(torch.ones(3))), ("b", nn.Parameter(torch.ones(7)))], 8, rest="host")
    lines = manager.describe().splitlines()
    assert lines[0].split()[:2] == ["chunk", "tensors"]
    assert ["host" in line and "released" in line for line in lines[1:]] == [True, True]


def test_loading_overwrites_shard_and_master() -> None:
    param = nn.Parameter(torch.zeros(6))
    chunk = Chunk(6, torch.bfloat16, device=device_tier("cpu"))
    info = chunk.append(param, "a")
    chunk.close(host_tier(), master=host_tier())
    values = torch.randn(6)
    chunk.load(info, values)
    chunk.gather()
    assert torch.equal(param, values.bfloat16())
    assert chunk.master is not None
    assert torch.equal(chunk.master, values)
    with pytest.raises(ValueError, match=r"'a' has shape \(6,\)"):
        chunk.load(info, torch.zeros(5))
