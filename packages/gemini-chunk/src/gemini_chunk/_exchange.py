"""All-gather and reduce-scatter for gloo, out of its sends, receives and all-to-all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

# Messages of ours on a group that others use, too: each pair of ranks matches those of one tag in the order sent.
_FIRST_TAG = 0x6E51
_NUM_SIZES = 2**28

# From this many bytes to each rank on, messages of their own are quicker for more than two ranks.
_DIRECT_BYTES = 2**18

# A block of this many elements stays in cache while it is summed in another dtype.
_BLOCK_NUMEL = 2**16


class GlooExchange:
    """The two collectives of a chunk for main memory and gloo.

    [Note: What is quick in gloo]
    Median milliseconds by size of the full buffer, on two busy cores; then the processor time that one rank spends on
    it, which compute cannot have.

    | ranks | MiB | all-gather | by messages | reduce-scatter | by all-to-all | by messages |
    |---|---|---|---|---|---|---|
    | 2 | 1/4 | 0.42, 0.19 | 0.24, 0.12 | 0.69, 0.39 | 0.37, 0.18 | 0.37, 0.14 |
    | 2 | 1 | 1.4, 0.8 | 1.0, 0.4 | 2.5, 1.3 | 1.1, 0.6 | 2.4, 0.5 |
    | 2 | 8 | 11, 5.4 | 8.0, 3.2 | 28, 11 | 10, 5.3 | 6.7, 2.9 |
    | 2 | 32 | 82, 36 | 30, 15 | 129, 48 | 69, 25 | 28, 14 |
    | 4 | 1/4 | 1.2, 0.5 | 2.9, 0.7 | 3.2, 1.3 | 0.9, 0.4 | 2.3, 1.1 |
    | 4 | 1 | 7.6, 0.8 | 3.3, 0.5 | 9.3, 1.4 | 4.9, 0.7 | 5.5, 0.7 |
    | 4 | 8 | 26, 7.1 | 18, 4.2 | 53, 13 | 20, 5.4 | 24, 6.9 |
    | 4 | 32 | 281, 46 | 118, 17 | 340, 67 | 132, 25 | 197, 27 |

    So each rank sends its part straight to every other one, and sums what it receives itself. The sends come first: a
    receive that waits for its sender costs up to twice the time. Cutting messages into pieces of 1 to 4 MiB gained
    nothing.
    ``integration_tests/benchmarks/bench_collectives.py`` measures this again.

    [Note: One order of summation]
    The parts of all ranks are added in the order of the ranks, whatever the size and the way they travelled; of more
    than two ranks, 16-bit elements are added in fp32. So each rank, run and chunk size gives the same bits.

    Args:
        group: a group whose backend for main memory is gloo; None is the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        world = group if group is not None else dist.group.WORLD
        assert world is not None, "the default group is initialised: it has a rank"
        self._group = world
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        # How large a part must be that messages to every rank are quicker than one operation of gloo's.
        self._smallest_bytes = _DIRECT_BYTES if self._world_size > 2 else 0
        self._others = [rank for rank in range(self._world_size) if rank != self._rank]

    def all_gather(self, full: Tensor, shard: Tensor) -> Transfers:
        """Start to fill ``full`` from each rank's ``shard``, which may be its own part of it."""
        if shard.nbytes < self._smallest_bytes:
            return Transfers(all_gather_single(as_bytes(full), as_bytes(shard), group=self._group, async_op=True))
        parts = full.chunk(self._world_size)
        works = self._swap([shard] * self._world_size, parts)
        own = parts[self._rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        return Transfers(*works)

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Transfers:
        """Start to write into ``shard`` the sum of all ranks' part for this rank of ``full``; they do not overlap."""
        if shard.nbytes < self._smallest_bytes:
            arrived = torch.empty_like(full)
            work = dist.all_to_all_single(as_bytes(arrived), as_bytes(full), group=self._group, async_op=True)
            return Transfers(work, finish=partial(_sum, arrived.chunk(self._world_size), shard))
        parts = full.chunk(self._world_size)
        # One part is received in the place of the sum. That of rank 0, or for rank 0 that of rank 1: of the first two
        # terms either may come first.
        received = [shard, *(torch.empty_like(shard) for _ in self._others[1:])]
        terms = [*received[: self._rank], parts[self._rank], *received[self._rank :]]
        return Transfers(*self._swap(parts, terms), finish=partial(_sum, terms, shard))

    def _swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[dist.Work]:
        """Start to send each other rank its tensor, and to receive one from it; all of one size, by rank."""
        # Messages of another size have another tag: gloo would abort the process that received one.
        tag = _FIRST_TAG + sent[self._rank].nbytes % _NUM_SIZES
        # The group's own methods: torch.distributed's functions around them take four times as long as a small message.
        sends = [self._group.send([sent[rank]], rank, tag) for rank in self._others]
        return sends + [self._group.recv([received[rank]], rank, tag) for rank in self._others]


class Transfers:
    """Operations of ``torch.distributed`` under way, and what is to do once they are over.

    Args:
        works: the operations.
        finish: is called after the last.
    """

    def __init__(self, *works: dist.Work | None, finish: Callable[[], None] | None = None) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        """Return when the result may be used; raise what an operation raised."""
        for work in self._works:
            if work is not None:
                work.wait()
        finish, self._works, self._finish = self._finish, (), None
        if finish is not None:
            finish()


def _sum(terms: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of tensors of one shape into ``out``, which may be the first or the second of them.

    [Note: One order of summation].
    """
    if len(terms) == 2 or out.dtype.itemsize > 2:
        torch.add(terms[0], terms[1], out=out)
        for term in terms[2:]:
            out.add_(term)
        return
    for block, *others in zip(*(term.split(_BLOCK_NUMEL) for term in (out, *terms)), strict=True):
        total = others[0].float()
        for term in others[1:]:
            total += term
        block.copy_(total)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor: backends do not know every dtype."""
    return tensor.detach().view(-1).view(torch.uint8)


def _renamed(new: str, old: str) -> Callable[..., dist.Work | None]:
    """Return a collective under the name that this torch knows: 2.13 renamed the ``_tensor`` variants."""
    function: Callable[..., dist.Work | None] = getattr(dist, new, None) or getattr(dist, old)
    return function


all_gather_single = _renamed("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
