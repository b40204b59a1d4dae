"""Traps of gathering and releasing parameters under autograd: first that torch has the trap, then that we pass it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from ddp_checks import SETUPS, Counting, OneAhead, Setup, assert_at_rest, check_training, default_loss, same_bits
from test_ddp_models import DIM, ZOO, Model, mlp
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from gemini_ddp import ZeroDDP
from gemini_ddp.testing import PlainChunk, PlainStore, PoisonStore

every_setup = pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
both_checkpoints = pytest.mark.parametrize("use_reentrant", [False, True])


def pair(make: Callable[[], nn.Module], setup: Setup) -> tuple[nn.Module, ZeroDDP[PlainChunk], PlainStore]:
    torch.manual_seed(0)
    plain = make()
    model, store = setup.wrap(copy.deepcopy(plain))
    return plain, model, store


def assert_same_gradients(plain: nn.Module, model: nn.Module, store: PlainStore) -> None:
    for (name, wanted), param in zip(plain.named_parameters(), model.parameters(), strict=True):
        same_bits(store.gradient(param), wanted.grad, name)
    assert_at_rest(store)


# -- released memory ------------------------------------------------------------------------------------------------

LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "deepcopy": copy.deepcopy,
    "clone": torch.clone,
    "norm": torch.norm,
    "matmul": lambda p: p @ torch.ones(DIM),
    "save": lambda p: _saved(p),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "to": lambda p: p.to(torch.float64),
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda p: p.add_(1.0),
    "mul_": lambda p: p.mul_(2.0),
    "copy_": lambda p: p.copy_(torch.ones(p.shape)),
    "normal_": nn.init.normal_,
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
}


def _saved(param: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(param, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


@pytest.mark.parametrize("look", LOOKS)
def test_released_parameters_can_be_looked_at_and_are_nan(look: str) -> None:
    _, model, _ = pair(ZOO["Stack"], SETUPS["poison"])
    for param in model.parameters():
        if look != "matmul" or param.dim() == 2:
            assert LOOKS[look](param).isnan().all()
        assert "nan" in repr(param)


@pytest.mark.parametrize("write", WRITES)
def test_released_parameters_refuse_to_be_written(write: str) -> None:
    plain, model, store = pair(ZOO["Stack"], SETUPS["poison"])
    with torch.no_grad():
        for param in model.parameters():
            with pytest.raises(RuntimeError, match="single memory location"):
                WRITES[write](param)
    for each in (plain, model):
        default_loss(each, 0).backward()
    assert_same_gradients(plain, model, store)


# -- what autograd keeps of a parameter -----------------------------------------------------------------------------

OPERATIONS: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    # These keep a view: backward reads the memory that the parameter had in forward.
    "linear": ((DIM, DIM), F.linear),
    "matmul": ((DIM, DIM), lambda x, w: x @ w),
    "transposed": ((DIM, DIM), lambda x, w: x @ w.T),
    "einsum": ((DIM, DIM), lambda x, w: torch.einsum("bi,ji->bj", x, w)),
    "narrowed": ((2 * DIM, DIM), lambda x, w: F.linear(x, w[DIM:])),
    # These keep the parameter: backward reads the memory that it has by then.
    "mul": ((DIM,), lambda x, w: x * w),
    "div": ((DIM,), lambda x, w: x / (w.square() + 1)),
    "layer_norm": ((DIM,), lambda x, w: F.layer_norm(x, (DIM,), w)),
    "rms_norm": ((DIM,), lambda x, w: F.rms_norm(x, (DIM,), w)),
    "conv1d": ((1, 1, 3), lambda x, w: F.conv1d(x[:, None], w, padding=1)[:, 0]),
    "prelu": ((DIM,), F.prelu),
    "bilinear": ((DIM, DIM, DIM), lambda x, w: F.bilinear(x, x.tanh(), w)),
    "pow": ((DIM,), lambda x, w: (x.abs() + 1) ** w),
    "where": ((DIM,), lambda x, w: torch.where(w > 0, x * w, x)),
    "exp": ((DIM,), lambda x, w: x * w.exp()),
}


class Operation(nn.Module):
    """A module that does one thing with its parameter."""

    def __init__(self, shape: tuple[int, ...], call: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.weight)


class Between(Model):
    """An operation between others, so that it is left long before the forward ends."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.first, self.operation, self.last = mlp(), operation, mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.operation(self.first(x)))


