"""Optimizers over a part of the model, and ranks whose shard is nothing but padding: all ranks do the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini_booster.zero import GeminiDDP, GeminiOptimizer
from gemini_ddp import ZeroDDPError
from ranks import run_ranks


def data(rank: int, step: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def check_part(rank: int, world_size: int) -> None:
    cases: list[tuple[nn.Module, list[int]]] = [
        (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), [4]),
        (nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 1, bias=False)), [0, 1, 2]),
    ]
    for case, (source, optimized) in enumerate(cases):
        for param in source.parameters():
            nn.init.normal_(param, generator=torch.Generator().manual_seed(case))
        for settings in ({"shard_param_frac": 0.0}, {"shard_param_frac": 1.0}):
            for size in ({"min_chunk_size_m": 0, "search_range_m": 0, "hidden_dim": 4}, {}):
                check_training(rank, world_size, source, optimized, {**settings, **size})


def check_training(
    rank: int, world_size: int, source: nn.Module, optimized: list[int], settings: dict[str, Any]
) -> None:
    plain, module = copy.deepcopy(source), copy.deepcopy(source)
    params = [[p for i in optimized for p in layers[i].parameters()] for layers in (plain, module)]  # type: ignore[index]
    oracle = torch.optim.SGD(params[0], lr=0.1, momentum=0.9)
    model = GeminiDDP(module, precision="fp32", **settings)
    optimizer = GeminiOptimizer(torch.optim.SGD(params[1], lr=0.1, momentum=0.9), model)
    for step in range(4):
        optimizer.backward(model(data(rank, step)).square().mean())
        optimizer.step()
        plain.zero_grad()
        torch.cat([plain(data(other, step)) for other in range(world_size)]).square().mean().backward()
        oracle.step()
    trained = model.state_dict()
    for name, wanted in plain.state_dict().items():
        torch.testing.assert_close(trained[name], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_not_optimized_stays_and_no_rank_waits(world_size: int) -> None:
    run_ranks(check_part, world_size, timeout_s=60)


def check_dropped(rank: int, world_size: int) -> None:
    plain, module = nn.Linear(4, 4), nn.Linear(4, 4)
    module.load_state_dict(plain.state_dict())
    model = GeminiDDP(module, precision="fp32", min_chunk_size_m=0, search_range_m=0, hidden_dim=4)
    optimizer = GeminiOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    before = model.state_dict()
    optimizer.backward(model(data(rank, 0)).sum())
    model.zero_grad()
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if world_size > 1:
        with pytest.raises(ZeroDDPError, match="would hold placeholders"):
            model.unwrap().state_dict()


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_zero_grad_of_the_model_drops_gradients_and_placeholders_are_not_saved(world_size: int) -> None:
    run_ranks(check_dropped, world_size)
