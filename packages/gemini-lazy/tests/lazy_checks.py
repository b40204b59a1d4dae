"""What the tests of gemini-lazy share: the comparison with eager construction, and exact peaks of memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from gemini_lazy import LazyInitContext, is_lazy, materialize, materialize_value

T = TypeVar("T")
SEED = 1234


def same(left: Tensor, right: Tensor) -> bool:
    """Equal bit for bit, in layout too."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and left.stride() == right.stride()
        and left.requires_grad == right.requires_grad
        and torch.equal(left, right)
    )


def eager_and_lazy(make: Callable[[], T]) -> tuple[T, T]:
    """Run ``make`` with and without the context under one seed; the generator must end in the same place."""
    torch.manual_seed(SEED)
    eager = make()
    state = torch.get_rng_state()
    torch.manual_seed(SEED)
    with LazyInitContext():
        lazy = make()
    assert torch.equal(torch.get_rng_state(), state), "the random stream goes on elsewhere"
    return eager, lazy


def real(tensor: Tensor) -> Tensor:
    return materialize(tensor) if is_lazy(tensor) else tensor


def check_tensors(make: Callable[[], Sequence[Tensor]]) -> list[bool]:
    """Materialise what ``make`` returns, first forwards and then backwards, and compare; tell which were lazy."""
    lazy: list[bool] = []
    for step in (1, -1):
        eager, made = eager_and_lazy(make)
        lazy = [is_lazy(tensor) for tensor in made]
        for wanted, tensor in list(zip(eager, made, strict=True))[::step]:
            assert same(wanted, real(tensor))
    return lazy


def entries(module: nn.Module) -> dict[str, Tensor]:
    named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return dict(itertools.chain(*named))


def check_module(make: Callable[[], nn.Module]) -> nn.Module:
    """Compare with eager construction: in order, reversed, whole, and as values of a module that stays lazy."""
    for step in (1, -1):
        eager, module = eager_and_lazy(make)
        assert all(is_lazy(parameter) for parameter in module.parameters())
        for tensor in list(entries(module).values())[::step]:
            real(tensor)
        assert_same(eager, module)
    eager, module = eager_and_lazy(make)
    wanted = entries(eager)
    for name, tensor in entries(module).items():
        if is_lazy(tensor):
            value = materialize_value(tensor)
            assert is_lazy(tensor)
            assert same(wanted[name].detach(), value), name
    objects = entries(module)
    LazyInitContext.materialize(module)
    assert all(entries(module)[name] is tensor for name, tensor in objects.items())
    assert_same(eager, module)
    return module


def assert_same(eager: nn.Module, module: nn.Module) -> None:
    wanted, got = entries(eager), entries(module)
    assert list(wanted) == list(got)
    for name, tensor in wanted.items():
        assert same(tensor, got[name]), name
        assert type(got[name]) is type(tensor)
    # The same names share one object.
    assert [name for name, _ in eager.named_parameters()] == [name for name, _ in module.named_parameters()]


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the most bytes of CPU tensor memory that ``run`` held at once beyond those held before."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        kept = run()
    held = peak = 0
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del kept
    assert events
    return peak
