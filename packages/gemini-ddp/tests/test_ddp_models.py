"""Awkward modules train as in plain PyTorch, bit for bit, and leave every chunk released."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from ddp_checks import SETUPS, Setup, check_training, default_loss
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

DIM = 6


class Model(nn.Module):
    """Takes ``batch(step)``: floats, shape ``(4, DIM)``."""

    def batch(self, step: int) -> Tensor:
        return torch.randn(4, DIM, generator=torch.Generator().manual_seed(step))


class TokenModel(nn.Module):
    """Takes ``batch(step)``: token ids, shape ``(3, 5)``."""

    def batch(self, step: int) -> Tensor:
        return torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(step))


def mlp(width: int = DIM, depth: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


ZOO: dict[str, Callable[[], nn.Module]] = {}


def zoo(cls: type[nn.Module]) -> type[nn.Module]:
    ZOO[cls.__name__] = cls
    return cls


@zoo
class Stack(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(depth=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@zoo
class OwnParametersAndChildren(Model):
    """The root owns parameters, reads some before and some after its children."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(DIM))
        self.scale = nn.Parameter(torch.randn(()))
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + self.shift) * self.scale


@zoo
class TiedHead(TokenModel):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, DIM)
        self.body = mlp()
        self.head = nn.Linear(DIM, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


@zoo
class FunctionalTie(TokenModel):
    """The head reads another module's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, DIM)
        self.body = mlp()

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.body(self.embed(ids)), self.embed.weight)


class _Borrower(nn.Module):
    def forward(self, x: Tensor, lender: nn.Linear) -> Tensor:
        return F.linear(x, lender.weight * 0.5, lender.bias)


@zoo
class WeightOfAnotherModule(Model):
    """A module without parameters, a sibling's weight, and several uses of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.body = mlp()
        self.borrower = _Borrower()

    def forward(self, x: Tensor) -> Tensor:
        x = self.borrower(self.body(x), self.first)
        return self.borrower(self.first(x).tanh(), self.first)


@zoo
class TransposedView(Model):
    """A view of a weight is taken early and read late."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        transposed, bias = self.first.weight.T, self.first.bias[None]
        return self.body(self.first(x)) @ transposed + bias


class _Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, DIM))

    def forward(self, count: int) -> Tensor:
        return self.table[:count]


@zoo
class ModuleThatReturnsAView(Model):
    """As learned positions do; the view is read after its owner was left."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = _Positions()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions(x.shape[0])
        return self.body(x) + positions


class _Query(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(DIM))

    def forward(self) -> Tensor:
        return self.query


@zoo
class ModuleThatReturnsItsParameter(Model):
    def __init__(self) -> None:
        super().__init__()
        self.query = _Query()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        query = self.query()
        return self.body(x) * query


class _Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.weight.detach()[0]
        return x @ self.weight


@zoo
class DetachedViewInAnAttribute(Model):
    def __init__(self) -> None:
        super().__init__()
        self.keeper = _Keeper()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.keeper(x))
        return x * self.keeper.kept


@zoo
class SelfAttention(Model):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x[None]
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


@zoo
class Encoder(Model):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 2, dim_feedforward=8, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x[None])


@zoo
class EncoderDecoder(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(DIM, 2, 1, 1, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x[None], x[None].flip(1))


@zoo
class SharedLayer(Model):
    """One layer called four times, in between others."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(DIM, DIM)
        self.others = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for other in self.others:
            x = other(self.shared(x).tanh()).tanh()
        return self.shared(x)


@zoo
class SharedModuleObject(Model):
    """The same module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.between = mlp()
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x).tanh()))


@zoo
class OrderThatFollowsTheData(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        start = int(x.abs().sum()) % 4
        for index in range(4 - start % 2):
            x = self.layers[(index * 3 + start) % 4](x).tanh()
        return x


@zoo
class Recurrent(Model):
    """One C++ call that takes a list of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(DIM, DIM, num_layers=2, batch_first=True)
        self.head = nn.GRUCell(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.cell(x[None])
        return self.head(out[0], x)


@dataclass
class Result:
    hidden: Tensor
    extra: dict[str, list[Tensor]]


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


class Output(OrderedDict[str, Tensor]):
    """Like transformers' ModelOutput: a dict whose entries are attributes as well."""

    def __getattr__(self, name: str) -> Tensor:
        return self[name]


class Plain:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Wrapping(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.randn(DIM))
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.linear(x).tanh() * self.scale)


