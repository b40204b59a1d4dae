"""A reduced gradient and new weights go to where a chunk rests in the background, and nobody meets them half-way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from chunk_board import Board
from torch import nn

from gemini_chunk import (
    Chunk,
    ChunkError,
    ChunkManager,
    Collectives,
    LocalCollectives,
    ProcessGroupCollectives,
    device_tier,
    host_tier,
)
from gemini_chunk.testing import CountingCollectives, FailingCopier, LateCopier
from ranks import run_ranks

NUMEL = 12
WORLDS = [1, 2]


def managers(world_size: int, *, dtype: torch.dtype = torch.float32, count: int = 1) -> list[ChunkManager]:
    """Return the ranks' managers with chunks of one parameter on the host; masters make 16 bits give their place."""
    ranks: list[Collectives] = list(Board(world_size).ranks) if world_size > 1 else [LocalCollectives()]
    made = []
    for rank in ranks:
        manager = ChunkManager(device=device_tier("cpu"), host=host_tier(), collectives=rank)
        for index in range(count):
            param = nn.Parameter(torch.arange(1.0, NUMEL + 1).to(dtype))
            manager.register(
                [(f"p{index}", param)],
                NUMEL,
                rest="host",
                master=None if dtype is torch.float32 else "host",
                synchronise=None,
            )
        manager.tier("host").incoming = LateCopier()
        made.append(manager)
    return made


def start_reductions(ranks: list[ChunkManager], index: int = 0) -> None:
    for manager in ranks:
        param = manager.chunks[index].tensors[0].tensor
        manager.take_gradient(param, torch.full((NUMEL,), 2.0))
    for manager in ranks:
        manager.start_reduce(manager.chunks[index])


def copier(manager: ChunkManager) -> LateCopier:
    incoming = manager.tier("host").incoming
    assert isinstance(incoming, LateCopier)
    return incoming


