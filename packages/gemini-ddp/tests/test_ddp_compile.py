"""Compiled blocks and compiled models train as uncompiled ones do; the hooks of the wrapper are never compiled."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from ddp_checks import Setup, assert_at_rest, check_training, default_loss, same_bits
from test_ddp_models import ZOO
from torch import Tensor, nn

from gemini_ddp import ZeroDDP
from gemini_ddp.testing import PlainChunk, PlainStore, PoisonStore

# The compiler looks at the gradients of all that enters a graph, activations too.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

Backend = str | Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., object]]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from child if isinstance(child, (nn.ModuleList, nn.Sequential)) else [child]


@dataclass
class Compiled(Setup):
    """Compiles blocks or the module before it is wrapped, or the wrapped model."""

    what: str = "blocks"
    backend: Backend = "aot_eager"

    def wrap(self, module: nn.Module) -> tuple[ZeroDDP[PlainChunk], PlainStore]:
        for part in {"blocks": blocks(module), "module": [module]}.get(self.what, ()):
            part.compile(backend=self.backend)
        model, store = super().wrap(module)
        if self.what == "wrapped model":
            model.compile(backend=self.backend)
        return model, store


@pytest.mark.parametrize("what", ["blocks", "module", "wrapped model"])
@pytest.mark.parametrize("name", ["Stack", "TiedHead", "Encoder", "Convolutions", "Checkpointed", "TransposedView"])
def test_compiled_training_equals_uncompiled(name: str, what: str) -> None:
    check_training(ZOO[name], Compiled(params_per_chunk=3, what=what))


class Counting:
    """A backend that counts what it is asked to compile."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize("what", ["blocks", "module", "wrapped model"])
def test_nothing_is_compiled_anew_after_the_second_step(what: str) -> None:
    backend = Counting()
    torch.manual_seed(0)
    model, _ = Compiled(what=what, backend=backend).wrap(ZOO["Encoder"]())
    default_loss(model, 0).backward()
    default_loss(model, 1).backward()
    assert backend.graphs > 0
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(2, 5):
            default_loss(model, step).backward()


def test_block_that_is_gathered_as_one_compiles_to_one_graph() -> None:
    backend = Counting()
    torch.manual_seed(0)
    plain = ZOO["Encoder"]()
    module = copy.deepcopy(plain)
    for layer in module.encoder.layers:
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)
    store = PoisonStore(module.parameters(), params_per_chunk=3)
    model = ZeroDDP(module, store, leaf_modules=[nn.TransformerEncoderLayer])
    for step in range(3):
        for each in (plain, model):
            default_loss(each, step).backward()
        for (name, param), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            same_bits(store.gradient(other), param.grad, name)
        assert_at_rest(store)
    assert backend.graphs == 2  # one for each layer


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch itself uses it
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_generated_code_computes_the_same_to_rounding() -> None:
    torch.manual_seed(0)
    plain = ZOO["Stack"]()
    model, store = Compiled(what="blocks", backend="inductor").wrap(copy.deepcopy(plain))
    for step in range(3):
        for each in (plain, model):
            default_loss(each, step).backward()
        for (name, param), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            # Fused code adds in another order.
            torch.testing.assert_close(store.gradient(other), param.grad, rtol=1e-5, atol=1e-7, msg=name)
        assert_at_rest(store)
