"""Steps that are not one forward and one backward: accumulation, evaluation in between, errors, partial backwards."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from ddp_checks import SETUPS, Counting, OneAhead, Setup, assert_at_rest, check_training, default_loss, same_bits
from test_ddp_models import DIM, ZOO, Model, mlp
from torch import Tensor, nn

from gemini_ddp import ZeroDDP, ZeroDDPError
from gemini_ddp.testing import PlainChunk, PlainStore, PoisonStore

every_setup = pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
MIXED = [
    "OwnParametersAndChildren",
    "TiedHead",
    "FunctionalTie",
    "SharedLayer",
    "Checkpointed",
    "CheckpointedReentrant",
]
several_models = pytest.mark.parametrize("name", MIXED)


def pair(name: str, setup: Setup) -> tuple[nn.Module, ZeroDDP[PlainChunk], PlainStore]:
    torch.manual_seed(0)
    plain = ZOO[name]()
    model, store = setup.wrap(copy.deepcopy(plain))
    return plain, model, store


def assert_same_gradients(plain: nn.Module, model: nn.Module, store: PlainStore) -> None:
    for (name, wanted), param in zip(plain.named_parameters(), model.parameters(), strict=True):
        same_bits(store.gradient(param), wanted.grad, name)
    assert_at_rest(store)


def clear(plain: nn.Module, store: PlainStore) -> None:
    plain.zero_grad()
    for weight in store.weights:
        weight.grad = None


# -- several forwards and backwards ---------------------------------------------------------------------------------


@every_setup
@several_models
def test_two_forwards_before_one_backward(name: str, setup: Setup) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        return default_loss(model, step) + default_loss(model, step + 10)

    check_training(ZOO[name], setup, loss=loss)


@every_setup
@several_models
def test_gradients_of_several_backwards_add_up(name: str, setup: Setup) -> None:
    plain, model, store = pair(name, setup)
    for step in range(3):
        for micro in range(2):
            for each in (plain, model):
                default_loss(each, 2 * step + micro).backward()
        assert_same_gradients(plain, model, store)
        clear(plain, store)


@every_setup
@pytest.mark.parametrize("name", ["OwnParametersAndChildren", "TiedHead", "FunctionalTie", "SharedLayer"])
def test_second_backward_through_a_retained_graph(name: str, setup: Setup) -> None:
    plain, model, store = pair(name, setup)
    for step in range(3):
        for each in (plain, model):
            loss = default_loss(each, step)
            loss.backward(retain_graph=True)
            (loss * 2).backward()
        assert_same_gradients(plain, model, store)
        clear(plain, store)


@every_setup
def test_two_forwards_and_their_backwards_in_the_same_and_in_the_other_order(setup: Setup) -> None:
    plain, model, store = pair("SharedLayer", setup)
    for order in ((0, 1), (1, 0)):
        for each in (plain, model):
            losses = [default_loss(each, step) for step in range(2)]
            for index in order:
                losses[index].backward()
        assert_same_gradients(plain, model, store)
        clear(plain, store)


class TwoHeads(Model):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.left = nn.Linear(DIM, 2)
        self.right = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        return {"left": self.left(hidden), "right": self.right(hidden), "hidden": hidden}


@every_setup
def test_loss_on_a_part_of_the_outputs_leaves_the_rest_without_a_gradient(setup: Setup) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        out = model(model.batch(step))
        return out[("left", "right", "hidden")[step % 3]].square().mean()

    check_training(TwoHeads, setup, loss=loss, steps=6)


@every_setup
def test_forward_without_backward_does_not_disturb_the_next_step(setup: Setup) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        if step % 2:
            default_loss(model, step + 50)
        return default_loss(model, step)

    for name in ("OwnParametersAndChildren", "FunctionalTie", "OutputsThatCannotBeWalked"):
        check_training(ZOO[name], setup, loss=loss, steps=5)


@every_setup
def test_only_some_parameters_are_asked_for(setup: Setup) -> None:
    plain, model, store = pair("OwnParametersAndChildren", setup)
    for each in (plain, model):
        inputs = [param for param in each.parameters() if param.dim() == 2]
        default_loss(each, 0).backward(inputs=inputs)
    assert_same_gradients(plain, model, store)
    clear(plain, store)
    for each in (plain, model):
        default_loss(each, 1).backward()
    assert_same_gradients(plain, model, store)


# -- torch.autograd.grad --------------------------------------------------------------------------------------------


@every_setup
def test_autograd_grad_gives_gradients_of_inputs(setup: Setup) -> None:
    plain, model, store = pair("OwnParametersAndChildren", setup)
    found = []
    for each in (plain, model):
        x = each.batch(0).requires_grad_()
        found.append(torch.autograd.grad(each(x).sum(), x)[0])
    assert torch.equal(*found)
    assert_at_rest(store)
    assert all(weight.grad is None for weight in store.weights)
    for each in (plain, model):
        default_loss(each, 1).backward()
    assert_same_gradients(plain, model, store)


@every_setup
def test_autograd_grad_gives_gradients_of_parameters_and_leaves_the_store_alone(setup: Setup) -> None:
    plain, model, store = pair("FunctionalTie", setup)
    found = [torch.autograd.grad(default_loss(each, 0), list(each.parameters())) for each in (plain, model)]
    for wanted, got in zip(*found, strict=True):
        assert torch.equal(wanted, got)
    assert_at_rest(store)
    assert all(weight.grad is None for weight in store.weights)
    for each in (plain, model):
        default_loss(each, 1).backward()
    assert_same_gradients(plain, model, store)


@every_setup
def test_second_derivatives_are_refused_and_the_next_step_is_clean(setup: Setup) -> None:
    plain, model, store = pair("OwnParametersAndChildren", setup)
    x = model.batch(0).requires_grad_()
    with pytest.raises(ZeroDDPError, match="create_graph"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(ZeroDDPError, match="create_graph"):
        default_loss(model, 0).backward(create_graph=True)
    for each in (plain, model):
        default_loss(each, 1).backward()
    assert_same_gradients(plain, model, store)


# -- evaluation -----------------------------------------------------------------------------------------------------

NO_GRAD: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def evaluate(model: nn.Module, mode: Callable[[], contextlib.AbstractContextManager[None]], step: int) -> Tensor:
    was_training = model.training
    model.eval()
    with mode():
        out = model(model.batch(step))
        out = out + 0 if isinstance(out, Tensor) else out
    model.train(was_training)
    return out


# What torch says of re-entrant checkpoints without gradients.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@every_setup
@pytest.mark.parametrize("mode", NO_GRAD)
@pytest.mark.parametrize(
    "name", [*MIXED, "Encoder", "Convolutions", "ModuleThatReturnsAView", "DetachedViewInAnAttribute"]
)
def test_evaluation_before_between_and_inside_steps(name: str, mode: str, setup: Setup) -> None:
    plain, model, store = pair(name, setup)
    oracle = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(store.weights, lr=0.1)
    for step in range(3):
        found = [evaluate(each, NO_GRAD[mode], step) for each in (plain, model)]
        # nn.MultiheadAttention takes another path under no_grad, but not in a pass that records.
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
        assert_at_rest(store)
        losses = [default_loss(each, step) for each in (plain, model)]
        found = [evaluate(each, NO_GRAD[mode], step + 7) for each in (plain, model)]
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
        for loss in losses:
            loss.backward()
        assert_same_gradients(plain, model, store)
        oracle.step()
        optimizer.step()
        clear(plain, store)


@every_setup
def test_evaluation_with_gradients_enabled(setup: Setup) -> None:
    plain, model, store = pair("OwnParametersAndChildren", setup)
    for step in range(3):
        for each in (plain, model):
            each.eval()
            default_loss(each, step).backward()
            each.train()
            default_loss(each, step).backward()
        assert_same_gradients(plain, model, store)
        clear(plain, store)


def test_evaluation_between_steps_leaves_the_plan_alone() -> None:
    _, model, _ = pair("Stack", SETUPS["poison-planned"])
    for step in range(4):
        evaluate(model, torch.no_grad, step)
        default_loss(model, step).backward()
        evaluate(model, torch.no_grad, step + 1)
    assert model.deviations == 0


# -- errors ---------------------------------------------------------------------------------------------------------


class Failing(Model):
    """Raises on request before, in the middle of or in the backward of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(DIM))
        self.fail_at: tuple[str, int] | None = None
        self.error: BaseException = RuntimeError("on request")

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index, layer in enumerate(self.layers):
            if self.fail_at == ("forward", index):
                raise self.error
            x = layer(x).tanh() * self.scale
            x = _FailInBackward.apply(x, self, index)
        return F.linear(x, self.embed.weight)


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, model: Failing, index: int) -> Tensor:
        ctx.model, ctx.index = model, index  # type: ignore[attr-defined] # as torch's tutorials do
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.model.fail_at == ("backward", ctx.index):  # type: ignore[attr-defined] # see above
            raise ctx.model.error  # type: ignore[attr-defined] # see above
        return grad, None, None


