"""A copy of a wrapped model is a plain module with full values; a pickle of it is refused."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from ddp_checks import LR, OneAhead, Setup, assert_at_rest, default_loss, same_bits
from test_ddp_models import ZOO
from torch import nn

from gemini_ddp import ZeroDDP, ZeroDDPError
from gemini_ddp.testing import PlainChunk, PoisonStore


def wrapped(name: str) -> tuple[nn.Module, ZeroDDP[PlainChunk], PoisonStore]:
    torch.manual_seed(0)
    plain = ZOO[name]()
    module = copy.deepcopy(plain)
    store = PoisonStore(module.parameters())
    return plain, ZeroDDP(module, store, OneAhead()), store


@pytest.mark.parametrize("name", ["Stack", "TiedHead", "Convolutions", "Parametrized", "Checkpointed", "OddShapes"])
def test_copy_is_a_plain_module_with_full_values(name: str) -> None:
    plain, model, store = wrapped(name)
    frozen = next(iter(model.parameters())).requires_grad_(False)
    default_loss(model, 0).backward()
    torch.optim.SGD(store.weights, lr=LR).step()
    state = model.state_dict()
    copied = copy.deepcopy(model)
    assert_at_rest(store)
    assert type(copied) is type(plain)
    assert list(copied.state_dict()) == list(state)
    for key, value in copied.state_dict().items():
        same_bits(value, state[key], key)
    assert [p.requires_grad for p in copied.parameters()] == [p is not frozen for p in model.parameters()]
    for child in copied.modules():
        assert not child._forward_hooks
        assert not child._forward_pre_hooks

    plain.load_state_dict(state)
    for each in (plain, copied):
        default_loss(each, 1).backward()
    for (key, param), other in zip(plain.named_parameters(), copied.named_parameters(), strict=True):
        if other[1].requires_grad:
            same_bits(other[1].grad, param.grad, key)
    assert_at_rest(store)


def test_copy_leaves_the_wrapped_model_as_it_is() -> None:
    _, model, store = wrapped("Stack")
    default_loss(model, 0).backward()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for param in copied.parameters():
            param.zero_()
    default_loss(model, 0).backward()
    _, twin, twin_store = wrapped("Stack")
    for _ in range(2):
        default_loss(twin, 0).backward()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        same_bits(store.gradient(param), twin_store.gradient(other), "after a copy")


def test_hooks_of_the_user_are_copied_and_those_of_the_wrapper_are_not() -> None:
    calls: list[nn.Module] = []
    _, model, _ = wrapped("Stack")
    model.unwrap().layers[0].register_forward_hook(lambda module, _, __: calls.append(module))
    copied = copy.deepcopy(model)
    default_loss(copied, 0)
    assert calls == [copied.layers[0]]


class Marked(nn.Parameter):
    pass


def test_copied_parameters_have_their_class_and_attributes() -> None:
    module = ZOO["Stack"]()
    module.marked = Marked(torch.ones(2))
    module.marked.partner = module.layers[0][0].weight
    module.layers[0][0].bias.no_decay = True
    copied = copy.deepcopy(ZeroDDP(module, PoisonStore(module.parameters()), OneAhead()))
    assert type(copied.marked) is Marked
    assert copied.marked.partner is copied.layers[0][0].weight
    assert copied.layers[0][0].bias.no_decay
    same_bits(copied.marked, torch.ones(2), "marked")


def test_copy_can_be_wrapped_again() -> None:
    plain, model, _ = wrapped("Stack")
    other, store = Setup().wrap(copy.deepcopy(model))
    for each in (plain, other):
        default_loss(each, 0).backward()
    for (key, param), twin in zip(plain.named_parameters(), other.parameters(), strict=True):
        same_bits(store.gradient(twin), param.grad, key)


def test_average_follows_full_values() -> None:
    plain, model, store = wrapped("TiedHead")
    optimizer = torch.optim.SGD(store.weights, lr=LR)
    oracle = torch.optim.SGD(plain.parameters(), lr=LR)
    average, wanted = copy.deepcopy(model), copy.deepcopy(plain)
    for step in range(3):
        for each, steps in ((model, optimizer), (plain, oracle)):
            default_loss(each, step).backward()
            steps.step()
            steps.zero_grad()
        with torch.no_grad():
            entries = dict(average.named_parameters())
            for name, value in model.named_full_values():
                if name in entries:  # a tied parameter is there once, its value comes under each name
                    entries[name].lerp_(value, 0.1)
            for param, new in zip(wanted.parameters(), plain.parameters(), strict=True):
                param.lerp_(new, 0.1)
    for (name, param), other in zip(wanted.named_parameters(), average.parameters(), strict=True):
        same_bits(other, param, name)


@pytest.mark.parametrize("save", [pickle.dumps, lambda model: torch.save(model, io.BytesIO()), copy.copy])
def test_pickling_a_wrapped_model_is_an_error_that_tells_what_to_save(save: object) -> None:
    _, model, _ = wrapped("Stack")
    with pytest.raises(ZeroDDPError, match=r"Save its state_dict\(\)"):
        save(model)  # type: ignore[operator] # one of the functions above


def test_copy_of_a_module_within_shares_its_hooks_and_drags_nothing_along() -> None:
    model = wrapped("Stack")[1]
    within = [child for child in model.module.modules() if next(child.parameters(recurse=False), None) is not None]
    for child in within:
        copied = copy.deepcopy(child)
        for hooks in ("_forward_hooks", "_forward_pre_hooks"):
            assert list(getattr(copied, hooks).values()) == list(getattr(child, hooks).values())
    default_loss(copy.deepcopy(model.module), 0)
