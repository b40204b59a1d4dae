"""A shard comes to the device ahead of its gather, alone and in the background, and nothing is lost on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from chunk_board import Board
from torch import Tensor, nn

from gemini_chunk import (
    BackgroundCopier,
    Chunk,
    ChunkError,
    ChunkManager,
    Collectives,
    Handle,
    LocalCollectives,
    ProcessGroupCollectives,
    TierFullError,
    device_tier,
    disk_tier,
    host_tier,
)
from gemini_chunk.testing import CountingCollectives, FailingCopier, LateCopier
from ranks import run_ranks

NUMEL = 18
BYTES = 4 * NUMEL


def values() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, generator=generator) for _ in range(3)]


def chunk_on_host(
    copier: LateCopier | FailingCopier | None = None,
    *,
    collectives: Collectives | None = None,
    capacity: int | None = None,
) -> Chunk:
    device, host = device_tier("cpu", capacity), host_tier()
    host.outgoing = copier or BackgroundCopier()
    chunk = Chunk(NUMEL, torch.float32, device=device, collectives=collectives)
    for value in values():
        chunk.append(nn.Parameter(value))
    chunk.close(host, synchronise=None)
    return chunk


def device_bytes(chunk: Chunk) -> int:
    return chunk._device.used


def assert_values(chunk: Chunk) -> None:
    assert all(torch.equal(info.tensor, value) for info, value in zip(chunk.tensors, values(), strict=True))


def test_a_fetched_chunk_is_gathered_without_another_copy_and_without_more_memory() -> None:
    copier = LateCopier()
    chunk = chunk_on_host(copier)
    chunk.start_fetch()
    assert (chunk.is_fetched, chunk.is_gathered, device_bytes(chunk)) == (True, False, BYTES)
    chunk.start_fetch()
    assert all(torch.isnan(info.tensor).all() for info in chunk.tensors)
    assert chunk.missing_bytes == 0, "a single rank fetches straight into the full buffer"
    handle = chunk.start_gather()
    assert (copier.started, copier.open, chunk.is_fetched) == (1, 1, False), "a gather of one rank waits for nothing"
    handle.wait()
    assert_values(chunk)
    assert (copier.started, chunk.gathers, device_bytes(chunk)) == (1, 1, BYTES)
    assert chunk._device.received == {"host": BYTES}


def test_several_ranks_fetch_their_shards_and_gather_in_collectives_alone() -> None:
    board = Board(3)
    copiers = [LateCopier() for _ in range(3)]
    chunks = [chunk_on_host(copier, collectives=rank) for copier, rank in zip(copiers, board.ranks, strict=True)]
    for chunk in chunks[:2]:  # a fetch is each rank's own affair
        chunk.start_fetch()
        assert (device_bytes(chunk), chunk.missing_bytes) == (BYTES // 3, BYTES)
    assert board.operations == []
    handles = [chunk.start_gather() for chunk in chunks]
    assert [copier.open for copier in copiers] == [0, 0, 0], "the collective reads what was fetched"
    assert [device_bytes(chunk) for chunk in chunks] == [BYTES] * 3, "nothing of the fetch is left"
    for chunk, handle in zip(chunks, handles, strict=True):
        handle.wait()
        assert_values(chunk)
    assert [copier.started for copier in copiers] == [1, 1, 1]
    assert all(copier.faults == [] for copier in copiers)


def test_what_is_there_or_rests_on_the_device_is_not_fetched() -> None:
    copier = LateCopier()
    chunk = chunk_on_host(copier)
    chunk.gather()
    chunk.start_fetch().wait()
    assert (copier.started, chunk.can_fetch) == (1, False)
    chunk.release()
    assert chunk.can_fetch
    chunk.move(chunk._device)
    chunk.start_fetch().wait()
    assert not chunk.is_fetched


AFTERWARDS: dict[str, Callable[[Chunk], object]] = {
    "release": lambda chunk: chunk.release(),
    "move": lambda chunk: chunk.move(host_tier()),
    "move to the device": lambda chunk: chunk.move(chunk._device),
    "commit": lambda chunk: chunk.commit(),
    "load": lambda chunk: chunk.load(chunk.tensors[0], values()[0]),
    "reset": lambda chunk: chunk.reset(),
    "discard": lambda chunk: chunk.discard(),
    "forget_fetched": lambda chunk: chunk.forget_fetched(),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", AFTERWARDS)
def test_whatever_may_change_the_shard_gives_back_what_was_fetched(name: str, world_size: int) -> None:
    copiers = [LateCopier() for _ in range(world_size)]
    ranks = Board(world_size).ranks if world_size > 1 else [LocalCollectives()]
    chunks = [chunk_on_host(copier, collectives=rank) for copier, rank in zip(copiers, ranks, strict=True)]
    for chunk, copier in zip(chunks, copiers, strict=True):
        handle = chunk.start_fetch()
        AFTERWARDS[name](chunk)
        assert (copier.open, copier.faults, chunk.is_fetched) == (0, [], False)
        handle.wait()  # over already: nothing happens
        rests_there = chunk.rest is chunk._device
        assert device_bytes(chunk) == (BYTES // world_size if rests_there else 0)
    for handle in [chunk.start_gather() for chunk in chunks]:
        handle.wait()
    for chunk in chunks:
        assert_values(chunk)
        chunk.free()
        assert device_bytes(chunk) == 0


@pytest.mark.parametrize("name", ["read", "local_value"])
def test_reading_one_tensor_leaves_a_fetch_alone(name: str) -> None:
    copier = LateCopier()
    chunk = chunk_on_host(copier)
    chunk.start_fetch()
    assert torch.equal(getattr(chunk, name)(chunk.tensors[1]), values()[1])
    assert (chunk.is_fetched, copier.open) == (True, 1)


def test_a_chunk_freed_while_it_is_fetched_leaves_no_byte() -> None:
    copier = LateCopier()
    chunk = chunk_on_host(copier)
    host = chunk.rest
    chunk.start_fetch()
    chunk.free()
    assert (device_bytes(chunk), host.used, copier.open, copier.faults) == (0, 0, 0, [])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("when", ["start", "wait"])
def test_a_failed_fetch_is_raised_where_it_is_waited_for_and_leaves_the_chunk_at_rest(
    when: Literal["start", "wait"], world_size: int
) -> None:
    failing = FailingCopier((), when=when)
    collectives = Board(2).ranks[0] if world_size == 2 else LocalCollectives()
    chunk = chunk_on_host(failing, collectives=collectives)

    def fails(what: str, call: Callable[[], object]) -> None:
        with pytest.raises(ChunkError, match=f"{what} chunk 0 failed on rank 0: a copy of .* was told to fail"):
            call()
        assert (device_bytes(chunk), chunk.is_fetched, chunk.is_gathered) == (0, False, False)
        assert all(torch.isnan(info.tensor).all() for info in chunk.tensors)

    failing.at = range(2)
    fails("Fetching", lambda: chunk.start_fetch().wait())
    fails("Gathering", chunk.gather)  # which has to fetch
    if when == "wait":
        failing.at = range(2, 4)
        chunk.start_fetch()
        fails("Gathering", chunk.gather)  # which uses what was fetched
        chunk.start_fetch()
        chunk.release()  # nobody needs what the failed fetch would have brought
        assert (device_bytes(chunk), chunk.is_fetched) == (0, False)
    if world_size == 1:
        chunk.start_fetch()
        chunk.gather()
        assert_values(chunk)
        assert device_bytes(chunk) == BYTES


def test_a_move_that_fails_leaves_the_shard_where_it_was() -> None:
    chunk = chunk_on_host()
    other = host_tier()
    other.incoming = FailingCopier({0})
    handle = chunk.start_move(other)
    with pytest.raises(ChunkError, match="Moving chunk 0 to the host tier failed: a copy of 18"):
        handle.wait()
    assert other.used == 0
    chunk.gather()
    assert_values(chunk)


def test_a_full_device_is_told_by_the_chunk_and_passed_over_by_the_manager() -> None:
    chunk = chunk_on_host(capacity=BYTES - 1)
    with pytest.raises(TierFullError, match="chunk 0 full buffer"):
        chunk.start_fetch()
    assert (device_bytes(chunk), chunk.is_fetched) == (0, False)
    manager = ChunkManager(device=device_tier("cpu", 47))
    tensors = [(str(index), nn.Parameter(value)) for index, value in enumerate(values())]
    first, second, third = manager.register(tensors, 6, rest="host")
    manager.start_fetch(first)
    manager.start_fetch(second).wait()
    assert (first.is_fetched, second.is_fetched) == (True, False)
    manager.gather(third)  # what was only fetched makes way
    assert (first.is_fetched, third.is_gathered) == (False, True)


def test_fetches_make_way_before_a_device_is_said_to_be_full() -> None:
    manager = ChunkManager(device=device_tier("cpu", 3 * 24))
    tensors = [(str(index), nn.Parameter(torch.zeros(6))) for index in range(5)]
    chunks = manager.register(tensors, 6, rest="host")
    for chunk in chunks[:3]:
        manager.start_fetch(tensors[chunks.index(chunk)][1])
    assert manager.has_room(chunks[:3])
    assert [chunk.is_fetched for chunk in chunks] == [True, True, True, False, False]
    assert manager.has_room(chunks[2:5])
    assert [chunk.is_fetched for chunk in chunks] == [False, False, True, False, False]
    assert not manager.has_room(chunks)
    manager.rest()
    assert manager.tiers["device"].used == 0


def test_a_gradient_in_the_place_of_the_parameters_is_never_fetched() -> None:
    manager = ChunkManager(device=device_tier("cpu"))
    params = [nn.Parameter(torch.ones(6, dtype=torch.bfloat16))]
    (chunk,) = manager.register([("p", params[0])], 6, rest="host", master="host")
    manager.start_fetch(chunk)
    manager.take_gradient(params[0], torch.full((6,), 2.0))
    manager.finish_backward()
    assert chunk.gradient is chunk.shard
    manager.start_fetch(chunk)
    assert not chunk.is_fetched
    manager.gather(chunk)
    assert torch.equal(params[0], torch.ones(6, dtype=torch.bfloat16))


def test_copies_are_made_in_another_thread_and_in_order(tmp_path: Path) -> None:
    class Noting(BackgroundCopier):
        def __init__(self) -> None:
            super().__init__()
            self.go = threading.Event()
            self.copied: list[tuple[str, int]] = []

        def copy(self, target: Tensor, source: Tensor) -> None:
            assert self.go.wait(60)
            super().copy(target, source)
            self.copied.append((threading.current_thread().name, source.numel()))

    disk = disk_tier(tmp_path)
    disk.outgoing = noting = Noting()
    manager = ChunkManager(device=device_tier("cpu"), disk=disk)
    tensors = [(str(numel), nn.Parameter(torch.randn(numel))) for numel in (300, 100, 200)]
    wanted = [param.detach().clone() for _, param in tensors]
    chunks = [manager.register([entry], entry[1].numel(), rest="disk")[0] for entry in tensors]
    handles: list[Handle] = [manager.start_fetch(chunk) for chunk in chunks]
    assert noting.copied == [], "who starts a fetch goes on at once"
    noting.go.set()
    for handle in handles:
        handle.wait()
    assert [numel for _, numel in noting.copied] == [300, 100, 200]
    assert all(name.startswith("gemini_chunk") for name, _ in noting.copied)
    for (_, param), value in zip(tensors, wanted, strict=True):
        manager.gather(param)
        assert torch.equal(param, value)


def check_steps(rank: int, world_size: int, folder: str) -> None:
    results = []
    for rest in ("host", "disk"):
        for ahead in (0, 1, 3):
            counting = CountingCollectives(ProcessGroupCollectives() if world_size > 1 else LocalCollectives())
            manager = ChunkManager(device=device_tier("cpu"), disk=disk_tier(folder), collectives=counting)
            torch.manual_seed(0)
            params = [nn.Parameter(torch.randn(50, dtype=torch.bfloat16)) for _ in range(6)]
            chunks = manager.register(
                [(str(index), param) for index, param in enumerate(params)], 51, rest=rest, master=rest
            )  # type: ignore[call-overload] # a tier by name
            for step in range(3):
                for place, (chunk, param) in enumerate(zip(chunks, params, strict=True)):
                    manager.begin_use([param])
                    for following in chunks[place + 1 : place + 1 + ahead]:
                        manager.start_fetch(following)
                    manager.take_gradient(param, param.detach() * (rank + step + 1))
                    manager.end_use([param], in_backward=True)
                    manager.start_reduce(chunk)
                manager.finish_backward()
                for chunk in chunks:
                    assert chunk.master is not None
                    assert chunk.gradient is not None
                    chunk.master.sub_(chunk.gradient.float(), alpha=0.1)
                    chunk.commit()
            assert manager.tiers["device"].used == 0
            results.append(
                ([manager.full_value(param) for param in params], counting.calls, manager.traffic()["ranks"])
            )
    for found, calls, sent in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0][0], strict=True))
        assert (calls, sent) == results[0][1:], "fetches change no collective"


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_steps_with_fetches_are_the_same_bit_for_bit(world_size: int, tmp_path: Path) -> None:
    run_ranks(check_steps, world_size, str(tmp_path))
