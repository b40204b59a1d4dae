"""Every collaborator can be replaced by another implementation of its Protocol, and training gives the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP, GeminiOptimizer
from gemini_chunk import Chunk, ChunkManager, device_tier
from gemini_ddp import ZeroDDP
from gemini_ddp.interfaces import ChunkStore
from gemini_ddp.testing import ChunkStoreContract, PlainStore
from gemini_optim import HybridAdam, ZeroOptimizer
from gemini_optim.testing import PlainModel, check_sharded_model
from gemini_placement import ChunkPlacement, Placement, PlacementError, PlacementPolicy, Plan, PlanStep
from gemini_placement.interfaces import ChunkT, TierName, Trace
from gemini_placement.testing import PlacementPolicyContract
from models import batch, lm_loss, seeded_model
from ranks import run_ranks

SMALL_CHUNKS: dict[str, Any] = {"min_chunk_size_m": 0.004, "search_range_m": 0.004, "hidden_dim": 32}
STEPS = 4
LR = 0.05


def group_of(world_size: int) -> dist.ProcessGroup | None:
    return dist.group.WORLD if world_size > 1 else None


def train_with_shards(rank: int, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train with everything that is ours, under plain SGD: one multiplication and one addition per element."""
    model = GeminiDDP(seeded_model(kind), precision="fp32", max_prefetch=1, **SMALL_CHUNKS)
    optimizer = GeminiOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model)
    losses = []
    for step in range(STEPS):
        loss = lm_loss(model, batch(rank, step))
        losses.append(loss.item())
        optimizer.backward(loss)
        optimizer.step()
    return losses, model.state_dict()


# -- a store that replicates everything -------------------------------------------------------------------------------


def check_plain_store(rank: int, world_size: int) -> None:
    for kind in ("gpt2", "llama"):
        train_over_plain_store(rank, world_size, kind)


def train_over_plain_store(rank: int, world_size: int, kind: str) -> None:
    wanted_losses, wanted = train_with_shards(rank, kind)
    module = seeded_model(kind)
    store = PlainStore(module.parameters(), params_per_chunk=3, process_group=group_of(world_size))
    model = ZeroDDP(module, store, process_group=group_of(world_size))
    losses = []
    for step in range(STEPS):
        loss = lm_loss(model, batch(rank, step))
        losses.append(loss.item())
        model.backward(loss)
        with torch.no_grad():
            for weight in store.weights:
                assert weight.grad is not None
                weight.add_(weight.grad, alpha=-LR)
                weight.grad = None
    assert losses == pytest.approx(wanted_losses, rel=1e-6)  # a sum over three ranks may be taken in another order
    for name, value in model.state_dict().items():
        assert (value - wanted[name]).abs().max() <= 1e-6


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_store_that_replicates_everything_trains_to_the_same_numbers(world_size: int) -> None:
    run_ranks(check_plain_store, world_size)


# -- a policy that never evicts ---------------------------------------------------------------------------------------


class NeverEvict:
    """Keeps every chunk gathered on the device."""

    def place(
        self, chunks: Sequence[ChunkT], *, capacities: Mapping[TierName, int | None], world_size: int
    ) -> Placement[ChunkT]:
        kept = ChunkPlacement(keep_gathered=True, param_tier="device", optim_tier="device")
        placement = Placement(chunks, [kept] * len(chunks))
        needed, capacity = placement.needed_bytes, capacities["device"]
        if capacity is not None and needed["device"] > capacity:
            raise PlacementError("Nothing is ever evicted.", needed=needed, available=capacities)
        return placement

    def schedule(self, trace: Trace[ChunkT], placement: Placement[ChunkT]) -> Plan[ChunkT]:
        steps = tuple(PlanStep(tuple(dict.fromkeys(access.chunks)), (), (), ()) for access in trace.accesses)
        used = {chunk for step in steps for chunk in step.chunks}
        every = sum(chunk.full_bytes for chunk in placement.chunks)
        peak = dict(placement.needed_bytes)
        return Plan(steps=steps, gathers=len(used), peak_gathered_bytes=every, peak_bytes=peak, traffic={})


class TestNeverEvict(PlacementPolicyContract):
    def make_policy(self) -> PlacementPolicy:
        return NeverEvict()


class Planner(Generic[ChunkT]):
    """A policy and what it placed."""

    def __init__(self, policy: PlacementPolicy, placement: Placement[ChunkT]) -> None:
        self.policy = policy
        self.placement = placement
        self.plans = 0

    def schedule(self, trace: Trace[ChunkT]) -> Plan[ChunkT]:
        self.plans += 1
        return self.policy.schedule(trace, self.placement)


def check_never_evict(rank: int, world_size: int) -> None:
    for kind in ("gpt2", "llama"):
        train_without_evicting(rank, world_size, kind)


