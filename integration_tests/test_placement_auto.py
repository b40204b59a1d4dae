"""Automatic placement at work: sequences that grow, gradients that stay, states that are loaded, forced eviction."""

from __future__ import annotations

import contextlib
import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP
from gemini_chunk import ChunkManager, TierName
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


def accumulate(
    rank: int, mode: str, *, steps: int = 4, resumed: bool = False, **settings: Any
) -> tuple[list[float], GeminiDDP, list[dict[str, int]]]:
    """Return what `train` does but for each backward, for steps of two backwards whose inputs grow within the third.

    Args:
        rank: of this process.
        mode: ``"flag"`` announces that gradients accumulate, ``"plain"`` does not; under ``"no_sync"`` the first of the
            two backwards keeps its gradients whole, and under ``"one"`` there is no second.
        steps: how many.
        resumed: save after the second step, and go on with a new model that loads that before its first step.
        settings: of the model.
    """
    settings = {**SMALL_CHUNKS, "enable_gradient_accumulation": mode == "flag", **settings}

    def make() -> tuple[GeminiDDP, GeminiAdamOptimizer]:
        torch.manual_seed(7)
        model = GeminiDDP(build_model("llama", layers=3), precision="bf16", **settings)
        return model, GeminiAdamOptimizer(model, lr=1e-2, max_norm=1.0)

    model, optimizer = make()
    losses: list[float] = []
    peaks: list[dict[str, int]] = []
    for step in range(steps):
        backwards = 1 if mode == "one" else 2
        for number in range(backwards):
            for tier in model.chunk_manager.tiers.values():
                tier.reset_peak()
            keeps_local = mode == "no_sync" and number + 1 < backwards
            with model.no_sync() if keeps_local else contextlib.nullcontext():
                loss = lm_loss(model, growing_ids(rank, 12 if step >= 2 and number else step))
                losses.append(loss.item())
                optimizer.backward(loss)
            peaks.append({name: tier.peak for name, tier in model.chunk_manager.tiers.items()})
        optimizer.step()
        if resumed and step == 1:
            weights = {name: value.clone() for name, value in model.named_master_values(torch.float32)}
            states = copy.deepcopy(optimizer.state_dict(only_rank_0=False))
            model, optimizer = make()
            model.load_state_dict(weights)
            optimizer.load_state_dict(states)
    return losses, model, peaks


def weights_of(model: GeminiDDP) -> list[torch.Tensor]:
    return [value.clone() for _, value in model.named_master_values(torch.float32)]


