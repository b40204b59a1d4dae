"""A share of the model states on the disk: bytes as asked, no number changed, and checkpoints as ever."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini_booster import Booster, GeminiPlugin
from gemini_booster.zero import GeminiDDP
from gemini_optim import HybridAdam
from models import SMALL_CHUNKS, batch, lm_loss, seeded_model
from ranks import run_ranks

SHARES: tuple[dict[str, float], ...] = ({}, {"offload": 1.0}, {"disk": 1.0}, {"offload": 0.3, "disk": 0.4})
COMBINATIONS: list[dict[str, float]] = [
    {
        "shard_param_frac": index % 3 / 2,
        **{f"{where}_param_frac": share for where, share in param.items()},
        **{f"{where}_optim_frac": share for where, share in optim.items()},
    }
    for index, (param, optim) in enumerate(itertools.product(SHARES, SHARES))
]


def boosted(precision: str, **settings: Any) -> tuple[Booster, GeminiDDP, torch.optim.Optimizer]:
    module = seeded_model("llama")
    plugin = GeminiPlugin(precision=precision, max_norm=0.5, **SMALL_CHUNKS, **settings)  # type: ignore[arg-type]
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(module, HybridAdam(module.parameters(), lr=1e-2))
    assert optimizer is not None
    return booster, model, optimizer


def train(rank: int, booster: Booster, model: GeminiDDP, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = lm_loss(model, batch(rank, step))
        losses.append(loss.item())
        booster.backward(loss, optimizer)
        optimizer.step()
    return losses


def check_combinations(rank: int, world_size: int, precision: str, folder: str) -> None:
    wanted = train(rank, *boosted(precision), 3)
    for settings in COMBINATIONS:
        booster, model, optimizer = boosted(precision, offload_directory=folder, **settings)
        assert train(rank, booster, model, optimizer, 3) == wanted, settings
        assert model.deviations == 0
        for tier, usage in model.memory_usage().items():
            chunks = model.chunk_manager.chunks
            params = sum(chunk.shard_bytes for chunk in chunks if model.placement.of(chunk).param_tier == tier)
            optims = sum(  # master weights of the whole shard, moments of what is no padding
                4 * chunk.shard_numel + 8 * chunk.valid_numel
                for chunk in chunks
                if model.placement.of(chunk).optim_tier == tier
            )
            if tier != "device" and precision == "bf16":
                assert usage["used"] == params + optims, (settings, tier)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_are_bit_identical_with_any_share_on_the_disk(precision: str, world_size: int, tmp_path: Path) -> None:
    run_ranks(check_combinations, world_size, precision, str(tmp_path), timeout_s=160)
    assert not list(tmp_path.iterdir()), "the files have no names, so none is left behind"


def check_checkpoints(rank: int, world_size: int, folder: str) -> None:
    away: dict[str, Any] = {"disk_optim_frac": 0.7, "disk_param_frac": 1.0, "offload_directory": folder}
    booster, model, optimizer = boosted("bf16", **away)
    train(rank, booster, model, optimizer, 2)
    booster.save_model(model, f"{folder}/model", shard=True, use_safetensors=True)
    booster.save_optimizer(optimizer, f"{folder}/optimizer.pt")
    states = {name: value.float() for name, value in model.named_master_values(torch.float32)}
    continued = []
    for settings in ({}, away):
        booster, model, optimizer = boosted("bf16", **settings)
        booster.load_model(model, f"{folder}/model")
        booster.load_optimizer(optimizer, f"{folder}/optimizer.pt")
        loaded = dict(model.named_full_values())
        assert all(torch.equal(loaded[name], value.to(loaded[name].dtype)) for name, value in states.items())
        continued.append(train(rank, booster, model, optimizer, 2))
    assert continued[0] == continued[1]


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_from_the_disk_continues_anywhere(world_size: int, tmp_path: Path) -> None:
    run_ranks(check_checkpoints, world_size, str(tmp_path), timeout_s=100)
