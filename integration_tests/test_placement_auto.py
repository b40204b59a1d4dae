"""Automatic placement at work: capacities kept, eviction forced at every access, sequences that grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP
from gemini_chunk import ChunkManager
from gemini_placement import PlacementError
from gemini_placement.tracer import trace_model
from models import SMALL_CHUNKS, VOCABULARY, build_model, lm_loss
from ranks import run_ranks


def growing_ids(rank: int, step: int) -> torch.Tensor:
    """Return token ids; from step 10 on the sequences are twice as long, and then of every length."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    length = 8 if step < 10 else (16, 16, 5, 11)[step % 4]
    return torch.randint(VOCABULARY, (2, length), generator=generator)


def train(rank: int, **settings: Any) -> tuple[list[float], GeminiDDP, list[dict[str, int]]]:
    """Return the losses of 14 steps, and the bytes at the peak of each tier in each of them."""
    torch.manual_seed(7)
    model = GeminiDDP(build_model("llama", layers=3), precision="bf16", **{**SMALL_CHUNKS, **settings})
    optimizer = GeminiAdamOptimizer(model, lr=1e-2, max_norm=1.0)
    losses: list[float] = []
    peaks: list[dict[str, int]] = []
    for step in range(14):
        for tier in model.chunk_manager.tiers.values():
            tier.reset_peak()
        loss = lm_loss(model, growing_ids(rank, step))
        losses.append(loss.item())
        optimizer.backward(loss)
        optimizer.step()
        peaks.append({name: tier.peak for name, tier in model.chunk_manager.tiers.items()})
    return losses, model, peaks


def activation_bytes(rank: int, step: int) -> int:
    """Return what a step takes beside the model states."""
    ids = growing_ids(rank, step)
    batch = {"input_ids": ids, "labels": ids}
    return trace_model(build_model("llama", layers=3), batch, dtype=torch.bfloat16).max_non_model_bytes


def check_growth(rank: int, world_size: int, folder: str) -> None:
    wanted, unlimited, _ = train(rank)
    whole = unlimited.placement.needed_bytes["device"]
    activations = {step: activation_bytes(rank, step) for step in (0, 10, 11, 12, 13)}
    assert activations[12] > 1.5 * activations[0]  # sequences of twice the length
    refused = []
    for share in (0.2, 0.35, 0.5, 0.8):
        for prefetch in (0, 1):
            device, host = int(share * whole + 2 * activations[12]), int(0.3 * whole)
            try:
                losses, model, peaks = train(
                    rank,
                    placement_policy="auto",
                    max_prefetch=prefetch,
                    offload_directory=folder,
                    device_capacity=device,
                    host_capacity=host,
                    gpu_margin_mem_ratio=0.0,  # optimizer states never leave the tier that they rest in
                )
            except PlacementError:
                refused.append(share)
                continue
            assert losses == wanted, (share, prefetch)
            assert model.memstats is not None
            assert model.memstats.max_non_model_bytes == activations[0], "what was counted is what was foretold"
            for step, peak in enumerate(peaks):
                assert peak["device"] + activations[step if step > 9 else 0] <= device, (share, prefetch, step)
                assert peak["host"] <= host
            assert model.deviations == 0
    assert set(refused) <= {0.2}, refused


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_sequences_that_grow_train_as_without_a_limit_and_keep_every_capacity(world_size: int, tmp_path: Path) -> None:
    run_ranks(check_growth, world_size, str(tmp_path), timeout_s=160)


def check_eviction(rank: int, world_size: int, folder: str) -> None:
    wanted, *_ = train(rank)
    has_room = ChunkManager.has_room
    away: dict[str, Any] = {"offload_param_frac": 0.5, "disk_param_frac": 0.5, "offload_optim_frac": 1.0}
    evictions = 0

    def without_room(self: ChunkManager, chunks: Any) -> bool:
        nonlocal evictions
        evictions += 1
        has_room(self, chunks)
        return False  # as if the device were full at every access

    ChunkManager.has_room = without_room  # type: ignore[method-assign] # the ranks' processes end here
    losses, model, _ = train(rank, max_prefetch=2, offload_directory=folder, **away)
    assert losses == wanted
    assert evictions > len(model.plans[0].steps)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_eviction_at_every_access_changes_no_loss(world_size: int, tmp_path: Path) -> None:
    run_ranks(check_eviction, world_size, str(tmp_path), timeout_s=100)
