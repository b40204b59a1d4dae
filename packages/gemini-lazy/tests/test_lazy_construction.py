"""Modules built under the context equal those built without it, bit for bit."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from lazy_checks import assert_same, check_module, eager_and_lazy
from torch import Tensor, nn
from torch.nn.utils import parametrizations, skip_init

from gemini_lazy import LazyInitContext, is_lazy


class Initialised(nn.Module):
    """Every initialiser of torch."""

    def __init__(self) -> None:
        super().__init__()
        init = nn.init
        self.truncated = nn.Parameter(init.trunc_normal_(torch.empty(40, 60), std=2.0))
        self.wide = nn.Parameter(init.orthogonal_(torch.empty(30, 40)))
        self.tall = nn.Parameter(init.orthogonal_(torch.empty(40, 30), gain=0.5))
        self.eye = nn.Parameter(init.eye_(torch.empty(7, 5)))
        self.sparse = nn.Parameter(init.sparse_(torch.empty(50, 7), 0.3))
        self.dirac = nn.Parameter(init.dirac_(torch.empty(6, 5, 3)))
        self.constant = nn.Parameter(init.constant_(torch.empty(4), 0.1))
        for name in ("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "uniform_", "normal_"):
            self.register_parameter(name[:-1], nn.Parameter(getattr(init, name)(torch.empty(9, 11))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.head.weight, std=0.02)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        frequency = 1.0 / (10000.0 ** (torch.arange(0, 16, 2, dtype=torch.int64).float() / 16))
        self.register_buffer("frequency", frequency, persistent=False)
        angles = torch.outer(torch.arange(32).float(), frequency)
        self.register_buffer("cosine", torch.cat((angles, angles), dim=-1).cos())
        self.register_buffer("mask", torch.tril(torch.ones(5, 5, dtype=torch.bool)).view(1, 1, 5, 5))
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.layers = nn.ModuleList(nn.Sequential(nn.Dropout(rate), nn.Linear(4, 4)) for rate in rates)
        self.bias = nn.Parameter(torch.full((4,), rates[-1]))


class ByDummyForward(nn.Module):
    """Learns a size by running a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        width = self.features(torch.randn(2, 3, 10, 10)).flatten(1).shape[1]
        self.head = nn.Linear(width, 2)


def own_reset() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    with torch.no_grad():
        module[0].weight[2:4].fill_(0.5)
        module[0].weight.data.view(-1)[::7] = 3
        module[1].weight.copy_(module[0].weight.t())
        module[0].weight.mul_(module[1].weight.norm())
        module[1].bias.data = torch.randn(6)
        module[1].bias.clamp_(min=0)
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(30, 40),
    "embedding": lambda: nn.Embedding(20, 16, padding_idx=3),
    "embedding_bag": lambda: nn.EmbeddingBag(20, 16),
    "layer_norm": lambda: nn.LayerNorm(8),
    "conv": lambda: nn.Conv2d(3, 8, 3),
    "conv_transpose": lambda: nn.ConvTranspose1d(3, 8, 3),
    "lstm": lambda: nn.LSTM(8, 9, num_layers=2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    "batch_norm": lambda: nn.BatchNorm2d(5),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(20, 30)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(20, 30)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(20, 30)),
    "cayley": lambda: parametrizations.orthogonal(nn.Linear(30, 30), orthogonal_map="cayley"),
    "householder": lambda: parametrizations.orthogonal(nn.Linear(20, 30), orthogonal_map="householder"),
    "skip_init": lambda: skip_init(nn.Linear, 3, 4).requires_grad_(False).apply(lambda m: m.reset_parameters()),
    "half": lambda: nn.Linear(30, 40).half(),
    "bfloat16": lambda: nn.Linear(30, 40).to(torch.bfloat16),
    "channels_last": lambda: nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last),
    "copy": lambda: copy.deepcopy(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))),
    "initialisers": Initialised,
    "tied": Tied,
    "rotary": Rotary,
    "dummy_forward": ByDummyForward,
    "own_reset": own_reset,
}


@pytest.mark.parametrize("name", MODULES)
def test_module_equals_eager_construction_in_any_order_of_materialisation(name: str) -> None:
    check_module(MODULES[name])


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_hook_based_norms_compute_the_same_output(norm: Callable[[nn.Module], nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch prefers parametrizations
        eager, lazy = eager_and_lazy(lambda: norm(nn.Linear(20, 30)))
    LazyInitContext.materialize(lazy)
    assert_same(eager, lazy)
    assert not is_lazy(lazy.weight)  # a plain attribute, not a parameter
    inputs = torch.randn(3, 20)
    assert torch.equal(eager(inputs), lazy(inputs))


def test_training_after_the_context_sees_the_same_random_stream() -> None:
    def train(lazy: bool) -> Tensor:
        torch.manual_seed(7)
        if lazy:
            with LazyInitContext():
                model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 1))
            LazyInitContext.materialize(model)
        else:
            model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 5)).sum().backward()
            optimizer.step()
        return model[0].weight

    assert torch.equal(train(lazy=True), train(lazy=False))


