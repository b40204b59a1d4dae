"""The first training step of an automatic run is recorded, and tells what is left to model states."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP
from gemini_placement import AutoPlacementPolicy, MemStats, PlacementError
from gemini_placement.tracer import trace_model

SMALL: dict[str, Any] = {"min_chunk_size_m": 0.0005, "search_range_m": 0.0005, "hidden_dim": 16, "precision": "bf16"}
WIDTH = 32


class Chain(nn.Module):
    """Layers whose loss is made outside of them, by whoever calls it."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        if self.fails:
            raise ValueError("no batch")
        return x


class Passing(TorchDispatchMode):
    """A mode of the user's, which does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def batch(length: int = 8) -> Tensor:
    return torch.ones(length, WIDTH, dtype=torch.bfloat16)


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def step(model: GeminiDDP, optimizer: GeminiAdamOptimizer, length: int = 8) -> float:
    loss = loss_of(model(batch(length)))
    loss.backward()
    optimizer.step()
    return loss.item()


def modes() -> int:
    return int(torch._C._len_torch_dispatch_stack())


def test_what_is_recorded_is_what_a_run_on_paper_foretells_and_serves_another_process(tmp_path: Path) -> None:
    model = GeminiDDP(Chain(), placement_policy="auto", **SMALL)
    optimizer = GeminiAdamOptimizer(model)
    assert model.memstats is None
    step(model, optimizer)
    paper = trace_model(Chain(), [batch()], loss=loss_of, dtype=torch.bfloat16)  # type: ignore[arg-type] # a tensor
    assert model.memstats == paper
    assert modes() == 0
    model.memstats.save(tmp_path / "step.json")
    again = GeminiDDP(Chain(), memstats=MemStats.load(tmp_path / "step.json"), **SMALL)
    assert again.memstats == paper
    assert again.expected_plan is not None


def test_static_placement_records_nothing() -> None:
    model = GeminiDDP(Chain(), **SMALL)
    step(model, GeminiAdamOptimizer(model))
    assert model.memstats is None


def test_modes_of_the_user_are_left_in_order() -> None:
    model = GeminiDDP(Chain(), placement_policy="auto", **SMALL)
    optimizer = GeminiAdamOptimizer(model)
    with Passing() as mode:
        output = model(batch())
        assert torch._C._get_dispatch_stack_at(modes() - 1) is mode
    loss_of(output).backward()
    optimizer.step()
    assert modes() == 0
    assert model.memstats is not None


def test_a_step_that_fails_is_not_the_first() -> None:
    module = Chain()
    model = GeminiDDP(module, placement_policy="auto", **SMALL)
    optimizer = GeminiAdamOptimizer(model)
    module.fails = True
    with pytest.raises(ValueError, match="no batch"):
        model(batch())
    assert modes() == 0
    module.fails = False
    step(model, optimizer)
    paper = trace_model(Chain(), [batch()], loss=loss_of, dtype=torch.bfloat16)  # type: ignore[arg-type] # a tensor
    assert model.memstats == paper


def test_model_states_get_what_activations_leave_and_come_to_the_device() -> None:
    model = GeminiDDP(Chain(), placement_policy="auto", device_capacity=100_000, **SMALL)
    before = model.placement
    optimizer = GeminiAdamOptimizer(model, lr=1e-2)
    losses = [step(model, optimizer) for _ in range(4)]
    assert model.memstats is not None
    assert before.resting_bytes["host"] > model.placement.resting_bytes["host"] == 0
    assert model.memory_usage()["host"]["used"] == 0
    assert model.memory_usage()["device"]["capacity"] == 90_000 - model.memstats.max_non_model_bytes
    whole = GeminiDDP(Chain(), **SMALL)
    optimizer = GeminiAdamOptimizer(whole, lr=1e-2)
    assert losses == [step(whole, optimizer) for _ in range(4)]


def test_a_longer_batch_sends_parameters_away_for_its_activations() -> None:
    model = GeminiDDP(Chain(), placement_policy="auto", device_capacity=40_000, gpu_margin_mem_ratio=0.0, **SMALL)
    optimizer = GeminiAdamOptimizer(model)
    step(model, optimizer)
    step(model, optimizer)
    device = model.chunk_manager.tier("device")
    resting = model.placement.resting_bytes["device"]
    assert resting
    device.reset_peak()
    step(model, optimizer, 28)
    longer = trace_model(Chain(), [batch(28)], loss=loss_of, dtype=torch.bfloat16)  # type: ignore[arg-type] # a tensor
    assert device.peak + longer.max_non_model_bytes <= 40_000
    assert model.placement.resting_bytes["device"] < resting


def test_what_does_not_fit_beside_activations_is_refused_with_what_would() -> None:
    given: dict[str, Any] = {"placement_policy": "auto", **SMALL}
    model = GeminiDDP(Chain(), device_capacity=20_000, **given)
    with pytest.raises(PlacementError, match=r"The first step took [\d,]+ bytes beside them") as refused:
        loss_of(model(batch(40))).backward()
    enough = int(re.findall(r"give the device ([\d,]+) bytes", str(refused.value))[0].replace(",", ""))
    model = GeminiDDP(Chain(), device_capacity=enough, **given)
    step(model, GeminiAdamOptimizer(model), 40)
    stats = trace_model(Chain(), [batch(40)], loss=loss_of, dtype=torch.bfloat16)  # type: ignore[arg-type] # a tensor
    with pytest.raises(PlacementError, match=r"A step takes [\d,]+ bytes beside them"):
        GeminiDDP(Chain(), device_capacity=20_000, memstats=stats, **given)


@pytest.mark.parametrize("length", [60, 72])
def test_inputs_may_grow_and_shrink_with_the_settings_as_they_come(length: int) -> None:
    """What one rank placed on the device at first may leave it, too."""
    model = GeminiDDP(Chain(), placement_policy="auto", device_capacity=85_000, **SMALL)
    optimizer = GeminiAdamOptimizer(model, lr=1e-2)
    whole = GeminiDDP(Chain(), **SMALL)
    wanted = GeminiAdamOptimizer(whole, lr=1e-2)
    for each in (8, 8, 60, 8, length):
        assert step(model, optimizer, each) == step(whole, wanted, each)
    assert {shard.states_tier for shard in model.shards} == {"host"}, "states leave first"
    assert {chunk.tier for chunk in model.chunk_manager.chunks} == {"device" if length == 60 else "host"}


def test_what_cannot_leave_the_device_is_not_tried_again_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    evictions = 0
    evict = AutoPlacementPolicy.evict

    def counting(*args: Any, **settings: Any) -> Any:
        nonlocal evictions
        evictions += 1
        return evict(*args, **settings)

    monkeypatch.setattr(AutoPlacementPolicy, "evict", counting)
    model = GeminiDDP(Chain(), placement_policy="auto", device_capacity=40_000, **SMALL)
    optimizer = GeminiAdamOptimizer(model)
    found = []
    for length in (8, 8, 90, 90, 100, 8, 90):
        step(model, optimizer, length)
        found.append(evictions)
    assert found[1] < found[2], "it makes room for a longer batch"
    assert found[2] == found[-1], "there is no more to be made"


def test_where_less_memory_trains_more_does(caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, Any] = {"placement_policy": "auto", **SMALL}
    for capacity in range(24_000, 130_000, 2_000):
        model = GeminiDDP(Chain(), device_capacity=capacity, **given)
        optimizer = GeminiAdamOptimizer(model)
        for _ in range(3):
            step(model, optimizer)
        assert model.memory_usage()["device"]["peak"] <= capacity  # type: ignore[operator] # it is a number
    assert not caplog.records


def test_no_mode_outlives_its_model_or_hinders_another_s_record() -> None:
    given: dict[str, Any] = {"placement_policy": "auto", **SMALL}

    def recorded(model: GeminiDDP) -> int:
        step(model, GeminiAdamOptimizer(model), 40)
        assert model.memstats is not None
        return model.memstats.max_non_model_bytes

    alone = recorded(GeminiDDP(Chain(), **given))
    model = GeminiDDP(Chain(), **given)
    model(batch())
    assert modes() == 1, "a step is under way"
    del model
    gc.collect()
    assert modes() == 0
    refused = GeminiDDP(Chain(), device_capacity=20_000, **given)
    with pytest.raises(PlacementError):
        loss_of(refused(batch(40))).backward()
    assert recorded(GeminiDDP(Chain(), **given)) == alone, "though the refused one is still there"
    assert modes() == 0


def test_a_backward_that_fails_is_not_in_the_record() -> None:
    model = GeminiDDP(Chain(), placement_policy="auto", **SMALL)
    optimizer = GeminiAdamOptimizer(model)
    handle = model.unwrap().layers[1].register_full_backward_hook(_fail)  # type: ignore[index,union-attr] # a list
    with pytest.raises(ValueError, match="no gradient"):
        loss_of(model(batch())).backward()
    handle.remove()
    step(model, optimizer)
    paper = trace_model(Chain(), [batch()], loss=loss_of, dtype=torch.bfloat16)  # type: ignore[arg-type] # a tensor
    assert model.memstats is not None
    assert len(model.memstats.accesses) == len(paper.accesses)


def _fail(*_: object) -> None:
    raise ValueError("no gradient")
