"""Ranks whose losses follow from different results of the same modules, changing step by step, train as plain PyTorch.

What a rank gathers and holds must not depend on its own gradients: one gather more or less on one rank pairs up with
another chunk's on the others, silently where chunks have one size.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini_booster.zero import GeminiDDP, GeminiOptimizer
from ranks import run_ranks

SMALLEST: dict[str, Any] = {"min_chunk_size_m": 0, "search_range_m": 0, "hidden_dim": 4}
SETTINGS: list[dict[str, Any]] = [
    SMALLEST,
    {**SMALLEST, "hidden_dim": 20, "max_prefetch": 2},  # one layer to a chunk
    {**SMALLEST, "hidden_dim": 40, "max_prefetch": 1},
    {**SMALLEST, "hidden_dim": 52},
    {**SMALLEST, "offload_optim_frac": 1.0, "offload_param_frac": 1.0},
    {"shard_param_frac": 0.0},
]
WIDTH = 4


class Pair(nn.Module):
    """Two products, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.right = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.left, x @ self.right


class Results(nn.Module):
    """Many results of one input: of layers in a row and side by side, called twice, late, and recomputed."""

    def __init__(self, owns: bool) -> None:
        super().__init__()
        # The model's own backward then comes first, and its forward ends last.
        self.scale = nn.Parameter(torch.ones(WIDTH)) if owns else 1.0
        self.trunk = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.pairs = nn.ModuleList(Pair() for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.recomputed = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.late = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, late: bool) -> list[Tensor]:
        results = [self.twice(x)]
        for layer in self.trunk:
            x = layer(x).tanh() * self.scale
        for pair in self.pairs:
            x, other = pair(x)
            results.append(other)
        results += [head(x) for head in self.heads]
        for index, layer in enumerate(self.recomputed):
            results.append(checkpoint(layer, x.tanh(), use_reentrant=index == 0))
        results.append(self.twice(x))
        if late:
            results.append(self.late(x))
        return [x, *results]


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """Return a loss from some results, chosen by rank and step; the first of all ranks' follow from few."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    results = model(torch.randn(3, WIDTH, generator=generator), late=step >= 4)
    count = 1 if step == 0 else int(torch.randint(1, len(results), (1,), generator=generator))
    chosen = torch.randperm(len(results), generator=generator)[:count].tolist()
    return torch.stack([results[index].square().mean() for index in chosen]).sum()


def check_losses(rank: int, world_size: int, settings: dict[str, Any], owns: bool) -> None:
    torch.manual_seed(0)
    plain = Results(owns)
    module = copy.deepcopy(plain)
    model = GeminiDDP(module, precision="fp32", **settings)
    optimizer = GeminiOptimizer(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1), model)
    oracle = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(12):
        optimizer.backward(loss_of(model, rank, step))
        optimizer.step()
        assert not any(chunk.is_gathered for chunk in model.chunk_manager.chunks)
        for other in range(world_size):
            (loss_of(plain, other, step) / world_size).backward()
        oracle.step()
        oracle.zero_grad()
        trained = model.state_dict()
        for name, wanted in plain.state_dict().items():
            torch.testing.assert_close(trained[name], wanted, rtol=1e-5, atol=1e-6, msg=f"step {step}: {name}")


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("owns", [False, True], ids=["", "root"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("settings", SETTINGS, ids=["smallest", "equal", "two", "three", "offloaded", "gathered"])
def test_losses_may_follow_from_different_results_on_each_rank(
    settings: dict[str, Any], world_size: int, owns: bool
) -> None:
    run_ranks(check_losses, world_size, settings, owns, timeout_s=90)
