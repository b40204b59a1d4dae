"""Where chunks rest: the value that a policy returns, and the bytes that it takes per tier."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Generic

from gemini_placement.interfaces import ChunkFacts, ChunkT, Phase, TierName

TIERS: Final[tuple[TierName, ...]] = ("device", "host", "disk")


class PlacementError(RuntimeError):
    """Model states do not fit into the tiers.

    Attributes:
        needed: bytes per tier that the placement asked for takes, or at least takes.
        available: capacity per tier in bytes, None without a limit; a tier that is missing does not exist.
    """

    def __init__(
        self, reason: str, *, needed: Mapping[TierName, int], available: Mapping[TierName, int | None]
    ) -> None:
        table = "; ".join(
            f"{tier} needs {needed.get(tier, 0):,} bytes and has {_capacity_text(available, tier)}"
            for tier in TIERS
            if tier in available or needed.get(tier)
        )
        super().__init__(f"The model states do not fit: {table}. {reason}")
        self.needed: Mapping[TierName, int] = dict(needed)
        self.available: Mapping[TierName, int | None] = dict(available)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlacement:
    """Where the parts of one chunk rest between uses.

    Attributes:
        keep_gathered: the full buffer is never released; it then also holds the shard.
        param_tier: where the shard of the working parameters rests; "device" if ``keep_gathered``.
        optim_tier: where master weights and optimizer states rest; without meaning for a frozen chunk.
    """

    keep_gathered: bool
    param_tier: TierName
    optim_tier: TierName


class Placement(Generic[ChunkT]):
    """The resting places of all chunks; an immutable value."""

    def __init__(
        self,
        chunks: Sequence[ChunkT],
        placements: Sequence[ChunkPlacement],
        *,
        max_prefetch: int = 0,
        max_fetch: int = 0,
        max_held: int = 0,
        world_size: int = 1,
        device_capacity: int | None = None,
    ) -> None:
        """Pair chunks with their placements.

        Args:
            chunks: distinct chunks with distinct names.
            placements: as many.
            max_prefetch: chunks gathered ahead of their use, for counting the working set.
            max_fetch: chunks fetched ahead of their gather, likewise.
            max_held: chunks that stay gathered from forward to backward, likewise.
            world_size: ranks that share the chunks.
            device_capacity: bytes for model states on the device; None without a limit.

        Raises:
            ValueError: the lengths differ, a chunk or a name comes twice, or a kept chunk rests off the device.
        """
        if len(chunks) != len(placements):
            raise ValueError(f"{len(chunks)} chunks came with {len(placements)} placements; each needs one.")
        check_distinct(chunks)
        for chunk, place in zip(chunks, placements, strict=True):
            if place.keep_gathered and place.param_tier != "device":
                raise ValueError(f"{chunk.name} cannot stay gathered and rest on {place.param_tier}.")
        self._places = MappingProxyType(dict(zip(chunks, placements, strict=True)))
        ahead = Ahead(max_prefetch, max_fetch, world_size, max_held)
        self._needed = needed_bytes(chunks, placements, ahead)
        self.fetched_bytes = ahead.fetched_bytes(_away(chunks, placements))
        self._resting = resting_bytes(chunks, placements)
        self.device_capacity = device_capacity
        self.world_size = world_size

    @property
    def chunks(self) -> tuple[ChunkT, ...]:
        """The placed chunks in the order in which they were given."""
        return tuple(self._places)

    @property
    def needed_bytes(self) -> Mapping[TierName, int]:
        """Bytes of model states per tier on one rank; on the device with the working set."""
        return MappingProxyType(self._needed)

    @property
    def resting_bytes(self) -> Mapping[TierName, int]:
        """Bytes of model states per tier on one rank between steps; full buffers that stay gathered are among them."""
        return MappingProxyType(self._resting)

    def room_bytes(self, phase: Phase) -> int | None:
        """Return the bytes that full buffers of released chunks may take at a time, None without a limit."""
        if self.device_capacity is None:
            return None
        gradients = gradient_bytes(self.chunks) if phase == "backward" else 0
        if phase == "backward" and self.world_size > 1:  # one buffer fills while another is being reduced
            gradients += max((chunk.full_bytes for chunk in self.chunks if chunk.trainable), default=0)
        return self.device_capacity - self._resting["device"] - gradients

    @property
    def digest(self) -> str:
        """64 hexadecimal digits, equal for equal placements of chunks with equal names; for comparing ranks."""
        content = [
            [chunk.name, place.keep_gathered, place.param_tier, place.optim_tier]
            for chunk, place in self._places.items()
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def of(self, chunk: ChunkT) -> ChunkPlacement:
        """Return where ``chunk`` rests.

        Raises:
            KeyError: the chunk was not placed.
        """
        try:
            return self._places[chunk]
        except KeyError:
            raise KeyError(f"{chunk.name} is not one of the {len(self._places)} chunks placed here.") from None

    def describe(self) -> str:
        """Return a table for people: bytes per tier, then one line per chunk."""
        needed = ", ".join(f"{tier} {self._needed[tier]:,}" for tier in TIERS)
        lines = [
            f"{len(self._places)} chunks; bytes with the working set: {needed}",
            f"digest {self.digest[:16]}",
            "",
            f"{'chunk':<16}  {'full bytes':>15}  {'gathered':<8}  {'shard':<6}  optimizer",
        ]
        for chunk, place in self._places.items():
            kept = "always" if place.keep_gathered else "in use"
            optim = place.optim_tier if chunk.optim_bytes else "-"
            lines.append(f"{chunk.name:<16}  {chunk.full_bytes:>15,}  {kept:<8}  {place.param_tier:<6}  {optim}")
        return "\n".join(lines)


def has_master(chunk: ChunkFacts, place: ChunkPlacement) -> bool:
    """Return whether a chunk has master weights beside its working parameters."""
    return chunk.optim_bytes > 0 and not (chunk.is_own_master and place.param_tier == place.optim_tier)


@dataclass(frozen=True, slots=True)
class Ahead:
    """How far a policy goes ahead of the use of chunks, and what that takes of the device.

    Attributes:
        max_prefetch: chunks gathered ahead of their use.
        max_fetch: chunks fetched ahead of their gather.
        world_size: ranks that share the chunks.
        max_held: chunks that stay gathered from forward to backward.
    """

    max_prefetch: int
    max_fetch: int
    world_size: int
    max_held: int = 0

    def __post_init__(self) -> None:
        check_depth("max_prefetch", self.max_prefetch)
        check_depth("max_fetch", self.max_fetch)
        check_depth("max_held", self.max_held)

    @property
    def buffers(self) -> int:
        """How many released chunks must have room at a time.

        One is in use. A second one is for a module whose parameters lie in two, or for what is held over a short gap; a
        third one for recompute that starts while backward still uses another. Then come those ahead of their use, and
        those that stay between forward and backward.
        """
        return 3 + self.max_prefetch + self.max_held

    def gathered_bytes(self, released: Iterable[ChunkFacts]) -> int:
        """Return the most that full buffers of released chunks take: as many `buffers` of the largest."""
        return sum(sorted((chunk.full_bytes for chunk in released), reverse=True)[: self.buffers])

    def advice(self, asked: Ahead) -> str:
        """Return the settings of these depths, in the place of those that were asked for."""
        depths = [f"max_prefetch={self.max_prefetch}"]
        depths += [f"max_fetch={self.max_fetch}"] if asked.max_fetch else []
        depths += [f"max_held={self.max_held}"] if asked.max_held else []
        return ", ".join(depths)

    def fetched_bytes(self, away: Iterable[ChunkFacts]) -> int:
        """Return the most that fetched chunks take, of those that rest off the device."""
        return sum(sorted((fetch_bytes(chunk, self.world_size) for chunk in away), reverse=True)[: self.max_fetch])


def fetch_bytes(chunk: ChunkFacts, world_size: int) -> int:
    """Return what a fetched chunk takes of the device: a single rank fetches straight into the full buffer."""
    return chunk.full_bytes if world_size == 1 else chunk.shard_bytes


def _away(chunks: Sequence[ChunkFacts], placements: Sequence[ChunkPlacement]) -> list[ChunkFacts]:
    return [chunk for chunk, place in zip(chunks, placements, strict=True) if place.param_tier != "device"]


def needed_bytes(
    chunks: Sequence[ChunkFacts], placements: Sequence[ChunkPlacement], ahead: Ahead
) -> dict[TierName, int]:
    """Count the bytes that a placement takes per tier, the device's working set included."""
    needed = resting_bytes(chunks, placements)
    released = [chunk for chunk, place in zip(chunks, placements, strict=True) if not place.keep_gathered]
    needed["device"] += ahead.gathered_bytes(released) + ahead.fetched_bytes(_away(chunks, placements))
    needed["device"] += gradient_bytes(chunks)
    return needed


