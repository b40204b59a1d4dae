"""Carrying model states to other tiers, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from gemini_booster._shards import ChunkShard
from gemini_chunk import Chunk, ChunkManager, TierName
from gemini_placement import ChunkPlacement, Placement

Exchange = Callable[[Sequence[int]], list[list[int]]]


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """What carries a part of a chunk from one tier to another, with the bytes that it frees and takes."""

    source: TierName
    tier: TierName
    frees: int
    takes: int
    carry: Callable[[], None]


class Carrier:
    """Carries chunks, and the optimizer states of their shards, to where a placement has them.

    Args:
        manager: has the chunks.
        shards: of the trainable ones.
        exchange: returns every rank's numbers.
    """

    def __init__(self, manager: ChunkManager, shards: Sequence[ChunkShard], exchange: Exchange) -> None:
        self._manager = manager
        self._shards = shards
        self._exchange = exchange

    @property
    def places(self) -> list[ChunkPlacement]:
        """Where each chunk rests now, which may not be where it is to rest."""
        states = {shard.chunk: shard.states_tier for shard in self._shards}
        return [
            ChunkPlacement(
                keep_gathered=chunk.keeps_gathered, param_tier=chunk.tier, optim_tier=states.get(chunk, "device")
            )
            for chunk in self._manager.chunks
        ]

    @property
    def is_blocked(self) -> bool:
        """Whether parameters are in use, or gradients have their place."""
        return any(chunk.users > 0 or chunk.gradient is not None for chunk in self._manager.chunks)

    def carry(self, placement: Placement[Chunk], *, params: bool = True) -> bool:
        """Carry what rests elsewhere, as far as there is room; every rank calls it.

        Args:
            placement: where chunks are to rest.
            params: whether parameters are carried, too; not while `is_blocked`.

        Returns:
            Whether all is there.
        """
        moves = self._moves_of_states(placement)
        return self._make(moves + self._moves_of_params(placement) if params else moves)

    def _moves_of_states(self, placement: Placement[Chunk]) -> list[_Move]:
        moves = []
        for shard in self._shards:
            tier, num_bytes = placement.of(shard.chunk).optim_tier, shard.states_bytes
            carry = partial(shard.move_states, self._manager.tier(tier))
            moves.append(_Move(shard.states_tier, tier, num_bytes, num_bytes, carry))
        return [move for move in moves if move.source != move.tier]

    def _moves_of_params(self, placement: Placement[Chunk]) -> list[_Move]:
        alone = self._manager.world_size == 1  # what rests on the device is gathered as long as it does
        moves = []
        for chunk in self._manager.chunks:
            source, tier = chunk.tier, placement.of(chunk).param_tier
            if source != tier and (alone or not chunk.keeps_gathered):
                frees, takes = (
                    chunk.full_bytes if alone and where == "device" else chunk.shard_bytes for where in (source, tier)
                )
                moves.append(_Move(source, tier, frees, takes, partial(self._manager.move, chunk, tier)))
        return moves

    def _make(self, moves: Sequence[_Move]) -> bool:
        """Make the moves for which there is room or gets room, those off the device first.

        Ranks may have a little more or less of what pads a shard; they make the same moves all the same.

        Returns:
            Whether all were made.
        """
        tiers = self._manager.tiers
        numbers = [tier.used for tier in tiers.values()] + [move.takes for move in moves]
        numbers = [max(column) for column in zip(*self._exchange(numbers), strict=True)]
        used = dict(zip(tiers, numbers, strict=False))
        takes = dict(zip(moves, numbers[len(tiers) :], strict=True))
        waiting = sorted(moves, key=lambda move: move.tier == "device")
        while waiting:
            left = []
            for move in waiting:
                capacity = tiers[move.tier].capacity
                if capacity is not None and used[move.tier] + takes[move] > capacity:
                    left.append(move)
                    continue
                move.carry()
                used[move.tier] += takes[move]
                used[move.source] -= move.frees
            if len(left) == len(waiting):
                return False  # two would have to change places, and neither tier has room for both
            waiting = left
        return True
