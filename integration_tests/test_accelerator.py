"""The same training on an accelerator; skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gemini_booster.zero import GeminiDDP, GeminiOptimizer
from models import SMALL_CHUNKS, batch, largest, lm_loss, seeded_model

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE is None, reason="this machine has no accelerator"),
]

PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"offload_optim_frac": 1.0},
    {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "pin_memory": True, "max_prefetch": 2},
    {"placement_policy": "auto", "device_capacity": "64MiB"},
]


@pytest.mark.parametrize("settings", PLACEMENTS)
def test_training_on_the_device_equals_plain_training_there(settings: dict[str, Any]) -> None:
    plain = seeded_model("llama").to(DEVICE)
    oracle = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    model = GeminiDDP(seeded_model("llama"), precision="fp32", **SMALL_CHUNKS, **settings)
    optimizer = GeminiOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, max_norm=0.5)
    for step in range(5):
        ids = batch(0, step).to(DEVICE)
        optimizer.backward(lm_loss(model, ids))
        optimizer.step()
        oracle.zero_grad()
        lm_loss(plain, ids).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        oracle.step()
    trained, scale = model.state_dict(), largest(plain.parameters())
    for name, wanted in plain.state_dict().items():
        assert (trained[name] - wanted.cpu()).abs().max() <= 1e-5 * scale, name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_training_on_the_device_lowers_the_loss(precision: Any) -> None:
    model = GeminiDDP(seeded_model("gpt2"), precision=precision, min_chunk_size_m=0, search_range_m=0.01)
    optimizer = GeminiOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model, initial_scale=2.0**8)
    ids = batch(0, 0).to(DEVICE)
    losses = []
    for _ in range(20):
        loss = lm_loss(model, ids)
        losses.append(loss.item())
        optimizer.backward(loss)
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
