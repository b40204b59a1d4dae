"""State dicts of ZeroOptimizer on one rank: torch's format, both ways."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini_optim import HybridAdam, ZeroOptimizer
from gemini_optim.testing import PlainModel

SHAPES = [(4, 8), (16,), (), (48,)]


def make_params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def backward(params: list[nn.Parameter], step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.stack([(p * torch.randn(p.shape, generator=generator)).sum() for p in params]).sum()


def make_hybrid(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return HybridAdam([{"params": params[:2]}, {"params": params[2:], "lr": 0.1}], 1e-2, weight_decay=0.1)


def make_torch(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.1}]
    return torch.optim.AdamW(groups, 1e-2, weight_decay=0.1)


def make_sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 1e-2, momentum=0.9)


def make_nadam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, 1e-2)


def train(zero: ZeroOptimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        zero.backward(backward(params, step))
        zero.step()


def train_plain(optim: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        optim.zero_grad()
        backward(params, step).backward()
        optim.step()


def assert_same_state(ours: dict[int, dict[str, object]], theirs: dict[int, dict[str, object]]) -> None:
    assert ours.keys() == theirs.keys()
    for index, state in theirs.items():
        assert ours[index].keys() == state.keys()
        for name, value in state.items():
            assert isinstance(value, Tensor)
            torch.testing.assert_close(ours[index][name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", [make_hybrid, make_torch, make_sgd, make_nadam])
def test_state_dict_is_that_of_the_plain_optimizer(make) -> None:
    ours, theirs = make_params(), make_params()
    zero, plain = ZeroOptimizer(make(ours), PlainModel(ours, chunk_numel=60), block_numel=10), make(theirs)
    train(zero, ours, range(3))
    train_plain(plain, theirs, range(3))
    found, expected = zero.state_dict(), plain.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert_same_state(found["state"], expected["state"])
    plain.load_state_dict(found)
    assert_same_state(plain.state_dict()["state"], found["state"])


@pytest.mark.parametrize("make", [make_hybrid, make_torch, make_sgd, make_nadam])
@pytest.mark.parametrize("way", ["load", "take over", "inner handle"])
def test_state_of_the_plain_optimizer_is_continued(make, way: str) -> None:
    theirs = make_params()
    plain = make(theirs)
    train_plain(plain, theirs, range(3))
    ours = [nn.Parameter(p.detach().clone()) for p in theirs]
    optim = make(ours)
    if way == "take over":
        optim.load_state_dict(copy.deepcopy(plain.state_dict()))
    zero = ZeroOptimizer(optim, PlainModel(ours, chunk_numel=60), block_numel=10)
    if way == "load":
        zero.load_state_dict(plain.state_dict())
    elif way == "inner handle":
        optim.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(zero, ours, range(3, 6))
    train_plain(plain, theirs, range(3, 6))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert_same_state(zero.state_dict()["state"], plain.state_dict()["state"])
    assert not optim.state


def test_parameters_that_have_stepped_unequally_keep_their_own_counts() -> None:
    theirs = make_params()
    plain = HybridAdam(theirs, 1e-2)
    for step, used in enumerate([slice(0, 4), slice(1, 3), slice(1, 2)]):
        plain.zero_grad()
        backward(theirs[used], step).backward()
        plain.step()
    ours = [nn.Parameter(p.detach().clone()) for p in theirs]
    zero = ZeroOptimizer(HybridAdam(ours, 1e-2), PlainModel(ours))
    saved = plain.state_dict()
    del saved["state"][3]  # and one that has not stepped at all
    plain.load_state_dict(saved)
    zero.load_state_dict(saved)
    train(zero, ours, range(3, 5))
    train_plain(plain, theirs, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    state = zero.state_dict()["state"]
    assert [float(state[index]["step"]) for index in range(4)] == [3, 5, 4, 2]


def test_loading_restores_hyperparameters_scale_and_counters_in_place() -> None:
    params = make_params()
    zero = ZeroOptimizer(make_hybrid(params), PlainModel(params), growth_interval=5)
    zero.param_groups[1].update(lr=0.7, betas=(0.5, 0.6), weight_decay=0.9)
    zero.loss_scaler.update(False)
    saved = copy.deepcopy(zero.state_dict())
    other_params = make_params()
    optim = make_hybrid(other_params)
    other = ZeroOptimizer(optim, PlainModel(other_params))
    group = optim.param_groups[1]
    other.load_state_dict(saved)
    assert optim.param_groups[1] is group
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.7, (0.5, 0.6), 0.9)
    assert all(a is b for a, b in zip(group["params"], other_params[2:], strict=True))
    assert other.state_dict()["loss_scaler"] == saved["loss_scaler"]


def carry_away(zero: ZeroOptimizer) -> None:
    """Do to all states what a model may: other memory, the same values, and nothing of use where they were."""
    for memory in zero._memory._buffers.values():
        old = memory.data
        memory.data = old.clone()
        old.fill_(torch.nan)


@pytest.mark.parametrize("make", [make_hybrid, make_torch, make_sgd, make_nadam])
def test_states_may_be_carried_elsewhere_between_steps(make) -> None:
    params, others = make_params(), make_params()
    zero, still = ZeroOptimizer(make(params), PlainModel(params)), ZeroOptimizer(make(others), PlainModel(others))
    for step in range(4):
        train(zero, params, range(step, step + 1))
        train(still, others, range(step, step + 1))
        carry_away(zero)
        if step == 2:
            zero.load_state_dict(copy.deepcopy(zero.state_dict()))
            carry_away(zero)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    assert_same_state(zero.state_dict()["state"], still.state_dict()["state"])


def test_saved_state_shares_no_memory_with_training() -> None:
    params = make_params()
    zero = ZeroOptimizer(make_hybrid(params), PlainModel(params))
    train(zero, params, range(1))
    saved = zero.state_dict()
    kept = copy.deepcopy(saved)
    zero.load_state_dict(saved)
    train(zero, params, range(1, 3))
    assert_same_state(saved["state"], kept["state"])
    assert saved["param_groups"] == kept["param_groups"]


def test_16_bit_states_become_fp32() -> None:
    params = make_params()
    zero = ZeroOptimizer(make_hybrid(params), PlainModel(params))
    train(zero, params, range(1))
    saved = zero.state_dict()
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
        state["step"] = 1  # as old optimizers saved it
    zero.load_state_dict(saved)
    train(zero, params, range(1, 2))
    state = zero.state_dict()["state"][0]
    assert (state["exp_avg"].dtype, float(state["step"])) == (torch.float32, 2.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved["param_groups"].pop(), r"\[2\].*\[2, 2\]"),
        (lambda saved: saved["param_groups"][0]["params"].pop(), r"\[1, 2\].*\[2, 2\]"),
        (lambda saved: saved["state"].update({9: {}}), "9"),
        (lambda saved: saved["state"][0].update(exp_avg=torch.zeros(3)), r"'exp_avg' of parameter 0.*\(3,\).*\(4, 8\)"),
        (lambda saved: saved["loss_scaler"].pop("scale"), "scale"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_nothing_changes(change, message: str) -> None:
    params = make_params()
    zero = ZeroOptimizer(make_hybrid(params), PlainModel(params))
    train(zero, params, range(1))
    before = copy.deepcopy(zero.state_dict())
    saved = copy.deepcopy(before)
    for group in saved["param_groups"]:
        group["lr"] = 77.0
    change(saved)
    with pytest.raises(ValueError, match=message):
        zero.load_state_dict(saved)
    assert zero.state_dict()["param_groups"] == before["param_groups"]
    assert zero.state_dict()["loss_scaler"] == before["loss_scaler"]
    assert_same_state(zero.state_dict()["state"], before["state"])


@pytest.mark.parametrize("on", ["zero", "optim"])
def test_hooks_of_saving_and_loading_run_as_torchs_do(on: str) -> None:
    params = make_params()
    optim = HybridAdam(params)
    zero = ZeroOptimizer(optim, PlainModel(params))
    handle = zero if on == "zero" else optim
    calls: list[str] = []

    def expect(name: str, optimizer: torch.optim.Optimizer) -> None:
        assert optimizer is handle
        calls.append(name)

    def add(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        expect("add", optimizer)
        return {**state_dict, "note": 7}

    def change(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        expect("change", optimizer)
        state_dict["param_groups"] = [{**group, "lr": 0.25} for group in state_dict["param_groups"]]

    handle.register_state_dict_pre_hook(lambda optimizer: expect("before saving", optimizer))
    handle.register_state_dict_post_hook(add)
    handle.register_load_state_dict_pre_hook(change)
    handle.register_load_state_dict_post_hook(lambda optimizer: expect("after loading", optimizer))
    saved = zero.state_dict()
    assert saved["note"] == 7
    zero.load_state_dict(saved)
    assert calls == ["before saving", "add", "change", "after loading"]
    assert zero.param_groups[0]["lr"] == 0.25
    assert saved["param_groups"][0]["lr"] == 1e-3, "the caller's dict stays as it was"
