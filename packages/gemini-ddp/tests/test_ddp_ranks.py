"""Over ranks: every rank has its own data, and the gradients are those of plain PyTorch on all of it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Set
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_checks import LR, OneAhead, assert_at_rest, default_loss
from test_ddp_models import ZOO
from torch import Tensor, nn

from gemini_ddp import ZeroDDP, ZeroDDPError
from gemini_ddp.testing import PlainChunk, PlainStore, PoisonStore
from ranks import run_ranks

KINDS = ["Stack", "TiedHead", "FunctionalTie", "SharedLayer", "Encoder", "Checkpointed", "CheckpointedReentrant"]
KINDS += ["OutputsInObjects", "Parametrized", "MixtureOfExperts", "OrderThatFollowsTheData", "OddShapes"]


# Modules that choose among their children by their data, unlike on each rank.
LEAVES = {"MixtureOfExperts": "", "OrderThatFollowsTheData": ""}


def wrap(
    module: nn.Module, store_type: type[PlainStore] = PoisonStore, leaf: str | None = None
) -> tuple[ZeroDDP[PlainChunk], PlainStore]:
    group = dist.group.WORLD
    store = store_type(module.parameters(), params_per_chunk=2, process_group=group)
    leaf_modules = [] if leaf is None else [leaf]
    return ZeroDDP(module, store, OneAhead(), process_group=group, leaf_modules=leaf_modules), store


def check_mean_of_ranks(rank: int, world_size: int) -> None:
    for name in KINDS:
        torch.manual_seed(0)
        plain = ZOO[name]()
        model, store = wrap(copy.deepcopy(plain), leaf=LEAVES.get(name))
        oracle = torch.optim.SGD(plain.parameters(), lr=LR)
        optimizer = torch.optim.SGD(store.weights, lr=LR)
        for step in range(3):
            for other in range(world_size):
                (default_loss(plain, 10 * step + other) / world_size).backward()
            default_loss(model, 10 * step + rank).backward()
            for (key, param), mine in zip(plain.named_parameters(), model.parameters(), strict=True):
                wanted = torch.zeros_like(param) if param.grad is None else param.grad
                got = store.gradient(mine)
                assert (got is None) == (param.grad is None), f"{name} {key}"
                if got is None:
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

    def start_reduce(self, chunk: PlainChunk) -> None:
        self.calls.append(("reduce", chunk.index))
        super().start_reduce(chunk)

    def finish_backward(self, unused: Set[Tensor] = frozenset(), *, keep_local: bool = False) -> None:
        self.calls.append(("finish", 0))
        super().finish_backward(unused, keep_local=keep_local)


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
    assert {"gather", "reduce", "finish"} <= {call for call, _ in first}


def check_idle_expert(rank: int, world_size: int) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

        def forward(self, x: Tensor, which: int) -> Tensor:
            return self.experts[which](x)

    torch.manual_seed(0)
    model, store = wrap(nn.Sequential(nn.Linear(3, 3), Experts()), leaf="1")
    x = torch.ones(1, 3)
    for step in range(3):
        outer, inner = model.module
        inner(outer(x), (rank + step) % 2).sum().backward()
        for index, expert in enumerate(inner.experts):
            gradient = store.gradient(expert.bias)
            assert gradient is not None
            assert torch.equal(gradient, torch.full((3,), 0.5 * (step + 1))), (rank, index)
        assert_at_rest(store)


@pytest.mark.distributed
def test_expert_of_a_leaf_that_is_idle_on_one_rank_counts_as_zero_there() -> None:
    run_ranks(check_idle_expert, 2)


def check_divergence(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model, store = wrap(Either())
    for _ in range(2):
        with pytest.raises(ZeroDDPError, match=r"rank 0 'first' in forward, rank 1 'second' in forward.*leaf_modules"):
            model(torch.ones(1, 3), first=rank == 0, second=rank == 1)
        model.reset()
        assert_at_rest(store)
    model(torch.ones(1, 3), first=True, second=True).sum().backward()


class Either(nn.Module):
    """Calls its layers as it is told, and lets its loss follow from those it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.third = nn.Linear(3, 3)
        self.free = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, *, first: bool = True, second: bool = True, free: bool = False) -> Tensor:
        x = self.third(x)
        if first:
            x = self.first(x)
        if second:
            x = self.second(x)
        return x * self.free if free else x


@pytest.mark.distributed
def test_ranks_that_call_different_modules_are_told_so() -> None:
    run_ranks(check_divergence, 2)


def check_unlike_use(rank: int, world_size: int) -> None:
    """The root's parameter, at the end of backward, and one in the middle of it, are used on one rank alone."""
    torch.manual_seed(0)
    plain = Either()
    model, store = wrap(copy.deepcopy(plain))
    for step in range(4):
        for other in range(world_size):
            x = torch.full((2, 3), float(other + step))
            (plain(x, free=other == step % 2).sum() / world_size).backward()
        model(torch.full((2, 3), float(rank + step)), free=rank == step % 2).sum().backward()
        for param, mine in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(store.gradient(mine), param.grad, rtol=1e-6, atol=1e-6)
        assert_at_rest(store)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_parameter_used_on_one_rank_alone_counts_as_zero_on_the_others(world_size: int) -> None:
    run_ranks(check_unlike_use, world_size)


def check_no_sync(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = Either()
    model, store = wrap(copy.deepcopy(plain), Recording)
    assert isinstance(store, Recording)
    for step in range(4):
        for micro in range(3):
            for other in range(world_size):
                # The third micro-batch leaves out what the first used on one rank.
                x = torch.full((2, 3), 1.0 + other + step + micro)
                (plain(x, free=micro == 0 and other == 0).sum() / world_size).backward()
            x = torch.full((2, 3), 1.0 + rank + step + micro)
            store.calls.clear()
            with model.no_sync() if micro < 2 else contextlib.nullcontext():
                model(x, free=micro == 0 and rank == 0).sum().backward()
            assert ("reduce", 0) not in store.calls or micro == 2
            assert_at_rest(store)
        for param, mine in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(store.gradient(mine), param.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_of_backwards_under_no_sync_are_reduced_with_the_next(world_size: int) -> None:
    run_ranks(check_no_sync, world_size)


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
