"""Random programs of factories, views, writes, draws and reads give the same tensors lazily and eagerly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy_checks import eager_and_lazy, real, same
from torch import Tensor

from gemini_lazy import LazyInitContext, is_lazy, materialize, materialize_value

MAKE: dict[str, Callable[[], Tensor]] = {
    "zeros": lambda: torch.zeros(4, 6),
    "arange": lambda: torch.arange(24.0).view(4, 6),
    "randn": lambda: torch.randn(4, 6),
    "rand_transposed": lambda: torch.rand(6, 4).t(),
}
DERIVE: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda tensor: tensor.t(),
    "row": lambda tensor: tensor[tensor.shape[0] // 2],
    "columns": lambda tensor: tensor[..., ::2],
    "flat": lambda tensor: tensor.reshape(-1),
    "data": lambda tensor: tensor.data,
    "contiguous": lambda tensor: tensor.contiguous(),
    "clone": lambda tensor: tensor.clone(),
    "sum": lambda tensor: tensor + tensor,
    "like": lambda tensor: torch.randn_like(tensor),
    "expanded": lambda tensor: tensor.expand(2, *tensor.shape),
    "cumulated": lambda tensor: tensor.cumsum(-1),
    "selected": lambda tensor: tensor[tensor > 0],
}
WRITE: dict[str, Callable[[Tensor], object]] = {
    "add": lambda tensor: tensor.add_(1),
    "scale": lambda tensor: tensor.mul_(-0.5),
    "fill": lambda tensor: tensor.fill_(3),
    "normal": lambda tensor: tensor.normal_(),
    "uniform": lambda tensor: tensor.uniform_(-1, 1),
    "part": lambda tensor: tensor[..., :2].exponential_(),
    "by_mask": lambda tensor: tensor.__setitem__(tensor > 1, 2.0),
    "by_value": lambda tensor: tensor.sub_(float(tensor.max())) if tensor.numel() else None,
    "from_itself": lambda tensor: tensor.copy_(tensor.flip(0)),
}
STEP = st.tuples(st.sampled_from([*MAKE, *DERIVE, *WRITE, "copy"]), st.integers(0, 99), st.integers(0, 99))


def run(program: list[tuple[str, int, int]]) -> list[Tensor]:
    tensors = [torch.ones(4, 6)]
    for name, first, second in program:
        one, other = tensors[first % len(tensors)], tensors[second % len(tensors)]
        if one.dim() > 3:
            continue
        overlaps = one.numel() > 1 and 0 in one.stride()
        if name in MAKE:
            tensors.append(MAKE[name]())
        elif name in DERIVE and (one.dim() == 2 or name != "transpose") and one.dim() > 0 and one.shape[0] > 0:
            tensors.append(DERIVE[name](one))
        elif name in WRITE and not overlaps and one.dim() > 0:
            WRITE[name](one)
        elif name == "copy" and not overlaps and one.shape == other.shape:
            one.copy_(other)
    return tensors


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=25), st.randoms(use_true_random=False), st.booleans())
def test_program_gives_the_same_tensors(program: list[tuple[str, int, int]], order: object, in_place: bool) -> None:
    eager, lazy = eager_and_lazy(lambda: run(program))
    places = list(range(len(lazy)))
    order.shuffle(places)  # type: ignore[attr-defined]  # a random.Random
    for place in places:
        tensor = lazy[place]
        if is_lazy(tensor) and not in_place:
            assert torch.equal(eager[place], materialize_value(tensor)), place
        else:
            assert same(eager[place], real(tensor)), place
    if in_place:
        # Aliases are aliases again: a write through any of them reaches the same others as it does eagerly.
        for wanted, tensor in zip(eager, lazy, strict=True):
            if wanted.dim() < 3:
                wanted.zero_()
                tensor.zero_()
        assert all(torch.equal(wanted, tensor) for wanted, tensor in zip(eager, lazy, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=12), st.lists(st.sampled_from(sorted(WRITE)), max_size=4), st.integers(0, 99))
def test_program_goes_on_under_a_second_context(
    program: list[tuple[str, int, int]], writes: list[str], place: int
) -> None:
    eager, lazy = eager_and_lazy(lambda: run(program))
    if is_lazy(first := lazy[place % len(lazy)]):
        materialize(first)
    target, lazy_target = eager[-1], lazy[-1]
    if target.dim() > 0 and 0 not in target.stride():
        for name in writes:
            state = torch.get_rng_state()
            WRITE[name](target)
            torch.set_rng_state(state)
            with LazyInitContext():
                WRITE[name](lazy_target)
    for wanted, tensor in zip(eager, lazy, strict=True):
        assert torch.equal(wanted, materialize(tensor) if is_lazy(tensor) else tensor)