@zoo
class OutputsInObjects(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                _Wrapping(lambda t: Result(t, {"all": [t * 2]})),
                _Wrapping(lambda t: Pair(t, None)),
                _Wrapping(lambda t: Output(hidden=t)),
                _Wrapping(Plain),
                _Wrapping(lambda t: {"a": ({"b": [t]},)}),
            ]
        )

    def forward(self, x: Tensor) -> Any:
        first = self.blocks[0](x)
        x = self.blocks[1](first.extra["all"][0] + first.hidden).left
        x = self.blocks[2](x).hidden
        x = self.blocks[3](x).hidden
        return Result(self.blocks[4](x)["a"][0]["b"][0], {"more": [x]})


class _Opaque:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@zoo
class OutputsThatCannotBeWalked(Model):
    """A root whose output is in an object with slots, and so is a block's."""

    def __init__(self) -> None:
        super().__init__()
        self.block = _Wrapping(_Opaque)
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.block(x).hidden)


class _Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))
        self.scale = nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.auxiliary = ((x.detach() @ self.weight.abs()) * self.scale).square().mean()
        return x @ self.weight


@zoo
class TensorsWithoutStorage(Model):
    """Sparse tensors, and vmap and grad over inputs and over a sibling's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(torch.sparse.mm(torch.eye(4).to_sparse(), self.first(x)))
        x = x + torch.func.vmap(torch.func.grad(lambda row: (row**3).sum()))(x.detach())
        return x @ torch.vmap(lambda row: row.cos())(self.first.weight)


@zoo
class AuxiliaryLossInAnAttribute(Model):
    """Backward reaches some of a module's operations, but not through what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.router = _Router()
        self.body = mlp()

    def forward(self, x: Tensor) -> Any:
        x = self.body(self.router(x))
        return x.detach() * 2, self.router.auxiliary


@zoo
class BranchTakenLater(Model):
    """From the second step on, a module is called that the first did not call; it returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = mlp(depth=1)
        self.positions = _Positions()
        self.query = _Query()
        self.last = mlp()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.calls += 1
        if self.calls == 1:
            return self.last(x)
        positions, query = self.positions(x.shape[0]), self.query()
        return self.last(x) * query + positions


@zoo
class InPlaceOnOutputs(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.relu = nn.ReLU(inplace=True)
        self.view = _ViewOfResult()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x += 1
        x = self.relu(self.layers[1](x))
        x = self.view(x)
        x *= 2
        x = self.layers[2](x)
        x[:, 0] = 0
        return self.layers[3](x).tanh_()


class _ViewOfResult(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, 2 * DIM)
        self.scale = nn.Parameter(torch.randn(2 * DIM))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale)[:, :DIM]


class _OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class _Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return _OwnFunction.apply(x, self.weight)


@zoo
class CustomAutogradFunction(Model):
    """Its own weight, and a sibling's."""

    def __init__(self) -> None:
        super().__init__()
        self.custom = _Custom()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return _OwnFunction.apply(self.body(self.custom(x)).tanh(), self.custom.weight)


@zoo
class Parametrized(Model):
    def __init__(self) -> None:
        super().__init__()
        self.weight_norm = parametrizations.weight_norm(nn.Linear(DIM, DIM))
        self.spectral_norm = parametrizations.spectral_norm(nn.Linear(DIM, DIM))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = self.spectral_norm(self.weight_norm(x).tanh()).tanh()
        return self.orthogonal(x) @ self.weight_norm.weight


@zoo
class Convolutions(Model):
    """With BatchNorm, whose buffers must move as in plain PyTorch, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.inner = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
        self.group = nn.GroupNorm(2, 4)
        self.up = nn.ConvTranspose1d(4, 1, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x[:, None]))
        return self.up(self.group(x + self.inner(x)))


@zoo
class OddShapes(Model):
    """0-dim, one-element and empty parameters, one that is never used, and one of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.randn(()))
        self.single = nn.Parameter(torch.randn(1))
        self.empty = nn.Parameter(torch.randn(0, DIM))
        self.never = nn.Parameter(torch.randn(3))
        self.wide = nn.Parameter(torch.randn(DIM, dtype=torch.float64))
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.linear(x), self.empty])
        return x * self.scalar + self.single + self.wide.float()