@every_setup
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_step_after_an_error_equals_a_clean_run(
    when: int, phase: str, error: type[BaseException], setup: Setup
) -> None:
    torch.manual_seed(0)
    plain = Failing()
    model, store = setup.wrap(copy.deepcopy(plain))
    inner = model.unwrap()
    assert isinstance(inner, Failing)
    oracle = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(store.weights, lr=0.1)
    for step in range(5):
        if step == when:
            inner.error = error("on request")
            for index in (0, 2, 3):
                inner.fail_at = (phase, index)
                with pytest.raises(error, match="on request"):
                    default_loss(model, 40 + index).backward()
                assert not torch.overrides._get_current_function_mode_stack()
                if phase == "forward":
                    assert_at_rest(store)
            inner.fail_at = None
        for each in (plain, model):
            default_loss(each, step).backward()
        assert_same_gradients(plain, model, store)
        oracle.step()
        optimizer.step()
        clear(plain, store)
    for (name, wanted), got in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        same_bits(got, wanted, name)


def test_gradient_that_a_hook_of_the_user_kept_from_the_store_is_not_added_to_the_next() -> None:
    torch.manual_seed(0)
    plain = Failing()
    module = copy.deepcopy(plain)
    fails = [True]

    def hook(_: Tensor) -> None:
        if fails.pop():
            raise RuntimeError("on request")

    handle = module.embed.weight.register_post_accumulate_grad_hook(hook)  # before ours, which takes the gradient
    model, store = Setup().wrap(module)
    with pytest.raises(RuntimeError, match="on request"):
        default_loss(model, 40).backward()
    handle.remove()
    for each in (plain, model):
        default_loss(each, 0).backward()
    assert_same_gradients(plain, model, store)


