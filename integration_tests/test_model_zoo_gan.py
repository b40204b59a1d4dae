"""Two wrapped models in one process that take turns: a generator, and the discriminator that judges it."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemini_booster.zero import GeminiDDP, GeminiOptimizer
from models import full_gradients, inputs_of
from ranks import run_ranks
from zoo import LR, STEPS, configuration, gradient_error, mean_gradients
from zoo_models import WIDTH, Discriminator, Generator


def make() -> tuple[Generator, Discriminator]:
    torch.manual_seed(7)
    return Generator(), Discriminator()


def judging_loss(maker: nn.Module, judge: nn.Module, rank: int, step: int) -> Tensor:
    """What the discriminator learns from; the generator gets no gradient of it."""
    real = inputs_of("vit", rank, step)["pixel_values"]
    false = maker(_noise(rank, step)).detach()
    return F.softplus(-judge(real)).mean() + F.softplus(judge(false)).mean()


def making_loss(maker: nn.Module, judge: nn.Module, rank: int, step: int) -> Tensor:
    """What the generator learns from; the discriminator gets a gradient of it, too."""
    return F.softplus(-judge(maker(_noise(rank, step)))).mean()


def _noise(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(30_000 * step + rank))


class Plain:
    """The plain models of all ranks, which step with the mean of their gradients."""

    def __init__(self, world_size: int) -> None:
        self.replicas = [make() for _ in range(world_size)]
        self.optimizers = [[torch.optim.SGD(module.parameters(), lr=LR) for module in pair] for pair in self.replicas]

    def gradients(self, which: int) -> dict[str, Tensor]:
        """Take the mean of all ranks' gradients of the first or the second model."""
        mean_gradients([pair[which] for pair in self.replicas])
        return full_gradients(self.replicas[0][which])

    def step(self, which: int) -> None:
        for pair in self.optimizers:
            pair[which].step()

    def zero_grad(self) -> None:
        for optimizer in (optimizer for pair in self.optimizers for optimizer in pair):
            optimizer.zero_grad()


def check_gan(rank: int, world_size: int, whole: bool) -> None:
    os.environ["GEMINI_DEBUG"] = "1"  # released memory is NaN
    tolerance = 0.0 if world_size == 2 else 1e-6  # two numbers have one sum, three have several
    plain = Plain(world_size)
    pair = [
        GeminiDDP(module, precision="fp32", chunk_configuration=configuration(module, world_size, whole=whole))
        for module in make()
    ]
    optimizers = [GeminiOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model) for model in pair]
    maker, judge = range(2)

    def zero_grad() -> None:
        plain.zero_grad()
        for optimizer in optimizers:
            optimizer.zero_grad()

    def compare_and_step(which: int) -> None:
        error = gradient_error(pair[which], plain.gradients(which))
        assert error <= tolerance, f"{'judge' if which else 'maker'}: off by {error:.1e}"
        assert not any(chunk.is_gathered for chunk in pair[which].chunk_manager.chunks)
        optimizers[which].step()
        plain.step(which)

    for step in range(STEPS):
        for which, loss in ((judge, judging_loss), (maker, making_loss)):  # in turns
            zero_grad()
            for other, replica in enumerate(plain.replicas):
                loss(*replica, other, step).backward()
            optimizers[which].backward(loss(pair[maker], pair[judge], rank, step))
            compare_and_step(which)
    for step in range(STEPS):  # both losses in one backward
        zero_grad()
        for other, replica in enumerate(plain.replicas):
            (judging_loss(*replica, other, step) + making_loss(*replica, other, step)).backward()
        both = judging_loss(pair[maker], pair[judge], rank, step) + making_loss(pair[maker], pair[judge], rank, step)
        both.backward()
        compare_and_step(judge)
        compare_and_step(maker)
    for model, module in zip(pair, plain.replicas[rank], strict=True):
        for name, value in module.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("whole", [False, True], ids=["smallest chunks", "one chunk"])
def test_generator_and_discriminator_train_as_in_plain_torch(whole: bool, world_size: int) -> None:
    run_ranks(check_gan, world_size, whole)
