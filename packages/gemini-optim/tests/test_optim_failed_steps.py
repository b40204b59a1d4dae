"""A step in which a shard fails is finished by the next call, and nothing tells it from one that did not fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gemini_optim import HybridAdam, UnfinishedStepError, ZeroOptimizer
from gemini_optim.testing import PlainModel, PlainShard
from ranks import run_ranks

Call = Literal["grad", "master", "new_state", "commit", "wait_commit"]
SHAPES = [(40,), (13,), (64,), (3, 3), (90,)]
BLOCK_NUMEL = 32  # so that a chunk is updated in several blocks, and a block holds several chunks

MAKERS: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda p: HybridAdam(p, 1e-2, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
}


def make(name: str, dtype: torch.dtype, group: dist.ProcessGroup | None = None) -> tuple[ZeroOptimizer, PlainModel]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    model = PlainModel(params, chunk_numel=60, process_group=group)
    model.is_resident = False
    zero = ZeroOptimizer(
        MAKERS[name](params), model, max_norm=0.5, initial_scale=8.0, growth_interval=1, block_numel=BLOCK_NUMEL
    )
    return zero, model


def backward(zero: ZeroOptimizer, step: int, rank: int = 0) -> None:
    generator = torch.Generator().manual_seed(100 * rank + step)
    params = [param for group in zero.param_groups for param in group["params"]]
    zero.backward(torch.stack([(p.float() * torch.randn(p.shape, generator=generator)).sum() for p in params]).sum())


def state_of(zero: ZeroOptimizer, model: PlainModel) -> list[object]:
    weights = [tensor.clone() for shard in model.shards for tensor in (shard.master(), shard._working)]
    return [weights, zero.state_dict(only_rank_0=False), zero.get_grad_norm()]


class Fault:
    """Lets the calls of a method of all shards fail from one of them on, by number, until it is lifted."""

    def __init__(self, call: Call, number: int) -> None:
        self.came = False
        self._patch = pytest.MonkeyPatch()
        numbers = itertools.count()
        original = getattr(PlainShard, call)

        def fail(shard: PlainShard, *args: object) -> object:
            self.came = self.came or next(numbers) == number
            if self.came:
                raise OSError(28, "no space left for the test")
            return original(shard, *args)

        self._patch.setattr(PlainShard, call, fail)

    def lift(self) -> None:
        self._patch.undo()


def step_with_fault(zero: ZeroOptimizer, call: Call, number: int, hooks: list[str]) -> bool:
    """Take a step that fails twice, if it makes so many calls, and finish it; return whether it failed."""
    fault = Fault(call, number)
    try:
        zero.step()
    except UnfinishedStepError:
        with pytest.raises(UnfinishedStepError, match=r"Rank 0: OSError.* no space left for the test"):
            zero.step()
        for other in (zero.zero_grad, zero.state_dict, lambda: zero.backward(torch.zeros(()))):
            with pytest.raises(UnfinishedStepError, match="no space left for the test"):
                other()
        assert hooks == ["before"]
    fault.lift()
    if fault.came:
        zero.step(closure)
    return fault.came


def closure() -> float:
    raise AssertionError("the step has its gradients")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("call", ["master", "new_state", "commit", "wait_commit"])
def test_a_step_that_failed_anywhere_is_finished_with_the_bits_of_one_that_did_not(
    call: Call, name: str, dtype: torch.dtype
) -> None:
    failed_step = 0 if call == "new_state" else 1
    for number in itertools.count():
        (wanted, plain), (found, model) = make(name, dtype), make(name, dtype)
        hooks: list[str] = []
        found.optim.register_step_pre_hook(lambda *_, hooks=hooks: hooks.append("before"))
        found.optim.register_step_post_hook(lambda *_, hooks=hooks: hooks.append("after"))
        came = False
        for step in range(3):
            for zero in (wanted, found):
                backward(zero, step)
            wanted.step()
            hooks.clear()
            if step == failed_step:
                came = step_with_fault(found, call, number, hooks)
            else:
                found.step()
            assert hooks == ["before", "after"]
        torch.testing.assert_close(state_of(found, model), state_of(wanted, plain), rtol=0.0, atol=0.0)
        if not came:
            break
    assert number > 3, "it failed at several points"


def test_what_the_optimizer_itself_raises_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    zero, _ = make("momentum", torch.float32)
    backward(zero, 0)

    def fail(_: object) -> None:
        raise RuntimeError("half of the elements are updated")

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", fail)
        with pytest.raises(RuntimeError, match="half of the elements are updated") as raised:
            zero.step()
    assert not isinstance(raised.value, UnfinishedStepError)
    zero.zero_grad()


def test_the_loss_of_a_closure_is_returned_when_its_step_is_finished() -> None:
    zero, _ = make("adam", torch.float32)

    def evaluate() -> float:
        backward(zero, 0)
        return 7.0

    fault = Fault("commit", 0)
    with pytest.raises(UnfinishedStepError):
        zero.step(evaluate)
    fault.lift()
    assert zero.step(closure) == 7.0


def check_one_failing_rank(rank: int, world_size: int, call: Call) -> list[object]:
    zero, model = make("adam", torch.float32, dist.group.WORLD)
    before = state_of(zero, model)
    fault = Fault(call, 2 if rank == 1 else -1)
    for step in range(2):
        backward(zero, step, rank)
        if step == 0:
            if call == "grad":  # no rank has begun
                with pytest.raises(OSError if rank == 1 else RuntimeError, match="no space left for the test"):
                    zero.step()
                torch.testing.assert_close(state_of(zero, model), before, rtol=0.0, atol=0.0)
            else:
                with pytest.raises(UnfinishedStepError, match=r"Rank 1: OSError.* no space left for the test"):
                    zero.step()
            fault.lift()
        zero.step()
        model.gather()
    return state_of(zero, model)


def train_without_faults(rank: int, world_size: int) -> list[object]:
    zero, model = make("adam", torch.float32, dist.group.WORLD)
    for step in range(2):
        backward(zero, step, rank)
        zero.step()
        model.gather()
    return state_of(zero, model)


@pytest.mark.distributed
@pytest.mark.parametrize("call", ["grad", "new_state", "commit", "wait_commit"])
def test_every_rank_raises_where_one_fails_and_all_finish_together(call: Call) -> None:
    wanted = run_ranks(train_without_faults, 2)
    torch.testing.assert_close(run_ranks(check_one_failing_rank, 2, call), wanted, rtol=0.0, atol=0.0)


def check_lost_gradient(rank: int, world_size: int) -> None:
    zero, model = make("adam", torch.float32, dist.group.WORLD)
    wanted, plain = make("adam", torch.float32, dist.group.WORLD)
    last = world_size - 1
    backward(zero, 0, rank)
    original = PlainShard.grad

    def lose(shard: PlainShard) -> torch.Tensor | None:
        if shard is model.shards[2] and shard.gradient is not None:
            shard.gradient = None
            raise OSError("lost on its way for the test")
        return original(shard)

    before = state_of(zero, model)
    with pytest.MonkeyPatch.context() as patch:
        if rank == last:
            patch.setattr(PlainShard, "grad", lose)
        with pytest.raises(OSError if rank == last else RuntimeError, match="lost on its way for the test") as raised:
            zero.step()
        told = raised.value.__notes__[0] if rank == last else str(raised.value)
        assert "The gradients of all ranks are dropped" in told
    assert all(shard.gradient is None for shard in model.shards)
    zero.step()
    torch.testing.assert_close(state_of(zero, model)[:2], before[:2], rtol=0.0, atol=0.0)
    for optimizer in (zero, wanted):
        backward(optimizer, 1, rank)
        optimizer.step()
    torch.testing.assert_close(state_of(zero, model), state_of(wanted, plain), rtol=0.0, atol=0.0)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_lost_on_one_rank_loses_the_step_on_all(world_size: int) -> None:
    run_ranks(check_lost_gradient, world_size)


def check_unlike_gradients(rank: int, world_size: int) -> None:
    for norm_type in (2.0, float("inf")):
        zero, model = make("adam", torch.float32, dist.group.WORLD)
        zero.norm_type = norm_type
        before = state_of(zero, model)
        for shard, ranks in ((0, {0}), (1, {1}), (2, set(range(1, world_size)))):
            backward(zero, 0, rank)
            if rank in ranks:
                model.shards[shard].discard()
            with pytest.raises(RuntimeError, match="Only some ranks have a gradient"):
                zero.step()
            assert all(shard.gradient is None for shard in model.shards)
        torch.testing.assert_close(state_of(zero, model), before, rtol=0.0, atol=0.0)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_have_gradients_of_unlike_chunks_do_not_step(world_size: int) -> None:
    run_ranks(check_unlike_gradients, world_size)
