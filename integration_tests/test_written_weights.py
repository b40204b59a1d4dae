"""A module that writes to its own weights trains as in plain torch, or is told; it never trains on in silence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini_booster.zero import GeminiDDP, GeminiOptimizer
from gemini_chunk import ChunkError
from ranks import run_ranks

SMALL = {"min_chunk_size_m": 1e-6, "hidden_dim": 2, "search_range_m": 1e-5}
ON_HOST = {**SMALL, "offload_optim_frac": 1.0, "offload_param_frac": 1.0}


class Clamping(nn.Linear):
    """Clamps its weight in forward as long as it is told to."""

    clamps = True

    def forward(self, x: Tensor) -> Tensor:
        if self.clamps:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Teacher(nn.Module):
    """Moves frozen weights after trained ones in forward, as momentum contrast does."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), Clamping(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.teacher.clamps:
            with torch.no_grad():
                for ours, theirs in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                    theirs.lerp_(ours, 0.5)
        result: Tensor = self.head(self.student(x) - self.teacher(x))
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "root": lambda: Clamping(4, 4),
    "inner": lambda: nn.Sequential(Clamping(4, 4), nn.Tanh(), nn.Linear(4, 4)),
    "teacher": Teacher,
}


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def take_step(model: GeminiDDP, optimizer: GeminiOptimizer, rank: int, step: int) -> None:
    optimizer.backward(model(inputs(rank, step)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def boosted(model: nn.Module, settings: dict[str, Any]) -> tuple[GeminiDDP, GeminiOptimizer]:
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.5)
    wrapped = GeminiDDP(model, precision="fp32", **settings)
    return wrapped, GeminiOptimizer(optimizer, wrapped)


def stop_writing(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Clamping):
            module.clamps = False


def check_refusals(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make()
        clean = copy.deepcopy(model)
        stop_writing(clean)
        wrapped, optimizer = boosted(model, settings)
        wanted, clean_optimizer = boosted(clean, settings)
        for step in range(3):
            if step != 1:
                with pytest.raises(ChunkError, match=r"weight'\] of chunk \d were written to, in place"):
                    wrapped(inputs(rank, step))
            writers = [module for module in model.modules() if isinstance(module, Clamping)]
            for writer in writers:
                writer.clamps = False
            take_step(wrapped, optimizer, rank, step)
            for writer in writers:
                writer.clamps = True
            take_step(wanted, clean_optimizer, rank, step)
            for (key, ours), theirs in zip(wrapped.state_dict().items(), wanted.state_dict().values(), strict=True):
                assert torch.equal(ours, theirs), (name, step, key)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "settings"), [(1, ON_HOST), (2, {}), (3, SMALL)], ids=["host", "whole", "small"]
)
def test_write_in_forward_that_would_be_lost_is_refused_and_a_clean_step_follows(
    world_size: int, settings: dict[str, Any]
) -> None:
    run_ranks(check_refusals, world_size, settings)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("settings", [SMALL, {}], ids=["small", "whole"])
def test_write_in_forward_lasts_where_a_single_rank_has_its_weights_on_the_device(
    name: str, settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    plain = copy.deepcopy(model)
    wrapped, optimizer = boosted(model, settings)
    plain_optimizer = torch.optim.SGD([param for param in plain.parameters() if param.requires_grad], lr=0.5)
    for step in range(3):
        take_step(wrapped, optimizer, 0, step)
        plain(inputs(0, step)).square().mean().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        for ours, theirs in zip(wrapped.state_dict().values(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(ours, theirs)


def check_assignments(rank: int, world_size: int) -> None:
    for settings in (SMALL, {}, ON_HOST):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        wrapped, optimizer = boosted(model, settings)
        take_step(wrapped, optimizer, rank, 0)
        before = wrapped.state_dict()
        model[1].weight.data = torch.eye(4)
        message = r"\['1.weight'\] of chunk \d were written to, in place or by assigning .data"
        with pytest.raises(ChunkError, match=message):
            wrapped(inputs(rank, 1))
        assert all(torch.equal(value, before[name]) for name, value in wrapped.state_dict().items())
        take_step(wrapped, optimizer, rank, 1)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_data_that_is_assigned_after_wrapping_is_refused(world_size: int) -> None:
    run_ranks(check_assignments, world_size)
