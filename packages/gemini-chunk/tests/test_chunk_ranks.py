"""Chunks over several ranks: gathering, averaging, reuse of the parameters' bytes, the order of reductions."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from gemini_chunk import Chunk, ChunkError, ChunkManager, ProcessGroupCollectives, device_tier, host_tier
from ranks import run_ranks

WORLDS = [1, 2, 3, 4]
SHAPES = ((7, 3), (5,), (), (4, 4))


def params_of(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def named(params: Sequence[nn.Parameter]) -> list[tuple[str, Tensor]]:
    return [(f"p{index}", param) for index, param in enumerate(params)]


def gradients(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def mean_of(world_size: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    every = [torch.cat([g.flatten() for g in gradients(rank, step)]) for rank in range(world_size)]
    return torch.stack([(g.to(dtype) / world_size).float() for g in every]).sum(0)


def own_part(chunk: Chunk, full: Tensor, rank: int) -> Tensor:
    padded = torch.zeros(chunk.shard_numel * chunk.world_size)
    padded[: full.numel()] = full
    return padded[rank * chunk.shard_numel : (rank + 1) * chunk.shard_numel]


def backward(manager: ChunkManager, params: list[nn.Parameter], rank: int, step: int) -> None:
    for param, gradient in zip(params, gradients(rank, step), strict=True):
        manager.begin_use([param])
        manager.end_use([param], in_backward=True)
        manager.take_gradient(param, gradient)
    manager.finish_backward()


def check_gather(rank: int, world_size: int) -> None:
    for rest, keep in [("device", False), ("device", True), ("host", False)]:
        check_gather_from(rank, world_size, rest, keep)


def check_gather_from(rank: int, world_size: int, rest: str, keep: bool) -> None:
    params = params_of(seed=rank)  # unlike on every rank: rank 0's must win
    manager = ChunkManager(device=device_tier("cpu"))
    for chunk in manager.register(named(params), 24, rest=rest, keep_gathered=keep):  # type: ignore[arg-type]
        manager.start_gather(chunk)
        manager.gather(chunk)
    for param, wanted in zip(params, params_of(seed=0), strict=True):
        assert torch.equal(param, wanted)
    for chunk in manager:
        manager.release(chunk)
        assert chunk.is_gathered == (keep or (world_size == 1 and rest == "device"))


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_rank_gathers_rank_0s_values(world_size: int) -> None:
    run_ranks(check_gather, world_size)


PLACES = [
    ("device", False, None, torch.float32),
    ("device", True, None, torch.float32),
    ("host", False, None, torch.float32),
    ("device", False, "host", torch.float32),
    ("device", False, "device", torch.bfloat16),
    ("device", True, "device", torch.bfloat16),
    ("device", True, "host", torch.bfloat16),
    ("host", False, "host", torch.bfloat16),
]


def check_mean_of_each(rank: int, world_size: int) -> None:
    for place in PLACES:
        check_mean(rank, world_size, *place)


def check_mean(rank: int, world_size: int, rest: str, keep: bool, master: str | None, dtype: torch.dtype) -> None:
    params = params_of(seed=0)
    before = torch.cat([param.detach().flatten() for param in params])
    manager = ChunkManager(device=device_tier("cpu"))
    chunk = manager.add_chunk(named(params), numel=48, dtype=dtype)
    manager.close(chunk, rest=rest, master=master, keep_gathered=keep)  # type: ignore[arg-type] # names of tiers
    resting = {name: tier.used for name, tier in manager.tiers.items()}
    for step in range(3):
        manager.gather(chunk)
        backward(manager, params, rank, step)
        assert chunk.gradient is not None
        wanted = own_part(chunk, mean_of(world_size, step, dtype), rank)
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(chunk.gradient.float(), wanted, rtol=tolerance, atol=tolerance)
        if step == 1:
            chunk.discard()
        else:
            assert chunk.master is not None
            chunk.master.sub_(chunk.gradient, alpha=0.5)
            before -= 0.5 * mean_of(world_size, step, dtype)
            chunk.commit()
        assert chunk.gradient is None
        assert {name: tier.used for name, tier in manager.tiers.items()} == resting
        assert chunk.master is not None
        torch.testing.assert_close(chunk.master.float(), own_part(chunk, before, rank), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(chunk.shard, chunk.master.to(dtype), rtol=0, atol=0)
        for param, full in zip(params, before.split([p.numel() for p in params]), strict=True):
            torch.testing.assert_close(manager.full_value(param).flatten().float(), full, rtol=2e-2, atol=2e-2)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", WORLDS)
def test_each_rank_gets_its_shard_of_the_mean_gradient(world_size: int) -> None:
    run_ranks(check_mean_of_each, world_size)


def check_reuse_of_each(rank: int, world_size: int) -> None:
    for keep in (False, True):
        check_reuse(rank, world_size, keep)


def check_reuse(rank: int, world_size: int, keep: bool) -> None:
    params = params_of(seed=0)
    values = [param.detach().bfloat16() for param in params]
    manager = ChunkManager(device=device_tier("cpu"))
    chunk = manager.add_chunk(named(params), numel=48, dtype=torch.bfloat16)
    manager.close(chunk, master="host", keep_gathered=keep)
    resting = manager.tiers["device"].used
    manager.gather(chunk)
    backward(manager, params, rank, step=0)
    assert manager.tiers["device"].used == resting, "the gradient takes the place of the working shard"
    assert all(torch.isnan(param).all() for param in params), "nobody may read gradients as parameters"
    manager.gather(chunk)  # an evaluation between backward and step
    assert all(torch.equal(param, value) for param, value in zip(params, values, strict=True))
    manager.release(chunk)
    backward(manager, params, rank, step=1)  # a second backward before the step
    assert chunk.gradient is not None
    wanted = mean_of(world_size, 0, torch.bfloat16) + mean_of(world_size, 1, torch.bfloat16)
    torch.testing.assert_close(chunk.gradient.float(), own_part(chunk, wanted, rank), rtol=2e-2, atol=4e-2)
    chunk.discard()
    assert manager.tiers["device"].used == resting
    manager.gather(chunk)
    assert all(torch.equal(param, value) for param, value in zip(params, values, strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", WORLDS)
def test_parameters_come_back_when_asked_for_before_the_step(world_size: int) -> None:
    run_ranks(check_reuse_of_each, world_size)


def check_sum_of_backwards(rank: int, world_size: int) -> None:
    params = params_of(seed=0)
    manager = ChunkManager(device=device_tier("cpu"))
    chunk = manager.add_chunk(named(params), numel=48, accumulates=True)
    manager.close(chunk)
    total = torch.zeros(chunk.used_numel)
    for step in range(4):
        backward(manager, params, rank, step)
        total += mean_of(world_size, step)
        assert chunk.gradient is not None
        torch.testing.assert_close(chunk.gradient, own_part(chunk, total, rank), rtol=1e-6, atol=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", WORLDS)
def test_gradients_of_several_backwards_add_up(world_size: int) -> None:
    run_ranks(check_sum_of_backwards, world_size)


def check_means(manager: ChunkManager, rank: int, step: int, times: Callable[[int, int], int]) -> None:
    """Compare every chunk's gradient with the mean over ranks, and drop it.

    Args:
        manager: holds the parameters of `params_of`.
        rank: this rank.
        step: what `gradients` were made for.
        times: how often a rank gave the gradient of a parameter, by its index.
    """
    full = [torch.zeros(shape) for shape in SHAPES]
    for other in range(manager.world_size):
        for index, gradient in enumerate(gradients(other, step)):
            full[index] += gradient / manager.world_size * times(other, index)
    for chunk in manager:
        assert chunk.gradient is not None
        mine = torch.cat([full[int(info.name[1:])].flatten() for info in chunk.tensors])
        torch.testing.assert_close(chunk.gradient, own_part(chunk, mine, rank), rtol=1e-6, atol=1e-6)
        chunk.discard()


def check_uneven_use(rank: int, world_size: int) -> None:
    params = params_of(seed=0)
    manager = ChunkManager(device=device_tier("cpu"))
    manager.register(named(params), 21)
    for step in range(3):
        # Each rank leaves out another parameter, so that not every chunk is ever complete there.
        for index, (param, gradient) in enumerate(zip(params, gradients(rank, step), strict=True)):
            if index != rank:
                manager.take_gradient(param, gradient)
        manager.finish_backward()
        check_means(manager, rank, step, lambda other, index: int(index != other))


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_parameter_without_gradient_on_a_rank_counts_as_zero_there(world_size: int) -> None:
    run_ranks(check_uneven_use, world_size)


def check_late_gradient(rank: int, world_size: int) -> None:
    params = params_of(seed=0)
    manager = ChunkManager(device=device_tier("cpu"))
    manager.register(named(params), 21)
    for step in range(2):
        for param, gradient in zip(params, gradients(rank, step), strict=True):
            manager.take_gradient(param, gradient)
        for chunk in manager:
            manager.start_reduce(chunk)
        manager.take_gradients([(params[0], gradients(rank, step)[0])])  # again, as re-entrant recompute does
        manager.take_gradient(params[-1], gradients(rank, step)[-1])
        manager.finish_backward()
        check_means(manager, rank, step, lambda _, index: 2 if index in (0, len(SHAPES) - 1) else 1)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_gradient_that_comes_after_its_chunk_was_reduced_is_added(world_size: int) -> None:
    run_ranks(check_late_gradient, world_size)


def check_reduce_dtype(rank: int, world_size: int) -> None:
    """1 + 3 * 2^-8 has no bf16: what is reduced there is rounded, what is reduced in fp32 is not until it must be."""
    terms = [1.0, *[2.0**-8] * (world_size - 1)]
    exact = 1 + (world_size - 1) * 2.0**-8
    rounded = float(torch.tensor(exact).bfloat16())
    assert rounded != exact
    sums = {}
    for reduce_dtype in (torch.float32, torch.bfloat16):
        for master in ("device", None):
            param = nn.Parameter(torch.zeros(12, dtype=torch.bfloat16))
            manager = ChunkManager(device=device_tier("cpu"))
            chunk = manager.add_chunk([("p", param)], numel=12, reduce_dtype=reduce_dtype)
            manager.close(chunk, master=master)  # type: ignore[arg-type]
            for _ in range(2):
                # A multiple of the world size: the division by it is exact.
                gradient = torch.full((12,), terms[rank] * world_size, dtype=torch.bfloat16)
                manager.take_gradient(param, gradient)
                manager.finish_backward()
                assert chunk.gradient is not None
                sums[reduce_dtype, master] = float(chunk.gradient[0])
                chunk.discard()
    assert sums[torch.float32, None] == exact
    assert sums[torch.float32, "device"] == rounded, "the gradient takes the place of the bf16 parameters"
    assert sums[torch.bfloat16, None] == rounded


@pytest.mark.distributed
def test_gradients_are_summed_in_the_reduce_dtype() -> None:
    run_ranks(check_reduce_dtype, 4)


def check_buffers(rank: int, world_size: int) -> None:
    params = params_of(seed=0, shapes=[(10,)] * 12)
    manager = ChunkManager(device=device_tier("cpu"))
    manager.register(named(params), 12)
    device = manager.tiers["device"]
    resting = device.used
    device.reset_peak()
    for param in reversed(params):
        manager.begin_use([param])
        manager.end_use([param], in_backward=True)
        if manager.take_gradient(param, torch.ones(10)):
            manager.start_reduce(manager.chunk_of(param))
    manager.finish_backward()
    reduced = sum(chunk.shard_numel * 4 for chunk in manager)
    assert device.used == resting + reduced
    assert device.peak <= resting + reduced + 3 * 12 * 4, "one full buffer, one filled and one travelling gradient"


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 4])
def test_no_more_than_two_gradient_buffers_exist(world_size: int) -> None:
    run_ranks(check_buffers, world_size)


class Failing(ProcessGroupCollectives):
    """Fails on one rank."""

    def all_gather(self, full: Tensor, shard: Tensor) -> "Failing":  # type: ignore[override] # a handle, too
        return self

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> "Failing":  # type: ignore[override] # a handle, too
        return self

    def wait(self) -> None:
        raise RuntimeError("connection closed by peer")


def check_failure(rank: int, world_size: int) -> None:
    params = params_of(seed=0)
    manager = ChunkManager(device=device_tier("cpu"), collectives=Failing())
    (chunk,) = manager.register(named(params), 48)
    resting = manager.tiers["device"].used
    with pytest.raises(ChunkError, match=f"Gathering chunk 0 failed on rank {rank}: connection closed by peer"):
        manager.gather(chunk)
    assert manager.tiers["device"].used == resting
    for param, gradient in zip(params[:-1], gradients(rank, 0), strict=False):
        manager.take_gradient(param, gradient)
    with pytest.raises(ChunkError, match=f"Reducing chunk 0 failed on rank {rank}: connection closed by peer"):
        manager.finish_backward()
    manager.reset()
    assert manager.tiers["device"].used == resting
    assert chunk.gradient is None


@pytest.mark.distributed
def test_a_failed_collective_names_the_chunk_and_leaves_the_manager_at_rest() -> None:
    run_ranks(check_failure, 2)


def check_move(rank: int, world_size: int) -> None:
    params = params_of(seed=0)
    manager = ChunkManager(device=device_tier("cpu"), host=host_tier())
    (chunk,) = manager.register(named(params), 48, rest="host")
    if world_size > 1:
        manager.move(chunk, "device")
        assert manager.tiers["host"].used == 0
        manager.move(chunk, "host")
    assert manager.tiers["device"].used == 0
    manager.gather(chunk)
    assert all(torch.equal(param, wanted) for param, wanted in zip(params, params_of(seed=0), strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_shard_moves_between_tiers_unchanged(world_size: int) -> None:
    run_ranks(check_move, world_size)


def check_full_master(rank: int, world_size: int) -> None:
    for rest, keep, master, dtype in PLACES:
        params = params_of(seed=rank, shapes=(*SHAPES, (0, 3)))
        frozen = [nn.Parameter(torch.full((3,), float(rank + 1)), requires_grad=False)]
        manager = ChunkManager(device=device_tier("cpu"))
        chunk = manager.add_chunk(named(params), dtype=dtype)
        manager.close(chunk, rest=rest, keep_gathered=keep, master=master)  # type: ignore[arg-type]
        manager.register([("frozen", frozen[0])], 4, trainable=False)
        gathers = chunk.gathers
        for param, wanted in zip(params, params_of(seed=0, shapes=(*SHAPES, (0, 3))), strict=True):
            value = manager.full_master(param)
            assert value.dtype == torch.float32
            assert torch.equal(value, wanted)
        assert chunk.gathers == gathers
        assert torch.equal(manager.full_master(frozen[0]), torch.ones(3))


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", WORLDS)
def test_full_master_weights_are_exact_and_gather_no_chunk(world_size: int) -> None:
    run_ranks(check_full_master, world_size)


def check_together(rank: int, world_size: int, dtype: torch.dtype) -> None:
    shapes = [(200, 200), (3,), (), (5, 2), (40_000,), (0,), (7,)]  # the long ones are copied on their own
    values = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype) for shape in shapes]
    found = []
    for together in (False, True):
        params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        manager = ChunkManager(device=device_tier("cpu"))
        chunks = manager.register(named(params), 41_000)
        pairs = [*zip(params, values, strict=True), (params[1], values[1]), (params[0], values[0])]
        if together:
            manager.take_gradients(pairs)
        else:
            for param, value in pairs:
                manager.take_gradient(param, value)
        manager.finish_backward()
        found.append([chunk.gradient for chunk in chunks])
    assert len(found[0]) > 1
    for alone, at_once in zip(*found, strict=True):
        assert alone is not None
        assert at_once is not None
        assert torch.equal(alone, at_once)


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_taken_together_have_the_bits_of_those_taken_one_by_one(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(check_together, world_size, dtype)
