"""A wrapped model outlives interrupts, lives beside another, is copied for an average, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from gemini_booster.zero import GeminiDDP, GeminiOptimizer
from models import SMALL_CHUNKS, batch, lm_loss, seeded_model
from ranks import run_ranks


def wrap(module: nn.Module, lr: float = 0.1) -> tuple[GeminiDDP, GeminiOptimizer]:
    model = GeminiDDP(module, precision="fp32", max_prefetch=1, **SMALL_CHUNKS)
    return model, GeminiOptimizer(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5), model)


def train(model: GeminiDDP, optimizer: GeminiOptimizer, rank: int, step: int) -> None:
    optimizer.backward(lm_loss(model, batch(rank, step)))
    optimizer.step()
    optimizer.zero_grad()


def assert_equal_states(got: nn.Module, wanted: nn.Module) -> None:
    state = got.state_dict()
    for name, value in wanted.state_dict().items():
        assert torch.equal(state[name], value), name


# -- interrupts -------------------------------------------------------------------------------------------------------


def interrupt(model: GeminiDDP, rank: int, module: nn.Module, *, in_backward: bool) -> None:
    """Press Ctrl+C while a module runs, on every rank."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    def stop_later(_: nn.Module, __: object, output: Tensor) -> None:
        output.register_hook(stop)

    handle = module.register_forward_hook(stop_later if in_backward else stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            lm_loss(model, batch(rank, 99)).backward()
    finally:
        handle.remove()


def interrupt_everywhere(rank: int, world_size: int) -> None:
    model, optimizer = wrap(seeded_model("gpt2"))
    twin, twin_optimizer = wrap(seeded_model("gpt2"))
    places = [child for child in model.unwrap().modules() if isinstance(child, (nn.Embedding, nn.LayerNorm))]
    at_rest = None
    for step, module in enumerate(places):
        for in_backward in (False, True):  # the first pass of all is interrupted, too
            interrupt(model, rank, module, in_backward=in_backward)
            if at_rest is not None:
                model.reset()
                assert model.memory_usage()["device"]["used"] == at_rest
        train(model, optimizer, rank, step)
        train(twin, twin_optimizer, rank, step)
        at_rest = model.memory_usage()["device"]["used"]
    assert_equal_states(model, twin)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_step_after_a_keyboard_interrupt_equals_a_clean_run(world_size: int) -> None:
    run_ranks(interrupt_everywhere, world_size)


# -- death ------------------------------------------------------------------------------------------------------------


def delete_everything(rank: int, world_size: int) -> None:
    for _ in range(2):
        model, optimizer = wrap(seeded_model("gpt2"))
        for step in range(2):
            train(model, optimizer, rank, step)
        interrupt(model, rank, model.lm_head, in_backward=True)
        manager = model.chunk_manager
        watched = [weakref.ref(thing) for thing in (model, optimizer, model.unwrap(), manager, *manager.chunks)]
        watched += [weakref.ref(param) for param in model.parameters()]
        watched += [weakref.ref(chunk.master) for chunk in manager.chunks if chunk.master is not None]
        del model, optimizer, manager
        gc.collect()
        assert [reference() for reference in watched if reference() is not None] == []
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]
        assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) < 4096  # the random state, and such


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_deleting_model_and_optimizer_frees_everything(world_size: int) -> None:
    run_ranks(delete_everything, world_size)


# -- two of them ------------------------------------------------------------------------------------------------------


def train_two(rank: int, world_size: int) -> None:
    alone: list[GeminiDDP] = []
    for kind in ("gpt2", "llama"):
        model, optimizer = wrap(seeded_model(kind))
        for step in range(3):
            train(model, optimizer, rank, step)
        alone.append(model)
    pairs = [wrap(seeded_model(kind)) for kind in ("gpt2", "llama")]
    for step in range(3):
        # Forward of the one, then of the other, then both backwards, which is what two models in one loss do.
        losses = [lm_loss(model, batch(rank, step)) for model, _ in pairs]
        sum(losses[1:], start=losses[0]).backward()
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
    for (model, _), wanted in zip(pairs, alone, strict=True):
        assert_equal_states(model, wanted)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_two_models_in_one_loss_train_as_each_alone(world_size: int) -> None:
    run_ranks(train_two, world_size)


# -- copies -----------------------------------------------------------------------------------------------------------


def average(rank: int, world_size: int) -> None:
    model, optimizer = wrap(seeded_model("gpt2"))
    mean = copy.deepcopy(model)
    assert type(mean) is type(model.unwrap())
    entries = dict(mean.named_parameters())  # a tied one once
    wanted = copy.deepcopy(entries)
    for step in range(2):
        train(model, optimizer, rank, step)
        state = model.state_dict()
        with torch.no_grad():
            for name, value in model.named_full_values():
                if name in entries:
                    entries[name].lerp_(value.cpu(), 0.1)
                    wanted[name].lerp_(state[name], 0.1)
    for name, value in mean.named_parameters():
        assert torch.equal(value, wanted[name]), name
    assert mean.lm_head.weight is mean.transformer.wte.weight
    assert lm_loss(mean, batch(rank, 0)).isfinite()
    again, _ = wrap(copy.deepcopy(model))
    assert_equal_states(again, model)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_copy_for_an_average_is_plain_and_can_be_wrapped_itself(world_size: int) -> None:
    run_ranks(average, world_size)