def test_optimizer_built_on_lazy_parameters_trains_them() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Tied()
        return model, torch.optim.AdamW([{"params": list(model.parameters()), "lr": 0.1}])

    (eager, eager_optimizer), (lazy, lazy_optimizer) = eager_and_lazy(make)
    LazyInitContext.materialize(lazy)
    assert lazy.head.weight is lazy.embed.weight
    tokens = torch.randint(20, (6,))
    for model, optimizer in ((eager, eager_optimizer), (lazy, lazy_optimizer)):
        model.head(model.embed(tokens)).square().mean().backward()
        optimizer.step()
    assert_same(eager, lazy)


def test_default_dtype_of_the_construction_counts_not_that_of_the_materialisation() -> None:
    def make() -> nn.Module:
        torch.set_default_dtype(torch.float64)
        try:
            module = nn.Linear(3, 4)
            module.register_buffer("thirds", torch.arange(4) / 3)
        finally:
            torch.set_default_dtype(torch.float32)
        return module

    assert check_module(make).thirds.dtype == torch.float64


def test_autocast_at_materialisation_changes_nothing() -> None:
    eager, lazy = eager_and_lazy(lambda: nn.Parameter(torch.randn(4, 4) @ torch.randn(4, 4)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        LazyInitContext.materialize(holder := nn.ParameterList([lazy]))
    assert torch.equal(holder[0], eager)


def test_default_device_is_where_tensors_are_made() -> None:
    with LazyInitContext(default_device="meta"):
        assert torch.empty(3).device.type == "meta"
    with LazyInitContext(default_device="cpu"):
        assert is_lazy(torch.empty(3))


def test_meta_tensors_stay_meta_tensors() -> None:
    with LazyInitContext(), torch.device("meta"):
        linear = nn.Linear(2, 3)
    assert linear.weight.device.type == "meta"
    assert not is_lazy(linear.weight)


def test_verbose_counts_the_lazy_entries(capsys: pytest.CaptureFixture[str]) -> None:
    with LazyInitContext():
        module = nn.BatchNorm1d(3)
    assert LazyInitContext.materialize(module, verbose=True) is module
    printed = capsys.readouterr().out
    assert "2 of 2 parameters" in printed
    assert "2 of 3 buffers" in printed  # torch makes the batch counter from a number
    LazyInitContext.materialize(module)
    assert not capsys.readouterr().out


def test_tensors_in_attributes_containers_and_hook_closures_are_materialised() -> None:
    class Scattered(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.plain = torch.ones(2)
            self.nested = {"list": [torch.arange(3), (torch.zeros(1),)]}
            captured = torch.full((2,), 4.0)
            self.register_forward_hook(lambda module, args, output: output + captured)

    eager, lazy = eager_and_lazy(Scattered)
    LazyInitContext.materialize(lazy)
    assert torch.equal(lazy.plain, eager.plain)
    assert torch.equal(lazy.nested["list"][0], eager.nested["list"][0])
    assert torch.equal(lazy.nested["list"][1][0], eager.nested["list"][1][0])
    assert torch.equal(lazy(torch.ones(1, 2)), eager(torch.ones(1, 2)))


def test_skipped_tensors_stay_lazy_and_dead_proxies_do_no_harm() -> None:
    with LazyInitContext():
        module = nn.Linear(2, 2)
        module.tables = [torch.arange(3.0), module.weight]
        module.weak = [weakref.proxy(nn.Identity())]
    LazyInitContext.materialize(module, skip=module.parameters())
    assert is_lazy(module.weight)
    assert is_lazy(module.bias)
    assert torch.equal(module.tables[0], torch.arange(3.0))
    assert not is_lazy(module.tables[0])


def test_lazy_module_is_copied_under_the_context_and_both_materialise() -> None:
    eager, lazy = eager_and_lazy(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    with LazyInitContext():
        twin = copy.deepcopy(lazy)
        with torch.no_grad():
            twin[0].weight.add_(1)
    LazyInitContext.materialize(lazy)
    LazyInitContext.materialize(twin)
    assert_same(eager, lazy)
    assert torch.equal(twin[0].weight, eager[0].weight + 1)
    assert torch.equal(twin[1].running_var, eager[1].running_var)