@zoo
class IntegerParameter(Model):
    def __init__(self) -> None:
        super().__init__()
        self.index = nn.Parameter(torch.tensor([5, 4, 3, 2, 1, 0]), requires_grad=False)
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[:, self.index]


@zoo
class Embeddings(TokenModel):
    """Sparse gradients, a bag, padding, and max_norm, which writes into the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Embedding(11, DIM, sparse=True)
        self.padded = nn.Embedding(11, DIM, padding_idx=0)
        self.bag = nn.EmbeddingBag(11, DIM)
        self.body = mlp()

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.sparse(ids) + self.padded(ids)) + self.bag(ids)[:, None]


@zoo
class DetachedAndFrozenPaths(Model):
    """Part of the graph is cut, and part runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.teacher = nn.Linear(DIM, DIM)
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return self.last(self.first(x).detach() + target) + self.first(x)


@zoo
class ParameterContainers(Model):
    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(DIM)) for _ in range(3)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(DIM))})
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        for param in self.listed:
            x = self.body(x * param)
        return x + self.named["a"]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, dropout=0.1, batch_first=True)
        self.net = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.scale = nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.net(x) * self.scale


class _Checkpointed(Model):
    use_reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.head = nn.Linear(DIM, DIM)
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x[None])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


@zoo
class Checkpointed(_Checkpointed):
    pass


@zoo
class CheckpointedReentrant(_Checkpointed):
    use_reentrant = True


class _NestedCheckpoints(_Checkpointed):
    def _inner(self, x: Tensor) -> Tensor:
        x = checkpoint(self.blocks[0], x, use_reentrant=self.use_reentrant)
        return checkpoint(self.blocks[1], x, use_reentrant=self.use_reentrant) * self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self._inner, self.first(x[None]), use_reentrant=self.use_reentrant)
        return self.head(checkpoint(self.blocks[2], x, use_reentrant=self.use_reentrant))


@zoo
class NestedCheckpoints(_NestedCheckpoints):
    pass


@zoo
class NestedCheckpointsReentrant(_NestedCheckpoints):
    use_reentrant = True


class _BorrowedUnderCheckpoint(Model):
    """Two recomputed segments read a weight that a third module owns, and share a block."""

    use_reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.shared = _Block()

    def _segment(self, x: Tensor) -> Tensor:
        return F.linear(self.shared(x), self.first.weight, self.first.bias).tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x[None])
        for _ in range(3):
            x = checkpoint(self._segment, x, use_reentrant=self.use_reentrant)
        return x


@zoo
class BorrowedUnderCheckpoint(_BorrowedUnderCheckpoint):
    pass


@zoo
class BorrowedUnderCheckpointReentrant(_BorrowedUnderCheckpoint):
    use_reentrant = True


@zoo
class MixtureOfExperts(Model):
    """An expert without tokens gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 4)
        self.experts = nn.ModuleList(mlp(depth=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = weights.argmax(-1) == index
            if chosen.any():
                out[chosen] = expert(x[chosen]) * weights[chosen, index, None]
        return out


# What torch says of re-entrant checkpoints inside re-entrant checkpoints.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
@pytest.mark.parametrize("name", ZOO)
def test_model_trains_as_in_plain_pytorch(name: str, setup: Setup) -> None:
    check_training(ZOO[name], setup)


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_whole_model_under_checkpoint(use_reentrant: bool, setup: Setup) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        torch.manual_seed(step)
        x = model.batch(step).requires_grad_()
        return checkpoint(model, x, use_reentrant=use_reentrant).square().mean()

    check_training(Stack, setup, loss=loss)
    check_training(SharedLayer, setup, loss=loss)


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_autocast_inside_and_around_the_model(setup: Setup) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return default_loss(model, step)

    for name in ("Stack", "TiedHead", "SharedLayer"):
        check_training(ZOO[name], setup, loss=loss)
