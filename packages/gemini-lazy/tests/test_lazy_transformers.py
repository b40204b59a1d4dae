"""Models of Hugging Face transformers, unmodified: lazy equals eager, bit for bit."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from lazy_checks import assert_same, eager_and_lazy, entries, real

from gemini_lazy import LazyInitContext, is_lazy, load_pretrained, materialize_value, read_slice

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**TEXT, "num_key_value_heads": 2}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
VISION = {**TEXT, "image_size": 32, "patch_size": 8}
WHISPER = {
    **ENDS,
    "vocab_size": 96,
    "d_model": 32,
    "num_mel_bins": 20,
    "max_source_positions": 30,
    "max_target_positions": 30,
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")},
    "decoder_start_token_id": 1,
}
MODELS: dict[str, tuple[str, str, dict[str, object]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, **ENDS}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "llama_tied": ("LlamaConfig", "LlamaForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "bert": ("BertConfig", "BertForMaskedLM", TEXT),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "vit": ("ViTConfig", "ViTForImageClassification", VISION),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", WHISPER),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "phi": ("PhiConfig", "PhiForCausalLM", TEXT),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**GROUPED, "head_dim": 8}),
}


def make(name: str) -> torch.nn.Module:
    config, model, options = MODELS[name]
    return getattr(transformers, model)(getattr(transformers, config)(**options))


@pytest.mark.parametrize("name", MODELS)
def test_model_equals_eager_construction(name: str) -> None:
    eager, lazy = eager_and_lazy(lambda: make(name))
    assert all(is_lazy(parameter) for parameter in lazy.parameters())
    backwards = list(entries(lazy).values())[::-1]
    for tensor in backwards[: len(backwards) // 2]:
        real(tensor)
    LazyInitContext.materialize(lazy)
    assert_same(eager, lazy)


def test_model_computes_the_same_loss_and_gradients() -> None:
    tokens = torch.arange(12).view(2, 6)
    eager, lazy = eager_and_lazy(lambda: make("llama_tied"))
    LazyInitContext.materialize(lazy)
    losses = [model(input_ids=tokens, labels=tokens).loss for model in (eager, lazy)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for wanted, got in zip(eager.parameters(), lazy.parameters(), strict=True):
        assert torch.equal(wanted.grad, got.grad)


def test_half_precision_of_the_config_is_kept() -> None:
    def half() -> torch.nn.Module:
        config = transformers.LlamaConfig(**GROUPED)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    eager, lazy = eager_and_lazy(half)
    assert lazy.lm_head.weight.dtype == torch.bfloat16
    LazyInitContext.materialize(lazy)
    assert_same(eager, lazy)


@pytest.mark.parametrize("name", ["gpt2", "t5", "bert", "llama"])
def test_saved_model_is_loaded_without_its_memory(tmp_path: Path, name: str) -> None:
    torch.manual_seed(5)
    saved = make(name)
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    with LazyInitContext():
        lazy = make(name)
    load_pretrained(lazy, tmp_path)
    for parameter, wanted in zip(lazy.parameters(), saved.parameters(), strict=True):
        assert torch.equal(materialize_value(parameter), wanted)
        assert torch.equal(read_slice(parameter, 3, 9), wanted.flatten()[3:9])
    LazyInitContext.materialize(lazy)
    assert_same(saved, lazy)


def test_from_pretrained_under_the_context_gives_the_saved_model(tmp_path: Path) -> None:
    saved = make("gpt2")
    saved.save_pretrained(tmp_path)
    with LazyInitContext():
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    LazyInitContext.materialize(loaded)
    assert_same(saved, loaded)


def test_transformers_can_be_imported_under_the_context() -> None:
    script = """
import torch
from gemini_lazy import LazyInitContext
def make():
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                        num_attention_heads=2, num_key_value_heads=2))
torch.manual_seed(0)
with LazyInitContext():
    lazy = make()
torch.manual_seed(0)
eager = make()
LazyInitContext.materialize(lazy)
assert all(torch.equal(a, b) for a, b in zip(lazy.parameters(), eager.parameters(), strict=True))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
