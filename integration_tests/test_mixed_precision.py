"""16-bit training with fp32 master weights: how far from the oracle, and what an overflow does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP, GeminiOptimizer
from models import SMALL_CHUNKS, batch, lm_loss, seeded_model
from ranks import run_ranks

STEPS = 10
LR = 0.1
SCALE = 2.0**5
# A sum over N ranks in 16 bits rounds N times at most, by half a unit in the last place of what was summed so far.
UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11}


def check_masters(rank: int, world_size: int, precision: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    source = seeded_model("gpt2")
    values = {name: p.detach().clone() for name, p in source.named_parameters()}
    model = GeminiDDP(source, precision=precision, **SMALL_CHUNKS)  # type: ignore[arg-type] # one of the two
    optimizer = GeminiOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model, initial_scale=SCALE)
    chunks = model.chunk_manager.chunks
    for chunk in chunks:  # the masters start from the values that were given, not from rounded ones
        for part in chunk.slices:
            assert chunk.master is not None
            assert torch.equal(chunk.master[part.in_shard], values[part.info.name].flatten()[part.in_tensor])
    rounded = seeded_model("gpt2").to(dtype)
    scale = SCALE if precision == "fp16" else 1.0
    for step in range(STEPS):
        rounded.load_state_dict(model.state_dict())
        sums: dict[str, Tensor] = {}
        sizes: dict[str, Tensor] = {}
        for other in range(world_size):
            rounded.zero_grad()
            (lm_loss(rounded, batch(other, step)) * scale).backward()
            for name, p in rounded.named_parameters():
                assert p.grad is not None
                gradient = p.grad.float() / scale / world_size
                sums[name] = sums.get(name, torch.zeros(())) + gradient
                sizes[name] = sizes.get(name, torch.zeros(())) + gradient.abs()
        before = [chunk.master.clone() for chunk in chunks if chunk.master is not None]
        optimizer.backward(lm_loss(model, batch(rank, step)))
        optimizer.step()
        for chunk, old in zip(chunks, before, strict=True):
            for part in chunk.slices:
                assert chunk.master is not None
                name = part.info.name
                wanted = old[part.in_shard] - LR * sums[name].flatten()[part.in_tensor]
                error = (chunk.master[part.in_shard] - wanted).abs()
                # fp16 gradients below its smallest normal number lose relative precision; the scale is small here.
                floor = 2.0**-24 / scale * world_size if precision == "fp16" else 0.0
                allowed = LR * (world_size * UNIT[precision] * sizes[name].flatten()[part.in_tensor] + floor)
                if world_size == 1:
                    allowed = torch.zeros_like(allowed)
                rounding = 2.0**-23 * (old[part.in_shard].abs() + wanted.abs())  # of the fp32 subtraction
                assert (error <= allowed + rounding).all(), (name, step, float(error.max()))


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_follow_the_fp32_update_of_the_same_rounded_forward(precision: str, world_size: int) -> None:
    run_ranks(check_masters, world_size, precision, timeout_s=150)


def snapshot(model: GeminiDDP, optimizer: GeminiOptimizer) -> list[Tensor]:
    """Return copies of all masters, working shards and optimizer states of this rank."""
    kept = [shard.master().clone() for shard in model.shards]
    kept += [chunk.shard.clone() for chunk in model.chunk_manager.chunks]
    state = optimizer.state_dict(only_rank_0=False)["state"]
    kept += [value.clone() for entry in state.values() for value in entry.values() if isinstance(value, Tensor)]
    return kept


def check_overflow(rank: int, world_size: int, shard_param_frac: float) -> None:
    model = GeminiDDP(seeded_model("gpt2"), precision="fp16", shard_param_frac=shard_param_frac, **SMALL_CHUNKS)
    optimizer = GeminiAdamOptimizer(model, lr=1e-3, initial_scale=SCALE, hysteresis=1, max_norm=1.0)
    for step in range(5):
        if step == 3:
            before, scale = snapshot(model, optimizer), optimizer.loss_scale
        loss = lm_loss(model, batch(rank, step))
        if step == 3 and rank == world_size - 1:  # on one rank only
            loss = loss * float("inf")
        optimizer.backward(loss)
        optimizer.step()
        if step == 3:
            assert optimizer.loss_scale == scale / 2
            after = snapshot(model, optimizer)
            assert len(before) == len(after)
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        if step == 4:
            changed = snapshot(model, optimizer)
            assert not any(torch.equal(a, b) for a, b in zip(after[: len(model.shards)], changed, strict=False))
    assert all(torch.isfinite(value).all() for value in snapshot(model, optimizer))


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("shard_param_frac", [1.0, 0.0])
def test_an_inf_on_one_rank_skips_the_step_on_all_and_changes_the_scale_alone(
    world_size: int, shard_param_frac: float
) -> None:
    run_ranks(check_overflow, world_size, shard_param_frac, timeout_s=100)
