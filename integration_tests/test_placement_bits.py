"""Placement, prefetch and world-wide bookkeeping never change a number; bytes and traffic are what DESIGN says."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP
from gemini_chunk import ProcessGroupCollectives
from models import SMALL_CHUNKS, batch, lm_loss, seeded_model
from ranks import run_ranks

PLACEMENTS: list[dict[str, Any]] = [
    {"shard_param_frac": frac, "offload_optim_frac": optim, "max_prefetch": prefetch}
    for frac, optim, prefetch in itertools.product((0.0, 0.3, 1.0), (0.0, 0.5, 1.0), (0, 2))
]
PLACEMENTS += [
    {"offload_optim_frac": 1.0, "offload_param_frac": share, "max_prefetch": prefetch}
    for share, prefetch in itertools.product((0.5, 1.0), (0, 2))
]
PLACEMENTS += [
    {"max_held": 3},
    {"max_held": 5, "max_prefetch": 2, "offload_optim_frac": 1.0, "offload_param_frac": 0.5},
]
PLACEMENTS.append({"placement_policy": "auto"})
PLACEMENTS.append({"placement_policy": "auto", "device_capacity": "1MB", "max_prefetch": 1})


def losses_of(rank: int, precision: str, steps: int = 3, **settings: Any) -> tuple[list[float], list[torch.Tensor]]:
    model = GeminiDDP(seeded_model("llama"), precision=precision, **SMALL_CHUNKS, **settings)  # type: ignore[arg-type]
    optimizer = GeminiAdamOptimizer(model, lr=1e-2, initial_scale=2.0**5, max_norm=0.5)
    losses = []
    for step in range(steps):
        loss = lm_loss(model, batch(rank, step))
        losses.append(loss.item())
        optimizer.backward(loss)
        optimizer.step()
    return losses, [shard.master().clone() for shard in model.shards]


def check_bits(rank: int, world_size: int, precision: str) -> None:
    wanted, masters = losses_of(rank, precision)
    assert len(set(wanted)) == len(wanted)
    for settings in PLACEMENTS:
        losses, ours = losses_of(rank, precision, **settings)
        assert losses == wanted, settings
        assert all(torch.equal(a, b) for a, b in zip(ours, masters, strict=True)), settings


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_are_bit_identical_over_placements(precision: str, world_size: int) -> None:
    run_ranks(check_bits, world_size, precision, timeout_s=160)


def check_chunk_sizes(rank: int, world_size: int) -> None:
    wanted = None
    for min_chunk_size_m in (0.0, 0.004, 0.01, 1.0):
        sizes = {**SMALL_CHUNKS, "min_chunk_size_m": min_chunk_size_m}
        model = GeminiDDP(seeded_model("llama"), precision="fp32", **sizes)
        optimizer = GeminiAdamOptimizer(model, lr=1e-2)
        losses = []
        for step in range(4):
            loss = lm_loss(model, batch(rank, step))
            losses.append(loss.item())
            optimizer.backward(loss)
            optimizer.step()
        wanted = losses if wanted is None else wanted
        assert losses == wanted, min_chunk_size_m


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_up_to_two_ranks_chunk_sizes_change_no_bit(world_size: int) -> None:
    run_ranks(check_chunk_sizes, world_size, timeout_s=100)


TABLE_BYTES: dict[str, tuple[dict[str, Any], Callable[[int], tuple[float, float]]]] = {
    # settings -> (device, host) bytes per parameter at rest, for N ranks; DESIGN section 10
    "ZeRO-2": ({"shard_param_frac": 0.0}, lambda n: (2 + 12 / n, 0.0)),
    "ZeRO-3": ({}, lambda n: (14 / n, 0.0)),
    "optimizer offloaded": ({"offload_optim_frac": 1.0}, lambda n: (2 / n, 12 / n)),
    "everything offloaded": ({"offload_optim_frac": 1.0, "offload_param_frac": 1.0}, lambda n: (0.0, 14 / n)),
}


def check_bytes(rank: int, world_size: int) -> None:
    for row, (settings, per_parameter) in TABLE_BYTES.items():
        source = seeded_model("gpt2", layers=6, width=64)
        numel = sum(p.numel() for p in source.parameters())
        model = GeminiDDP(source, precision="bf16", **{**SMALL_CHUNKS, "min_chunk_size_m": 0.016}, **settings)
        optimizer = GeminiAdamOptimizer(model, lr=1e-3)
        device, host = (model.chunk_manager.tiers[name] for name in ("device", "host"))
        chunk_bytes = max(chunk.full_bytes for chunk in model.chunk_manager.chunks)
        assert chunk_bytes < 0.05 * 14 * numel, "chunks are small against what is measured"
        for step in range(3):
            device.reset_peak()
            host.reset_peak()
            optimizer.backward(lm_loss(model, batch(rank, step)))
            optimizer.step()
        wanted_device, wanted_host = (share * numel for share in per_parameter(world_size))
        used = (row, device.used, wanted_device, host.used, wanted_host)
        assert abs(device.used - wanted_device) <= 0.02 * wanted_device + chunk_bytes, used
        assert abs(host.used - wanted_host) <= 0.02 * wanted_host + chunk_bytes, used
        # At the peak the working set comes on top: what the plan has gathered at a time, and one chunk of gradients.
        kept = sum(chunk.full_bytes for chunk in model.chunk_manager.chunks if chunk.keeps_gathered)
        gathered = max(plan.peak_gathered_bytes for plan in model.plans) - kept
        assert gathered <= 2 * chunk_bytes, "the chunks of one module, or two that take turns"
        allowed = 1.02 * wanted_device + gathered + 2 * chunk_bytes
        assert device.peak <= allowed, (row, device.peak, allowed, chunk_bytes)
        assert host.peak <= 1.02 * wanted_host + chunk_bytes, (row, host.peak, wanted_host)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bytes_at_rest_and_at_the_peak_are_those_of_the_table(world_size: int) -> None:
    run_ranks(check_bytes, world_size, timeout_s=120)


class Counter:
    """Counts collectives and the elements that this rank sends in them."""

    def __init__(self, world_size: int) -> None:
        self.calls: dict[str, int] = {}
        self.sent = 0.0
        self._share = (world_size - 1) / world_size

    def count(self, name: str, numel: int) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        self.sent += numel * self._share


def check_traffic(rank: int, world_size: int, kind: str) -> None:
    counter = Counter(world_size)
    gather, reduce, all_reduce = (
        ProcessGroupCollectives.all_gather,
        ProcessGroupCollectives.reduce_scatter,
        dist.all_reduce,
    )

    def counting_gather(self: Any, full: torch.Tensor, shard: torch.Tensor) -> Any:
        counter.count("all-gather", full.numel())
        return gather(self, full, shard)

    def counting_reduce(self: Any, shard: torch.Tensor, full: torch.Tensor) -> Any:
        counter.count("reduce-scatter", full.numel())
        return reduce(self, shard, full)

    def counting_all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert tensor.numel() <= 5, "the only all-reduce of a step is a small one"
        counter.calls["all-reduce"] = counter.calls.get("all-reduce", 0) + 1
        return all_reduce(tensor, *args, **kwargs)

    ProcessGroupCollectives.all_gather = counting_gather  # type: ignore[method-assign] # the ranks' processes end here
    ProcessGroupCollectives.reduce_scatter = counting_reduce  # type: ignore[method-assign]
    held_times: dict[int, int] = {}
    for shard_param_frac, prefetch, held in ((1.0, 0, 0), (1.0, 2, 0), (0.0, 0, 0), (1.0, 0, 3), (1.0, 2, 99)):
        model = GeminiDDP(
            seeded_model(kind, layers=4),
            precision="fp32",
            shard_param_frac=shard_param_frac,
            max_prefetch=prefetch,
            max_held=held,
            **SMALL_CHUNKS,
        )
        optimizer = GeminiAdamOptimizer(model, lr=1e-3, max_norm=1.0)
        chunks = model.chunk_manager.chunks
        assert len(chunks) > 5
        dist.all_reduce = counting_all_reduce
        for step in range(4):
            counter.calls.clear()
            counter.sent = 0.0
            gathered = [chunk.gathers for chunk in chunks]
            optimizer.backward(lm_loss(model, batch(rank, step)))
            optimizer.step()
        times = [chunk.gathers - before for chunk, before in zip(chunks, gathered, strict=True)]
        most = 2 if shard_param_frac == 1.0 and held < len(chunks) else 1
        if shard_param_frac == 1.0:
            held_times[held] = min(held_times.get(held, 2 * len(chunks)), sum(times))
        assert max(times) <= most, (times, prefetch)
        # The gradients' norm. Whether the step went well nobody asks, for all of it stays on the device.
        assert counter.calls == {"all-gather": sum(times), "reduce-scatter": len(chunks), "all-reduce": 1}
        travelling = [chunk.shard_numel * world_size for chunk in chunks]
        wanted = sum((count + 1) * numel for count, numel in zip(times, travelling, strict=True))
        assert counter.sent == pytest.approx(wanted * (world_size - 1) / world_size)
        # The table's traffic, less the gathers that are spared: the chunk at the turn, and values backward never reads.
        numel = sum(chunk.used_numel for chunk in chunks)
        spared = sum((most - count) * size for count, size in zip(times, travelling, strict=True))
        table = ((most + 1) * numel - spared) * (world_size - 1) / world_size
        assert counter.sent == pytest.approx(table, rel=2e-3)
        assert model.deviations == 0
        dist.all_reduce = all_reduce
    assert held_times[99] < held_times[3] < held_times[0], "what stays gathered from forward to backward saves gathers"


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_warm_step_gathers_twice_reduces_once_and_sends_what_the_table_says(kind: str, world_size: int) -> None:
    run_ranks(check_traffic, world_size, kind, timeout_s=120)
