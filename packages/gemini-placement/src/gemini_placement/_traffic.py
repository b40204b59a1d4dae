"""What a step moves: bytes per link for the parameters and gradients of a chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from gemini_placement._placement import ChunkPlacement, has_master
from gemini_placement.interfaces import ChunkFacts, TierName

RANKS: Final = "ranks"
"""The link between ranks: bytes that one rank sends in collectives."""

# What one byte costs on a link, relative to the host's. A disk is several times slower.
_COSTS: Final[Mapping[str, int]] = {"disk->device": 4, "device->disk": 4, "disk->host": 4, "host->disk": 4}


def link(source: str, target: str) -> str:
    """Return the name of the link that carries bytes from one tier to another."""
    return f"{source}->{target}"


def gather_traffic(chunk: ChunkFacts, place: ChunkPlacement, world_size: int) -> Counter[str]:
    """Return the bytes of one gather, per link: the shard comes from where it rests, and goes to the other ranks."""
    moved: Counter[str] = Counter()
    if place.param_tier != "device":
        moved[link(place.param_tier, "device")] += chunk.shard_bytes
    if world_size > 1:
        moved[RANKS] += chunk.shard_bytes * (world_size - 1)
    return moved


def gradient_traffic(chunk: ChunkFacts, place: ChunkPlacement, world_size: int) -> Counter[str]:
    """Return the bytes of the reduction of a chunk's gradient, per link, to where it waits."""
    moved: Counter[str] = Counter()
    if chunk.trainable and (waits := gradient_tier(chunk, place)) != "device":
        moved[link("device", waits)] += chunk.shard_bytes
    if chunk.trainable and world_size > 1:
        moved[RANKS] += chunk.shard_bytes * (world_size - 1)
    return moved


def update_traffic(chunk: ChunkFacts, place: ChunkPlacement, *, padding_bytes: int = 0) -> Counter[str]:
    """Return the bytes of the optimizer's step on a chunk, per link.

    It computes on the device if its states rest there, else on the host. The gradient comes; the new parameters go
    back, unless they are master weights themselves; states on the disk, master weights among them, are read and
    written, but for ``padding_bytes``, and sums of gradients read.
    """
    moved: Counter[str] = Counter()
    if not chunk.optim_bytes:
        return moved
    computes = "device" if place.optim_tier == "device" else "host"
    if place.param_tier != computes:
        if not chunk.sum_bytes:
            moved[link(place.param_tier, computes)] += chunk.shard_bytes
        if has_master(chunk, place):
            moved[link(computes, place.param_tier)] += chunk.shard_bytes
    if place.optim_tier == "disk":
        moved[link("disk", "host")] += chunk.optim_bytes - padding_bytes
        moved[link("host", "disk")] += chunk.optim_bytes - padding_bytes - chunk.sum_bytes
    return moved


def gradient_tier(chunk: ChunkFacts, place: ChunkPlacement) -> TierName:
    """Return where the reduced gradient of a chunk waits for the optimizer."""
    return place.optim_tier if chunk.sum_bytes and has_master(chunk, place) else place.param_tier


def cost(moved: Mapping[str, int]) -> int:
    """Return one number for bytes on several links."""
    return sum(amount * _COSTS.get(name, 1) for name, amount in moved.items())


def step_cost(chunk: ChunkFacts, place: ChunkPlacement, world_size: int) -> int:
    """Return the cost of a step that uses a chunk once in forward and once in backward."""
    gathers = (0 if world_size == 1 else 1) if place.keep_gathered else 2
    return (
        gathers * cost(gather_traffic(chunk, place, world_size))
        + cost(gradient_traffic(chunk, place, world_size))
        + cost(update_traffic(chunk, place))
    )
