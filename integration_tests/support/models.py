"""Small real models and data that differ by rank and by step, with the plain PyTorch run they are held against."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

logging.getLogger("transformers").setLevel(logging.ERROR)

VOCABULARY = 97
SEQ_LEN = 12
BATCH_SIZE = 2


def build_model(kind: str, *, layers: int = 2, width: int = 32) -> PreTrainedModel:
    """Return a model whose values depend on torch's seed alone; dropout is off."""
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": SEQ_LEN, "vocab_size": VOCABULARY}
        return GPT2LMHeadModel(GPT2Config(**sizes, **ends, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    if kind == "llama":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": layers}
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, **heads, **ends)
        )
    raise ValueError(f"unknown model {kind!r}")


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


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a plain model's gradients."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def largest(tensors: Iterator[Tensor]) -> float:
    """Return the largest absolute value."""
    return max(float(tensor.detach().abs().max()) for tensor in tensors)
