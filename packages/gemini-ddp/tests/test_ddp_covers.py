"""Modules whose parameters lie in one chunk are entered once for all that is within them."""

from __future__ import annotations

import copy

import pytest
import torch
from ddp_checks import OneAhead, assert_at_rest, same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini_ddp import ZeroDDP
from gemini_ddp._course import Course
from gemini_ddp.testing import PlainChunk, PoisonStore


class Block(nn.Module):
    """Two layers with a parameter of its own, and a tensor that it only hands on."""

    def __init__(self, recompute: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.recompute = recompute

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x).tanh()
        x = self.second(x) if self.recompute is None else checkpoint(self.second, x, use_reentrant=self.recompute)
        return (x + bias) * self.scale, bias


class Model(nn.Module):
    """Blocks that share a bias; a layer of the first is called once more from outside of its block."""

    def __init__(self, recompute: bool | None = None, outside: bool = False) -> None:
        super().__init__()
        self.bias = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(3))
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias(x).unsqueeze(0).unsqueeze(0)
        for block in self.blocks:
            x, bias = block(x, bias)
        return self.blocks[0].first(x) if self.outside else x


def wrap(module: nn.Module, params_per_chunk: int) -> tuple[ZeroDDP[PlainChunk], PoisonStore]:
    # The bias' two parameters first, then five of each block.
    store = PoisonStore(module.parameters(), params_per_chunk=params_per_chunk)
    return ZeroDDP(module, store, OneAhead()), store


def entered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list that grows by the phase and name of each scope that is entered."""
    entries: list[tuple[str, str]] = []
    enter = Course.enter

    def noted(self: Course[PlainChunk], scope: object, phase: str, params: object) -> None:
        entries.append((phase, scope.name))  # type: ignore[attr-defined] # a scope
        enter(self, scope, phase, params)  # type: ignore[arg-type]

    monkeypatch.setattr(Course, "enter", noted)
    return entries


def check_steps(plain: nn.Module, model: ZeroDDP[PlainChunk], store: PoisonStore) -> None:
    for step in range(3):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
        for (name, param), mine in zip(plain.named_parameters(), model.parameters(), strict=True):
            same_bits(store.gradient(mine), param.grad, f"step {step}: {name}")  # type: ignore[arg-type]
        assert_at_rest(store)


def test_calls_within_a_cover_are_passed_over_and_what_a_module_hands_on_enters_nobody_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    plain = Model()
    module = copy.deepcopy(plain)
    store = PoisonStore(
        [*module.blocks[0].parameters(), *module.blocks[1].parameters(), *module.blocks[2].parameters(),
         *module.bias.parameters()], params_per_chunk=5)  # fmt: skip
    model = ZeroDDP(module, store, OneAhead())
    entries = entered(monkeypatch)
    check_steps(plain, model, store)
    blocks = [f"blocks.{index}" for index in range(3)]
    step = [("forward", name) for name in ("", "bias", *blocks)]
    step += [("backward", name) for name in (*reversed(blocks), "bias")]
    assert entries == step * 3
    assert model.deviations == 0


@pytest.mark.parametrize("params_per_chunk", [1, 3, 5, 17])
@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_gradients_are_plain_ones_with_recompute_within_and_calls_from_outside(
    params_per_chunk: int, recompute: bool | None, outside: bool
) -> None:
    torch.manual_seed(0)
    plain = Model(recompute, outside)
    model, store = wrap(copy.deepcopy(plain), params_per_chunk)
    check_steps(plain, model, store)


def test_a_layer_of_a_cover_may_be_called_on_its_own() -> None:
    torch.manual_seed(0)
    plain = Block(None)
    model, store = wrap(copy.deepcopy(plain), 5)
    x = torch.randn(2, 3)
    with torch.no_grad():
        assert torch.equal(model.module.first(x), plain.first(x))
    loss, wanted = model.module.second(x).sum(), plain.second(x).sum()
    loss.backward()
    wanted.backward()
    same_bits(store.gradient(model.module.second.weight), plain.second.weight.grad, "second")
    assert_at_rest(store)