@every_setup
@pytest.mark.parametrize("mode", NO_GRAD)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_error_in_evaluation_between_forward_and_backward(error: type[BaseException], mode: str, setup: Setup) -> None:
    torch.manual_seed(0)
    plain = Failing()
    model, store = setup.wrap(copy.deepcopy(plain))
    inner = model.unwrap()
    assert isinstance(inner, Failing)
    inner.error = error("on request")
    for step in range(3):
        default_loss(plain, step).backward()
        loss = default_loss(model, step)
        inner.fail_at = ("forward", 2)
        with pytest.raises(error):
            evaluate(model, NO_GRAD[mode], step)
        inner.fail_at = None
        loss.backward()
        assert_same_gradients(plain, model, store)
        clear(plain, store)


@every_setup
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_state_can_be_read_and_written_after_an_error(phase: str, setup: Setup) -> None:
    torch.manual_seed(0)
    model, store = setup.wrap(Failing())
    inner = model.unwrap()
    assert isinstance(inner, Failing)
    saved = model.state_dict()
    inner.fail_at = (phase, 1)
    with pytest.raises(RuntimeError, match="on request"):
        default_loss(model, 0).backward()
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name])
    model.load_state_dict({name: value + 1 for name, value in saved.items()})
    assert_at_rest(store)
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name] + 1)


@every_setup
def test_reset_brings_everything_to_rest(setup: Setup) -> None:
    torch.manual_seed(0)
    model, store = setup.wrap(Failing())
    inner = model.unwrap()
    assert isinstance(inner, Failing)
    inner.fail_at = ("backward", 1)
    with pytest.raises(RuntimeError, match="on request"):
        default_loss(model, 0).backward()
    model.reset()
    assert_at_rest(store)
    assert all(weight.grad is None for weight in store.weights)


def test_reset_helps_where_the_module_itself_was_called_and_interrupted() -> None:
    torch.manual_seed(0)
    plain = Failing()
    model, store = SETUPS["poison"].wrap(copy.deepcopy(plain))
    inner = model.unwrap()
    assert isinstance(inner, Failing)
    inner.fail_at, inner.error = ("forward", 2), KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        inner(inner.batch(0))
    model.reset()
    assert not torch.overrides._get_current_function_mode_stack()
    inner.fail_at = None
    for each in (plain, model):
        default_loss(each, 0).backward()
    assert_same_gradients(plain, model, store)