def train_without_evicting(rank: int, world_size: int, kind: str) -> None:
    wanted_losses, wanted = train_with_shards(rank, kind)
    module = seeded_model(kind)
    manager = ChunkManager(device=device_tier("cpu"))
    for name, param in module.named_parameters():
        numel = -(-param.numel() // world_size) * world_size
        manager.add_chunk([(name, param)], numel=numel)
    policy = NeverEvict()
    capacities: dict[TierName, int | None] = {"device": None}
    placement = policy.place(manager.chunks, capacities=capacities, world_size=world_size)
    for chunk in manager.chunks:
        place = placement.of(chunk)
        manager.close(chunk, rest=place.param_tier, keep_gathered=place.keep_gathered)
    planner = Planner(policy, placement)
    model = ZeroDDP(module, manager, planner, process_group=group_of(world_size))
    losses = []
    for step in range(STEPS):
        loss = lm_loss(model, batch(rank, step))
        losses.append(loss.item())
        model.backward(loss)
        for chunk in manager.chunks:
            master, gradient = chunk.master, chunk.gradient
            assert master is not None
            assert gradient is not None
            master.add_(gradient, alpha=-LR)
            chunk.commit()
    assert planner.plans == 1
    assert model.deviations == 0
    assert losses == pytest.approx(wanted_losses, rel=1e-6)
    for name, value in model.state_dict().items():
        assert (value - wanted[name]).abs().max() <= 1e-6


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_policy_that_never_evicts_trains_to_the_same_numbers(world_size: int) -> None:
    run_ranks(check_never_evict, world_size)


# -- another sharded model under the optimizer ------------------------------------------------------------------------


def check_plain_model(rank: int, world_size: int) -> None:
    torch.manual_seed(3)
    ours = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 2))
    theirs = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 2))
    theirs.load_state_dict(ours.state_dict())
    model = GeminiDDP(ours, precision="fp32", min_chunk_size_m=0.0001, search_range_m=0.0001, hidden_dim=8)
    optimizer = GeminiAdamOptimizer(model, lr=1e-2, max_norm=0.1)
    plain = PlainModel(list(theirs.parameters()), chunk_numel=100, process_group=group_of(world_size))
    other = ZeroOptimizer(HybridAdam(theirs.parameters(), lr=1e-2), plain, max_norm=0.1)
    for step in range(STEPS):
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        plain.gather()
        losses = [module(inputs).square().mean() for module in (model, theirs)]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
        for each, loss in zip((optimizer, other), losses, strict=True):
            each.backward(loss)
            each.step()
        assert optimizer.get_grad_norm() == pytest.approx(other.get_grad_norm(), rel=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_another_sharded_model_trains_to_the_same_numbers(world_size: int) -> None:
    run_ranks(check_plain_model, world_size)


# -- ours under the others' contracts ---------------------------------------------------------------------------------


class ManagerContract(ChunkStoreContract[Chunk]):
    """`ChunkManager` as a store; the places where its chunks rest are set by the test."""

    settings: dict[str, Any] = {}  # noqa: RUF012 # one place at a time
    chunk_numel = 18

    def make_store(self, params: Sequence[nn.Parameter]) -> ChunkManager:
        manager = ChunkManager(device=device_tier("cpu"))
        for trainable in (True, False):
            named = [(f"p{i}", param) for i, param in enumerate(params) if param.requires_grad is trainable]
            manager.register(named, self.chunk_numel, trainable=trainable, **self.settings)
        return manager

    def gradient_of(self, store: ChunkStore[Chunk], param: nn.Parameter) -> Tensor | None:
        chunk = store.chunk_of(param)
        parts: list[Any] = [None] * self.world_size
        mine = None
        if chunk.gradient is not None:
            mine = [chunk.gradient[part.in_shard].float() for part in chunk.slices if part.info.tensor is param]
        if self.world_size == 1:
            parts = [mine]
        else:
            dist.all_gather_object(parts, mine)
        if any(part is None for part in parts):
            return None
        return torch.cat([piece for part in parts for piece in part]).view(param.shape)


def check_manager(rank: int, world_size: int) -> None:
    contract = ManagerContract()
    contract.rank, contract.world_size = rank, world_size
    for settings in (
        {},
        {"keep_gathered": True},
        {"rest": "host"},
        {"rest": "host", "master": "device"},
        {"master": "host"},
    ):
        for chunk_numel in (6, 60):  # a chunk for almost every parameter, and one for all
            contract.settings, contract.chunk_numel = settings, chunk_numel
            contract.check_all()


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_chunk_manager_keeps_the_contract_of_a_store(world_size: int) -> None:
    run_ranks(check_manager, world_size)


SHARDED: list[dict[str, Any]] = [
    {"precision": "fp32"},
    {"precision": "bf16", "shard_param_frac": 0.0},
    {"precision": "bf16", "offload_optim_frac": 1.0, "offload_param_frac": 1.0},
    {"precision": "fp16", "offload_optim_frac": 0.5, "max_prefetch": 1},
    {"precision": "bf16", "enable_gradient_accumulation": True},
]


def check_gemini_ddp(rank: int, world_size: int) -> None:
    for settings in SHARDED:
        model = GeminiDDP(seeded_model("gpt2"), **settings, **SMALL_CHUNKS)
        assert len(model.shards) > 3
        check_sharded_model(model, lambda model=model: lm_loss(model, batch(rank, 0)))  # type: ignore[misc]


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gemini_ddp_keeps_the_contract_of_a_sharded_model(world_size: int) -> None:
    run_ranks(check_gemini_ddp, world_size)
