"""Helpers of this package's tests: train a model plainly and wrapped, and compare bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gemini_ddp import ZeroDDP
from gemini_ddp.interfaces import Trace
from gemini_ddp.testing import PlainChunk, PlainStore, PoisonStore

LR = 0.05

# Tensors this small gain nothing from threads, and threads of several test runs wait for each other.
torch.set_num_threads(1)


@dataclass(frozen=True)
class Step:
    prefetch: tuple[PlainChunk, ...]
    release: tuple[PlainChunk, ...]
    fetch: tuple[PlainChunk, ...] = ()


@dataclass(frozen=True)
class Plan:
    steps: tuple[Step, ...]


class OneAhead:
    """Prefetches what the next access needs and keeps nothing else; remembers traces and plans."""

    def __init__(self) -> None:
        self.traces: list[list[tuple[str, tuple[PlainChunk, ...]]]] = []

    def schedule(self, trace: Trace[PlainChunk]) -> Plan:
        self.traces.append([(access.phase, tuple(access.chunks)) for access in trace.accesses])
        needs = [tuple(access.chunks) for access in trace.accesses]
        steps = []
        for own, following in zip(needs, [*needs[1:], ()], strict=True):
            prefetch = tuple(chunk for chunk in following if chunk not in own)
            steps.append(Step(prefetch, tuple(chunk for chunk in own if chunk not in following)))
        return Plan(tuple(steps))


@dataclass
class Setup:
    """One way to run a model: which store, how many parameters to a chunk, and whether a plan is followed."""

    store_type: type[PlainStore] = PoisonStore
    params_per_chunk: int = 1
    planned: bool = True

    def wrap(self, module: nn.Module) -> tuple[ZeroDDP[PlainChunk], PlainStore]:
        store = self.store_type(module.parameters(), params_per_chunk=self.params_per_chunk)
        return ZeroDDP(module, store, OneAhead() if self.planned else None), store


SETUPS = {
    "plain": Setup(PlainStore, planned=False),
    "plain-planned": Setup(PlainStore),
    "poison": Setup(PoisonStore, planned=False),
    "poison-planned": Setup(PoisonStore),
    "poison-chunks-of-3": Setup(PoisonStore, params_per_chunk=3),
}

Loss = Callable[[nn.Module, int], Tensor]


def default_loss(model: nn.Module, step: int) -> Tensor:
    """The mean square of what the model makes of its own ``batch``."""
    torch.manual_seed(100 + step)
    return loss_of(model(model.batch(step)))


def loss_of(output: Any) -> Tensor:
    tensors = [t for t in _flatten(output) if t.requires_grad]
    return torch.stack([t.square().mean() for t in tensors]).sum()


def _flatten(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    items = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else None
    return [t for item in (vars(output).values() if items is None else items) for t in _flatten(item)]


def assert_at_rest(store: PlainStore) -> None:
    gathered = [chunk for chunk in store.chunks if chunk.is_gathered]
    assert not gathered, f"{gathered} of {len(store.chunks)} chunks are still gathered."
    assert not any(store._users.values()), "A parameter is still in use."


def check_training(
    make: Callable[[], nn.Module], setup: Setup, *, loss: Loss = default_loss, steps: int = 3
) -> tuple[ZeroDDP[PlainChunk], PlainStore]:
    """Train plainly and wrapped; losses, gradients, buffers and final parameters are equal bit for bit."""
    torch.manual_seed(0)
    plain = make()
    model, store = setup.wrap(copy.deepcopy(plain))
    names = dict(zip(model.parameters(), (name for name, _ in plain.named_parameters()), strict=True))
    oracle = torch.optim.SGD(plain.parameters(), lr=LR, momentum=0.5)
    optimizer = torch.optim.SGD(store.weights, lr=LR, momentum=0.5)
    for step in range(steps):
        wanted = loss(plain, step)
        wanted.backward()
        got = loss(model, step)
        got.backward()
        assert torch.equal(got.detach(), wanted.detach()), f"step {step}: loss {got} instead of {wanted}"
        gradients = dict(plain.named_parameters())
        for param, name in names.items():
            same_bits(store.gradient(param), gradients[name].grad, f"step {step}: gradient of {name}")
            assert param.grad is None
        for param in plain.parameters():
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.to_dense()  # SGD rounds sparse gradients in another way
        assert_at_rest(store)
        oracle.step()
        optimizer.step()
        oracle.zero_grad()
        optimizer.zero_grad()
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        same_bits(state[name], value, name)
    assert_at_rest(store)
    return model, store


def same_bits(got: Tensor | None, wanted: Tensor | None, what: str) -> None:
    if wanted is None or got is None:
        assert got is None, f"{what}: {got} instead of {wanted}"
        assert wanted is None, f"{what}: {got} instead of {wanted}"
        return
    wanted = wanted.to_dense() if wanted.layout != torch.strided else wanted
    assert torch.equal(got, wanted), f"{what}: off by {(got - wanted).abs().max()}"


class Counting(PoisonStore):
    """Writes down gathers and releases that happen, by index of the chunk."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.events: list[tuple[str, int]] = []
        super().__init__(*args, **kwargs)
        self.events.clear()

    def _show(self, chunk: PlainChunk) -> None:
        self.events.append(("gather", chunk.index))
        super()._show(chunk)

    def _hide(self, chunk: PlainChunk) -> None:
        self.events.append(("release", chunk.index))
        super()._hide(chunk)
