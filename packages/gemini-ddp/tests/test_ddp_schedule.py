"""A plan is followed: prefetched, kept and released as it says; what deviates from it is counted and harmless."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ddp_checks import Counting, OneAhead, Plan, Step, assert_at_rest, default_loss, same_bits
from test_ddp_models import DIM, ZOO, Model
from torch import Tensor, nn

from gemini_ddp import ZeroDDP
from gemini_ddp.interfaces import Trace
from gemini_ddp.testing import PlainChunk, PoisonStore


class Chain(Model):
    """Three layers without biases, one chunk each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.skip: int | None = None
        self.log: list[tuple[str, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index != self.skip:
                x = layer(x).tanh()
                self.log.append(("run", index))
        return x


class Fixed:
    """Returns the plan it was given, as indices of chunks; remembers what it was asked."""

    def __init__(self, steps: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        self.steps = steps
        self.chunks: Sequence[PlainChunk] = ()
        self.traces: list[list[tuple[str, tuple[int, ...]]]] = []

    def schedule(self, trace: Trace[PlainChunk]) -> Plan:
        self.traces.append([(a.phase, tuple(chunk.index for chunk in a.chunks)) for a in trace.accesses])
        return Plan(
            tuple(
                Step(tuple(self.chunks[i] for i in prefetch), tuple(self.chunks[i] for i in release))
                for prefetch, release in self.steps
            )
        )


def chain(planner: Any) -> tuple[Chain, ZeroDDP[PlainChunk], Counting]:
    torch.manual_seed(0)
    module = Chain()
    store = Counting(module.parameters())
    planner.chunks = store.chunks
    model = ZeroDDP(module, store, planner)
    module.log = store.events
    default_loss(model, 0).backward()
    store.events.clear()
    return module, model, store


ON_DEMAND = [((), (0,)), ((), (1,)), ((), ()), ((), (2,)), ((), (1,)), ((), (0,))]


def test_trace_has_every_access_of_the_step_in_order() -> None:
    planner = Fixed([((), ())])
    with pytest.raises(ValueError, match="1 steps for 7 accesses"):
        chain(planner)
    # The root comes first, needs nothing of its own, and is an access all the same.
    assert planner.traces == [
        [
            ("forward", ()),
            ("forward", (0,)),
            ("forward", (1,)),
            ("forward", (2,)),
            ("backward", (2,)),
            ("backward", (1,)),
            ("backward", (0,)),
        ]
    ]


def test_prefetches_start_where_the_plan_says() -> None:
    steps = [((0,), ()), ((1,), (0,)), ((2,), (1,)), ((), ()), ((1,), (2,)), ((0,), (1,)), ((), (0,))]
    _, model, store = chain(Fixed(steps))
    for step in range(3):
        store.events.clear()
        default_loss(model, step).backward()
        gathers_and_runs = [event for event in store.events if event[0] != "release"]
        assert gathers_and_runs == [
            *[("gather", 0), ("gather", 1), ("run", 0), ("gather", 2), ("run", 1), ("run", 2)],
            *[("gather", 1), ("gather", 0)],
        ]
        assert_at_rest(store)
    assert model.deviations == 0


def test_chunks_stay_gathered_where_the_plan_releases_nothing() -> None:
    _, model, store = chain(Fixed([((), ())] * 7))
    for step in range(2):
        store.events.clear()
        default_loss(model, step).backward()
        assert [event for event in store.events if event[0] == "gather"] == [("gather", i) for i in range(3)]
        assert_at_rest(store)


def test_releases_follow_the_plan_at_once() -> None:
    _, model, store = chain(Fixed([((), ()), *ON_DEMAND]))
    loss = default_loss(model, 1)
    assert store.events == [
        *[("gather", 0), ("release", 0), ("run", 0)],
        *[("gather", 1), ("release", 1), ("run", 1)],
        *[("gather", 2), ("run", 2)],
    ]
    store.events.clear()
    loss.backward()
    assert store.events == [
        *[("release", 2), ("gather", 1), ("release", 1), ("gather", 0), ("release", 0)],
    ]


def test_without_a_planner_a_chunk_is_released_when_the_next_scope_begins() -> None:
    torch.manual_seed(0)
    module = Chain()
    store = Counting(module.parameters())
    model = ZeroDDP(module, store)
    module.log = store.events
    for step in range(2):
        store.events.clear()
        loss = default_loss(model, step)
        assert store.events == [
            *[("gather", 0), ("run", 0), ("release", 0)],
            *[("gather", 1), ("run", 1), ("release", 1)],
            *[("gather", 2), ("run", 2)],
        ]
        loss.backward()
        assert [event for event in store.events if event[0] == "gather"] == [("gather", i) for i in (0, 1, 2, 1, 0)]


def test_planner_is_asked_once_for_each_mode() -> None:
    planner = OneAhead()
    torch.manual_seed(0)
    module = Chain()
    model = ZeroDDP(module, PoisonStore(module.parameters()), planner)
    for step in range(3):
        default_loss(model, step).backward()
    assert len(planner.traces) == 1
    model.eval()
    for step in range(3):
        default_loss(model, step).backward()
    assert len(planner.traces) == 2
    for step in range(3):
        with torch.no_grad():
            model(module.batch(step))
    assert len(planner.traces) == 3
    assert [phase for phase, _ in planner.traces[2]] == ["forward"] * 4
    model.train()
    default_loss(model, 1).backward()
    assert len(planner.traces) == 3
    assert model.deviations == 0


def test_failed_first_step_makes_no_plan() -> None:
    planner = OneAhead()
    torch.manual_seed(0)
    module = Chain()
    model = ZeroDDP(module, PoisonStore(module.parameters()), planner)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, DIM + 1))
    assert planner.traces == []
    default_loss(model, 0).backward()
    assert len(planner.traces[0]) == 7


def test_deviations_are_counted_harmless_and_do_not_outlast_the_step() -> None:
    plain = Chain()
    module, model, store = chain(OneAhead())
    plain.load_state_dict(model.state_dict())
    counts = []
    for step, skip in enumerate([None, 1, None, 0, 2, None, None]):
        for weight in store.weights:
            weight.grad = None
        plain.zero_grad()
        plain.skip = module.skip = skip
        before = model.deviations
        wanted, got = default_loss(plain, step), default_loss(model, step)
        assert torch.equal(wanted.detach(), got.detach())
        wanted.backward()
        got.backward()
        for (name, param), other in zip(plain.named_parameters(), module.parameters(), strict=True):
            same_bits(store.gradient(other), param.grad, f"step {step}: {name}")
        assert_at_rest(store)
        counts.append(model.deviations - before)
    # A skipped layer is missed once in forward and once in backward.
    assert counts == [0, 2, 0, 2, 2, 0, 0]


def test_module_that_the_first_step_did_not_call_is_gathered_on_demand() -> None:
    torch.manual_seed(0)
    plain = Chain()
    plain.skip = 1
    module = copy.deepcopy(plain)
    store = PoisonStore(module.parameters())
    model = ZeroDDP(module, store, OneAhead())
    for step in range(4):
        plain.skip = module.skip = 1 if step % 2 == 0 else None
        for each in (plain, model):
            default_loss(each, step).backward()
        for (name, param), other in zip(plain.named_parameters(), module.parameters(), strict=True):
            same_bits(store.gradient(other), param.grad, f"step {step}: {name}")
        assert_at_rest(store)
    assert model.deviations > 0


def test_each_chunk_is_gathered_at_most_twice_a_planned_step() -> None:
    for name in ("Stack", "TiedHead", "Encoder", "Convolutions", "Checkpointed", "CheckpointedReentrant"):
        torch.manual_seed(0)
        module = ZOO[name]()
        store = Counting(module.parameters())
        model = ZeroDDP(module, store, OneAhead())
        for step in range(3):
            store.events.clear()
            default_loss(model, step).backward()
        gathers = [index for event, index in store.events if event == "gather"]
        counts = {chunk.index: gathers.count(chunk.index) for chunk in store.chunks}
        if "Checkpointed" in name:
            assert counts.pop(0) == 3  # the weight that the first and the last layer share, with all others between
        assert max(counts.values()) <= 2, (name, counts)


def test_prefetch_is_left_out_where_there_is_no_room_for_it() -> None:
    torch.manual_seed(0)
    module = Chain()
    store = PoisonStore(module.parameters(), max_gathered=1)
    model = ZeroDDP(module, store, OneAhead())
    plain = copy.deepcopy(Chain())
    plain.load_state_dict(model.state_dict())
    for step in range(3):
        for each in (plain, model):
            default_loss(each, step).backward()
    for (name, param), other in zip(plain.named_parameters(), module.parameters(), strict=True):
        same_bits(store.gradient(other), param.grad, name)
    assert model.deviations == 0


class LateBorrower(Model):
    """From the second step on, reads a weight outside its owner; no module is called that the first did not call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.between = nn.Linear(DIM, DIM)
        self.borrow = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.first(x))
        return x * self.first.bias if self.borrow else x


def test_use_outside_the_owner_that_no_recorded_pass_saw_poisons_the_loss() -> None:
    torch.manual_seed(0)
    module = LateBorrower()
    model = ZeroDDP(module, PoisonStore(module.parameters()), OneAhead())
    default_loss(model, 0).backward()
    module.borrow = True
    assert default_loss(model, 1).isnan()
    planless = LateBorrower()
    planless.borrow = True
    assert not default_loss(ZeroDDP(planless, PoisonStore(planless.parameters())), 1).isnan()


@pytest.mark.parametrize("planned", [False, True])
def test_watched_step_finds_a_use_outside_the_owner_for_good(planned: bool) -> None:
    torch.manual_seed(0)
    module = LateBorrower()
    plain = copy.deepcopy(module)
    store = PoisonStore(module.parameters())
    model = ZeroDDP(module, store, OneAhead() if planned else None)
    default_loss(model, 0).backward()
    module.borrow = plain.borrow = True
    default_loss(model, 1).backward()
    model.watch_next_step()
    for step in range(2, 5):
        plain.zero_grad()
        for weight in store.weights:
            weight.grad = None
        for each in (plain, model):
            default_loss(each, step).backward()
        for (name, param), other in zip(plain.named_parameters(), module.parameters(), strict=True):
            same_bits(store.gradient(other), param.grad, f"step {step}: {name}")
        assert_at_rest(store)


class Encoder(LateBorrower):
    def encode(self, x: Tensor) -> Tensor:
        return self.between(x) * self.first.bias


def test_modules_called_by_another_method_than_forward_are_named_once_a_step_was_not_finite(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = Encoder()
    model = ZeroDDP(module, PoisonStore(module.parameters()))
    inputs = module.batch(0)
    assert model.encode(inputs).isnan().all()
    assert not caplog.records
    model.watch_next_step()
    model(inputs)
    assert not caplog.records
    model.watch_next_step()
    for _ in range(2):
        model.encode(inputs)
    (record,) = caplog.records
    assert "module 'between' is called outside of the model's forward" in record.getMessage()


class NothingAhead(OneAhead):
    """Releases a chunk unless the next access needs it, and prefetches nothing."""

    def schedule(self, trace: Trace[PlainChunk]) -> Plan:
        return Plan(tuple(Step((), step.release) for step in super().schedule(trace).steps))


@pytest.mark.parametrize("name", ["OutputsThatCannotBeWalked", "AuxiliaryLossInAnAttribute"])
def test_scope_that_hides_its_outputs_is_held_in_planned_steps(name: str) -> None:
    torch.manual_seed(0)
    plain = ZOO[name]()
    module = copy.deepcopy(plain)
    store = PoisonStore(module.parameters())
    model = ZeroDDP(module, store, NothingAhead())
    for step in range(3):
        for each in (plain, model):
            default_loss(each, step).backward()
        for (key, param), other in zip(plain.named_parameters(), module.parameters(), strict=True):
            same_bits(store.gradient(other), param.grad, f"step {step}: {key}")
        assert_at_rest(store)


@pytest.mark.parametrize("name", ["Stack", "InPlaceOnOutputs", "OutputsInObjects", "Encoder", "Checkpointed"])
def test_scopes_whose_outputs_are_found_are_not_held(name: str) -> None:
    torch.manual_seed(0)
    module = ZOO[name]()
    model = ZeroDDP(module, PoisonStore(module.parameters()))
    for step in range(2):
        default_loss(model, step).backward()
    assert not any(scope.hides_outputs for scope in model._engine._scopes.values())


def test_evaluation_inside_a_step_interrupts_neither_recording_nor_plan() -> None:
    planner = OneAhead()
    torch.manual_seed(0)
    module = Chain()
    store = Counting(module.parameters())
    model = ZeroDDP(module, store, planner)
    for step in range(3):
        loss = default_loss(model, step)
        model.eval()
        with torch.no_grad():
            model(module.batch(step))
        model.train()
        store.events.clear()
        loss.backward()
    assert sorted(len(trace) for trace in planner.traces) == [4, 7]
    # The evaluation released the last chunk; then backward is one gather ahead.
    assert [index for event, index in store.events if event == "gather"] == [2, 1, 0]
    assert store.events.index(("gather", 1)) < store.events.index(("release", 2))
    assert model.deviations == 0
