"""Over ranks: every rank has its own data, and the gradients are those of plain PyTorch on all of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_checks import LR, OneAhead, assert_at_rest, default_loss
from test_ddp_models import ZOO
from torch import Tensor, nn

from gemini_ddp import ZeroDDP
from gemini_ddp.testing import PlainChunk, PlainStore, PoisonStore
from ranks import run_ranks

KINDS = ["Stack", "TiedHead", "FunctionalTie", "SharedLayer", "Encoder", "Checkpointed", "CheckpointedReentrant"]
KINDS += ["OutputsInObjects", "Parametrized", "MixtureOfExperts", "OrderThatFollowsTheData", "OddShapes"]


def wrap(module: nn.Module, store_type: type[PlainStore] = PoisonStore) -> tuple[ZeroDDP[PlainChunk], PlainStore]:
    store = store_type(module.parameters(), params_per_chunk=2, process_group=dist.group.WORLD)
    return ZeroDDP(module, store, OneAhead()), store


def check_mean_of_ranks(rank: int, world_size: int) -> None:
    for name in KINDS:
        torch.manual_seed(0)
        plain = ZOO[name]()
        model, store = wrap(copy.deepcopy(plain))
        oracle = torch.optim.SGD(plain.parameters(), lr=LR)
        optimizer = torch.optim.SGD(store.weights, lr=LR)
        for step in range(3):
            for other in range(world_size):
                (default_loss(plain, 10 * step + other) / world_size).backward()
            default_loss(model, 10 * step + rank).backward()
            for (key, param), mine in zip(plain.named_parameters(), model.parameters(), strict=True):
                wanted = torch.zeros_like(param) if param.grad is None else param.grad
                got = store.gradient(mine)
                if got is None:
                    assert world_size == 1
                    assert param.grad is None
                    continue
                # Dividing after the sum rounds in another order than dividing each loss.
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6, msg=f"{name} {key}")
                assert mine.grad is None
            assert_at_rest(store)
            oracle.step()
            optimizer.step()
            oracle.zero_grad()
            optimizer.zero_grad()
        for key, value in plain.state_dict().items():
            if key in dict(plain.named_parameters()):
                torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_are_the_mean_over_all_ranks_data(world_size: int) -> None:
    run_ranks(check_mean_of_ranks, world_size)


class Recording(PoisonStore):
    """Writes down the calls that may communicate, in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[tuple[str, int]] = []
        super().__init__(*args, **kwargs)

    def _show(self, chunk: PlainChunk) -> None:
        self.calls.append(("gather", chunk.index))
        super()._show(chunk)

    def finish_backward(self) -> None:
        self.calls.append(("finish", 0))
        super().finish_backward()

    def adopt_reduce_order(self) -> None:
        self.calls.append(("adopt", 0))
        super().adopt_reduce_order()


def check_same_calls(rank: int, world_size: int) -> list[tuple[str, int]]:
    calls = []
    for name in ("Stack", "TiedHead", "FunctionalTie", "Encoder", "Checkpointed", "OutputsThatCannotBeWalked"):
        torch.manual_seed(0)
        model, store = wrap(ZOO[name](), Recording)
        assert isinstance(store, Recording)
        for step in range(3):
            default_loss(model, 10 * step + rank).backward()
            with torch.no_grad():
                model(model.batch(rank))
        model.state_dict()
        calls += store.calls
    return calls


@pytest.mark.distributed
def test_ranks_gather_in_the_same_order_whatever_their_data() -> None:
    first, second = run_ranks(check_same_calls, 2)
    assert first == second
    assert ("adopt", 0) in first


def check_idle_expert(rank: int, world_size: int) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

        def forward(self, x: Tensor, which: int) -> Tensor:
            return self.experts[which](x)

    torch.manual_seed(0)
    model, store = wrap(Experts(), PlainStore)
    x = torch.ones(1, 3)
    model(x, rank).sum().backward()
    for index, expert in enumerate(model.experts):
        gradient = store.gradient(expert.bias)
        assert gradient is not None
        assert torch.equal(gradient, torch.full((3,), 0.5)), (rank, index)


@pytest.mark.distributed
def test_expert_that_is_idle_on_one_rank_counts_as_zero_there() -> None:
    run_ranks(check_idle_expert, 2)


def check_error_on_every_rank(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = ZOO["Stack"]()
    model, store = wrap(copy.deepcopy(plain))
    for step in range(3):
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 99))
        default_loss(model, step).backward()
        default_loss(plain, step).backward()
    for param, mine in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(store.gradient(mine), param.grad)


@pytest.mark.distributed
def test_step_after_an_error_on_every_rank_is_clean() -> None:
    run_ranks(check_error_on_every_rank, 2)
