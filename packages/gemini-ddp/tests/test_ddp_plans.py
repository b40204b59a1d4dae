"""Fetches that a plan asks for start where it says, and ranks whose plans differ are told before they follow them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ddp_checks import Counting, OneAhead, Plan, Step, assert_at_rest, default_loss
from test_ddp_models import ZOO
from test_ddp_schedule import Chain, Fixed

from gemini_ddp import ZeroDDP, ZeroDDPError
from gemini_ddp.interfaces import Trace
from gemini_ddp.testing import PlainChunk, PoisonStore
from ranks import run_ranks


class Fetching(Counting):
    """Writes down fetches, too."""

    def start_fetch(self, chunk: PlainChunk) -> None:
        self.events.append(("fetch", chunk.index))


class FetchTwoOn(Fixed):
    """Gathers on demand, and fetches at each access the chunk after the next one."""

    def schedule(self, trace: Trace[PlainChunk]) -> Plan:
        plan = super().schedule(trace)
        fetches = [(1,), (2,), (), (1,), (0,), (), ()]
        return Plan(
            tuple(
                Step(step.prefetch, step.release, tuple(self.chunks[index] for index in fetch))
                for step, fetch in zip(plan.steps, fetches, strict=True)
            )
        )


def fetching_chain(max_gathered: int | None = None) -> tuple[Chain, ZeroDDP[PlainChunk], Fetching]:
    torch.manual_seed(0)
    module = Chain()
    store = Fetching(module.parameters(), max_gathered=max_gathered)
    planner = FetchTwoOn([((0,), ()), ((), (0,)), ((), (1,)), ((), ()), ((), (2,)), ((), (1,)), ((), (0,))])
    planner.chunks = store.chunks
    model = ZeroDDP(module, store, planner)
    module.log = store.events
    default_loss(model, 0).backward()
    assert not any(event == "fetch" for event, _ in store.events), "the first step has no plan"
    store.events.clear()
    return module, model, store


def test_fetches_start_where_the_plan_says_after_the_gathers() -> None:
    _, model, store = fetching_chain()
    for step in range(2):
        store.events.clear()
        default_loss(model, step).backward()
        assert [event for event in store.events if event[0] != "release"] == [
            *[("gather", 0), ("fetch", 1), ("fetch", 2), ("run", 0)],
            *[("gather", 1), ("run", 1)],
            *[("gather", 2), ("fetch", 1), ("run", 2)],
            *[("fetch", 0), ("gather", 1), ("gather", 0)],
        ]
        assert_at_rest(store)
    assert model.deviations == 0


def test_a_step_that_leaves_the_plan_fetches_nothing_there_and_releases_no_fetched_chunk() -> None:
    module, model, store = fetching_chain()
    module.skip = 1
    loss = default_loss(model, 1)
    assert ("fetch", 1) in store.events
    assert ("release", 1) not in store.events, "it was fetched and not gathered: that is the store's affair"
    loss.backward()
    assert model.deviations > 0
    assert_at_rest(store)


def test_without_room_for_what_is_prefetched_nothing_is_fetched() -> None:
    _, model, store = fetching_chain()
    store._max_gathered = 0
    with pytest.raises(RuntimeError, match="no room"):
        default_loss(model, 1)
    assert not any(event == "fetch" for event, _ in store.events)


class Unlike(OneAhead):
    """Makes another plan on rank 1, or none at all."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def schedule(self, trace: Trace[PlainChunk]) -> Plan:
        plan = super().schedule(trace)
        if dist.get_rank() != 1:
            return plan
        if self._part == "error":
            raise KeyError("no such chunk")
        first, *others = plan.steps
        chunk = (*trace.accesses[1].chunks, *trace.accesses[-1].chunks)[:1]
        changed = {
            "prefetch": Step((), first.release),
            "release": Step(first.prefetch, chunk),
            "fetch": Step(first.prefetch, first.release, chunk),
        }
        return Plan((changed[self._part], *others))


def check_unlike_plans(rank: int, world_size: int) -> None:
    for part in ("prefetch", "release", "fetch", "error"):
        for mode in ("train", "eval"):
            torch.manual_seed(0)
            module = ZOO["Stack"]()
            group = dist.group.WORLD
            store = PoisonStore(module.parameters(), process_group=group)
            model = ZeroDDP(module, store, Unlike(part), process_group=group)
            own = part == "error" and rank == 1
            error, says = (KeyError, "no such chunk") if own else (ZeroDDPError, "plans .* differ")
            with pytest.raises(error, match=says):
                run(model, mode)


def run(model: ZeroDDP[PlainChunk], mode: str) -> None:
    model.train(mode == "train")
    with torch.set_grad_enabled(mode == "train"):
        loss = default_loss(model, 0)
        if mode == "train":
            loss.backward()


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_whose_plans_differ_all_raise_before_the_first_of_them_is_followed(world_size: int) -> None:
    run_ranks(check_unlike_plans, world_size)
