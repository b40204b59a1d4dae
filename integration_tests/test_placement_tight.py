"""Whatever capacity a placement admits, training keeps to it; what is advised instead of a refused one is admitted."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP
from gemini_placement import PlacementError
from ranks import run_ranks

WIDTH = 32
BLOCKS = 4
STEPS = 3
SMALL_CHUNKS: dict[str, Any] = {"min_chunk_size_m": 0.0005, "search_range_m": 0.0005, "hidden_dim": 16}


class Block(nn.Module):
    """Its chunks hold parameters of the unused branch beside those of the other: their gradients never are complete."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.side = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, side: bool) -> Tensor:
        x = x + self.down(self.up(self.norm(x)).tanh())
        return x + self.side(x).tanh() if side else x


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, sides: tuple[int, ...] = ()) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x, side=index in sides)
        out: Tensor = self.out(x)
        return out


def loss_of(model: nn.Module, rank: int, step: int, sides: tuple[int, ...] = ()) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    output: Tensor = model(torch.randn(4, WIDTH, generator=generator), sides)
    return output.float().square().mean()


def train(rank: int, sides: tuple[tuple[int, ...], ...], **settings: Any) -> tuple[list[float], GeminiDDP]:
    model = GeminiDDP(Branching(), **SMALL_CHUNKS, **settings)
    optimizer = GeminiAdamOptimizer(model, lr=1e-2, max_norm=0.5)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, rank, step, sides[step])
        losses.append(loss.item())
        optimizer.backward(loss)
        optimizer.step()
    return losses, model


def check_least_capacities(rank: int, world_size: int, precision: str) -> None:
    never: tuple[tuple[int, ...], ...] = ((),) * STEPS
    changing = ((1,), (), (0, 2))
    for sides in (never, changing):
        for settings in (
            {"offload_param_frac": 1.0, "offload_optim_frac": 1.0},
            {"offload_param_frac": 1.0, "offload_optim_frac": 1.0, "max_prefetch": 2, "max_fetch": 1},
            {"offload_param_frac": 0.5, "offload_optim_frac": 0.5},
            {"max_held": 2},
        ):
            wanted, free = train(rank, sides, precision=precision, **settings)
            least = free.placement.needed_bytes["device"]
            losses, model = train(rank, sides, precision=precision, device_capacity=least, **settings)
            assert losses == wanted, settings
            device, host = (model.chunk_manager.tier(name) for name in ("device", "host"))
            assert device.peak <= least
            assert host.used == free.chunk_manager.tier("host").used, "what was set aside has come back"


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_least_capacity_that_static_placement_admits_trains_to_the_same_losses(
    precision: str, world_size: int
) -> None:
    run_ranks(check_least_capacities, world_size, precision)


def refusal_of_auto(capacity: int, precision: str, rank: int) -> str:
    model = None
    try:
        model = GeminiDDP(
            Branching(),
            precision=precision,  # type: ignore[arg-type] # one of those
            placement_policy="auto",
            device_capacity=capacity,
            **SMALL_CHUNKS,
        )
        loss_of(model, rank, 0).backward()
    except PlacementError as error:
        return str(error)
    finally:
        if model is not None:
            model.end_recording()
    return ""


def check_advice(rank: int, world_size: int, precision: str) -> int:
    followed = 0
    for capacity in {"bf16": (28_000, 44_000), "fp32": (64_000, 98_000)}[precision]:
        message = refusal_of_auto(capacity, precision, rank)
        advised = re.search(r"give the device ([\d,]+) bytes", message)
        if advised is not None:
            followed += 1
            assert refusal_of_auto(int(advised[1].replace(",", "")), precision, rank) == "", (capacity, message)
    return followed


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_capacity_that_a_refusal_of_auto_advises_is_not_refused(precision: str, world_size: int) -> None:
    followed = run_ranks(check_advice, world_size, precision)
    assert min(followed) == 2


def check_level(rank: int, world_size: int, policy: str) -> list[tuple[int, int]]:
    """Return what is in use of the device, and what is left by its account, as each forward begins."""
    found: list[tuple[int, int]] = []
    model = GeminiDDP(
        Branching(),
        precision="bf16",
        placement_policy=policy,  # type: ignore[arg-type] # one of those
        device_capacity=200_000,
        max_prefetch=1,
        **SMALL_CHUNKS,
    )
    device = model.chunk_manager.tier("device")
    optimizer = GeminiAdamOptimizer(model, lr=1e-2)

    def look(*_: object) -> None:
        room = next(n for n in range(200_000, -1, -1) if device.fits(n))
        found.append((device.used, room))

    model.unwrap().register_forward_pre_hook(look)
    for step in range(STEPS):
        optimizer.backward(loss_of(model, rank, step))
        optimizer.step()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("policy", ["static", "auto"])
def test_ranks_have_the_same_room_where_one_has_no_states_of_what_is_never_used(policy: str) -> None:
    by_rank = run_ranks(check_level, 3, policy)
    unlike = 0
    for looks in zip(*by_rank, strict=True):
        used, room = zip(*looks, strict=True)
        assert len(set(room)) == 1, looks
        unlike += len(set(used)) > 1
    assert unlike
