"""ZeroOptimizer on several ranks, each with its own gradients, against plain torch on their mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini_optim import HybridAdam, ZeroOptimizer
from gemini_optim.testing import PlainModel, check_sharded_model
from ranks import run_ranks

WORLDS = [1, 2, 3, 4]
SHAPES = [(5, 7), (13,), (3, 3, 3), (), (1,), (40,), (64,)]

MAKERS: dict[str, Callable[[list[dict[str, object]]], torch.optim.Optimizer]] = {
    "hybrid": lambda groups: HybridAdam(groups, 1e-2),
    "adamw": lambda groups: torch.optim.AdamW(groups, 1e-2),
    "momentum": lambda groups: torch.optim.SGD(groups, 1e-2, momentum=0.9, dampening=0.5),
}


def make_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def make_groups(params: Sequence[nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": params[::2], "weight_decay": 0.5}, {"params": params[1::2], "lr": 0.1}]


def gradients(rank: int, step: int) -> list[Tensor]:
    """Multiples of 1/16, so that sums over ranks are exact in any order, and in fp16 up to a scale of 2**8."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randint(-16, 17, shape, generator=generator) / 16 for shape in SHAPES]


def mean_gradients(world_size: int, step: int) -> list[Tensor]:
    rows = zip(*(gradients(rank, step) for rank in range(world_size)), strict=True)
    return [torch.stack(row).sum(0) / world_size for row in rows]


def backward(zero: ZeroOptimizer, params: Sequence[nn.Parameter], rank: int, step: int) -> None:
    pairs = zip(params, gradients(rank, step), strict=True)
    zero.backward(torch.stack([(param.float() * grad).sum() for param, grad in pairs]).sum())


def plain_step(optim: torch.optim.Optimizer, grads: Sequence[Tensor]) -> None:
    params = [param for group in optim.param_groups for param in group["params"]]
    order = [*range(0, len(SHAPES), 2), *range(1, len(SHAPES), 2)]  # that of make_groups
    for param, index in zip(params, order, strict=True):
        param.grad = grads[index].clone()
    optim.step()


def assert_close(ours: Sequence[Tensor], theirs: Sequence[Tensor], *, exactly: bool) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0 if exactly else 1e-6, atol=0 if exactly else 1e-6)


def follow_plain_torch(rank: int, world_size: int) -> None:
    for name in MAKERS:
        for max_norm in (0.0, 0.5):
            follow_plain_optimizer(rank, world_size, name, max_norm)


def follow_plain_optimizer(rank: int, world_size: int, name: str, max_norm: float) -> None:
    ours, theirs = make_params(), make_params()
    optim, plain = MAKERS[name](make_groups(ours)), MAKERS[name](make_groups(theirs))
    model = PlainModel(ours, chunk_numel=60, process_group=dist.group.WORLD)
    zero = ZeroOptimizer(optim, model, max_norm=max_norm, block_numel=25)
    schedules = [torch.optim.lr_scheduler.StepLR(handle, 2, 0.5) for handle in (zero, plain)]
    for step in range(5):
        backward(zero, ours, rank, step)
        zero.step()
        model.gather()
        grads = mean_gradients(world_size, step)
        norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
        # Without clipping nothing is computed from the norm, and its squares are summed in fp32.
        assert zero.get_grad_norm() == pytest.approx(norm, rel=1e-12 if max_norm else 1e-6)
        if max_norm:
            assert norm > 2 * max_norm
            scratch = [nn.Parameter(grad.clone()) for grad in grads]
            for holder, grad in zip(scratch, grads, strict=True):
                holder.grad = grad
            torch.nn.utils.clip_grad_norm_(scratch, max_norm)
            grads = [holder.grad for holder in scratch]
        plain_step(plain, grads)
        for schedule in schedules:
            schedule.step()
        # torch's fp32 norm, and its other kernels' last elements, may differ in the last bit.
        assert_close(ours, theirs, exactly=name == "hybrid" and not max_norm)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", WORLDS)
def test_ranks_together_follow_one_plain_process(world_size: int) -> None:
    run_ranks(follow_plain_torch, world_size)


def keep_masters(rank: int, world_size: int) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        keep_masters_of(rank, world_size, dtype)


def keep_masters_of(rank: int, world_size: int, dtype: torch.dtype) -> None:
    ours = make_params(dtype)
    masters = [nn.Parameter(param.detach().float()) for param in ours]
    model = PlainModel(ours, chunk_numel=60, process_group=dist.group.WORLD)
    zero = ZeroOptimizer(MAKERS["hybrid"](make_groups(ours)), model, initial_scale=2**8, growth_interval=2)
    plain = MAKERS["hybrid"](make_groups(masters))
    for step in range(4):
        scale = zero.loss_scale
        backward(zero, ours, rank, step)
        zero.step()
        model.gather()
        grads = [(grad * scale).to(dtype).float() / scale for grad in mean_gradients(world_size, step)]
        plain_step(plain, grads)
        assert_close(ours, [master.to(dtype) for master in masters], exactly=True)
    assert scale == (2**9 if dtype == torch.float16 else 1)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", WORLDS)