def check_accumulation(rank: int, world_size: int, mode: str) -> None:
    wanted, unlimited, _ = accumulate(rank, mode)
    weights = weights_of(unlimited)
    whole = unlimited.placement.needed_bytes["device"]
    activations = [activation_bytes(rank, 0), activation_bytes(rank, 12)]
    on_device = set()
    for share, warmup in ((0.3, 0.2), (0.6, 0.8), (0.9, 0.2), (1.4, 0.8)):
        # What several ranks keep gathered from the start never leaves the device for inputs that grow.
        warmup = warmup if world_size == 1 else 0.8
        device = int(share * whole + 2 * activations[1])
        losses, model, peaks = accumulate(
            rank, mode, placement_policy="auto", device_capacity=device, warmup_non_model_data_ratio=warmup
        )
        assert losses == wanted, (share, warmup)
        assert all(map(torch.equal, weights_of(model), weights)), (share, warmup)
        for number, peak in enumerate(peaks):  # two of each step; nothing is known before the first is over
            beside = activations[number in (5, 7)] if number else 0
            assert peak["device"] + beside <= device, (share, warmup, number)
        on_device.add(model.placement.resting_bytes["device"])
    assert len(on_device) > 2, "more room is used"


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["flag", "plain", "no_sync"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_of_several_backwards_train_as_without_a_limit_and_keep_the_capacity(world_size: int, mode: str) -> None:
    run_ranks(check_accumulation, world_size, mode, timeout_s=160)


def check_refusal(rank: int, world_size: int) -> None:
    del world_size
    wanted, unlimited, _ = accumulate(rank, "plain", steps=2)
    settings: dict[str, Any] = {
        "placement_policy": "auto",
        "device_capacity": int(0.2 * unlimited.placement.needed_bytes["device"]) + 2 * activation_bytes(rank, 12),
    }
    # Just what one backward a step takes of the host: there is no room for a sum of gradients beside the states.
    _, one, _ = accumulate(rank, "one", steps=2, **settings)
    host = one.placement.needed_bytes["host"]
    with pytest.raises(PlacementError, match=r"or give the host [\d,]+ bytes") as refused:
        accumulate(rank, "plain", steps=2, host_capacity=host, **settings)
    enough = int(re.findall(r"give the host ([\d,]+) bytes", str(refused.value))[0].replace(",", ""))
    assert enough > host
    losses, _, peaks = accumulate(rank, "plain", steps=2, host_capacity=enough, **settings)
    assert losses == wanted
    assert all(peak["host"] <= enough for peak in peaks)


def check_refusal_of_whole_gradients(rank: int, world_size: int) -> None:
    del world_size
    away: dict[str, Any] = {"offload_param_frac": 1.0, "offload_optim_frac": 1.0}
    _, offloaded, _ = accumulate(rank, "no_sync", steps=1, **away)
    whole = sum(chunk.full_bytes for chunk in offloaded.chunk_manager.chunks)
    least = offloaded.placement.needed_bytes["device"] + activation_bytes(rank, 0)
    device = int((least + whole // 2) / 0.9)  # not enough for `whole`
    accumulate(rank, "one", placement_policy="auto", device_capacity=device, steps=2)
    with pytest.raises(PlacementError, match=rf"or leave out no_sync: the device keeps {whole:,} bytes"):
        accumulate(rank, "no_sync", placement_policy="auto", device_capacity=device, steps=2)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_have_no_room_are_refused_with_what_would_do(world_size: int) -> None:
    run_ranks(check_refusal, world_size, timeout_s=100)
    run_ranks(check_refusal_of_whole_gradients, world_size, timeout_s=100)


def check_resumption(rank: int, world_size: int, mode: str) -> None:
    del world_size
    wanted, unlimited, _ = accumulate(rank, mode, steps=5)
    whole = unlimited.placement.needed_bytes["device"]
    activations = activation_bytes(rank, 12)
    for share, warmup in ((0.4, 0.1), (0.7, 0.8), (1.2, 0.1)):
        limits: dict[str, Any] = {
            "placement_policy": "auto",
            "device_capacity": int(share * whole + 2 * activations),
            "warmup_non_model_data_ratio": warmup,
        }
        losses, model, peaks = accumulate(rank, mode, steps=5, resumed=True, **limits)
        assert losses == wanted, (share, warmup)
        assert all(peak["device"] <= limits["device_capacity"] for peak in peaks)
        for shard in model.shards:
            place = model.placement.of(shard.chunk)
            assert (shard.chunk.tier, shard.states_tier) == (place.param_tier, place.optim_tier), (share, warmup)
        # What is counted in `resting_bytes` and not there between steps: padding, and the sum of gradients.
        absent: dict[TierName, int] = {"device": 0, "host": 0}
        for chunk in model.chunk_manager.chunks:
            absent[model.placement.of(chunk).optim_tier] += chunk.sum_bytes + chunk.padding_bytes
        for name, amount in absent.items():
            used = model.memory_usage()[name]["used"]
            assert used == model.placement.resting_bytes[name] - amount, (share, warmup, name)


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["one", "plain"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_states_loaded_before_the_first_step_come_to_where_the_placement_says(world_size: int, mode: str) -> None:
    run_ranks(check_resumption, world_size, mode, timeout_s=160)


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
