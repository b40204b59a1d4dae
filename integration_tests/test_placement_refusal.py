"""What does not fit is refused on every rank before the first step, and the settings that the message names fit."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP
from gemini_placement import PlacementError
from models import SMALL_CHUNKS, batch, lm_loss, seeded_model
from ranks import run_ranks


def wrap(**settings: Any) -> GeminiDDP:
    return GeminiDDP(seeded_model("llama"), precision="bf16", **{**SMALL_CHUNKS, **settings})


def refusal_of(**settings: Any) -> str:
    """Return the message, which must tell of each tier that there is what it needs and has."""
    with pytest.raises(PlacementError) as refused:
        wrap(**settings)
    error = refused.value
    lacking = [tier for tier, needed in error.needed.items() if needed > (error.available.get(tier, 0) or 2**60)]
    assert lacking
    for tier, available in error.available.items():
        has = "no limit" if available is None else f"{available:,}"
        assert f"{tier} needs {error.needed[tier]:,} bytes and has {has}" in str(error)
    return str(error)


def check_refusals(rank: int, world_size: int) -> None:
    least = wrap(offload_optim_frac=1.0, offload_param_frac=1.0).placement.needed_bytes
    for settings in ({}, {"offload_optim_frac": 0.3}, {"shard_param_frac": 0.0, "max_prefetch": 3}):
        for device in (least["device"], least["device"] + least["host"] // 8):
            message = refusal_of(device_capacity=device, **settings)
            advice = re.search(r"The nearest that fits: (.*)\.$", message)
            assert advice is not None, message
            named = dict(pair.split("=") for pair in advice[1].split(", "))
            nearest = {name: int(value) if name == "max_prefetch" else float(value) for name, value in named.items()}
            model = wrap(device_capacity=device, **nearest)
            assert model.placement.needed_bytes["device"] <= device
            GeminiAdamOptimizer(model).backward(lm_loss(model, batch(rank, 0)))
    message = refusal_of(placement_policy="auto", device_capacity=least["device"], host_capacity=least["host"] // 2)
    enough = re.search(r"A host capacity of ([\d,]+) bytes would fit\.$", message)
    assert enough is not None, message
    host = int(enough[1].replace(",", ""))
    model = wrap(placement_policy="auto", device_capacity=least["device"], host_capacity=host)
    assert model.placement.needed_bytes["host"] <= host


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_refusal_says_what_is_lacking_and_what_would_fit_on_every_rank(world_size: int) -> None:
    run_ranks(check_refusals, world_size)
