"""Static placement: fixed shares of the model states."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gemini_placement._placement import (
    ChunkPlacement,
    Placement,
    PlacementError,
    check_arguments,
    check_fraction,
    check_prefetch,
    lacking_tiers,
    needed_bytes,
)
from gemini_placement._plan import Plan, plan_steps
from gemini_placement.interfaces import ChunkFacts, ChunkT, TierName, Trace

_FRACTIONS = ("shard_param_frac", "offload_optim_frac", "offload_param_frac")


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticPlacementPolicy:
    """Fixed shares of the model states, by bytes over all chunks, each in [0, 1].

    At least the share asked for is released or offloaded, and less than one chunk more. Chunks that forward uses first
    stay on the device and gathered first. With one rank, what rests on the device stays gathered.

    Attributes:
        shard_param_frac: parameters released after use; 1.0 is ZeRO-3, 0.0 is ZeRO-2.
        offload_optim_frac: optimizer states that rest on the host.
        offload_param_frac: shards of parameters that rest on the host; only when the other two are 1.0, else
            it is set to 0 with a warning.
        max_prefetch: chunks gathered ahead of their use.
    """

    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    max_prefetch: int = 0

    def __post_init__(self) -> None:
        for name in _FRACTIONS:
            check_fraction(name, getattr(self, name))
        check_prefetch(self.max_prefetch)
        if self.offload_param_frac and (self.shard_param_frac < 1 or self.offload_optim_frac < 1):
            warnings.warn(
                f"offload_param_frac={self.offload_param_frac} acts only when shard_param_frac and "
                f"offload_optim_frac are 1.0; they are {self.shard_param_frac} and {self.offload_optim_frac}, "
                f"so it is taken as 0. Set both to 1.0, or leave offload_param_frac out.",
                stacklevel=3,
            )
            object.__setattr__(self, "offload_param_frac", 0.0)

    def place(
        self, chunks: Sequence[ChunkT], *, capacities: Mapping[TierName, int | None], world_size: int
    ) -> Placement[ChunkT]:
        """Give each chunk its place by the fixed shares.

        Args:
            chunks: distinct chunks in the order of forward.
            capacities: bytes for model states per tier, None without a limit; a missing tier does not exist.
            world_size: ranks that share the chunks.

        Raises:
            PlacementError: the shares do not fit; the message names the nearest settings that do.
            ValueError: a name comes twice, or a capacity or the world size is out of range.
        """
        check_arguments(chunks, capacities, world_size)
        placements = self._placements(chunks, world_size)
        needed = needed_bytes(chunks, placements, max_prefetch=self.max_prefetch)
        if lacking_tiers(needed, capacities):
            advice = self._advice(chunks, capacities, world_size)
            raise PlacementError(f"{self} was asked for. {advice}", needed=needed, available=capacities)
        return Placement(chunks, placements, max_prefetch=self.max_prefetch)

    def schedule(self, trace: Trace[ChunkT], placement: Placement[ChunkT]) -> Plan[ChunkT]:
        """Plan one step over a trace of placed chunks; `PlanStep` says what its parts mean.

        Raises:
            KeyError: the trace uses a chunk that was not placed.
        """
        return plan_steps(trace, placement, max_prefetch=self.max_prefetch)

    def _placements(self, chunks: Sequence[ChunkFacts], world_size: int) -> list[ChunkPlacement]:
        # Hot chunks come first in forward, and last in backward: what leaves the device is taken from the end.
        released = _share_from_end([chunk.full_bytes for chunk in chunks], self.shard_param_frac)
        optim_away = _share_from_end([chunk.optim_bytes for chunk in chunks], self.offload_optim_frac)
        param_away = _share_from_end([chunk.shard_bytes for chunk in chunks], self.offload_param_frac)
        return [
            ChunkPlacement(
                # With one rank the shard is the whole chunk: releasing it would save nothing.
                keep_gathered=not away and (world_size == 1 or not release),
                param_tier="host" if away else "device",
                optim_tier="host" if optim else "device",
            )
            for release, optim, away in zip(released, optim_away, param_away, strict=True)
        ]

    def _advice(self, chunks: Sequence[ChunkFacts], capacities: Mapping[TierName, int | None], world_size: int) -> str:
        """Name the settings nearest to the ones asked for that fit, in steps of a twentieth."""
        grid = [step / 20 for step in range(21)]
        settings = [(shard, optim, 0.0) for shard in grid for optim in grid]
        settings += [(1.0, 1.0, param) for param in grid[1:]]
        asked = (self.shard_param_frac, self.offload_optim_frac, self.offload_param_frac)
        settings.sort(key=lambda other: sum(abs(a - b) for a, b in zip(asked, other, strict=True)))
        for prefetch in dict.fromkeys((self.max_prefetch, 0)):
            for setting in settings:
                policy = replace(self, **dict(zip(_FRACTIONS, setting, strict=True)), max_prefetch=prefetch)
                placements = policy._placements(chunks, world_size)
                if not lacking_tiers(needed_bytes(chunks, placements, max_prefetch=prefetch), capacities):
                    words = [f"{name}={value:g}" for name, value in zip(_FRACTIONS, setting, strict=True)]
                    return f"The nearest that fits: {', '.join(words)}, max_prefetch={prefetch}."
        return "No shares fit: use more ranks, smaller chunks, or more memory."


def _share_from_end(amounts: Sequence[int], fraction: float) -> list[bool]:
    """Mark entries from the last on until they sum to at least ``fraction`` of all; empty ones stay unmarked."""
    # Whole bytes: 0.1 + 0.2 must not take one chunk more than 0.3.
    target = round(fraction * sum(amounts))
    marks = [False] * len(amounts)
    taken = 0
    for index in range(len(amounts) - 1, -1, -1):
        if taken >= target:
            break
        marks[index] = amounts[index] > 0
        taken += amounts[index]
    return marks
