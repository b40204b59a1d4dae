"""Ranks generate sequences of unlike lengths together, before and between training steps, and nothing of it stays."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gemini_booster.zero import GeminiDDP, GeminiOptimizer
from models import SMALL_CHUNKS, batch, inputs_of, seeded_model
from ranks import run_ranks


def sequences(model: PreTrainedModel | GeminiDDP, rank: int, number: int, **options: Any) -> Tensor:
    """Return what a model makes of a prompt that has another length on every rank."""
    ids = batch(rank, number)[:, : 2 + rank].clamp(min=1)
    settings = {"max_new_tokens": 8, "do_sample": False, "no_repeat_ngram_size": 1, "pad_token_id": 0, **options}
    made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    assert isinstance(made, Tensor)
    return made


def check_generation(
    model: GeminiDDP, plain: PreTrainedModel, rank: int, world_size: int, number: int, **options: Any
) -> None:
    """Let each rank's sequences end at another step; they are plain PyTorch's, and memory is back at rest."""
    plain.load_state_dict(model.state_dict())
    longest = sequences(plain, rank, number, eos_token_id=-1, **options)
    new = longest[:, -8:] if not plain.config.is_encoder_decoder else longest[:, 1:]
    ends = new[:, 1 + 2 * (world_size - 1 - rank)].tolist()
    wanted = sequences(plain, rank, number, eos_token_id=ends, **options)
    if world_size > 1 and rank > 0:
        assert wanted.shape[1] < longest.shape[1]
    before = model.memory_usage()["device"]["used"] or 0
    assert torch.equal(sequences(model, rank, number, eos_token_id=ends, **options), wanted)
    # Of a pass whose backward is to come, chunks may have been there.
    assert (model.memory_usage()["device"]["used"] or 0) <= before


def train_with_generation(rank: int, world_size: int, kind: str) -> None:
    plain = seeded_model(kind)
    trained = []
    for generates in (True, False):
        module = copy.deepcopy(plain)
        model = GeminiDDP(module, precision="fp32", max_prefetch=1, **SMALL_CHUNKS)
        optimizer = GeminiOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        scratch = copy.deepcopy(plain)
        if generates:
            model.eval()
            check_generation(model, scratch.eval(), rank, world_size, 0)
            model.train()
        for step in range(3):
            loss = model(**inputs_of(kind, rank, step)).loss
            if generates and step == 1:  # between a forward and its backward
                check_generation(model, scratch, rank, world_size, 1, num_beams=2)
            optimizer.backward(loss)
            optimizer.step()
            if generates:
                check_generation(model, scratch, rank, world_size, 2 + step)
        trained.append(model.state_dict())
    for name, value in trained[1].items():
        assert torch.equal(trained[0][name], value), name


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_generation_of_unlike_lengths_equals_plain_and_leaves_training_as_it_is(kind: str, world_size: int) -> None:
    run_ranks(train_with_generation, world_size, kind)
