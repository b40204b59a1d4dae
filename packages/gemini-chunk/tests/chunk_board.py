"""A group of ranks in one process: operations are posted, and done once all have posted and somebody waits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gemini_chunk import Handle
from gemini_chunk.testing import Watched


class Operation:
    """The same operation of every rank."""

    def __init__(self, name: str, world_size: int) -> None:
        self.name = name
        self.posts: dict[int, tuple[Tensor, Tensor, Watched]] = {}
        self.world_size = world_size
        self.is_done = False

    def post(self, rank: int, output: Tensor, source: Tensor) -> None:
        self.posts[rank] = (output, source, Watched(self.name, output, source))

    def finish(self) -> None:
        if self.is_done:
            return
        assert len(self.posts) == self.world_size, f"{self.name} would hang: only ranks {sorted(self.posts)} are there"
        for rank, (_, _, watched) in self.posts.items():
            assert watched.fault() is None, f"rank {rank}: {watched.fault()}"
        self.is_done = True
        sources = [self.posts[rank][1].clone() for rank in range(self.world_size)]
        for rank in range(self.world_size):
            output = self.posts[rank][0]
            if self.name == "all_gather":
                output.copy_(torch.cat(sources))
            else:
                shards = [source.view(self.world_size, -1)[rank] for source in sources]
                output.zero_()
                for shard in shards:
                    output.add_(shard)


class Posted:
    def __init__(self, finish: Callable[[], None]) -> None:
        self.wait = finish


class Board:
    """Where the ranks of one group meet."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.operations: list[Operation] = []
        self.ranks = [BoardCollectives(self, rank) for rank in range(world_size)]

    def operation(self, index: int, name: str) -> Operation:
        if index == len(self.operations):
            self.operations.append(Operation(name, self.world_size))
        operation = self.operations[index]
        assert operation.name == name, f"ranks call {operation.name} and {name}"
        return operation

    @property
    def open(self) -> int:
        return sum(not operation.is_done for operation in self.operations)


class BoardCollectives:
    """One rank of a board."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board = board
        self.rank = rank
        self.world_size = board.world_size
        self._next = 0

    def _post(self, name: str, output: Tensor, source: Tensor) -> Handle:
        operation = self._board.operation(self._next, name)
        self._next += 1
        operation.post(self.rank, output, source)
        return Posted(operation.finish)

    def all_gather(self, full: Tensor, shard: Tensor) -> Handle:
        return self._post("all_gather", full, shard)

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Handle:
        return self._post("reduce_scatter", shard, full)

    def broadcast(self, tensor: Tensor) -> None:
        raise AssertionError("nobody could wait for rank 0 in one process")