def resting_bytes(chunks: Sequence[ChunkFacts], placements: Sequence[ChunkPlacement]) -> dict[TierName, int]:
    """Count the bytes that a placement takes per tier between steps."""
    resting: dict[TierName, int] = dict.fromkeys(TIERS, 0)
    for chunk, place in zip(chunks, placements, strict=True):
        # A kept full buffer holds the shard too: its bytes count once.
        resting[place.param_tier] += chunk.full_bytes if place.keep_gathered else chunk.shard_bytes
        resting[place.optim_tier] += chunk.optim_bytes
    return resting


def gradient_bytes(chunks: Sequence[ChunkFacts]) -> int:
    """Return the bytes of one gradient buffer and of the shard that it is reduced to, for the largest chunk."""
    return max((chunk.full_bytes + chunk.shard_bytes for chunk in chunks if chunk.trainable), default=0)


def lacking_tiers(needed: Mapping[TierName, int], capacities: Mapping[TierName, int | None]) -> list[TierName]:
    """Return the tiers that are asked for more than they have."""
    return [tier for tier in TIERS if not fits(needed[tier], capacities, tier)]


def fits(needed: int, capacities: Mapping[TierName, int | None], tier: TierName) -> bool:
    """Return whether a tier holds ``needed`` bytes; a tier that is missing holds none."""
    capacity = capacities.get(tier, 0)
    return capacity is None or needed <= capacity