@pytest.mark.parametrize("name", OPERATIONS)
def test_backward_reads_what_forward_read_although_it_was_released_in_between(name: str) -> None:
    setup = Setup(PoisonStore, planned=False)

    def loss(model: nn.Module, step: int) -> Tensor:
        result = default_loss(model, step)
        weight = model.get_parameter("operation.weight" if isinstance(model, Between) else "module.operation.weight")
        assert weight.isnan().all() == isinstance(model, ZeroDDP)
        return result

    check_training(lambda: Between(Operation(*OPERATIONS[name])), setup, loss=loss)


# -- recompute ------------------------------------------------------------------------------------------------------


class Recomputed(Model):
    """Blocks of two layers under checkpoints; the last one ends with a layer, before whose end recompute stops."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(mlp(depth=2) for _ in range(3))
        self.blocks.append(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def test_recompute_that_stops_early_leaves_no_module_entered() -> None:
    plain, model, store = pair(lambda: Recomputed(use_reentrant=False), SETUPS["poison-planned"])
    entered, left = [], []
    plain.blocks[-1][-1].register_forward_pre_hook(lambda *_: entered.append(1))
    plain.blocks[-1][-1].register_forward_hook(lambda *_: left.append(1))
    default_loss(plain, 0).backward()
    assert (len(entered), len(left)) == (2, 1)  # torch never says that the layer was left
    for step in range(3):
        default_loss(model, step).backward()
        with torch.no_grad():
            model(model.batch(step))
        assert_at_rest(store)  # the end of a pass without gradients is the end of its outermost module


@both_checkpoints
@pytest.mark.parametrize("planned", [False, True])
def test_recompute_and_the_backward_after_it_share_one_gather(planned: bool, use_reentrant: bool) -> None:
    _, model, store = pair(lambda: Recomputed(use_reentrant), Setup(Counting, planned=planned))
    assert isinstance(store, Counting)
    for step in range(3):
        store.events.clear()
        default_loss(model, step).backward()
        assert_at_rest(store)
        gathers = [index for event, index in store.events if event == "gather"]
        assert all(gathers.count(chunk.index) <= 2 for chunk in store.chunks), (step, gathers)
    assert model.deviations == 0


@both_checkpoints
def test_recompute_never_gathers_what_the_forward_would_want_next(use_reentrant: bool) -> None:
    """In backward the next block is one that is done with."""
    _, model, store = pair(lambda: Recomputed(use_reentrant), Setup(Counting))
    assert isinstance(store, Counting)
    inner = model.unwrap()
    assert isinstance(inner, Recomputed)
    block_of = {
        store.chunk_of(param).index: number
        for number, block in enumerate([inner.first, *inner.blocks])
        for param in block.parameters()
    }
    for step in range(3):
        loss = default_loss(model, step)
        store.events.clear()
        loss.backward()
        order = [block_of[index] for event, index in store.events if event == "gather"]
        assert order == sorted(order, reverse=True), step


def test_parameter_used_in_two_re_entrant_checkpoints_gets_its_gradient_in_parts() -> None:
    counts: dict[str, int] = {}

    def count(name: str) -> Callable[[Tensor], None]:
        def add(_: Tensor) -> None:
            counts[name] = counts.get(name, 0) + 1

        return add

    plain = ZOO["BorrowedUnderCheckpointReentrant"]()
    for name, param in plain.named_parameters():
        param.register_post_accumulate_grad_hook(count(name))
    default_loss(plain, 0).backward()
    assert counts["first.weight"] == 4  # three segments, and its owner
    for setup in SETUPS.values():
        check_training(ZOO["BorrowedUnderCheckpointReentrant"], setup)


@every_setup
@both_checkpoints
def test_second_backward_through_a_retained_graph_recomputes_again(use_reentrant: bool, setup: Setup) -> None:
    plain, model, store = pair(lambda: Recomputed(use_reentrant), setup)
    for step in range(3):
        for each in (plain, model):
            loss = default_loss(each, step)
            loss.backward(retain_graph=True)
            (loss * 2).backward()
        assert_same_gradients(plain, model, store)
        plain.zero_grad()
        for weight in store.weights:
            weight.grad = None


@every_setup
def test_autograd_grad_through_checkpoints(setup: Setup) -> None:
    plain, model, store = pair(lambda: Recomputed(use_reentrant=False), setup)
    for step in range(3):
        found = [torch.autograd.grad(default_loss(each, step), list(each.parameters())) for each in (plain, model)]
        assert all(torch.equal(*both) for both in zip(*found, strict=True))
        assert_at_rest(store)
        assert all(weight.grad is None for weight in store.weights)


# -- the end of a module's backward ---------------------------------------------------------------------------------


class ManyInputs(Model):
    """Several layers read the batch itself, of which no gradient is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.readers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(5))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        hidden = [reader(x).tanh() for reader in self.readers]
        return self.head(torch.stack(hidden).sum(0))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_backward_hook_of_a_first_layer_comes_before_its_gradients() -> None:
    plain = ManyInputs()
    seen = []
    reader = plain.readers[0]
    assert isinstance(reader, nn.Linear)
    handle = reader.register_full_backward_hook(lambda *_: seen.append(reader.weight.grad))
    default_loss(plain, 0).backward()
    handle.remove()
    assert seen == [None]


