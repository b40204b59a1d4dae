"""A model has one optimizer: a second one over other parameters is refused, over the same ones it takes over."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemini_optim import HybridAdam, UnfinishedStepError, ZeroOptimizer
from gemini_optim.testing import PlainModel, PlainShard


def make() -> tuple[list[nn.Parameter], PlainModel]:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))]
    return params, PlainModel(params, chunk_numel=4)


def train(zero: ZeroOptimizer, params: list[nn.Parameter]) -> None:
    zero.backward(torch.stack([param.sum() for param in params]).sum())
    zero.step()


def test_a_second_optimizer_over_other_parameters_is_refused_and_the_first_goes_on() -> None:
    params, model = make()
    first = ZeroOptimizer(torch.optim.SGD(params[:1], 0.5), model)
    with pytest.raises(ValueError, match=r"1 of its trainable parameters .*as parameter groups"):
        ZeroOptimizer(torch.optim.SGD(params[1:], 0.5), model)
    train(first, params)
    assert params[0].tolist() == [0.5] * 3


def test_an_optimizer_over_the_same_parameters_takes_over() -> None:
    params, model = make()
    first = ZeroOptimizer(HybridAdam(params), model)
    second = ZeroOptimizer(torch.optim.SGD(params[::-1], 0.5), model)
    with pytest.raises(RuntimeError, match="has replaced it"):
        first.step()
    train(second, params)
    assert torch.cat([param.detach() for param in params]).tolist() == [0.5] * 8


def test_an_optimizer_over_more_parameters_takes_over_and_frozen_ones_may_be_left_out() -> None:
    params, model = make()
    first = ZeroOptimizer(HybridAdam(params), model)
    params[0].requires_grad_(False)
    second = ZeroOptimizer(HybridAdam(params[1:]), model)
    third = ZeroOptimizer(HybridAdam(params), model)
    for replaced in (first, second):
        with pytest.raises(RuntimeError, match="has replaced it"):
            replaced.step()
    third.step()


def test_an_optimizer_that_could_not_be_built_replaces_none() -> None:
    params, model = make()
    first = ZeroOptimizer(HybridAdam(params), model)
    with pytest.raises(ValueError, match="not managed"):
        ZeroOptimizer(HybridAdam([*params, nn.Parameter(torch.ones(2))]), model)
    first.step()


def test_an_optimizer_that_nobody_has_any_more_is_not_in_the_way() -> None:
    params, model = make()
    first = ZeroOptimizer(HybridAdam(params[:1]), model)
    first.step = first.step  # type: ignore[method-assign]  # a cycle, as schedulers make one
    del first
    train(ZeroOptimizer(torch.optim.SGD(params[1:], 0.5), model), params)
    assert params[1].tolist() == [0.5] * 5


def test_other_models_do_not_matter() -> None:
    optimizers = []
    for _ in range(2):
        params, model = make()
        optimizers.append(ZeroOptimizer(torch.optim.SGD(params[:1], 0.5), model))
    for zero in optimizers:
        zero.step()


def test_an_optimizer_is_not_replaced_in_the_midst_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    params, model = make()
    first = ZeroOptimizer(HybridAdam(params), model)

    def fail(_: PlainShard) -> None:
        raise OSError("no room for the test")

    with monkeypatch.context() as patch:
        patch.setattr(PlainShard, "commit", fail)
        with pytest.raises(UnfinishedStepError):
            train(first, params)
    with pytest.raises(UnfinishedStepError, match="no room for the test"):
        ZeroOptimizer(HybridAdam(params), model)
    first.step()
