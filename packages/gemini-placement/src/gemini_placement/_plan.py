"""From a trace to a plan: when each chunk is gathered, prefetched and released."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from gemini_placement._holding import hold_in_room, hold_over_short_gaps
from gemini_placement._memory import step_peaks
from gemini_placement._placement import TIERS, Placement, fetch_bytes
from gemini_placement._traffic import cost, gather_traffic, gradient_traffic, update_traffic
from gemini_placement.interfaces import ChunkT, TierName, Trace


@dataclass(frozen=True, slots=True)
class PlanStep(Generic[ChunkT]):
    """What to do around one access of the trace.

    Attributes:
        chunks: gather these, or wait for them where a prefetch has started them, before the access.
        prefetch: then start gathering these; nothing waits for them yet.
        fetch: then start bringing this rank's shard of these to the device, for a gather that starts later; no other
            rank takes part. They rest off the device.
        release: release these when the access is over.
    """

    chunks: tuple[ChunkT, ...]
    prefetch: tuple[ChunkT, ...]
    fetch: tuple[ChunkT, ...]
    release: tuple[ChunkT, ...]


@dataclass(frozen=True)
class Plan(Generic[ChunkT]):
    """One training step, access by access; a value that ranks compare by its digest.

    Attributes:
        steps: one for each access of the trace.
        gathers: how many gathers a step takes, the first of each kept chunk included.
        peak_gathered_bytes: the most bytes that full buffers take at a time, prefetched and kept ones included, and
            what is fetched for later ones.
        peak_bytes: the most bytes of model states per tier, once the optimizer has made its states.
        traffic: bytes that a training step moves, by link: ``"host->device"`` and the like between tiers, and
            ``"ranks"`` for what this rank sends in collectives. Gathers, reductions and the optimizer's step are in it;
            states on the disk are read and written once.
    """

    steps: tuple[PlanStep[ChunkT], ...]
    gathers: int
    peak_gathered_bytes: int
    peak_bytes: Mapping[TierName, int]
    traffic: Mapping[str, int]

    @property
    def digest(self) -> str:
        """64 hexadecimal digits, equal for equal plans over chunks with equal names."""
        content = [
            [[chunk.name for chunk in part] for part in (step.chunks, step.prefetch, step.fetch, step.release)]
            for step in self.steps
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def describe(self) -> str:
        """Return a table for people: a summary, then one line per access."""

        def names(chunks: tuple[ChunkT, ...]) -> str:
            return ", ".join(chunk.name for chunk in chunks) or "-"

        rows = [("access", "use", "prefetch", "fetch", "release")]
        rows += [
            (str(index), names(step.chunks), names(step.prefetch), names(step.fetch), names(step.release))
            for index, step in enumerate(self.steps)
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            f"{len(self.steps)} accesses, {self.gathers} gathers, at most "
            f"{self.peak_gathered_bytes:,} bytes gathered; digest {self.digest[:16]}",
            "bytes at the peak: " + ", ".join(f"{tier} {self.peak_bytes[tier]:,}" for tier in TIERS),
            "bytes moved in a step: "
            + (", ".join(f"{name} {amount:,}" for name, amount in sorted(self.traffic.items())) or "none"),
            "",
        ]
        lines += [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
        ]
        return "\n".join(lines)


def plan_steps(
    trace: Trace[ChunkT],
    placement: Placement[ChunkT],
    *,
    max_prefetch: int,
    max_fetch: int = 0,
    max_held: int = 0,
    use_room: bool = False,
) -> Plan[ChunkT]:
    """Plan fetches, gathers and releases for a trace.

    A step starts with no chunk gathered but valid kept ones, and ends so. Between accesses stays what the next one
    uses, what is held for a later use, and what is ahead of its use: at most ``max_prefetch`` chunks, the soonest
    used first. A chunk that would be started at the next access is kept rather than released. Chunks that stay gathered
    have their memory always, so the first access starts all of them. Beyond those, of the chunks that rest off the
    device the soonest used are fetched, at most ``max_fetch`` at a time.

    Args:
        trace: the accesses of a step.
        placement: where its chunks rest.
        max_prefetch: chunks gathered ahead of their use.
        max_fetch: chunks fetched ahead of their gather.
        max_held: chunks that stay gathered from forward to backward.
        use_room: hold what the device has room for (`hold_in_room`); otherwise ``max_held`` and over short gaps.

    Raises:
        KeyError: the trace uses a chunk that was not placed.
    """
    asked = [tuple(dict.fromkeys(access.chunks)) for access in trace.accesses]
    kept = {chunk for chunk in dict.fromkeys(c for use in asked for c in use) if placement.of(chunk).keep_gathered}
    phases = [access.phase for access in trace.accesses]
    if use_room:
        ahead_bytes = max_prefetch * max((c.full_bytes for c in placement.chunks if c not in kept), default=0)
        ahead_bytes += placement.fetched_bytes
        room = [None if (free := placement.room_bytes(phase)) is None else free - ahead_bytes for phase in phases]
        costs = {c: cost(gather_traffic(c, placement.of(c), placement.world_size)) for c in placement.chunks}
        holding = hold_in_room(asked, kept, room, costs.__getitem__)
    else:
        holding = hold_over_short_gaps(asked, phases, kept, max_held=max_held)
    uses = [(*use, *held) for use, held in zip(asked, holding, strict=True)]
    always_bytes = sum(c.full_bytes for c in placement.chunks if placement.of(c).keep_gathered)

    first_use: dict[ChunkT, int] = {}
    later: dict[ChunkT, list[int]] = {}  # accesses that still need a chunk, in reverse
    for index in range(len(uses) - 1, -1, -1):
        for chunk in uses[index]:
            first_use[chunk] = index
            if chunk not in kept:
                later.setdefault(chunk, []).append(index)
    soonest = [_next_use(chunk, later, uses) for chunk in later]  # one entry for each chunk that has a use ahead
    heapq.heapify(soonest)
    away = [entry for entry in soonest if placement.of(entry[3]).param_tier != "device"]
    heapq.heapify(away)

    gathered: set[ChunkT] = set()
    ahead: set[ChunkT] = set()
    fetched: dict[ChunkT, int] = {}
    fetches: list[tuple[ChunkT, ...]] = []
    prefetches: list[tuple[ChunkT, ...]] = []
    releases: list[tuple[ChunkT, ...]] = []
    gathers: Counter[ChunkT] = Counter()
    starting_bytes: list[int] = []
    held_bytes: list[int] = []
    now_bytes = 0
    for index, use in enumerate(uses):
        ahead.difference_update(use)
        for chunk in _pop_used(soonest, index):
            later[chunk].pop()
            if later[chunk]:
                heapq.heappush(soonest, _next_use(chunk, later, uses))
        for chunk in _pop_used(away, index):
            if later[chunk]:
                heapq.heappush(away, _next_use(chunk, later, uses))
        chosen = _soonest_chunks(soonest, max_prefetch - len(ahead), ahead.union(use))
        ahead.update(chosen)
        if index:
            releases.append(tuple(c for c in uses[index - 1] if c not in kept and c not in ahead and c not in use))
            gathered.difference_update(releases[-1])
            now_bytes -= sum(chunk.full_bytes for chunk in releases[-1])
        if index == 0:
            chosen = sorted([*chosen, *kept.difference(use)], key=lambda chunk: (first_use[chunk], chunk.name))
        prefetches.append(tuple(chunk for chunk in chosen if chunk not in gathered))
        started = [c for c in (*use, *prefetches[-1]) if c not in gathered]
        gathers.update(started)
        gathered.update(started)
        most_bytes = now_bytes + sum(fetched.values())
        for chunk in started:
            now_bytes += 0 if chunk in kept else chunk.full_bytes
            if placement.world_size == 1:  # it was fetched into the full buffer
                fetched.pop(chunk, None)
            most_bytes = max(most_bytes, now_bytes + sum(fetched.values()))
            fetched.pop(chunk, None)
        fetches.append(tuple(_soonest_chunks(away, max_fetch - len(fetched), gathered.union(fetched))))
        fetched.update((chunk, fetch_bytes(chunk, placement.world_size)) for chunk in fetches[-1])
        held_bytes.append(now_bytes + sum(fetched.values()))
        starting_bytes.append(max(most_bytes, held_bytes[-1]))
    if uses:
        releases.append(tuple(chunk for chunk in uses[-1] if chunk not in kept))
    steps = tuple(PlanStep(*parts) for parts in zip(asked, prefetches, fetches, releases, strict=True))
    early_bytes = [
        sum(chunk.full_bytes for chunk in release if chunk in use and chunk not in access.held)
        for access, use, release in zip(trace.accesses, asked, releases, strict=True)
    ]
    return Plan(
        steps=steps,
        gathers=gathers.total(),
        peak_gathered_bytes=always_bytes + max(starting_bytes, default=0),
        peak_bytes=step_peaks(trace, placement, starting_bytes, held_bytes, early_bytes),
        traffic=_step_traffic(placement, gathers, trains="backward" in phases),
    )


def _step_traffic(placement: Placement[ChunkT], gathers: Counter[ChunkT], *, trains: bool) -> dict[str, int]:
    """Return the bytes that a step moves, by link, without links that carry nothing."""
    total: Counter[str] = Counter()
    for chunk in gathers:
        place = placement.of(chunk)
        for name, amount in gather_traffic(chunk, place, placement.world_size).items():
            total[name] += gathers[chunk] * amount
        if trains:
            total += gradient_traffic(chunk, place, placement.world_size)
            total += update_traffic(chunk, place, padding_bytes=chunk.padding_bytes)
    return dict(+total)


def _next_use(
    chunk: ChunkT, later: Mapping[ChunkT, list[int]], uses: Sequence[Sequence[ChunkT]]
) -> tuple[int, int, str, ChunkT]:
    """Return what orders chunks by their next use; the second field orders those of one access as it does."""
    following = later[chunk][-1]
    return following, uses[following].index(chunk), chunk.name, chunk


def _pop_used(soonest: list[tuple[int, int, str, ChunkT]], index: int) -> Iterator[ChunkT]:
    """Take the chunks off the heap that are used at access ``index``."""
    while soonest and soonest[0][0] <= index:
        yield heapq.heappop(soonest)[3]


def _soonest_chunks(soonest: list[tuple[int, int, str, ChunkT]], count: int, excluded: set[ChunkT]) -> list[ChunkT]:
    """Return up to ``count`` chunks of the heap that are used soonest, without those excluded."""
    chosen: list[ChunkT] = []
    looked_at: list[tuple[int, int, str, ChunkT]] = []
    while soonest and len(chosen) < count:
        looked_at.append(heapq.heappop(soonest))
        if looked_at[-1][3] not in excluded:
            chosen.append(looked_at[-1][3])
    for entry in looked_at:
        heapq.heappush(soonest, entry)
    return chosen
