"""Automatic placement: fits chunks into the tiers that there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemini_placement._placement import (
    ChunkPlacement,
    Placement,
    PlacementError,
    check_arguments,
    check_fraction,
    check_prefetch,
    fits,
    gathered_bytes,
    gradient_bytes,
    needed_bytes,
    released_buffers,
)
from gemini_placement._plan import Plan, plan_steps
from gemini_placement._stats import MemStats
from gemini_placement.interfaces import ChunkFacts, ChunkT, TierName, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoPlacementPolicy:
    """Keep on the device what saves most traffic, and send the rest to the host, then to the disk.

    Per byte, a shard on the device saves most (it is fetched in forward and in backward), then optimizer states
    (moved once a step), then keeping a chunk gathered (saves one gather of two). With no limit on the device all
    of this is done.

    Attributes:
        warmup_non_model_data_ratio: share of the device left to everything but model states as long as
            nothing has been measured; used by `model_bytes`.
        steady_cuda_cap_ratio: share of the device used at most once it has been measured; likewise.
        max_prefetch: chunks gathered ahead of their use.
    """

    warmup_non_model_data_ratio: float = 0.8
    steady_cuda_cap_ratio: float = 0.9
    max_prefetch: int = 0

    def __post_init__(self) -> None:
        check_fraction("warmup_non_model_data_ratio", self.warmup_non_model_data_ratio)
        check_fraction("steady_cuda_cap_ratio", self.steady_cuda_cap_ratio)
        check_prefetch(self.max_prefetch)

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
        fitting = _Fitting(chunks, capacities, world_size, self.max_prefetch)
        fitting.fill_device()
        fitting.fill_others()
        placements = fitting.placements()
        if placements is None:
            raise self._refusal(chunks, capacities, world_size, fitting)
        return Placement(chunks, placements, max_prefetch=self.max_prefetch)

    def schedule(self, trace: Trace[ChunkT], placement: Placement[ChunkT]) -> Plan[ChunkT]:
        """Plan one step over a trace of placed chunks; `PlanStep` says what its parts mean.

        Raises:
            KeyError: the trace uses a chunk that was not placed.
        """
        return plan_steps(trace, placement, max_prefetch=self.max_prefetch)

    def _refusal(
        self,
        chunks: Sequence[ChunkFacts],
        capacities: Mapping[TierName, int | None],
        world_size: int,
        fitting: _Fitting,
    ) -> PlacementError:
        if not fits(fitting.least_device_bytes, capacities, "device"):
            away = ChunkPlacement(keep_gathered=False, param_tier="host", optim_tier="host")
            needed = needed_bytes(chunks, [away] * len(chunks), max_prefetch=self.max_prefetch)
            advice = (
                "Even with every shard away, the device must hold the full buffers in use and one gradient buffer: "
            )
            for prefetch in range(self.max_prefetch - 1, -1, -1):
                if fits(_Fitting(chunks, capacities, world_size, prefetch).least_device_bytes, capacities, "device"):
                    return PlacementError(
                        f"{advice}max_prefetch={prefetch} would fit.", needed=needed, available=capacities
                    )
            advice += "give it that much, or use smaller chunks."
            return PlacementError(advice, needed=needed, available=capacities)
        # With the last tier unlimited the same order of choices goes through and shows what that tier would take.
        tier: TierName = "disk" if "disk" in capacities else "host"
        wider = _Fitting(chunks, {**capacities, tier: None}, world_size, self.max_prefetch)
        wider.fill_device()
        wider.fill_others()
        placements = wider.placements()
        assert placements is not None  # an unlimited tier takes all that the others leave
        needed = needed_bytes(chunks, placements, max_prefetch=self.max_prefetch)
        return PlacementError(
            f"A {tier} capacity of {needed[tier]:,} bytes would fit.", needed=needed, available=capacities
        )


class _Fitting:
    """The greedy choice, one part of a chunk at a time, in the order of forward."""

    def __init__(
        self,
        chunks: Sequence[ChunkFacts],
        capacities: Mapping[TierName, int | None],
        world_size: int,
        max_prefetch: int,
    ) -> None:
        self._chunks = chunks
        self._capacities = capacities
        self._world_size = world_size
        self._buffers = released_buffers(max_prefetch)
        self._kept = [False] * len(chunks)
        self._param_tiers: list[TierName | None] = [None] * len(chunks)
        self._optim_tiers: list[TierName | None] = [None if c.optim_bytes else "device" for c in chunks]
        self._by_size = sorted(range(len(chunks)), key=lambda index: -chunks[index].full_bytes)
        self._used: dict[TierName, int] = {"device": gradient_bytes(chunks), "host": 0, "disk": 0}
        self.least_device_bytes = self._used["device"] + gathered_bytes(chunks, max_prefetch)

    def fill_device(self) -> None:
        """Bring to the device what fits, in the order of what each byte saves."""
        for index, chunk in enumerate(self._chunks):
            # With one rank the shard is the whole chunk: resting on the device, it is gathered for good.
            keep = self._world_size == 1
            if self._take_device(chunk.full_bytes if keep else chunk.shard_bytes, index if keep else None):
                self._param_tiers[index] = "device"
        for index, chunk in enumerate(self._chunks):
            if self._optim_tiers[index] is None and self._take_device(chunk.optim_bytes):
                self._optim_tiers[index] = "device"
        for index, chunk in enumerate(self._chunks):
            if self._param_tiers[index] == "device" and not self._kept[index]:
                self._take_device(chunk.full_bytes - chunk.shard_bytes, index)

    def fill_others(self) -> None:
        """Send the rest to the host and what that cannot take to the disk, parameters first."""
        for index, chunk in enumerate(self._chunks):
            if self._param_tiers[index] is None:
                self._param_tiers[index] = self._take_other(chunk.shard_bytes)
        for index, chunk in enumerate(self._chunks):
            if self._optim_tiers[index] is None:
                self._optim_tiers[index] = self._take_other(chunk.optim_bytes)

    def placements(self) -> list[ChunkPlacement] | None:
        """Return the choice, or None if a part found no place or the working set has no room."""
        if not fits(self._used["device"] + self._working_bytes(), self._capacities, "device"):
            return None
        chosen: list[ChunkPlacement] = []
        for kept, param, optim in zip(self._kept, self._param_tiers, self._optim_tiers, strict=True):
            if param is None or optim is None:
                return None
            chosen.append(ChunkPlacement(keep_gathered=kept, param_tier=param, optim_tier=optim))
        return chosen

    def _take_device(self, amount: int, keep: int | None = None) -> bool:
        """Add bytes to the device if they fit beside the working set, which loses the chunk ``keep``."""
        if keep is not None:
            self._kept[keep] = True
        if fits(self._used["device"] + amount + self._working_bytes(), self._capacities, "device"):
            self._used["device"] += amount
            return True
        if keep is not None:
            self._kept[keep] = False
        return False

    def _take_other(self, amount: int) -> TierName | None:
        tiers: tuple[TierName, ...] = ("host", "disk")
        for tier in tiers:
            if tier in self._capacities and fits(self._used[tier] + amount, self._capacities, tier):
                self._used[tier] += amount
                return tier
        return None

    def _working_bytes(self) -> int:
        total = found = 0
        for index in self._by_size:
            if found == self._buffers:
                break
            if not self._kept[index]:
                total += self._chunks[index].full_bytes
                found += 1
        return total
