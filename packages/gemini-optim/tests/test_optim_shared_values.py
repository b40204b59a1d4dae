"""Values that an optimizer keeps in its groups or on itself, as its count of steps, change once in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gemini_optim import UnfinishedStepError, ZeroOptimizer
from gemini_optim.testing import PlainModel, PlainShard
from ranks import run_ranks

SHAPES = [(3,), (70,), (5, 4), (41,)]


class CountingAdam(torch.optim.Optimizer):
    """Adam that counts its steps in the group, on itself and in a tensor, and corrects by each of them."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0
        self.decay = torch.ones(())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure here
        self.calls += 1
        self.decay *= 0.9
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            correction = (1 - 0.9 ** group["step"]) * (1 - 0.99**self.calls) * (2 - self.decay)
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["average"] = torch.zeros_like(param)
                state["average"].lerp_(param.grad, 0.1)
                param.sub_(state["average"] / correction * group["lr"])


def make_params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def make_optim(params: list[nn.Parameter]) -> CountingAdam:
    return CountingAdam([{"params": params[:1], "lr": 0.1}, {"params": params[1:]}])


def loss_of(params: list[nn.Parameter], step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.stack([(p * torch.randn(p.shape, generator=generator)).sum() for p in params]).sum()


def train_plain(steps: int) -> tuple[list[nn.Parameter], CountingAdam]:
    params = make_params()
    optim = make_optim(params)
    for step in range(steps):
        loss_of(params, step).backward()
        optim.step()
        optim.zero_grad()
    return params, optim


def assert_as_plain(params: list[nn.Parameter], optim: torch.optim.Optimizer, steps: int) -> None:
    wanted, plain = train_plain(steps)
    torch.testing.assert_close(params, wanted, rtol=0.0, atol=0.0)
    assert isinstance(optim, CountingAdam)
    assert (optim.calls, optim.decay) == (plain.calls, plain.decay)
    assert [group["step"] for group in optim.param_groups] == [group["step"] for group in plain.param_groups]


def check_ranks(rank: int, world_size: int, block_numel: int) -> None:
    params = make_params()
    # Of the first chunk, three elements, the last ranks have nothing; the first group is in no other chunk.
    model = PlainModel(params, chunk_numel=70, process_group=dist.group.WORLD)
    zero = ZeroOptimizer(make_optim(params), model, block_numel=block_numel)
    decay = zero.optim.decay  # type: ignore[attr-defined]  # of a CountingAdam
    for step in range(3):
        zero.backward(loss_of(params, step))
        zero.step()
        model.gather()
    assert_as_plain(params, zero.optim, 3)
    assert zero.optim.decay is decay  # type: ignore[attr-defined]  # as above


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("block_numel", [16, 2**20])
def test_counts_do_not_depend_on_blocks_or_ranks(world_size: int, block_numel: int) -> None:
    run_ranks(check_ranks, world_size, block_numel)


def test_a_step_that_is_finished_later_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params()
    zero = ZeroOptimizer(make_optim(params), PlainModel(params, chunk_numel=70), block_numel=16)

    def fail(_: PlainShard) -> None:
        raise OSError("no room for the test")

    for step in range(2):
        zero.backward(loss_of(params, step))
        for call in ("commit", "wait_commit"):
            with monkeypatch.context() as patch:
                patch.setattr(PlainShard, call, fail)
                with pytest.raises(UnfinishedStepError):
                    zero.step()
        zero.step()
    assert_as_plain(params, zero.optim, 2)


def test_a_step_that_is_skipped_counts_nothing() -> None:
    params = make_params()
    zero = ZeroOptimizer(make_optim(params), PlainModel(params))
    zero.backward(loss_of(params, 0) * float("inf"))
    zero.step()
    zero.backward(loss_of(params, 0))
    zero.step()
    assert_as_plain(params, zero.optim, 1)


def test_counts_are_saved_and_loaded() -> None:
    first, second = make_params(), make_params()
    one = ZeroOptimizer(make_optim(first), PlainModel(first), block_numel=16)
    one.backward(loss_of(first, 0))
    one.step()
    other = ZeroOptimizer(make_optim(second), PlainModel(second), block_numel=16)
    other.load_state_dict(one.state_dict())
    assert [group["step"] for group in other.param_groups] == [1, 1]


@pytest.mark.parametrize("place", ["param_groups[1]['norm']", "the attribute 'norm'"])
def test_a_value_that_depends_on_the_parameters_is_refused_by_its_name(place: str) -> None:
    class Normed(torch.optim.SGD):
        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # as above
            norm = sum(float(p.grad.norm()) for p in self.param_groups[1]["params"] if p.grad is not None)
            if place.startswith("param_groups"):
                self.param_groups[1]["norm"] = norm
            else:
                self.norm = norm
            super().step()

    params = make_params()
    zero = ZeroOptimizer(Normed([{"params": params[:1]}, {"params": params[1:]}], lr=0.1), PlainModel(params))
    zero.backward(loss_of(params, 0))
    with pytest.raises(RuntimeError, match="element-wise") as raised:
        zero.step()
    assert place in str(raised.value)