@pytest.mark.parametrize("planned", [False, True])
def test_layers_whose_inputs_need_no_gradient_are_released_once_their_own_have_come(planned: bool) -> None:
    class Small(PoisonStore):
        def __init__(self, params: Iterable[nn.Parameter]) -> None:
            super().__init__(params, max_gathered=2)  # weight and bias of one layer

    class Fixed(Setup):
        def wrap(self, module: nn.Module) -> tuple[ZeroDDP[PlainChunk], Small]:
            store = Small(module.parameters())
            return ZeroDDP(module, store, OneAhead() if self.planned else None), store

    check_training(ManyInputs, Fixed(planned=planned))


# -- gathers that take their time -----------------------------------------------------------------------------------


class Late(PoisonStore):
    """A gather that was started fills its buffer only when a use waits for it."""

    def _show(self, chunk: PlainChunk) -> None:
        super()._show(chunk)
        with torch.no_grad():
            for param in chunk.params:
                if param.is_floating_point():
                    self._views[param].fill_(float("nan"))

    @torch.no_grad()
    def begin_use(self, tensors: Iterable[Tensor]) -> None:
        listed = list(tensors)
        super().begin_use(listed)
        for chunk in dict.fromkeys(self.chunk_of(tensor) for tensor in listed):
            for param in chunk.params:
                self._views[param].copy_(self._weights[param])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("name", [name for name in ZOO if name != "Embeddings"])
def test_nothing_is_read_before_its_gather_was_waited_for(name: str) -> None:
    check_training(ZOO[name], Setup(Late))


# -- weights that are computed before each call ---------------------------------------------------------------------


class Computed(Model):
    """As older torch does it: a hook before forward computes the weight from parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.spectral = nn.utils.spectral_norm(nn.Linear(DIM, DIM))
        self.pruned = nn.Linear(DIM, DIM)
        with torch.no_grad():  # with a graph it could not be copied
            prune.random_unstructured(self.pruned, "weight", amount=0.5)
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.pruned(self.spectral(x).tanh()))


class MixedDtypes(Model):
    """fp64, fp32, bf16 and complex parameters, each module in its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(DIM, DIM, dtype=torch.float64)
        self.norm = nn.LayerNorm(DIM)
        self.narrow = nn.Linear(DIM, DIM, dtype=torch.bfloat16)
        self.phase = nn.Parameter(torch.randn(DIM, dtype=torch.complex64))
        self.steps = nn.Parameter(torch.arange(DIM), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.wide(x.double()).float())
        x = self.narrow(x.bfloat16()).float()
        return (x * self.phase).abs() + self.steps


@every_setup
@pytest.mark.parametrize("make", [Computed, MixedDtypes])
def test_weights_of_hooks_and_of_all_dtypes_train_as_in_plain_pytorch(
    make: Callable[[], nn.Module], setup: Setup
) -> None:
    check_training(make, setup)


# -- evaluation -----------------------------------------------------------------------------------------------------


def test_a_loop_without_gradients_gathers_and_frees_alike_each_time() -> None:
    plain, model, store = pair(ZOO["Stack"], Setup(Counting))
    assert isinstance(store, Counting)
    seen = []
    for step in range(50):
        store.events.clear()
        with torch.no_grad():
            assert torch.equal(model(model.batch(step)), plain(plain.batch(step)))
        assert_at_rest(store)
        seen.append(tuple(store.events))
    assert len(set(seen[1:])) == 1
    assert [event for event, _ in seen[1]].count("gather") == len(store.chunks)


@every_setup
def test_transformer_layers_evaluate_alike_where_plain_torch_takes_its_fast_path(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    fast = torch._transformer_encoder_layer_fwd

    def counted(*args: object) -> Tensor:
        calls.append(1)
        return fast(*args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    plain, model, store = pair(lambda: ZOO["Encoder"]().eval(), setup)
    for step in range(3):
        with torch.no_grad():
            wanted = plain(plain.batch(step))
            assert calls
            calls.clear()
            torch.testing.assert_close(model(model.batch(step)), wanted, rtol=1e-5, atol=1e-6)
        assert_at_rest(store)