def test_error_while_gathering_leaves_the_model_usable() -> None:
    class Full(PoisonStore):
        full = False

        def start_gather(self, chunk: PlainChunk) -> None:
            if self.full and chunk.index == 4:
                raise MemoryError("no room")
            super().start_gather(chunk)

    torch.manual_seed(0)
    plain = ZOO["Stack"]()
    model, store = Setup(Full).wrap(copy.deepcopy(plain))
    assert isinstance(store, Full)
    for step in range(3):
        store.full = True
        with pytest.raises(MemoryError):
            default_loss(model, step).backward()
        store.full = False
        for each in (plain, model):
            default_loss(each, step).backward()
        assert_same_gradients(plain, model, store)
        clear(plain, store)


# -- room -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("name", ["Stack", "TiedHead", "SharedLayer", "Checkpointed", "NestedCheckpoints"])
def test_training_in_as_little_room_as_one_scope_needs(name: str, planned: bool) -> None:
    def run(max_gathered: int | None) -> PlainStore:
        class Small(PoisonStore):
            def __init__(self, params: object) -> None:
                super().__init__(params, max_gathered=max_gathered)  # type: ignore[arg-type] # as Setup calls it

        return check_training(ZOO[name], setup_of(Small, planned))[1]

    # A layer; the shared layer and another; what a block's attention reads, and the block's own scale; the root's bias.
    needed = {"Stack": 2, "TiedHead": 2, "SharedLayer": 4, "Checkpointed": 5, "NestedCheckpoints": 6}[name]
    run(needed)
    with pytest.raises(RuntimeError, match="There is no room"):
        run(needed - 1)


def setup_of(store_type: type[PlainStore], planned: bool) -> Setup:
    class Fixed(Setup):
        def wrap(self, module: nn.Module) -> tuple[ZeroDDP[PlainChunk], PlainStore]:
            store = store_type(module.parameters())
            return ZeroDDP(module, store, OneAhead() if planned else None), store

    return Fixed()


# -- growth ---------------------------------------------------------------------------------------------------------


def _live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def _hooks(model: nn.Module) -> int:
    modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


@pytest.mark.parametrize("planned", [False, True])
def test_two_hundred_mixed_steps_leave_no_more_behind_than_ten(planned: bool) -> None:
    torch.manual_seed(0)
    model, store = Setup(PoisonStore, planned=planned).wrap(Failing())
    inner = model.unwrap()
    assert isinstance(inner, Failing)
    generator = torch.Generator().manual_seed(0)

    def step(number: int) -> None:
        event = int(torch.randint(0, 6, (), generator=generator))
        if event == 0:
            evaluate(model, torch.no_grad, number)
        elif event == 1:
            evaluate(model, torch.inference_mode, number)
        elif event == 2:
            default_loss(model, number)
        elif event in (3, 4):
            inner.fail_at = (("forward", "backward")[event - 3], number % 4)
            with pytest.raises(RuntimeError, match="on request"):
                default_loss(model, number).backward()
            inner.fail_at = None
        default_loss(model, number).backward()
        assert_at_rest(store)
        for weight in store.weights:
            weight.grad = None
        # The traceback that pytest.raises kept would keep the graph.
        inner.error = RuntimeError("on request")

    for number in range(30):
        step(number)
    tensors, hooks = _live_tensors(), _hooks(model)
    for number in range(200):
        step(number)
    assert _live_tensors() <= tensors
    assert _hooks(model) == hooks


def test_gathers_are_counted_two_for_each_chunk_and_one_for_an_embedding() -> None:
    torch.manual_seed(0)
    model, store = Setup(Counting).wrap(
        nn.Sequential(nn.Embedding(11, DIM), nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
    )
    assert isinstance(store, Counting)
    ids = torch.arange(5)
    for _ in range(3):
        store.events.clear()
        model(ids).sum().backward()
        gathers = [index for event, index in store.events if event == "gather"]
        # embedding; first linear; last linear stays for backward; first linear again.
        assert gathers == [0, 1, 2, 3, 4, 1, 2]
        assert_at_rest(store)
