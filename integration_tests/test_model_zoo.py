"""Unmodified models of many families train as under plain PyTorch, in chunks of any size, recomputed or not."""

from __future__ import annotations

import os

import pytest
from torch import nn

from gemini_booster.zero import GeminiDDP
from models import SMALL_CHUNKS
from ranks import run_ranks
from zoo import RECOMPUTE, ZOO, Entry, Recompute, check_against, configuration, train_plainly

# Several models to a start of ranks: importing transformers takes longer than training one.
GROUPS = [
    ("gpt2", "llama", "qwen3", "mixtral"),
    ("bert", "t5", "mamba"),
    ("vit", "whisper", "clip"),
    ("resnet", "unet", "rnn", "tied"),
]
CHUNKS = ("smallest", "several modules", "whole model")


def wrap(entry: Entry, recompute: Recompute, chunks: str, world_size: int) -> GeminiDDP:
    module = entry.make(recompute)
    if chunks == "several modules":
        return GeminiDDP(module, precision="fp32", max_prefetch=1, **SMALL_CHUNKS)
    given = configuration(module, world_size, whole=chunks == "whole model")
    model = GeminiDDP(module, precision="fp32", max_prefetch=1, chunk_configuration=given)
    trainable = [param for param in module.parameters() if param.requires_grad]
    assert len(model.shards) == (1 if chunks == "whole model" else len(trainable))
    return model


def check_zoo(rank: int, world_size: int, names: tuple[str, ...]) -> None:
    os.environ["GEMINI_DEBUG"] = "1"  # released memory is NaN
    for name in names:
        entry = ZOO[name]
        for recompute in RECOMPUTE:
            reference = train_plainly(entry, world_size, recompute)
            # Two numbers have one sum, three have several. A re-entrant checkpoint brings the gradient of a parameter
            # that is used outside of it, too, in parts: they may be reduced one by one.
            exact = world_size == 2 and not (name == "tied" and recompute)
            for chunks in CHUNKS:
                model = wrap(entry, recompute, chunks, world_size)
                try:
                    check_against(entry, reference, model, rank, exact=exact)
                except AssertionError as error:
                    raise AssertionError(f"{name}, re-entrant {recompute}, chunks: {chunks}: {error}") from error


@pytest.mark.distributed
@pytest.mark.parametrize("names", GROUPS, ids="-".join)
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_losses_and_final_values_are_those_of_plain_torch(world_size: int, names: tuple[str, ...]) -> None:
    run_ranks(check_zoo, world_size, names, timeout_s=170)


def test_every_model_is_in_a_group() -> None:
    assert sorted(name for group in GROUPS for name in group) == sorted(ZOO)


@pytest.mark.parametrize("name", ZOO)
def test_models_with_checkpoints_call_their_modules_again(name: str) -> None:
    entry = ZOO[name]

    def calls(recompute: Recompute) -> int:
        count = 0

        def add(*_: object) -> None:
            nonlocal count
            count += 1

        handle = nn.modules.module.register_module_forward_pre_hook(add)
        try:
            entry.loss(entry.make(recompute), entry.inputs(0, 0)).backward()
        finally:
            handle.remove()
        return count

    plain = calls(None)
    assert calls(False) > plain
    assert calls(True) > plain
