"""Memory and traffic of a step are known before there is a model: a run on paper predicts what a real one takes."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP
from gemini_placement import MemStats
from gemini_placement.tracer import trace_model
from models import SMALL_CHUNKS, inputs_of
from ranks import run_ranks
from zoo import ZOO, Entry, Inputs, Recompute
from zoo_models import WIDTH, Discriminator, Generator

LARGE_CHUNKS: dict[str, Any] = {"min_chunk_size_m": 0.03, "search_range_m": 0.02, "hidden_dim": 32}
SETTINGS: list[tuple[str, Recompute, dict[str, Any]]] = [
    ("bf16", None, SMALL_CHUNKS),
    ("fp32", False, {**LARGE_CHUNKS, "offload_optim_frac": 1.0, "offload_param_frac": 1.0}),
    (
        "fp32",
        True,
        {
            **SMALL_CHUNKS,
            "max_prefetch": 1,
            "disk_optim_frac": 0.6,
            "offload_optim_frac": 0.4,
            "disk_param_frac": 0.5,
            "offload_param_frac": 0.2,
        },
    ),
]


def _noise(rank: int, step: int) -> Inputs:
    return {"noise": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(30_000 * step + rank))}


def _make(model: nn.Module, inputs: Inputs) -> Tensor:
    return cast("Tensor", model(inputs["noise"])).square().mean()


def _judge(model: nn.Module, inputs: Inputs) -> Tensor:
    return F.softplus(-model(inputs["pixel_values"])).mean()


MODELS = {
    **ZOO,
    "generator": Entry(build=Generator, inputs=_noise, loss=_make),
    "discriminator": Entry(build=Discriminator, inputs=partial(inputs_of, "vit"), loss=_judge),
}


class _CalledError(Exception):
    """Ends a loss function where it calls the model."""


def run_on_paper(entry: Entry, recompute: Recompute, inputs: Inputs, dtype: torch.dtype) -> MemStats:
    """Trace a model of the zoo, whose loss functions call it."""
    calls: list[Any] = []

    def stand_in(*args: Tensor, **kwargs: object) -> None:
        calls.append(kwargs or args)
        raise _CalledError

    with contextlib.suppress(_CalledError):
        entry.loss(cast("nn.Module", stand_in), inputs)

    def loss(output: object) -> Tensor:
        return entry.loss(cast("nn.Module", lambda *_, **__: output), inputs)

    return trace_model(entry.make(recompute), calls[0], loss=loss, dtype=dtype)


def check_predictions(rank: int, world_size: int, names: tuple[str, ...], folder: str) -> None:
    for number, name in enumerate(names):
        entry = MODELS[name]
        chosen = SETTINGS if len(names) == 2 else [SETTINGS[number % 3], SETTINGS[(number + 1) % 3]]
        for precision, recompute, settings in chosen:
            if name in ("resnet", "generator", "discriminator"):
                precision = "fp32"  # the buffers of BatchNorm and spectral norm are, and on the CPU all must be alike
            dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
            stats = run_on_paper(entry, recompute, entry.inputs(rank, 0), dtype)
            model = GeminiDDP(
                entry.make(recompute),
                precision=cast("Any", precision),
                memstats=stats,
                offload_directory=folder,
                **settings,
            )
            check_against_a_step(entry, model, rank, f"{name}, recompute {recompute}, {precision}")


def check_against_a_step(entry: Entry, model: GeminiDDP, rank: int, what: str) -> None:
    optimizer = GeminiAdamOptimizer(model, lr=1e-3)
    manager = model.chunk_manager
    before: dict[str, int] = {}
    for step in range(2):
        before = manager.traffic()
        for tier in manager.tiers.values():
            tier.reset_peak()
        optimizer.backward(entry.loss(model, entry.inputs(rank, step)))
        optimizer.step()
    assert model.deviations == 0
    moved = {link: amount - before.get(link, 0) for link, amount in manager.traffic().items()}
    for plan in (model.expected_plan, model.plans[0]):
        assert plan is not None
        assert plan.traffic == {link: amount for link, amount in moved.items() if amount}, what
        for tier in manager.tiers.values():
            tolerance = 0.05 if tier.name == "device" else 0.0
            assert abs(plan.peak_bytes[tier.name] - tier.peak) <= tolerance * tier.peak, (
                f"{what}, {tier.name}: {plan.peak_bytes[tier.name]:,} bytes predicted, {tier.peak:,} measured"
            )


GROUPS = [
    ("gpt2", "llama", "qwen3", "mixtral", "mamba", "bert", "t5"),
    ("vit", "whisper", "clip", "resnet", "unet", "rnn", "tied", "generator", "discriminator"),
]


@pytest.mark.distributed
@pytest.mark.parametrize("names", GROUPS, ids=["words", "others"])
def test_peaks_within_five_percent_and_traffic_to_the_byte_for_the_whole_zoo(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    run_ranks(check_predictions, 2, names, str(tmp_path), timeout_s=100)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 3])
def test_peaks_and_traffic_of_one_rank_and_of_three(world_size: int, tmp_path: Path) -> None:
    run_ranks(check_predictions, world_size, ("t5", "tied"), str(tmp_path), timeout_s=100)


def test_every_model_of_the_zoo_is_in_a_group() -> None:
    assert sorted(name for group in GROUPS for name in group) == sorted(MODELS)
