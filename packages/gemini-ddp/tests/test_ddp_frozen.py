"""Frozen parameters and adapters: right gradients for the rest, and released and gathered like the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from ddp_checks import SETUPS, Counting, Setup, assert_at_rest, check_training, default_loss, same_bits
from test_ddp_models import DIM, ZOO, Model, mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini_ddp import ZeroDDPError
from gemini_ddp.testing import PoisonStore

every_setup = pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)


def half_frozen(make: Callable[[], nn.Module], phase: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = make()
        for index, param in enumerate(model.parameters()):
            if index % 2 == phase:
                param.requires_grad_(False)
        return model

    return build


FROZEN = ["Stack", "TiedHead", "FunctionalTie", "WeightOfAnotherModule", "TransposedView", "SelfAttention", "Encoder"]
FROZEN += ["SharedLayer", "Convolutions", "Recurrent", "Parametrized", "OutputsInObjects", "InPlaceOnOutputs"]
FROZEN += ["Checkpointed", "CheckpointedReentrant", "BorrowedUnderCheckpoint", "MixtureOfExperts"]


# What torch says of a re-entrant checkpoint whose inputs come from a frozen layer.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@every_setup
@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("name", FROZEN)
def test_every_other_parameter_frozen(name: str, phase: int, setup: Setup) -> None:
    check_training(half_frozen(ZOO[name], phase), setup)


class Adapted(nn.Module):
    """A frozen linear layer and a trainable low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.down = nn.Linear(DIM, 2, bias=False)
        self.up = nn.Linear(2, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class AdaptedModel(Model):
    recompute = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            x = x.tanh()
        return x


class RecomputedAdaptedModel(AdaptedModel):
    recompute = True


@every_setup
@pytest.mark.parametrize("make", [AdaptedModel, RecomputedAdaptedModel])
def test_adapters_over_frozen_layers_train(make: Callable[[], nn.Module], setup: Setup) -> None:
    check_training(make, setup, steps=4)


def test_frozen_layers_are_released_during_backward_and_gathered_twice_a_step() -> None:
    most = 0

    class Watching(Counting):
        def _show(self, chunk: object) -> None:
            nonlocal most
            super()._show(chunk)  # type: ignore[arg-type] # a PlainChunk
            most = max(most, sum(each.is_gathered for each in self.chunks))

    torch.manual_seed(0)
    model, store = Setup(Watching).wrap(AdaptedModel())
    assert isinstance(store, Watching)
    for step in range(3):
        if step == 2:
            most = 0
        store.events.clear()
        default_loss(model, step).backward()
        gathers = [index for event, index in store.events if event == "gather"]
        # The last module of forward is the first of backward, and the first base layer has nobody to pass gradients to.
        assert all(1 <= gathers.count(chunk.index) <= 2 for chunk in store.chunks)
        assert_at_rest(store)
    # A base layer, both halves of its adapter, and what is gathered ahead; 16 chunks in all.
    assert most <= 6


@every_setup
def test_parameters_may_be_frozen_and_thawed_between_steps(setup: Setup) -> None:
    torch.manual_seed(0)
    for name in ("Stack", "OwnParametersAndChildren", "SharedLayer", "TiedHead", "SelfAttention"):
        plain = ZOO[name]()
        model, store = setup.wrap(copy.deepcopy(plain))
        for step in range(6):
            for each in (plain, model):
                for index, param in enumerate(each.parameters()):
                    param.requires_grad_(step % 3 == 0 or index % 3 == step % 3)
                default_loss(each, step).backward()
            for (key, wanted), param in zip(plain.named_parameters(), model.parameters(), strict=True):
                same_bits(store.gradient(param), wanted.grad, f"{name}, step {step}: {key}")
            assert_at_rest(store)
            plain.zero_grad()
            for param in model.parameters():
                store._weights[param].grad = None


class Critic(Model):
    """The two models of a GAN, as one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = mlp()
        self.critic = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(self.generator(x))


@every_setup
def test_gradients_pass_through_what_is_frozen_for_one_of_two_losses(setup: Setup) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        model.critic.requires_grad_(step % 2 == 0)
        model.generator.requires_grad_(step % 2 == 1)
        return model(model.batch(step)).square().mean()

    torch.manual_seed(0)
    plain = Critic()
    model, store = setup.wrap(copy.deepcopy(plain))
    for step in range(4):
        for each in (plain, model):
            loss(each, step).backward()
        for (key, wanted), param in zip(plain.named_parameters(), model.parameters(), strict=True):
            same_bits(store.gradient(param), wanted.grad, key)
        assert_at_rest(store)


def test_parameter_that_was_frozen_at_first_cannot_be_thawed() -> None:
    model, _ = SETUPS["poison"].wrap(AdaptedModel())
    default_loss(model, 0).backward()
    model.layers[1].base.weight.requires_grad_(True)
    with pytest.raises(ZeroDDPError, match=r"'layers\.1\.base\.weight' was frozen"):
        default_loss(model, 1)
    model.layers[1].base.weight.requires_grad_(False)
    default_loss(model, 1).backward()


@every_setup
def test_wholly_frozen_model_passes_gradients_to_its_inputs(setup: Setup) -> None:
    torch.manual_seed(0)
    plain = ZOO["OwnParametersAndChildren"]().requires_grad_(False)
    model, store = setup.wrap(copy.deepcopy(plain))
    for step in range(3):
        found = []
        for each in (plain, model):
            x = each.batch(step).requires_grad_()
            each(x).square().sum().backward()
            found.append(x.grad)
        assert torch.equal(*found)
        assert_at_rest(store)


def test_prompt_before_a_frozen_model() -> None:
    class Prompted(Model):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = nn.Parameter(torch.randn(2, DIM))
            self.net = ZOO["Encoder"]().requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(torch.cat([self.prompt, x]))

    for setup in SETUPS.values():
        check_training(Prompted, setup)


def test_state_of_a_model_with_frozen_parameters_is_whole() -> None:
    torch.manual_seed(0)
    plain = AdaptedModel()
    model, _ = Setup(PoisonStore, params_per_chunk=4).wrap(copy.deepcopy(plain))
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        same_bits(state[name], value, name)
