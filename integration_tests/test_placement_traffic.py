"""The bytes that a plan predicts for each link are those that a step moves, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP
from models import SMALL_CHUNKS, inputs_of, seeded_model
from ranks import run_ranks

PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"shard_param_frac": 0.0, "offload_optim_frac": 1.0},
    {"offload_optim_frac": 0.5, "offload_param_frac": 0.5, "max_prefetch": 1},
    {"disk_optim_frac": 0.6, "offload_optim_frac": 0.4, "disk_param_frac": 0.3, "offload_param_frac": 0.3},
    {"disk_optim_frac": 1.0, "disk_param_frac": 1.0, "max_prefetch": 2},
    {"placement_policy": "auto", "device_capacity": 400_000},
    {"placement_policy": "auto", "device_capacity": 700_000, "host_capacity": 300_000, "max_prefetch": 1},
]


def train_counted(rank: int, folder: str, **settings: Any) -> tuple[GeminiDDP, dict[str, int]]:
    """Return a model after three steps, and the bytes that the last one moved by link."""
    model = GeminiDDP(seeded_model("gpt2"), offload_directory=folder, **{**SMALL_CHUNKS, **settings})
    optimizer = GeminiAdamOptimizer(model, lr=1e-3)
    before: dict[str, int] = {}
    for step in range(3):
        before = model.chunk_manager.traffic()
        optimizer.backward(model(**inputs_of("gpt2", rank, step)).loss)
        optimizer.step()
    assert model.deviations == 0
    moved = {link: amount - before.get(link, 0) for link, amount in model.chunk_manager.traffic().items()}
    return model, {link: amount for link, amount in moved.items() if amount}


def check_traffic(rank: int, world_size: int, folder: str) -> None:
    # With master weights, and without where parameters and states rest together.
    for precision, item_bytes in (("bf16", 2), ("fp32", 4)):
        for placement in PLACEMENTS:
            settings = {key: v * item_bytes // 2 if "capacity" in key else v for key, v in placement.items()}
            model, moved = train_counted(rank, folder, precision=precision, **settings)
            assert moved == model.plans[0].traffic, (precision, settings)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_moves_exactly_the_bytes_that_its_plan_predicts(world_size: int, tmp_path: Path) -> None:
    run_ranks(check_traffic, world_size, str(tmp_path), timeout_s=100)
