"""PEFT adapters train over a frozen base that is sharded, and are saved and loaded on their own."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini_booster import Booster, GeminiPlugin
from models import SMALL_CHUNKS, batch, lm_loss, seeded_model
from ranks import run_ranks

peft: Any = pytest.importorskip("peft")

# What PEFT asks of the current transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

STEPS = 3


def new_booster() -> Booster:
    return Booster(plugin=GeminiPlugin(precision="fp32", **SMALL_CHUNKS))


def configuration() -> object:
    return peft.LoraConfig(r=2, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)


def adapted_model(booster: Booster) -> nn.Module:
    """Return the same adapted model on every rank, with adapters that already do something."""
    model = booster.enable_lora(seeded_model("gpt2"), lora_config=configuration())
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.1, generator=torch.Generator().manual_seed(param.numel()))
    return model


def train(booster: Booster, model: nn.Module, plain: nn.Module, rank: int, world_size: int) -> Any:
    """Train with Gemini and plainly on all ranks' data; return the wrapped model."""
    trained = [param for param in plain.parameters() if param.requires_grad]
    oracle = torch.optim.SGD(trained, lr=0.5)
    wrapped, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(STEPS):
        booster.backward(lm_loss(wrapped, batch(rank, step)), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        for other in range(world_size):
            (lm_loss(plain, batch(other, step)) / world_size).backward()
        oracle.step()
        oracle.zero_grad()
    return wrapped


def check_adapters(rank: int, world_size: int, folder: str) -> None:
    booster = new_booster()
    model = adapted_model(booster)
    plain, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    wrapped = train(booster, model, plain, rank, world_size)
    state = wrapped.state_dict()
    for name, value in plain.state_dict().items():
        if "lora_" in name:
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)  # ranks add in another order
            assert not torch.equal(state[name], before[name]), name
        else:
            assert torch.equal(state[name], before[name]), name

    # The optimizer has the adapters only, and the frozen rest is sharded.
    assert len(wrapped.shards) == sum(chunk.trainable for chunk in wrapped.chunk_manager.chunks)
    adapter_bytes = sum(param.nbytes for param in plain.parameters() if param.requires_grad)
    frozen_bytes = sum(param.nbytes for param in plain.parameters() if not param.requires_grad)
    used = wrapped.memory_usage()["device"]["used"]
    assert used is not None
    assert used <= frozen_bytes / world_size + 4 * adapter_bytes

    for use_safetensors in (True, False):
        place = Path(folder, str(use_safetensors))
        booster.save_lora_as_pretrained(wrapped, place, use_safetensors=use_safetensors)
        names = {file.name for file in place.iterdir()}
        assert ("adapter_model.safetensors" if use_safetensors else "adapter_model.bin") in names
        assert sum(file.stat().st_size for file in place.iterdir()) < frozen_bytes / 2
        loaded = peft.PeftModel.from_pretrained(seeded_model("gpt2"), place)
        assert_same_state(loaded, state)
        again = booster.enable_lora(seeded_model("gpt2"), place)
        assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in model.parameters()]
        resumed, *_ = booster.boost(again)
        for name, value in resumed.state_dict().items():
            assert torch.equal(value, state[name]), name

    booster.save_model(wrapped, Path(folder, "whole.bin"))
    assert_same_state(torch.load(Path(folder, "whole.bin")), state)


def assert_same_state(model: nn.Module | dict[str, Tensor], state: dict[str, Tensor]) -> None:
    entries = model.state_dict() if isinstance(model, nn.Module) else model
    assert list(entries) == list(state)
    for name, value in entries.items():
        assert torch.equal(value, state[name]), name


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_adapters_train_as_plain_ones_and_are_saved_and_loaded_on_their_own(world_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(check_adapters, world_size, folder)


def generate_with_adapters(rank: int, world_size: int) -> None:
    booster = new_booster()
    model = adapted_model(booster)
    prompt = batch(rank, 0)[:, : 2 + rank]
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    options |= {"max_new_tokens": 2 + 3 * rank}
    wanted = model.generate(input_ids=prompt, **options)  # type: ignore[operator] # nn.Module has no such method
    wrapped, *_ = booster.boost(model)
    assert torch.equal(wrapped.generate(input_ids=prompt, **options), wanted)


@pytest.mark.distributed
def test_adapted_model_generates_unlike_lengths() -> None:
    run_ranks(generate_with_adapters, 2)


def adapters_asked_for_wrongly(rank: int, world_size: int, folder: str) -> None:
    booster = new_booster()
    with pytest.raises(ValueError, match="either lora_config"):
        booster.enable_lora(seeded_model("gpt2"))
    with pytest.raises(ValueError, match="either lora_config"):
        booster.enable_lora(seeded_model("gpt2"), folder, configuration())
    plain, *_ = booster.boost(seeded_model("gpt2"))
    with pytest.raises(ValueError, match="Call enable_lora first"):
        booster.enable_lora(plain, lora_config=configuration())
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no adapters"):
        booster.save_lora_as_pretrained(plain, folder)
    wrapped, *_ = booster.boost(adapted_model(booster))
    file = Path(folder, f"file-{rank}")
    file.touch()
    with pytest.raises((ValueError, RuntimeError), match="is a file"):
        booster.save_lora_as_pretrained(wrapped, file)


@pytest.mark.distributed
def test_wrong_uses_of_adapters_are_errors_that_say_what_to_do() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(adapters_asked_for_wrongly, 2, folder)
