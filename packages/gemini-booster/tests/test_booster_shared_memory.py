"""What shares memory with a parameter without being it is refused before anything is taken into chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gemini_booster.zero import GeminiDDP
from gemini_lazy import LazyInitContext


class Model(nn.Module):
    """An embedding, a head, and whatever a test does to them."""

    def __init__(self, change: Callable[[Model], object]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        change(self)


def share_data(model: Model) -> None:
    model.head.weight.data = model.embedding.weight.data.t()


def share_rows(model: Model) -> None:
    both = torch.randn(6, 4)
    model.embedding.weight, model.head.weight = nn.Parameter(both[:4]), nn.Parameter(both[2:])


def share_with_frozen(model: Model) -> None:
    share_data(model)
    model.embedding.weight.requires_grad_(False)


REFUSED: dict[str, tuple[Callable[[Model], object], str]] = {
    "data": (share_data, "'embedding.weight' shares memory with parameter 'head.weight'.*Tie them as one object"),
    "rows": (share_rows, "'embedding.weight' shares memory with parameter 'head.weight'"),
    "frozen": (share_with_frozen, "'head.weight' shares memory with parameter 'embedding.weight'"),
    "buffer": (
        lambda model: model.head.register_buffer("copy", model.embedding.weight.detach()[1]),
        "'embedding.weight' shares memory with 'head.copy'.*Compute with 'embedding.weight' itself",
    ),
    "view": (
        lambda model: setattr(model, "turned", model.embedding.weight.t()),
        "'embedding.weight' shares memory with 'turned'",
    ),
    "list": (
        lambda model: setattr(model, "cached", [model.head.weight.data]),
        "'head.weight' shares memory with 'cached'",
    ),
    "bits": (
        lambda model: setattr(model, "bits", model.head.weight.data.view(torch.uint8)[0]),
        "'head.weight' shares memory with 'bits'",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_tensor_in_a_parameters_memory_is_refused_and_the_model_is_as_it_was(kind: str) -> None:
    change, message = REFUSED[kind]
    model = Model(change)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        GeminiDDP(model, precision="fp32")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def tie(model: Model) -> None:
    model.head.weight = model.embedding.weight
    model.aliases = [model.head.weight]  # type: ignore[assignment] # no module


def interleave(model: Model) -> None:
    both = torch.randn(4, 8)
    model.embedding.weight, model.head.weight = nn.Parameter(both[:, :4]), nn.Parameter(both[:, 4:])


def share_frozen(model: Model) -> None:
    share_data(model)
    model.requires_grad_(False)
    model.extra = nn.Linear(4, 4)


def expand(model: Model) -> None:
    zero = torch.zeros(1)
    model.extra = nn.ParameterList([zero.expand(4), zero.expand(3), torch.empty(0), torch.empty(0)])


def normalise(model: Model) -> None:
    torch.nn.utils.spectral_norm(model.head)


@pytest.mark.parametrize("change", [tie, interleave, share_frozen, expand, normalise])
def test_what_does_not_come_apart_is_wrapped(change: Callable[[Model], object]) -> None:
    model = GeminiDDP(Model(change), precision="fp32")
    assert model.memory_usage()["device"]["used"]


def test_lazy_parameters_share_no_memory() -> None:
    with LazyInitContext():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    GeminiDDP(model, precision="fp32")
