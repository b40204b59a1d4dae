"""GeminiDDP on a small module: what it tells, what it keeps of the module, and what it gives every rank."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP
from gemini_lazy import LazyInitContext
from gemini_placement import AccessStats, MemStats
from gemini_search import search_chunk_configuration
from ranks import run_ranks

SMALL: dict[str, Any] = {"min_chunk_size_m": 0.0005, "search_range_m": 0.0005, "hidden_dim": 16}


class Net(nn.Module):
    """Three layers, a frozen one among them, and buffers of unlike dtypes."""

    depth = 3

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 40)
        self.middle = nn.Linear(40, 40)
        self.last = nn.Linear(40, 3)
        self.middle.requires_grad_(False)
        self.register_buffer("scale", torch.rand(3, dtype=torch.float64))
        self.register_buffer("mask", torch.rand(3) > 0.5)
        self.register_buffer("phase", torch.randn(2, 3, dtype=torch.complex64).t())
        self.register_buffer("count", torch.randint(1000, ()))
        self.register_buffer("grid", torch.rand(3).expand(2, 3))
        self.register_buffer("none", torch.empty(0))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.last(self.middle(self.first(inputs).tanh()).tanh())
        return hidden


def net(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net()


def data(rank: int = 0) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(rank))


def train(model: GeminiDDP, rank: int, steps: int = 3) -> list[float]:
    optimizer = GeminiAdamOptimizer(model, lr=1e-2, initial_scale=2**5)
    losses = []
    for _ in range(steps):
        loss = model(data(rank)).float().square().mean()
        losses.append(loss.item())
        optimizer.backward(loss)
        optimizer.step()
    return losses


def check_face(rank: int, world_size: int) -> None:
    module = net()
    names, modes = [name for name, _ in module.named_parameters()], module.training
    model = GeminiDDP(module, precision="fp32", **SMALL)
    assert model.unwrap() is module
    assert [name for name, _ in model.named_parameters()] == names
    assert model.training == modes
    assert model.depth == 3  # attributes are the module's
    assert all(type(param) is nn.Parameter for param in model.parameters())
    usage = model.memory_usage()
    assert set(usage) == {"device", "host"}
    for tier in usage.values():
        assert set(tier) == {"used", "peak", "capacity"}
        assert isinstance(tier["used"], int)
        assert isinstance(tier["peak"], int)
        assert 0 <= tier["used"] <= tier["peak"]
        assert tier["capacity"] is None
    losses = train(model, rank)
    assert losses[-1] < losses[0]
    assert torch.equal(model.state_dict()["middle.weight"], net().middle.weight)  # frozen
    assert len(model.plans) == 1
    assert model.deviations == 0
    with torch.no_grad():
        model.eval()(data(rank))
    assert len(model.plans) == 2  # one for each mode
    if world_size > 1:
        assert model.process_group is dist.group.WORLD
        assert not any(chunk.is_gathered for chunk in model.chunk_manager.chunks)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_wrapped_module_keeps_its_face_and_tells_of_its_memory(world_size: int) -> None:
    run_ranks(check_face, world_size)


def check_rank_0s_values(rank: int, world_size: int) -> None:
    wanted = net(seed=0).state_dict()
    for lazy in (False, True):
        if lazy:
            with LazyInitContext():
                module = net(seed=rank)
        else:
            module = net(seed=rank)
        state = GeminiDDP(module, precision="fp32", **SMALL).state_dict()
        assert state.keys() == wanted.keys()
        for name, value in wanted.items():
            assert state[name].dtype == value.dtype
            assert torch.equal(state[name], value), name


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_gets_the_parameters_and_buffers_of_rank_0(world_size: int) -> None:
    run_ranks(check_rank_0s_values, world_size)


def check_groups(rank: int, world_size: int) -> None:
    """Two models of two ranks each, in a world of four."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = groups[rank // 2]
    wanted = net(seed=rank // 2 * 2).state_dict()
    model = GeminiDDP(net(seed=rank), precision="fp32", process_group=own, **SMALL)
    assert model.process_group is own
    assert torch.equal(model.state_dict()["first.weight"], wanted["first.weight"])
    losses = train(model, rank % 2)
    everyones: list[Any] = [None] * world_size
    dist.all_gather_object(everyones, losses)
    assert everyones[0] != everyones[2]
    alone = dist.new_group([rank], use_local_synchronization=True)
    single = GeminiDDP(net(seed=rank), precision="fp32", process_group=alone, **SMALL)
    assert single.process_group is None
    assert torch.equal(single.state_dict()["first.weight"], net(seed=rank).first.weight)
    train(single, rank)


@pytest.mark.distributed
def test_models_of_other_groups_do_not_meet() -> None:
    run_ranks(check_groups, 4)


@pytest.mark.parametrize("verbose", [False, True])
def test_verbose_logs_packing_and_placement(verbose: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gemini_booster"):
        GeminiDDP(net(), precision="bf16", offload_optim_frac=1.0, verbose=verbose, **SMALL)
    if not verbose:
        assert not caplog.records
        return
    (record,) = caplog.records
    assert record.name == "gemini_booster"
    text = record.getMessage()
    assert "first.weight" in text
    assert "frozen" in text
    assert "host" in text
    assert "bytes with the working set" in text


def test_master_values_are_exact_or_cast() -> None:
    source = {name: param.detach().clone() for name, param in net().named_parameters()}
    model = GeminiDDP(net(), precision="bf16", **SMALL)
    exact = dict(model.named_master_values(torch.float32))
    assert list(exact) == list(model.unwrap().state_dict())
    for name, value in source.items():
        frozen = name.startswith("middle")
        assert exact[name].dtype == torch.float32
        assert torch.equal(exact[name], value.bfloat16().float() if frozen else value)
    assert exact["scale"].dtype == torch.float64
    assert all(
        value.dtype == torch.float16 for name, value in model.named_master_values(torch.float16) if name in source
    )


def test_a_given_configuration_and_a_given_trace_decide_the_packing() -> None:
    sizes = {name: param.numel() for name, param in net().named_parameters() if param.requires_grad}
    configuration = search_chunk_configuration(sizes, 1, hidden_dim=1, min_chunk_size_m=0, search_range_m=0)
    for wrong in ({**sizes, "nonesuch": 3}, dict(list(sizes.items())[1:])):
        other = search_chunk_configuration(wrong, 1, hidden_dim=1, min_chunk_size_m=0, search_range_m=0)
        with pytest.raises(ValueError, match="must place each trainable parameter"):
            GeminiDDP(net(), precision="fp32", chunk_configuration=other)
    model = GeminiDDP(net(), precision="fp32", chunk_configuration=configuration)
    trainable = [chunk for chunk in model.chunk_manager.chunks if chunk.trainable]
    assert [[info.name for info in chunk.tensors] for chunk in trainable] == [
        [slot.name for slot in chunk.tensors] for chunk in configuration.chunks
    ]
    order = ("last.weight", "last.bias", "first.bias", "first.weight")
    stats = MemStats(accesses=(AccessStats(phase="forward", params=order, non_model_bytes=0),))
    model = GeminiDDP(net(), precision="fp32", memstats=stats, **SMALL)
    packed = [info.name for chunk in model.chunk_manager.chunks if chunk.trainable for info in chunk.tensors]
    assert tuple(packed) == order


def test_outputs_may_be_cast_to_fp32() -> None:
    model = GeminiDDP(net(), precision="bf16", force_outputs_fp32=True, **SMALL)
    assert model(data()).dtype == torch.float32


def test_bytes_rest_where_the_settings_say(tmp_path: Path) -> None:
    numel = sum(param.numel() for param in net().parameters() if param.requires_grad)
    frozen = sum(param.numel() for param in net().parameters() if not param.requires_grad)
    model = GeminiDDP(net(), precision="bf16", offload_optim_frac=1.0, offload_param_frac=1.0, **SMALL)
    usage = model.memory_usage()
    assert usage["device"]["used"] == 0
    assert usage["host"]["used"] == pytest.approx(6 * numel + 2 * frozen, abs=64)
    on_disk = GeminiDDP(
        net(),
        precision="bf16",
        placement_policy="auto",
        device_capacity="10kB",
        host_capacity=2000,
        offload_directory=str(tmp_path),
        **SMALL,
    )
    train(on_disk, 0)
    usage = on_disk.memory_usage()
    assert set(usage) == {"device", "host", "disk"}
    assert usage["disk"]["used"]
    # What the activations of the first step left of nine tenths of it.
    assert on_disk.memstats is not None
    assert usage["device"]["capacity"] == 9_000 - on_disk.memstats.max_non_model_bytes


def test_a_deleted_model_is_freed() -> None:
    module = net()
    model = GeminiDDP(module, precision="fp32", **SMALL)
    train(model, 0)
    references: list[weakref.ref[Any]] = [weakref.ref(model), weakref.ref(module), weakref.ref(model.chunk_manager)]
    del model, module
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