def check_arguments(chunks: Sequence[ChunkFacts], capacities: Mapping[TierName, int | None], world_size: int) -> None:
    """Raise ValueError or TypeError for what no placement can be made of."""
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size must be an int, got {world_size!r}.")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}.")
    unknown = [tier for tier in capacities if tier not in TIERS]
    if unknown:
        raise ValueError(f"capacities names the tier {unknown[0]!r}; tiers are {', '.join(TIERS)}.")
    if "device" not in capacities:
        raise ValueError("capacities must name the device: its bytes for model states, or None without a limit.")
    for tier, capacity in capacities.items():
        if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int)):
            raise TypeError(f"The capacity of {tier} must be an int in bytes, or None; got {capacity!r}.")
        if capacity is not None and capacity < 0:
            raise ValueError(f"The capacity of {tier} must not be negative, got {capacity}.")
    check_distinct(chunks)


def check_distinct(chunks: Sequence[ChunkFacts]) -> None:
    """Raise ValueError if a name comes twice: ranks compare chunks by name."""
    seen: set[str] = set()
    for chunk in chunks:
        if chunk.name in seen:
            raise ValueError(f"Two chunks are named {chunk.name!r}; names must be unique.")
        seen.add(chunk.name)


def check_depth(name: str, depth: object) -> None:
    """Raise TypeError or ValueError unless ``depth`` is a number of chunks."""
    if isinstance(depth, bool) or not isinstance(depth, int):
        raise TypeError(f"{name} must be an int, a number of chunks; got {depth!r}.")
    if depth < 0:
        raise ValueError(f"{name} must not be negative, got {depth}.")


def check_fraction(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number in [0, 1], got {value!r}.")


def _capacity_text(capacities: Mapping[TierName, int | None], tier: TierName) -> str:
    if tier not in capacities:
        return "none (the tier is not available)"
    capacity = capacities[tier]
    return "no limit" if capacity is None else f"{capacity:,}"
