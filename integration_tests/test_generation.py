"""Ranks generate sequences of unlike lengths together, before, between and after training steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gemini_booster.zero import GeminiDDP, GeminiOptimizer
from models import SEQ_LEN, SMALL_CHUNKS, VOCABULARY, batch, inputs_of, lm_loss, seeded_model
from ranks import run_ranks


def prompt(rank: int, number: int) -> Tensor:
    """Return token ids of another length on every rank; 0, the end of a sequence, is not among them."""
    return batch(rank, number)[:1, : 2 + rank].clamp(min=1)


def generate(model: PreTrainedModel | GeminiDDP, rank: int, number: int, **options: Any) -> Tensor:
    ids = prompt(rank, number)
    sequences = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_length=SEQ_LEN,
        pad_token_id=0,
        eos_token_id=ends(model, rank),
        **{"do_sample": False, **options},
    )
    assert isinstance(sequences, Tensor)
    return sequences


def ends(model: PreTrainedModel | GeminiDDP, rank: int) -> list[int]:
    """Return tokens that end a sequence: many on rank 0, fewer on the next, so that their sequences end at unlike steps."""
    return list(range(0, VOCABULARY, 2 + 6 * rank))