def test_16_bit_ranks_update_fp32_masters(world_size: int) -> None:
    run_ranks(keep_masters, world_size)


def skip_together(rank: int, world_size: int) -> None:
    skip_step(rank, world_size, torch.float16, 2.0, math.inf)
    skip_step(rank, world_size, torch.float16, math.inf, math.nan)
    skip_step(rank, world_size, torch.bfloat16, math.inf, math.inf)
    skip_step(rank, world_size, torch.float32, 2.0, math.nan)


def skip_step(rank: int, world_size: int, dtype: torch.dtype, norm_type: float, bad: float) -> None:
    params = make_params(dtype)
    model = PlainModel(params, chunk_numel=60, process_group=dist.group.WORLD)
    zero = ZeroOptimizer(
        MAKERS["hybrid"](make_groups(params)), model, norm_type=norm_type, hysteresis=2, initial_scale=2**8
    )
    backward(zero, params, rank, 0)
    zero.step()
    scales = [zero.loss_scale]
    before = [shard.master().clone() for shard in model.shards]
    saved = zero.state_dict(only_rank_0=False)["state"]
    for _ in range(3):
        backward(zero, params, rank, 1)
        if rank == world_size - 1:
            model.shards[0].gradient[0] = bad
        zero.step()
        scales.append(zero.loss_scale)
    assert scales == ([256, 256, 128, 64] if dtype == torch.float16 else [1] * 4)
    assert zero.get_grad_norm() == math.inf
    assert_close([shard.master() for shard in model.shards], before, exactly=True)
    for index, state in zero.state_dict(only_rank_0=False)["state"].items():
        assert_close(list(state.values()), list(saved[index].values()), exactly=True)
    backward(zero, params, rank, 1)
    zero.step()
    assert math.isfinite(zero.get_grad_norm())
    assert not torch.equal(model.shards[0].master(), before[0])


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", WORLDS)
def test_overflow_on_one_rank_skips_the_step_on_all(world_size: int) -> None:
    run_ranks(skip_together, world_size)


def count_collectives(rank: int, world_size: int, name: str, stays: bool) -> list[list[tuple[str, int]]]:
    params = make_params()
    # A chunk for each parameter: the scalar's is all padding on every rank but the first.
    model = PlainModel(params, chunk_numel=1, process_group=dist.group.WORLD)
    assert any(not shard.slices for shard in model.shards) == (rank > 0)
    model.is_resident = stays or rank > 0
    zero = ZeroOptimizer(MAKERS[name](make_groups(params)), model, max_norm=1.0)
    calls: list[tuple[str, int]] = []
    originals = {name: getattr(dist, name) for name in ("all_reduce", "broadcast", "all_gather_object", "send", "recv")}
    counts = []
    for step, count in enumerate([3, 3, 4, 4]):  # the fourth parameter is the scalar, which is on one rank alone
        pairs = list(zip(params, gradients(rank, step), strict=True))[:count]
        zero.backward(torch.stack([(param * grad).sum() for param, grad in pairs]).sum())
        for name, original in originals.items():
            setattr(dist, name, lambda *a, n=name, f=original, **k: (calls.append((n, a[0].numel())), f(*a, **k))[1])
        zero.step()
        for name, original in originals.items():
            setattr(dist, name, original)
        counts.append(calls.copy())
        calls.clear()
    return counts


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_step_sends_five_numbers_before_the_update_and_one_after_it_where_a_rank_may_fail(world_size: int) -> None:
    lone, both = [("all_reduce", 5)], [("all_reduce", 5), ("all_reduce", 1)]
    for name, stays, expected in (
        ("hybrid", True, [both, lone, both, lone]),  # the first and the third take memory for states, on some rank
        ("hybrid", False, [both] * 4),
        ("momentum", True, [both] * 4),  # nobody knows what it takes
    ):
        counts = run_ranks(count_collectives, world_size, name, stays)
        assert counts == [expected if world_size > 1 else [[]] * 4] * world_size


def refuse_unmanaged(rank: int, world_size: int) -> None:
    params = make_params()
    model = PlainModel(params[1:], chunk_numel=1, process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"1 of the optimizer's 7 parameters.*\(5, 7\)"):
        ZeroOptimizer(torch.optim.SGD(params), model)
    # Parameters that lie on another rank alone are no mistake.
    ZeroOptimizer(torch.optim.SGD(params[1:]), model)


