"""The collectives of a process group: every value arrives, and sums have the same bits whatever their size and way."""

import itertools

import pytest
import torch
from torch import Tensor

from gemini_chunk import ProcessGroupCollectives
from ranks import run_ranks

WORLDS = [2, 3, 4]
# Elements of a shard: one, an odd number, and sizes on both sides of what travels in one operation of gloo's.
NUMELS = [1, 37, 2**12, 2**16 + 3]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return (torch.randn(numel, generator=generator) * 10 ** torch.randn(numel, generator=generator)).to(dtype)


def sum_in_rank_order(terms: list[Tensor]) -> Tensor:
    dtype = terms[0].dtype
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    total = terms[0].to(wide)
    for term in terms[1:]:
        total = total + term.to(wide)
    return total.to(dtype)


def check_gather(rank: int, world_size: int, in_place: bool) -> None:
    collectives = ProcessGroupCollectives()
    for numel, dtype in itertools.product(NUMELS, [*DTYPES, torch.int64, torch.bool]):
        full = torch.zeros(world_size * numel, dtype=dtype)
        shard = full[rank * numel : (rank + 1) * numel] if in_place else torch.empty(numel, dtype=dtype)
        shard.copy_(values(rank, numel, torch.float32).to(dtype))
        collectives.all_gather(full, shard).wait()
        wanted = torch.cat([values(other, numel, torch.float32).to(dtype) for other in range(world_size)])
        assert torch.equal(full, wanted), (numel, dtype)


@pytest.mark.distributed
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_rank_gets_every_shard(world_size: int, in_place: bool) -> None:
    run_ranks(check_gather, world_size, in_place)


def check_sums(rank: int, world_size: int) -> None:
    collectives = ProcessGroupCollectives()
    for numel, dtype in itertools.product(NUMELS, DTYPES):
        every = [values(other, world_size * numel, dtype) for other in range(world_size)]
        full = every[rank].clone()
        shard = torch.full((numel,), float("nan"), dtype=dtype)
        collectives.reduce_scatter(shard, full).wait()
        own = slice(rank * numel, (rank + 1) * numel)
        assert torch.equal(shard, sum_in_rank_order([part[own] for part in every])), (numel, dtype)
        assert torch.equal(full, every[rank]), "the source is left alone"


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", WORLDS)
def test_sums_are_taken_in_the_order_of_the_ranks_at_every_size(world_size: int) -> None:
    run_ranks(check_sums, world_size)


def check_many_in_flight(rank: int, world_size: int) -> None:
    collectives = ProcessGroupCollectives()
    sizes = [2**17, 5, 2**15, 70_001, 1]
    gathers = [
        (torch.zeros(world_size * n), torch.full((n,), float(100 * index + rank))) for index, n in enumerate(sizes)
    ]
    sums = [(torch.zeros(n), torch.full((world_size * n,), float(index + 1))) for index, n in enumerate(sizes)]
    handles = []
    for gather, reduction in zip(gathers, sums, strict=True):
        handles += [collectives.all_gather(*gather), collectives.reduce_scatter(*reduction)]
    # Ranks wait in unlike orders.
    for handle in handles if rank % 2 else reversed(handles):
        handle.wait()
        handle.wait()  # a second time does nothing
    for index, (full, _) in enumerate(gathers):
        wanted = torch.tensor([float(100 * index + other) for other in range(world_size)])
        assert torch.equal(full, wanted.repeat_interleave(sizes[index]))
    for index, (shard, _) in enumerate(sums):
        assert torch.equal(shard, torch.full_like(shard, float(world_size * (index + 1))))


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", WORLDS)
def test_operations_in_flight_together_do_not_mix(world_size: int) -> None:
    run_ranks(check_many_in_flight, world_size)


def check_users_messages(rank: int, world_size: int) -> None:
    collectives = ProcessGroupCollectives()
    shard = torch.full((2**16,), float(rank))
    full = torch.empty(world_size * shard.numel())
    gathering = collectives.all_gather(full, shard)
    note = torch.full((2**16,), 7.0 + rank)
    if rank == 0:
        torch.distributed.send(note, 1)
    elif rank == 1:
        torch.distributed.recv(note, 0)
    gathering.wait()
    assert torch.equal(full, torch.arange(float(world_size)).repeat_interleave(shard.numel()))
    assert note[0] == (7.0 if rank < 2 else 7.0 + rank)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_of_the_user_on_the_same_group_pass_beside(world_size: int) -> None:
    run_ranks(check_users_messages, world_size)
