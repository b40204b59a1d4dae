"""Small real models and data that differ by rank and by step, with the plain PyTorch run they are held against."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

logging.getLogger("transformers").setLevel(logging.ERROR)

VOCABULARY = 97
# Chunks of a few thousand elements, so that small models have many.
SMALL_CHUNKS: dict[str, Any] = {"min_chunk_size_m": 0.004, "search_range_m": 0.004, "hidden_dim": 32}
SEQ_LEN = 12
BATCH_SIZE = 2
IMAGE_SIZE = 16
MEL_BINS = 8
FRAMES = 16

_FAMILIES = {  # classes of the configuration and of the model
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "bert": ("BertConfig", "BertForMaskedLM"),
    "t5": ("T5Config", "T5ForConditionalGeneration"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "vit": ("ViTConfig", "ViTForImageClassification"),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration"),
    "mamba": ("MambaConfig", "MambaForCausalLM"),
}
FAMILIES = tuple(_FAMILIES)


def build_model(kind: str, *, layers: int = 2, width: int = 32) -> PreTrainedModel:
    """Return a model whose values depend on torch's seed alone; dropout is off."""
    words: dict[str, object] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    depth: dict[str, object] = {"hidden_size": width, "num_hidden_layers": layers}
    block: dict[str, object] = {**depth, "num_attention_heads": 4, "intermediate_size": 2 * width}
    starts: dict[str, object] = {"pad_token_id": 0, "decoder_start_token_id": 0}
    options: dict[str, object] = {}
    if kind == "gpt2":
        options = {**words, "n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": SEQ_LEN}
        options |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    elif kind == "llama":
        options = {**words, **block, "num_key_value_heads": 2}
    elif kind == "bert":
        options = {**words, **block, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
        options |= {"max_position_embeddings": SEQ_LEN}
    elif kind == "t5":
        options = {"vocab_size": VOCABULARY, "d_model": width, "d_kv": 8, "d_ff": 2 * width, "num_layers": layers}
        options |= {**starts, "num_heads": 4, "dropout_rate": 0}
    elif kind == "mixtral":
        options = {**words, **block, "num_key_value_heads": 2, "num_local_experts": 4}
    elif kind == "vit":
        options = {**block, "image_size": IMAGE_SIZE, "patch_size": 8}
    elif kind == "whisper":
        options = {**words, **starts, "d_model": width, "num_mel_bins": MEL_BINS}
        options |= {"max_source_positions": FRAMES // 2, "max_target_positions": SEQ_LEN}
        for part in ("encoder", "decoder"):
            options |= {f"{part}_layers": layers, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 2 * width}
    elif kind == "mamba":
        options = {**words, **depth, "state_size": 4}
    config_class, model_class = _FAMILIES[kind]
    config = getattr(transformers, config_class)(**options)
    model: PreTrainedModel = getattr(transformers, model_class)(config)
    return model


def seeded_model(kind: str, *, layers: int = 2, width: int = 32) -> PreTrainedModel:
    """Return the same model on every rank."""
    torch.manual_seed(7)
    return build_model(kind, layers=layers, width=width)


def batch(rank: int, step: int) -> Tensor:
    """Return token ids, shape ``(BATCH_SIZE, SEQ_LEN)``, unlike on every rank and in every step."""
    generator = torch.Generator().manual_seed(10_000 * step + rank)
    return torch.randint(VOCABULARY, (BATCH_SIZE, SEQ_LEN), generator=generator)


def joint_batch(world_size: int, step: int) -> Tensor:
    """Return all ranks' token ids, shape ``(world_size * BATCH_SIZE, SEQ_LEN)``."""
    return torch.cat([batch(rank, step) for rank in range(world_size)])


def lm_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean next-token loss."""
    loss = model(input_ids=ids, labels=ids).loss
    assert isinstance(loss, Tensor)
    return loss


def inputs_of(kind: str, rank: int, step: int) -> dict[str, Tensor]:
    """Return what a model of a family is called with, unlike on every rank and in every step."""
    ids = batch(rank, step)
    generator = torch.Generator().manual_seed(20_000 * step + rank)
    if kind == "vit":
        shape = (BATCH_SIZE, 3, IMAGE_SIZE, IMAGE_SIZE)
        return {"pixel_values": torch.randn(shape, generator=generator), "labels": ids[:, 0] % 2}
    if kind == "whisper":
        return {"input_features": torch.randn(BATCH_SIZE, MEL_BINS, FRAMES, generator=generator), "labels": ids}
    return {"input_ids": ids, "labels": ids}


def joint_inputs(kind: str, world_size: int, step: int) -> dict[str, Tensor]:
    """Return all ranks' inputs in one batch."""
    parts = [inputs_of(kind, rank, step) for rank in range(world_size)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a plain model's gradients."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def largest(tensors: Iterator[Tensor]) -> float:
    """Return the largest absolute value."""
    return max(float(tensor.detach().abs().max()) for tensor in tensors)
