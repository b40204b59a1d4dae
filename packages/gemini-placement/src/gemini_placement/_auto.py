"""Automatic placement: fits chunks into the tiers that there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gemini_placement._fitting import Fitting, Problem, find_any, improve
from gemini_placement._placement import (
    TIERS,
    Ahead,
    ChunkPlacement,
    Placement,
    PlacementError,
    check_arguments,
    check_depth,
    check_fraction,
    fits,
    needed_bytes,
)
from gemini_placement._plan import Plan, plan_steps
from gemini_placement._stats import MemStats
from gemini_placement.interfaces import ChunkFacts, ChunkT, TierName, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoPlacementPolicy:
    """Keep on the device what saves most traffic, and send the rest to the host, then to the disk.

    Per byte, a shard on the device saves most (it is fetched in forward and in backward), then optimizer states
    (moved once a step), then keeping a chunk gathered (saves one gather of two). With no limit on the device all
    of this is done. Where chunks are few and unlike, the choice is improved by exchanges; the room that is left holds
    chunks between their uses, and gives up first what is used last.

    Attributes:
        warmup_non_model_data_ratio: share of the device left to everything but model states as long as
            nothing has been measured; used by `model_bytes`.
        steady_cuda_cap_ratio: share of the device used at most once it has been measured; likewise.
        gpu_margin_mem_ratio: share that optimizer states may take of what parameters leave free on the device.
        max_prefetch: chunks gathered ahead of their use.
        max_fetch: chunks fetched from host or disk ahead of their gather, beyond those.
    """

    warmup_non_model_data_ratio: float = 0.8
    steady_cuda_cap_ratio: float = 0.9
    gpu_margin_mem_ratio: float = 1.0
    max_prefetch: int = 0
    max_fetch: int = 0

    def __post_init__(self) -> None:
        check_fraction("warmup_non_model_data_ratio", self.warmup_non_model_data_ratio)
        check_fraction("steady_cuda_cap_ratio", self.steady_cuda_cap_ratio)
        check_fraction("gpu_margin_mem_ratio", self.gpu_margin_mem_ratio)
        check_depth("max_prefetch", self.max_prefetch)
        check_depth("max_fetch", self.max_fetch)

    def model_bytes(self, device_bytes: int, stats: MemStats | None = None) -> int:
        """Return how much of a device model states may take: what to give `place` as its capacity.

        Args:
            device_bytes: memory of the device.
            stats: what a step needed beside the model states; None before one has been measured.
        """
        if stats is None:
            return int(device_bytes * (1 - self.warmup_non_model_data_ratio))
        return max(0, int(device_bytes * self.steady_cuda_cap_ratio) - stats.max_non_model_bytes)

    def place(
        self, chunks: Sequence[ChunkT], *, capacities: Mapping[TierName, int | None], world_size: int
    ) -> Placement[ChunkT]:
        """Fit the chunks into the tiers.

        Args:
            chunks: distinct chunks in the order of forward.
            capacities: bytes for model states per tier, None without a limit; a missing tier does not exist.
            world_size: ranks that share the chunks.

        Raises:
            PlacementError: they do not fit; the message says what would.
            ValueError: a name comes twice, or a capacity or the world size is out of range.
        """
        check_arguments(chunks, capacities, world_size)
        choice = self._choose(self._problem(chunks, capacities, world_size))
        if choice is None:
            raise self._refusal(chunks, capacities, world_size)
        return self._placement(chunks, choice, world_size, capacities)

    def place_again(
        self, placement: Placement[ChunkT], *, capacities: Mapping[TierName, int | None]
    ) -> Placement[ChunkT]:
        """Fit placed chunks into the tiers anew, as far as they can be moved: for capacities that are known by now.

        Chunks that are their own master weights stay where they are, and so do the parameters of those that stay
        gathered; with several ranks, no other comes to stay gathered.

        Args:
            placement: where the chunks rest.
            capacities: as for `place`.

        Raises:
            PlacementError: neither a new placement nor the one that there is fits.
        """
        chunks, world_size = placement.chunks, placement.world_size
        check_arguments(chunks, capacities, world_size)
        choice = [placement.of(chunk) for chunk in chunks]
        problem = self._problem(chunks, capacities, world_size, may_keep=False)
        reachable = [
            _reachable(chunk, old, new, world_size)
            for chunk, old, new in zip(chunks, choice, self._choose(problem) or choice, strict=True)
        ]
        if problem.allows(reachable):
            choice = reachable
        elif not problem.allows(choice):
            needed = needed_bytes(chunks, choice, problem.ahead)
            raise PlacementError("This is where they rest.", needed=needed, available=capacities)
        return self._placement(chunks, choice, world_size, capacities)

    def evict(
        self,
        placement: Placement[ChunkT],
        *,
        capacities: Mapping[TierName, int | None],
        moves_params: bool = True,
    ) -> Placement[ChunkT]:
        """Send away what a tier has no room for: optimizer states and then parameters, each the last first.

        What the device cannot hold goes to the host, else to the disk; what the host cannot, where there is room.
        Chunks that are their own master weights stay where they are, and so do the parameters of those that several
        ranks keep gathered. What is left may be too much: then no more can be moved.

        Args:
            placement: where the chunks rest.
            capacities: as for `place`, for a step that leaves less room, or takes more of it.
            moves_params: whether parameters may move; not while gradients have their place.
        """
        chunks, world_size = placement.chunks, placement.world_size
        choice = [placement.of(chunk) for chunk in chunks]
        problem = self._problem(chunks, capacities, world_size)
        movable = [index for index in range(len(chunks) - 1, -1, -1) if not chunks[index].is_own_master]
        for tier, moves_states in itertools.product(TIERS, (True, False) if moves_params else (True,)):
            for index in movable:
                if fits(needed_bytes(chunks, choice, problem.ahead)[tier], capacities, tier):
                    break
                choice[index] = self._evicted(problem, choice, index, tier, moves_states=moves_states)
        return self._placement(chunks, choice, world_size, capacities)

    def _evicted(
        self, problem: Problem, choice: Sequence[ChunkPlacement], index: int, tier: TierName, *, moves_states: bool
    ) -> ChunkPlacement:
        """Return a chunk's place with its states, or its parameters, off a tier, if they are there and can go."""
        chunk, old = problem.chunks[index], choice[index]
        if moves_states:
            stays = old.optim_tier != tier or not chunk.optim_bytes
        else:
            stays = old.param_tier != tier or (old.keep_gathered and problem.world_size > 1)
        for other in () if stays else TIERS:
            keep = other == "device" and problem.world_size == 1
            new = replace(old, optim_tier=other) if moves_states else replace(old, keep_gathered=keep, param_tier=other)
            needed = needed_bytes(problem.chunks, [*choice[:index], new, *choice[index + 1 :]], problem.ahead)
            if other != tier and fits(needed[other], problem.capacities, other):
                return new
        return old

    def _placement(
        self,
        chunks: Sequence[ChunkT],
        choice: Sequence[ChunkPlacement],
        world_size: int,
        capacities: Mapping[TierName, int | None],
    ) -> Placement[ChunkT]:
        return Placement(
            chunks,
            choice,
            max_prefetch=self.max_prefetch,
            max_fetch=self.max_fetch,
            world_size=world_size,
            device_capacity=capacities["device"],
        )

    def _problem(
        self,
        chunks: Sequence[ChunkFacts],
        capacities: Mapping[TierName, int | None],
        world_size: int,
        *,
        may_keep: bool = True,
    ) -> Problem:
        return Problem(chunks, capacities, world_size, self._ahead(world_size), may_keep)

    def _choose(self, problem: Problem) -> list[ChunkPlacement] | None:
        choice = self._first_choice(problem)
        return choice if choice is None or self.gpu_margin_mem_ratio < 1 else improve(problem, choice)

    def _first_choice(self, problem: Problem) -> list[ChunkPlacement] | None:
        return Fitting(problem, self.gpu_margin_mem_ratio).fill() or find_any(problem)

    def schedule(self, trace: Trace[ChunkT], placement: Placement[ChunkT]) -> Plan[ChunkT]:
        """Plan one step over a trace of placed chunks; `PlanStep` says what its parts mean.

        Raises:
            KeyError: the trace uses a chunk that was not placed.
        """
        return plan_steps(trace, placement, max_prefetch=self.max_prefetch, max_fetch=self.max_fetch, use_room=True)

    def _ahead(self, world_size: int) -> Ahead:
        return Ahead(self.max_prefetch, self.max_fetch, world_size)

    def _less_ahead(self, world_size: int) -> Iterator[Ahead]:
        """Yield lower depths, the nearest first; fetches go first, for gathers wait for other ranks as well."""
        for fetch in range(self.max_fetch - 1, -1, -1):
            yield Ahead(self.max_prefetch, fetch, world_size)
        for prefetch in range(self.max_prefetch - 1, -1, -1):
            yield Ahead(prefetch, 0, world_size)

    def _refusal(
        self, chunks: Sequence[ChunkFacts], capacities: Mapping[TierName, int | None], world_size: int
    ) -> PlacementError:
        """Say what is lacking, and the nearest settings that would fit."""
        away = [ChunkPlacement(keep_gathered=False, param_tier="host", optim_tier="host")] * len(chunks)
        needed = needed_bytes(chunks, away, self._ahead(world_size))
        if not fits(needed["device"], capacities, "device"):
            advice = (
                "Even with every shard away, the device must hold the full buffers in use and one gradient buffer: "
            )
            lower = [
                ahead
                for ahead in self._less_ahead(world_size)
                if fits(needed_bytes(chunks, away, ahead)["device"], capacities, "device")
            ]
            advice += (
                f"{lower[0].advice(self._ahead(world_size))} would fit."
                if lower
                else "give it that much, or use smaller chunks."
            )
            return PlacementError(advice, needed=needed, available=capacities)
        tier: TierName = "disk" if "disk" in capacities else "host"
        enough = self._least_capacity(chunks, capacities, world_size, tier)
        choice = self._first_choice(self._problem(chunks, {**capacities, tier: enough}, world_size))
        assert choice is not None  # the search has found it before
        needed = needed_bytes(chunks, choice, self._ahead(world_size))
        return PlacementError(f"A {tier} capacity of {enough:,} bytes would fit.", needed=needed, available=capacities)

    def _least_capacity(
        self,
        chunks: Sequence[ChunkFacts],
        capacities: Mapping[TierName, int | None],
        world_size: int,
        tier: TierName,
    ) -> int:
        """Return the bytes that a tier must have at least, as near as the search can tell."""
        low = capacities.get(tier) or 0
        high = sum(chunk.shard_bytes + chunk.optim_bytes for chunk in chunks)
        while high - low > 1:
            middle = (low + high) // 2
            if self._first_choice(self._problem(chunks, {**capacities, tier: middle}, world_size)) is None:
                low = middle
            else:
                high = middle
        return high


def _reachable(chunk: ChunkFacts, old: ChunkPlacement, new: ChunkPlacement, world_size: int) -> ChunkPlacement:
    """Return the new place of a chunk as far as it can be moved there from the old one."""
    if chunk.is_own_master:
        return old
    if old.keep_gathered and world_size > 1:
        return replace(old, optim_tier=new.optim_tier)
    return replace(new, keep_gathered=world_size == 1 and new.param_tier == "device")
