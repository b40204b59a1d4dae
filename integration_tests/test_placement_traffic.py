"""What a plan predicts is what a step does: bytes per link exactly, bytes at the peak of each tier nearly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP
from gemini_placement.tracer import trace_model
from models import FAMILIES, SMALL_CHUNKS, inputs_of, seeded_model
from ranks import run_ranks

PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"shard_param_frac": 0.0, "offload_optim_frac": 1.0},
    {"offload_optim_frac": 0.5, "offload_param_frac": 0.5, "max_prefetch": 1},
    {"disk_optim_frac": 0.6, "offload_optim_frac": 0.4, "disk_param_frac": 0.3, "offload_param_frac": 0.3},
    {"disk_optim_frac": 1.0, "disk_param_frac": 1.0, "max_prefetch": 2},
    {"placement_policy": "auto", "device_capacity": "120kB"},
    {"placement_policy": "auto", "device_capacity": "250kB", "host_capacity": "300kB", "max_prefetch": 1},
]


def train_counted(rank: int, kind: str, folder: str, **settings: Any) -> tuple[GeminiDDP, dict[str, int]]:
    """Return a model after three steps, and the bytes that the last one moved by link; its peaks are in the tiers."""
    model = GeminiDDP(seeded_model(kind), precision="bf16", offload_directory=folder, **{**SMALL_CHUNKS, **settings})
    optimizer = GeminiAdamOptimizer(model, lr=1e-3)
    manager = model.chunk_manager
    before: dict[str, int] = {}
    for step in range(3):
        before = manager.traffic()
        for tier in manager.tiers.values():
            tier.reset_peak()
        optimizer.backward(model(**inputs_of(kind, rank, step)).loss)
        optimizer.step()
    assert model.deviations == 0
    moved = {link: amount - before.get(link, 0) for link, amount in manager.traffic().items()}
    return model, {link: amount for link, amount in moved.items() if amount}


def check_traffic(rank: int, world_size: int, folder: str) -> None:
    for settings in PLACEMENTS:
        # No chunk has a padded tail on one of two ranks, and none is small against what is measured.
        model, moved = train_counted(rank, "gpt2", folder, **settings)
        assert moved == model.plans[0].traffic, settings


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_moves_exactly_the_bytes_that_its_plan_predicts(world_size: int, tmp_path: Path) -> None:
    run_ranks(check_traffic, world_size, str(tmp_path), timeout_s=100)


def check_peaks(rank: int, world_size: int, folder: str) -> None:
    for kind in FAMILIES:
        for settings in (PLACEMENTS[0], PLACEMENTS[3], PLACEMENTS[4]):
            model, _ = train_counted(rank, kind, folder, **settings)
            largest = max(chunk.full_bytes for chunk in model.chunk_manager.chunks)
            for name, tier in model.chunk_manager.tiers.items():
                predicted = model.plans[0].peak_bytes[name]
                # A plan knows chunks, not parameters: of one that is used twice, as tied weights are, it cannot tell
                # that the gradient comes with the last use, and so it counts one buffer from the first on.
                exact = name != "device" or kind in ("llama", "vit")
                allowed = 0.05 * tier.peak + (0 if exact else largest)
                assert abs(predicted - tier.peak) <= allowed, (kind, settings, name, predicted, tier.peak)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_peak_of_each_tier_is_predicted_within_five_percent(world_size: int, tmp_path: Path) -> None:
    run_ranks(check_peaks, world_size, str(tmp_path), timeout_s=160)


def check_expected(rank: int, world_size: int, folder: str) -> None:
    for kind in FAMILIES:
        if kind == "mamba":
            continue  # its blocks use parameters of the modules within them, which only a run on chunks finds out
        stats = trace_model(seeded_model(kind), inputs_of(kind, rank, 0), dtype=torch.bfloat16)
        for settings in (PLACEMENTS[0], PLACEMENTS[3], PLACEMENTS[4]):
            model, _ = train_counted(rank, kind, folder, memstats=stats, **settings)
            expected, plan = model.expected_plan, model.plans[0]
            assert expected is not None
            assert expected.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.05), (kind, settings)
            if kind != "bert":  # two modules of its head have one operation: which one backward enters first is chance
                assert expected.traffic == plan.traffic, (kind, settings)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_without_memory_predicts_what_the_first_step_records(world_size: int, tmp_path: Path) -> None:
    run_ranks(check_expected, world_size, str(tmp_path), timeout_s=160)
