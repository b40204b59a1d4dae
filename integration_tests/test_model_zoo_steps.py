"""Steps that are not one forward and one backward have the gradients of plain PyTorch, too."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from gemini_booster.zero import GeminiDDP
from models import full_gradients
from ranks import run_ranks
from zoo import ZOO, configuration, gradient_error, mean_gradients

NAMES = ("gpt2", "t5", "unet", "tied")

Loss = Callable[[int], Tensor]
"""The loss of one of several batches of this rank."""


def two_forwards_and_one_backward(loss: Loss, model: nn.Module) -> Sequence[Tensor]:
    (loss(0) + loss(1)).backward()
    return ()


def two_forwards_and_their_backwards_in_the_other_order(loss: Loss, model: nn.Module) -> Sequence[Tensor]:
    first, second = loss(0), loss(1)
    second.backward()
    first.backward()
    return ()


def two_backwards_before_one_step(loss: Loss, model: nn.Module) -> Sequence[Tensor]:
    loss(0).backward()
    loss(1).backward()
    return ()


def two_backwards_through_one_graph(loss: Loss, model: nn.Module) -> Sequence[Tensor]:
    kept = loss(0)
    kept.backward(retain_graph=True)
    (2 * kept).backward()
    return ()


def gradients_asked_for_and_a_backward_after_them(loss: Loss, model: nn.Module) -> Sequence[Tensor]:
    params = [param for param in model.parameters() if param.requires_grad]
    asked = torch.autograd.grad(loss(0), params)
    loss(1).backward()
    return asked


def gradients_of_some_parameters_only(loss: Loss, model: nn.Module) -> Sequence[Tensor]:
    loss(0).backward(inputs=[param for param in model.parameters() if param.dim() == 1])
    return ()


def evaluation_between_forward_and_backward(loss: Loss, model: nn.Module) -> Sequence[Tensor]:
    kept = loss(0)
    model.eval()
    with torch.no_grad():
        between = loss(1)
    model.train()
    kept.backward()
    return (between,)


WAYS = [
    two_forwards_and_one_backward,
    two_forwards_and_their_backwards_in_the_other_order,
    two_backwards_before_one_step,
    two_backwards_through_one_graph,
    gradients_asked_for_and_a_backward_after_them,
    gradients_of_some_parameters_only,
    evaluation_between_forward_and_backward,
]


def check_ways(rank: int, world_size: int, name: str) -> None:
    os.environ["GEMINI_DEBUG"] = "1"  # released memory is NaN
    entry = ZOO[name]
    for recompute in (None, False):
        replicas = [entry.make(recompute) for _ in range(world_size)]
        module = entry.make(recompute)
        chunks = configuration(module, world_size, whole=False)
        model = GeminiDDP(module, precision="fp32", max_prefetch=1, chunk_configuration=chunks)

        def loss_of(model: nn.Module, rank: int) -> Loss:
            return lambda step: entry.loss(model, entry.inputs(rank, step))

        for turn in range(2):  # once while the step is recorded, then by plan
            for way in WAYS:
                place = f"{name}, recompute {recompute}, turn {turn}: {way.__name__}"
                wanted = [way(loss_of(replica, other), replica) for other, replica in enumerate(replicas)][rank]
                mean_gradients(replicas)
                got = way(loss_of(model, rank), model)
                assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True)), place
                # Plain torch adds up on each rank and we over the ranks first: that rounds in another order.
                assert gradient_error(model, full_gradients(replicas[0])) <= 1e-6, place
                assert not any(chunk.is_gathered for chunk in model.chunk_manager.chunks), place
                model.zero_grad()
                for replica in replicas:
                    replica.zero_grad()


@pytest.mark.distributed
@pytest.mark.parametrize("name", NAMES)
def test_unusual_steps_have_the_gradients_of_plain_torch(name: str) -> None:
    run_ranks(check_ways, 2, name, timeout_s=120)
