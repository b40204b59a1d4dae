"""Parameters that get no gradient, in some steps, on some ranks or ever: as in plain PyTorch, which leaves them alone.

Momentum, weight decay and Adam's moments all act on a gradient of zero, and none of them on a gradient of None.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini_booster import Booster, GeminiPlugin
from gemini_booster.zero import GeminiDDP, GeminiOptimizer
from ranks import run_ranks

SETTINGS: list[dict[str, Any]] = [
    {"min_chunk_size_m": 0, "search_range_m": 0, "hidden_dim": 4},
    {"shard_param_frac": 0.0},
    {"offload_optim_frac": 1.0},
]


class Branches(nn.Module):
    """Every module is called on every rank; the loss follows from those that ``used`` names."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))
        self.never = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        x = self.base(x).tanh()
        for index, head in enumerate(self.heads):
            y = head(x)
            x = x + (y if index in used else y.detach())
        return x * self.scale if 3 in used else x


def uses(rank: int, step: int) -> tuple[int, ...]:
    """Head 0 always, head 1 on one rank in turn, head 2 on no rank in two of three steps, the scale in turn."""
    return (0, *([1] if step % 2 == rank % 2 else []), *([2] if step % 3 == 0 else []), *([3] if rank == 1 else []))


def make(kind: str, params: Any) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)
    # An epsilon as large as the gradients: else Adam turns rounding noise into steps of size lr.
    return torch.optim.AdamW(params, lr=0.1, weight_decay=0.1, eps=0.1)


def data(rank: int, step: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def check_unused(rank: int, world_size: int, kind: str) -> None:
    for settings in SETTINGS:
        torch.manual_seed(0)
        plain = Branches()
        oracle = make(kind, plain.parameters())
        module = copy.deepcopy(plain)
        model = GeminiDDP(module, precision="fp32", **settings)
        optimizer = GeminiOptimizer(make(kind, module.parameters()), model)
        for step in range(7):
            if step == 5:
                for frozen in (plain, module):
                    frozen.base.requires_grad_(False)
            optimizer.backward(model(data(rank, step), uses(rank, step)).square().mean())
            optimizer.step()
            for other in range(world_size):
                (plain(data(other, step), uses(other, step)).square().mean() / world_size).backward()
            oracle.step()
            oracle.zero_grad()
        trained = model.state_dict()
        for name, wanted in plain.state_dict().items():
            torch.testing.assert_close(trained[name], wanted, rtol=1e-5, atol=1e-6, msg=f"{name} {settings}")
        assert torch.equal(trained["never"], torch.ones(4))
        saved = optimizer.state_dict(only_rank_0=False)["state"]
        wanted_state = oracle.state_dict()["state"]
        assert saved.keys() == wanted_state.keys(), settings
        for number, state in wanted_state.items():
            for name, value in state.items():
                torch.testing.assert_close(saved[number][name], value, rtol=1e-5, atol=1e-6, msg=f"{number} {name}")


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_what_no_rank_used_is_not_updated_and_what_one_used_counts_as_zero_elsewhere(
    kind: str, world_size: int
) -> None:
    run_ranks(check_unused, world_size, kind)


def check_accumulation(rank: int, world_size: int) -> None:
    """Three ways to sum micro-batches, each equal to the big batch."""
    for way in ("no_sync", "plain", "fp32"):
        torch.manual_seed(0)
        plain = Branches()
        oracle = make("sgd", plain.parameters())
        module = copy.deepcopy(plain)
        plugin = GeminiPlugin(precision="fp32", enable_gradient_accumulation=way == "fp32", **SETTINGS[0])
        booster = Booster(plugin=plugin)
        model, optimizer, *_ = booster.boost(module, make("sgd", module.parameters()))
        assert optimizer is not None
        for step in range(4):
            for micro in range(3):
                number = 3 * step + micro
                loss = model(data(rank, number), uses(rank, number)).square().mean() / 3
                if way == "no_sync" and micro < 2:
                    with booster.no_sync(model, optimizer):
                        booster.backward(loss, optimizer)
                else:
                    booster.backward(loss, optimizer)
                for other in range(world_size):
                    micro_loss = plain(data(other, number), uses(other, number)).square().mean()
                    (micro_loss / (3 * world_size)).backward()
            optimizer.step()
            oracle.step()
            oracle.zero_grad()
        trained = model.state_dict()
        for name, wanted in plain.state_dict().items():
            torch.testing.assert_close(trained[name], wanted, rtol=1e-5, atol=1e-6, msg=f"{name} {way}")
        with booster.no_sync(model, optimizer):
            booster.backward(model(data(rank, 0), (0,)).sum(), optimizer)
        with pytest.raises(RuntimeError, match="outside of no_sync"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
        # What was dropped counts no more: head 0 had a gradient, and has none in the backward that is reduced.
        booster.backward(model(data(rank, 0), (1,)).sum(), optimizer)
        optimizer.step()
        assert torch.equal(model.state_dict()["heads.0.weight"], trained["heads.0.weight"])


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_micro_batches_equal_the_big_batch_reduced_each_time_or_once(world_size: int) -> None:
    run_ranks(check_accumulation, world_size)
