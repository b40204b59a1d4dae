"""Static placement: fixed shares of the model states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gemini_placement._placement import (
    Ahead,
    ChunkPlacement,
    Placement,
    PlacementError,
    check_arguments,
    check_depth,
    check_fraction,
    lacking_tiers,
    needed_bytes,
)
from gemini_placement._plan import Plan, plan_steps
from gemini_placement.interfaces import ChunkFacts, ChunkT, TierName, Trace

_PARAM_FRACTIONS = ("shard_param_frac", "offload_param_frac", "disk_param_frac")
_OPTIM_FRACTIONS = ("offload_optim_frac", "disk_optim_frac")


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticPlacementPolicy:
    """Fixed shares of the model states, by bytes over all chunks, each in [0, 1] and in any combination.

    A share is met within one chunk, and what leaves the device altogether is at least what was asked for. Chunks that
    forward uses first, and backward last, stay on the device and gathered first; the disk takes from the other end.
    What rests off the device is released after use whatever ``shard_param_frac`` says. With one rank, what rests on
    the device stays gathered.

    Attributes:
        shard_param_frac: parameters released after use; 1.0 is ZeRO-3, 0.0 is ZeRO-2.
        offload_optim_frac: optimizer states that rest on the host.
        offload_param_frac: shards of parameters that rest on the host.
        disk_optim_frac: optimizer states that rest on the disk; with ``offload_optim_frac`` at most 1.
        disk_param_frac: shards of parameters that rest on the disk; with ``offload_param_frac`` at most 1.
        max_prefetch: chunks gathered ahead of their use.
        max_fetch: chunks fetched from host or disk ahead of their gather, beyond those.
        max_held: chunks that stay gathered from the end of forward to their backward; ``max_prefetch`` do anyhow.
    """

    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    disk_optim_frac: float = 0.0
    disk_param_frac: float = 0.0
    max_prefetch: int = 0
    max_fetch: int = 0
    max_held: int = 0

    def __post_init__(self) -> None:
        for name in (*_PARAM_FRACTIONS, *_OPTIM_FRACTIONS):
            check_fraction(name, getattr(self, name))
        check_depth("max_prefetch", self.max_prefetch)
        check_depth("max_fetch", self.max_fetch)
        check_depth("max_held", self.max_held)
        for part in ("optim", "param"):
            host, disk = (getattr(self, f"{where}_{part}_frac") for where in ("offload", "disk"))
            if host + disk > 1 + 1e-9:  # 0.9 + 0.1 may come out a bit above
                raise ValueError(
                    f"offload_{part}_frac={host:g} and disk_{part}_frac={disk:g} are shares of the same bytes, so "
                    "together they must be at most 1."
                )

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
        ahead = Ahead(self.max_prefetch, self.max_fetch, world_size, self.max_held)
        needed = needed_bytes(chunks, placements, ahead)
        if lacking_tiers(needed, capacities):
            advice = self._advice(chunks, capacities, world_size)
            raise PlacementError(f"{self} was asked for. {advice}", needed=needed, available=capacities)
        return Placement(
            chunks,
            placements,
            max_prefetch=self.max_prefetch,
            max_fetch=self.max_fetch,
            max_held=self.max_held,
            world_size=world_size,
            device_capacity=capacities["device"],
        )

    def schedule(self, trace: Trace[ChunkT], placement: Placement[ChunkT]) -> Plan[ChunkT]:
        """Plan one step over a trace of placed chunks; `PlanStep` says what its parts mean.

        Raises:
            KeyError: the trace uses a chunk that was not placed.
        """
        return plan_steps(
            trace, placement, max_prefetch=self.max_prefetch, max_fetch=self.max_fetch, max_held=self.max_held
        )

    def _placements(self, chunks: Sequence[ChunkFacts], world_size: int) -> list[ChunkPlacement]:
        released = _from_end([chunk.full_bytes for chunk in chunks], host=self.shard_param_frac, disk=0.0)
        params = _from_end(
            [chunk.shard_bytes for chunk in chunks], host=self.offload_param_frac, disk=self.disk_param_frac
        )
        optims = _from_end(
            [chunk.optim_bytes for chunk in chunks], host=self.offload_optim_frac, disk=self.disk_optim_frac
        )
        return [
            ChunkPlacement(
                # With one rank the shard is the whole chunk: releasing it would save nothing.
                keep_gathered=param == "device" and (world_size == 1 or release == "device"),
                param_tier=param,
                optim_tier=optim,
            )
            for release, param, optim in zip(released, params, optims, strict=True)
        ]

    def _advice(self, chunks: Sequence[ChunkFacts], capacities: Mapping[TierName, int | None], world_size: int) -> str:
        """Name the settings nearest to the ones asked for that fit."""
        as_asked = Ahead(self.max_prefetch, self.max_fetch, world_size, self.max_held)
        fewer = replace(as_asked, max_fetch=0, max_held=0)
        for ahead in dict.fromkeys((as_asked, fewer, replace(fewer, max_prefetch=0))):
            nearest = self._nearest(chunks, capacities, ahead)
            if nearest is not None:
                names = [n for n in (*_PARAM_FRACTIONS, *_OPTIM_FRACTIONS) if "disk" in capacities or "disk" not in n]
                words = [f"{name}={getattr(nearest, name):g}" for name in names]
                return f"The nearest that fits: {', '.join(words)}, {ahead.advice(as_asked)}."
        return "No shares fit: use more ranks, smaller chunks, or more memory."

    def _nearest(
        self, chunks: Sequence[ChunkFacts], capacities: Mapping[TierName, int | None], ahead: Ahead
    ) -> StaticPlacementPolicy | None:
        """Return the nearest settings on a grid that fit.

        Bytes of parameters and of optimizer states add up, so each kind is counted once, and pairs are tried by
        distance.
        """
        disk_exists = "disk" in capacities
        grid = 10 if disk_exists else 20
        counted = [
            (policy, needed_bytes(chunks, policy._placements(chunks, ahead.world_size), ahead))
            for host, disk in _pairs(grid, disk_exists)
            for policy in [
                StaticPlacementPolicy(
                    shard_param_frac=shard / grid,
                    offload_param_frac=host / grid,
                    disk_param_frac=disk / grid,
                    max_prefetch=ahead.max_prefetch,
                    max_fetch=ahead.max_fetch,
                    max_held=ahead.max_held,
                )
                for shard in range(host + disk, grid + 1)
            ]
        ]
        params = sorted(counted, key=lambda entry: self._distance(entry[0], _PARAM_FRACTIONS))
        pairs = [(host / grid, disk / grid) for host, disk in _pairs(grid, disk_exists)]
        optims = sorted(
            (replace(self, offload_optim_frac=host, disk_optim_frac=disk) for host, disk in pairs),
            key=lambda policy: self._distance(policy, _OPTIM_FRACTIONS),
        )
        moved = [policy._moved_states(chunks) for policy in optims]
        nearest, least = None, float("inf")
        for policy, needed in params:
            for other, change in zip(optims, moved, strict=True):
                distance = self._distance(policy, _PARAM_FRACTIONS) + self._distance(other, _OPTIM_FRACTIONS)
                if distance >= least:
                    break
                if not lacking_tiers({tier: needed[tier] + change[tier] for tier in needed}, capacities):
                    least = distance
                    nearest = replace(
                        policy, offload_optim_frac=other.offload_optim_frac, disk_optim_frac=other.disk_optim_frac
                    )
        return nearest

    def _distance(self, other: StaticPlacementPolicy, names: Sequence[str]) -> float:
        return sum(abs(float(getattr(self, name)) - float(getattr(other, name))) for name in names)

    def _moved_states(self, chunks: Sequence[ChunkFacts]) -> dict[TierName, int]:
        """Return what each tier holds more than if all optimizer states were on the device."""
        moved: dict[TierName, int] = {"device": 0, "host": 0, "disk": 0}
        sizes = [chunk.optim_bytes for chunk in chunks]
        tiers = _from_end(sizes, host=self.offload_optim_frac, disk=self.disk_optim_frac)
        for amount, tier in zip(sizes, tiers, strict=True):
            moved[tier] += amount
            moved["device"] -= amount
        return moved


def _pairs(grid: int, disk_exists: bool) -> Iterator[tuple[int, int]]:
    """Yield shares of the host and of the disk in steps of one over ``grid``, together at most 1."""
    for host in range(grid + 1):
        for disk in range(grid + 1 - host if disk_exists else 1):
            yield host, disk


def _from_end(amounts: Sequence[int], *, host: float, disk: float) -> list[TierName]:
    """Give entries to the disk from the last on, then to the host, until each share of the sum is reached.

    Empty entries stay on the device.
    """
    # Whole bytes: 0.1 + 0.2 must not take one chunk more than 0.3.
    to_disk, away = round(disk * sum(amounts)), round((disk + host) * sum(amounts))
    tiers: list[TierName] = ["device"] * len(amounts)
    taken = 0
    for index in range(len(amounts) - 1, -1, -1):
        if taken >= away:
            break
        if amounts[index]:
            tiers[index] = "disk" if taken < to_disk else "host"
        taken += amounts[index]
    return tiers