def assert_gradient(chunk: Chunk) -> None:
    assert chunk.gradient is not None
    assert torch.equal(chunk.gradient.float(), torch.full((chunk.shard_numel,), 2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_waited_for_by_who_reads_it_and_its_buffer_comes_back_then(dtype: torch.dtype) -> None:
    (manager,) = managers(1, dtype=dtype)
    chunk, device = manager.chunks[0], manager.tier("device")
    start_reductions([manager])
    assert (copier(manager).open, device.used) == (1, NUMEL * dtype.itemsize)
    chunk.wait_reduce()
    assert copier(manager).open == 1, "the collective is over, its result on its way"
    assert_gradient(chunk)
    assert (copier(manager).open, copier(manager).faults) == (0, [])
    manager.rest()
    assert device.used == 0


def test_of_several_ranks_the_shard_of_the_sum_is_carried() -> None:
    ranks = managers(2)
    start_reductions(ranks)
    for manager in ranks:
        manager.chunks[0].wait_reduce()
        assert copier(manager).open == 1
        assert_gradient(manager.chunks[0])
        manager.rest()
        assert (manager.tier("device").used, copier(manager).faults) == (0, [])


def test_the_next_chunk_waits_for_the_buffer_rather_than_take_another() -> None:
    (manager,) = managers(1, count=3)
    device = manager.tier("device")
    for index in range(3):
        start_reductions([manager], index)
        assert (copier(manager).open, device.peak) == (1, 4 * NUMEL)
    manager.finish_backward()
    assert (copier(manager).open, copier(manager).faults, device.used) == (0, [], 0)
    for chunk in manager:
        assert_gradient(chunk)


def refused_move(chunk: Chunk) -> None:
    with pytest.raises(ChunkError, match="holds a gradient"):
        chunk.move(chunk._device)


AFTERWARDS: dict[str, Callable[[Chunk], object]] = {
    "gather": lambda chunk: chunk.gather(),
    "commit": lambda chunk: chunk.commit(),
    "discard": lambda chunk: chunk.discard(),
    "reset": lambda chunk: chunk.reset(),
    "read": lambda chunk: chunk.read(chunk.tensors[0]),
    "free": lambda chunk: chunk.free(),
    "move": refused_move,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", AFTERWARDS)
def test_whatever_comes_while_a_gradient_is_on_its_way_finds_it_there(name: str, dtype: torch.dtype) -> None:
    (manager,) = managers(1, dtype=dtype)
    (chunk,) = manager.chunks
    start_reductions([manager])
    AFTERWARDS[name](chunk)
    assert copier(manager).faults == []
    if name == "free":
        return
    manager.gather(chunk)
    assert torch.equal(chunk.tensors[0].tensor.float(), torch.arange(1.0, NUMEL + 1))
    if name in ("commit", "discard", "reset"):
        assert chunk.gradient is None
    else:
        assert_gradient(chunk)
    manager.reset()
    assert (manager.tier("device").used, copier(manager).open, copier(manager).faults) == (0, 0, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("when", ["start", "wait"])
def test_a_gradient_that_cannot_be_carried_is_dropped_and_the_parameters_stay(
    when: Literal["start", "wait"], dtype: torch.dtype
) -> None:
    (manager,) = managers(1, dtype=dtype)
    (chunk,) = manager.chunks
    at_rest = {name: tier.used for name, tier in manager.tiers.items()}
    manager.tier("host").incoming = FailingCopier({0}, when=when)
    backward = lambda: (start_reductions([manager]), manager.finish_backward())  # noqa: E731
    with pytest.raises(ChunkError, match="Carrying the gradient of chunk 0 to the host tier failed: a copy of 12"):
        backward()
    manager.reset()
    assert {name: tier.used for name, tier in manager.tiers.items()} == at_rest
    assert chunk.gradient is None
    backward()
    assert_gradient(chunk)
    chunk.discard()
    manager.gather(chunk)
    assert torch.equal(chunk.tensors[0].tensor.float(), torch.arange(1.0, NUMEL + 1))


NEEDS_THE_SHARD: dict[str, Callable[[Chunk], object]] = {
    "shard": lambda chunk: chunk.shard,
    "master": lambda chunk: chunk.master,
    "start_fetch": lambda chunk: chunk.start_fetch(),
    "start_gather": lambda chunk: chunk.start_gather(),
    "read": lambda chunk: chunk.read(chunk.tensors[0]),
    "move": lambda chunk: chunk.move(host_tier()),
    "discard": lambda chunk: chunk.discard(),
    "reset": lambda chunk: chunk.reset(),
    "commit": lambda chunk: chunk.commit(),
}


@pytest.mark.parametrize("name", NEEDS_THE_SHARD)
def test_new_weights_are_taken_over_before_the_shard_is_needed_or_changed_again(name: str) -> None:
    (manager,) = managers(1, dtype=torch.bfloat16)
    (chunk,) = manager.chunks
    assert chunk.master is not None
    chunk.master.mul_(2)
    handle = chunk.start_commit()
    assert (copier(manager).open, chunk.gradient, chunk.generation) == (1, None, 1)
    NEEDS_THE_SHARD[name](chunk)
    assert (copier(manager).open, copier(manager).faults) == (0, [])
    handle.wait()
    manager.gather(chunk)
    assert torch.equal(chunk.tensors[0].tensor.float(), 2 * torch.arange(1.0, NUMEL + 1))


def test_new_weights_go_to_the_device_by_the_copier_of_the_tier_they_rest_on() -> None:
    manager = ChunkManager(device=device_tier("cpu"), collectives=Board(2).ranks[0])
    param = nn.Parameter(torch.ones(NUMEL))
    (chunk,) = manager.register([("p", param)], NUMEL, master="host", synchronise=None)
    manager.tier("host").outgoing = late = LateCopier()
    assert chunk.master is not None
    chunk.master.fill_(3.0)
    chunk.start_commit()
    assert late.open == 1
    assert torch.equal(chunk.shard, torch.full((NUMEL // 2,), 3.0))


@pytest.mark.parametrize("when", ["start", "wait"])
def test_new_weights_that_could_not_be_written_are_written_when_they_are_needed(
    when: Literal["start", "wait"],
) -> None:
    (manager,) = managers(1, dtype=torch.bfloat16)
    (chunk,) = manager.chunks
    manager.tier("host").incoming = FailingCopier({0, 1}, when=when)
    assert chunk.master is not None
    chunk.master.mul_(2)
    handle = chunk.start_commit()
    with pytest.raises(ChunkError, match="into chunk 0, which rests on the host tier, failed: a copy of 12"):
        handle.wait()
    if when == "wait":
        with pytest.raises(ChunkError, match="Taking new weights over"):
            manager.gather(chunk)
    manager.gather(chunk)
    assert torch.equal(chunk.tensors[0].tensor.float(), 2 * torch.arange(1.0, NUMEL + 1))


def check_training(rank: int, world_size: int) -> None:
    found = []
    for late in (False, True):
        collectives = CountingCollectives(ProcessGroupCollectives() if world_size > 1 else LocalCollectives())
        manager = ChunkManager(device=device_tier("cpu"), collectives=collectives, debug=True)
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(NUMEL + index)) for index in range(4)]
        chunks = manager.register([(str(index), param) for index, param in enumerate(params)], 17, rest="host")
        host = manager.tier("host")
        if late:
            host.incoming, host.outgoing = LateCopier(), LateCopier()
        for step in range(3):
            for _ in range(2):  # backwards add up
                for param in reversed(params):
                    manager.begin_use([param])
                    manager.take_gradient(param, param.detach() * (rank + step))
                    manager.end_use([param], in_backward=True)
                    manager.start_reduce(param)
                manager.finish_backward()
            for chunk in chunks:
                assert chunk.master is not None
                assert chunk.gradient is not None
                chunk.master.sub_(chunk.gradient, alpha=0.1)
                chunk.start_commit()
        if isinstance(host.incoming, LateCopier) and isinstance(host.outgoing, LateCopier):
            assert host.incoming.faults == host.outgoing.faults == []
        found.append([manager.full_value(param) for param in params])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_with_late_copies_is_the_same_bit_for_bit(world_size: int) -> None:
    run_ranks(check_training, world_size)