@pytest.mark.distributed
def test_unmanaged_parameters_are_found_over_all_ranks() -> None:
    run_ranks(refuse_unmanaged, 3)


def keep_contract(rank: int, world_size: int) -> None:
    params = make_params(torch.bfloat16)
    model = PlainModel(params, chunk_numel=60, process_group=dist.group.WORLD)
    check_sharded_model(model, lambda: torch.stack([param.float().sum() for param in params]).sum())


@pytest.mark.distributed
def test_plain_model_keeps_the_contract_on_several_ranks() -> None:
    run_ranks(keep_contract, 3)


def train_and_save(
    rank: int, group: dist.ProcessGroup, name: str, chunk_numel: int, steps: range, start: dict[str, Any] | None
) -> dict[str, Any]:
    """Train on gradients that do not depend on the number of ranks; return weights and state."""
    params = make_params()
    for param, value in zip(params, start["params"] if start else [], strict=bool(start)):
        param.data.copy_(value)
    model = PlainModel(params, chunk_numel=chunk_numel, process_group=group)
    zero = ZeroOptimizer(MAKERS[name](make_groups(params)), model, max_norm=1.0, block_numel=25)
    if start:
        zero.load_state_dict(start["optim"])
    for step in steps:
        backward(zero, params, 0, step)
        zero.step()
        model.gather()
        zero.param_groups[0]["lr"] *= 0.9
    on_first, everywhere = zero.state_dict(), zero.state_dict(only_rank_0=False)
    assert len(on_first["state"]) == (7 if dist.get_rank(group) == 0 else 0)
    for index, state in on_first["state"].items():
        assert_close(list(state.values()), list(everywhere["state"][index].values()), exactly=True)
    return {"params": [param.detach() for param in params], "optim": everywhere}


def resume_on_other_worlds(rank: int, world_size: int) -> None:
    # The last ranks of the world: their numbers in the group are others than in the world.
    groups = {size: dist.new_group(range(world_size - size, world_size)) for size in WORLDS}
    for name in ("hybrid", "momentum"):
        exactly = name == "hybrid"  # torch's SGD rounds the last elements of each cut in its own way
        for first, second in ((1, 2), (2, 1), (2, 3), (3, 2), (3, 1), (1, 4), (4, 3), (2, 2)):
            saved: list[Any] = [None, None]
            if rank >= world_size - first:
                start = train_and_save(rank, groups[first], name, 60, range(3), None)
                saved = [start, train_and_save(rank, groups[first], name, 60, range(5), None)]
            dist.broadcast_object_list(saved, src=world_size - 1)
            if rank >= world_size - second:
                start, whole = saved
                resumed = train_and_save(rank, groups[second], name, 45, range(3, 5), start)
                assert_close(resumed["params"], whole["params"], exactly=exactly)
                assert resumed["optim"]["param_groups"] == whole["optim"]["param_groups"]
                for index, state in whole["optim"]["state"].items():
                    found = resumed["optim"]["state"][index]
                    assert found.keys() == state.keys()
                    assert_close([found[key] for key in state], list(state.values()), exactly=exactly)


@pytest.mark.distributed
def test_saved_training_goes_on_bit_for_bit_on_any_world_and_chunk_size() -> None:
    run_ranks(resume_on_other_worlds, 4)


def gather_odd_bits(rank: int, world_size: int) -> list[list[int]]:
    params = [nn.Parameter(torch.zeros(7))]
    model = PlainModel(params, process_group=dist.group.WORLD)
    zero = ZeroOptimizer(torch.optim.SGD(params, 0.0, momentum=0.5), model)
    odd = torch.tensor([-0.0, 1e-45, math.inf, -math.inf, math.nan, 0.0, 1.0])
    odd.view(torch.int32)[4] |= 0x123  # a NaN with a payload
    zero.load_state_dict({**zero.state_dict(), "state": {0: {"momentum_buffer": odd}}})
    found = zero.state_dict(only_rank_0=False)["state"][0]["momentum_buffer"]
    return [found.view(torch.int32).tolist(), odd.view(torch.int32).tolist()]


@pytest.mark.distributed
def test_state_travels_byte_for_byte() -> None:
    for found, expected in run_ranks(gather_odd_bits, 3):
        assert found == expected


def load_unlike_dicts(rank: int, world_size: int) -> None:
    params = make_params()
    model = PlainModel(params, process_group=dist.group.WORLD)
    zero = ZeroOptimizer(MAKERS["hybrid"](make_groups(params)), model)
    backward(zero, params, rank, 0)
    zero.step()
    with pytest.raises(ValueError, match=r"\[7, 0\].*only_rank_0=False"):
        zero.load_state_dict(zero.state_dict())


@pytest.mark.distributed
def test_a_state_that_only_rank_0_has_is_refused_on_every_rank() -> None:
    run_ranks(load_unlike_dicts, 2)
