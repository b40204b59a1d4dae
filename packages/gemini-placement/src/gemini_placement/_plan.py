"""From a trace to a plan: when each chunk is gathered, prefetched and released."""

from __future__ import annotations

import hashlib
import heapq
import json
from dataclasses import dataclass
from typing import Generic

from gemini_placement._placement import Placement
from gemini_placement.interfaces import ChunkT, Phase, Trace


@dataclass(frozen=True, slots=True)
class PlanStep(Generic[ChunkT]):
    """What to do around one access of the trace.

    Attributes:
        chunks: gather these, or wait for them where a prefetch has started them, before the access.
        prefetch: then start gathering these; nothing waits for them yet.
        release: release these when the access is over.
    """

    chunks: tuple[ChunkT, ...]
    prefetch: tuple[ChunkT, ...]
    release: tuple[ChunkT, ...]


@dataclass(frozen=True)
class Plan(Generic[ChunkT]):
    """One training step, access by access; a value that ranks compare by its digest.

    Attributes:
        steps: one for each access of the trace.
        gathers: how many gathers a step takes, the first of each kept chunk included.
        peak_gathered_bytes: the most bytes that full buffers take at a time, prefetched and kept ones included.
    """

    steps: tuple[PlanStep[ChunkT], ...]
    gathers: int
    peak_gathered_bytes: int

    @property
    def digest(self) -> str:
        """64 hexadecimal digits, equal for equal plans over chunks with equal names."""
        content = [
            [[chunk.name for chunk in part] for part in (step.chunks, step.prefetch, step.release)]
            for step in self.steps
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def describe(self) -> str:
        """Return a table for people: a summary, then one line per access."""

        def names(chunks: tuple[ChunkT, ...]) -> str:
            return ", ".join(chunk.name for chunk in chunks) or "-"

        rows = [("access", "use", "prefetch", "release")]
        rows += [
            (str(index), names(step.chunks), names(step.prefetch), names(step.release))
            for index, step in enumerate(self.steps)
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            f"{len(self.steps)} accesses, {self.gathers} gathers, at most "
            f"{self.peak_gathered_bytes:,} bytes gathered; digest {self.digest[:16]}",
            "",
        ]
        lines += [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
        ]
        return "\n".join(lines)


def plan_steps(trace: Trace[ChunkT], placement: Placement[ChunkT], *, max_prefetch: int) -> Plan[ChunkT]:
    """Plan gathers and releases for a trace.

    A step starts with no chunk gathered but valid kept ones, and ends so. Between accesses stays what the next one
    uses, what is held over a short gap (`_hold_over`), and what is ahead of its use: at most ``max_prefetch`` chunks,
    the soonest used first. A chunk that would be started at the next access is kept rather than released.

    Raises:
        KeyError: the trace uses a chunk that was not placed.
    """
    asked = [tuple(dict.fromkeys(access.chunks)) for access in trace.accesses]
    kept = {chunk for chunk in dict.fromkeys(c for use in asked for c in use) if placement.of(chunk).keep_gathered}
    phases = [access.phase for access in trace.accesses]
    uses = [(*use, *held) for use, held in zip(asked, _hold_over(asked, phases, kept), strict=True)]
    always_bytes = sum(c.full_bytes for c in placement.chunks if placement.of(c).keep_gathered)

    # later[chunk]: accesses that still need it, in reverse. A kept chunk needs gathering for its first use only.
    later: dict[ChunkT, list[int]] = {}
    for index in range(len(uses) - 1, -1, -1):
        for chunk in uses[index]:
            indices = later.setdefault(chunk, [])
            if chunk in kept:
                indices.clear()
            indices.append(index)
    # One entry for each chunk that has a use ahead; the second field orders the chunks of one access as it does.
    soonest = [(indices[-1], uses[indices[-1]].index(chunk), chunk.name, chunk) for chunk, indices in later.items()]
    heapq.heapify(soonest)

    gathered: set[ChunkT] = set()
    ahead: set[ChunkT] = set()
    prefetches: list[tuple[ChunkT, ...]] = []
    releases: list[tuple[ChunkT, ...]] = []
    gathers = peak_bytes = gathered_bytes = 0
    for index, use in enumerate(uses):
        ahead.difference_update(use)
        while soonest and soonest[0][0] <= index:
            chunk = heapq.heappop(soonest)[3]
            later[chunk].pop()
            if later[chunk]:
                following = later[chunk][-1]
                heapq.heappush(soonest, (following, uses[following].index(chunk), chunk.name, chunk))
        chosen = _soonest_chunks(soonest, max_prefetch - len(ahead), ahead.union(use))
        ahead.update(chosen)
        if index:
            releases.append(tuple(c for c in uses[index - 1] if c not in kept and c not in ahead and c not in use))
            gathered.difference_update(releases[-1])
            gathered_bytes -= sum(chunk.full_bytes for chunk in releases[-1])
        prefetches.append(tuple(chunk for chunk in chosen if chunk not in gathered))
        started = [c for c in (*use, *prefetches[-1]) if c not in gathered]
        gathers += len(started)
        gathered.update(started)
        gathered_bytes += sum(chunk.full_bytes for chunk in started if chunk not in kept)
        peak_bytes = max(peak_bytes, gathered_bytes)
    if uses:
        releases.append(tuple(chunk for chunk in uses[-1] if chunk not in kept))
    steps = tuple(PlanStep(*parts) for parts in zip(asked, prefetches, releases, strict=True))
    return Plan(steps=steps, gathers=gathers, peak_gathered_bytes=always_bytes + peak_bytes)


def _hold_over(uses: list[tuple[ChunkT, ...]], phases: list[Phase], kept: set[ChunkT]) -> list[list[ChunkT]]:
    """Return, for each access, the chunks that stay gathered over it though it does not use them.

    A layer's small parameters often lie in one chunk and are used before and after those of others; without this,
    that chunk would be gathered again for each of them. Gaps within forward and within backward are bridged, the
    shortest first. With what an access uses itself, no more bytes are gathered than two of the largest chunks have, or
    than the access that uses most needs.
    """
    gathered = [sum(chunk.full_bytes for chunk in use if chunk not in kept) for use in uses]
    largest = max((chunk.full_bytes for use in uses for chunk in use if chunk not in kept), default=0)
    limit = max([2 * largest, *gathered])
    gaps: list[tuple[int, int, str, ChunkT]] = []
    last: dict[ChunkT, int] = {}
    for index, use in enumerate(uses):
        for chunk in use:
            start = last.get(chunk, index)
            if chunk not in kept and index - start > 1 and phases[start] == phases[index]:
                gaps.append((index - last[chunk], last[chunk], chunk.name, chunk))
            last[chunk] = index
    held: list[list[ChunkT]] = [[] for _ in uses]
    for length, start, _, chunk in sorted(gaps, key=lambda gap: gap[:3]):
        between = range(start + 1, start + length)
        if all(gathered[index] + chunk.full_bytes <= limit for index in between):
            for index in between:
                held[index].append(chunk)
                gathered[index] += chunk.full_bytes
    return held


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
