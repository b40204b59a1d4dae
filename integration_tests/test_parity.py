"""Training over ranks equals one plain PyTorch process on all ranks' data.

Adam divides a gradient by its own size, so it hides constant factors and blows rounding noise up to steps of size lr.
Hence parameters are compared under SGD with momentum; under AdamW the reduced gradients and the update are.
"""

from __future__ import annotations

import pytest
import torch

from gemini_booster import Booster, GeminiPlugin
from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP
from models import SMALL_CHUNKS, batch, joint_batch, largest, lm_loss, seeded_model
from ranks import run_ranks

STEPS = 10


def check_sgd(rank: int, world_size: int, kind: str) -> None:
    for max_norm in (0.0, 0.5):
        model, plain = seeded_model(kind), seeded_model(kind)
        if rank:  # every rank's own values: rank 0's must be given to all
            torch.nn.init.normal_(next(model.parameters()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        oracle = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        booster = Booster(plugin=GeminiPlugin(precision="fp32", max_norm=max_norm, **SMALL_CHUNKS))
        wrapped, boosted, *_ = booster.boost(model, optimizer)
        assert boosted is not None
        clipped = 0
        for step in range(STEPS):
            booster.backward(lm_loss(wrapped, batch(rank, step)), boosted)
            boosted.step()
            oracle.zero_grad()
            lm_loss(plain, joint_batch(world_size, step)).backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm if max_norm else float("inf"))
            clipped += bool(max_norm and norm > max_norm)
            oracle.step()
            assert boosted.get_grad_norm() == pytest.approx(float(norm), rel=1e-5)
        assert clipped == (STEPS if max_norm else 0)
        trained = wrapped.state_dict()
        scale = largest(plain.parameters())
        for name, wanted in plain.state_dict().items():
            assert (trained[name] - wanted).abs().max() <= 1e-6 * scale, (name, max_norm)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_under_sgd_the_parameters_equal_a_single_plain_process(kind: str, world_size: int) -> None:
    run_ranks(check_sgd, world_size, kind, timeout_s=150)


def check_adamw(rank: int, world_size: int, kind: str) -> None:
    plain = seeded_model(kind)
    model = GeminiDDP(seeded_model(kind), precision="fp32", **SMALL_CHUNKS)
    optimizer = GeminiAdamOptimizer(model, lr=1e-3, weight_decay=0.01)
    flats = []
    for shard in model.shards:
        # torch's fused kernel rounds the last numel % 16 elements of a tensor in another way than the others.
        padded = torch.zeros(-(-shard.master().numel() // 16) * 16)
        padded[: shard.master().numel()] = shard.master()
        flats.append(torch.nn.Parameter(padded))
    oracle = torch.optim.AdamW(flats, lr=1e-3, weight_decay=0.01, fused=True)
    for step in range(STEPS):
        plain.load_state_dict(model.state_dict())
        plain.zero_grad()
        lm_loss(plain, joint_batch(world_size, step)).backward()
        gradients = dict(plain.named_parameters())
        scale = largest(p.grad for p in gradients.values() if p.grad is not None)
        optimizer.backward(lm_loss(model, batch(rank, step)))
        for chunk, shard, flat in zip(model.chunk_manager.chunks, model.shards, flats, strict=True):
            reduced = shard.grad()
            assert reduced is not None
            flat.grad = torch.zeros_like(flat)
            flat.grad[: reduced.numel()] = reduced
            for part in chunk.slices:
                wanted = gradients[part.info.name].grad
                assert wanted is not None
                error = (reduced[part.in_shard] - wanted.flatten()[part.in_tensor]).abs().max()
                assert error <= 1e-6 * scale, (part.info.name, step)
        optimizer.step()
        oracle.step()
        for shard, flat in zip(model.shards, flats, strict=True):
            assert torch.equal(shard.master(), flat.detach()[: shard.master().numel()]), (shard.name, step)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_under_adamw_the_gradients_are_the_oracles_and_the_update_is_torchs(kind: str, world_size: int) -> None:
    run_ranks(check_adamw, world_size, kind, timeout_s=150)
