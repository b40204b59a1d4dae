"""Cutting a list of sizes into runs of consecutive tensors: the arithmetic beneath the search.

[Note: Longest runs suffice]
Let ``cost(i)`` be the least total of buffer sizes, then the least number of chunks, for the tensors from ``i``
on. Leaving out tensors never makes a cover dearer, so ``cost`` does not rise with ``i``. Hence a chunk of a given
size may always take as many tensors as fit, and there is one move per size from each position.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

_MAX_CANDIDATES: Final = 400


class Piece(NamedTuple):
    """The tensors ``start:stop`` in a full buffer of ``numel`` elements."""

    start: int
    stop: int
    numel: int


def padded(numel: int, multiple: int) -> int:
    """Return ``numel`` rounded up to a multiple of ``multiple``."""
    return -(-numel // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Strip:
    """A list of tensors with the oversized ones taken out.

    Attributes:
        prefix: ``prefix[i]`` is the number of elements before tensor ``i``; one entry more than tensors.
        own: oversized tensors, each with whatever followed it and fits into its padding.
        runs: ``(start, stop)`` of the tensors between them; no chunk crosses the border of a run.
    """

    prefix: Sequence[int]
    own: list[Piece]
    runs: list[tuple[int, int]]

    @property
    def own_numel(self) -> int:
        return sum(piece.numel for piece in self.own)

    @property
    def run_numel(self) -> int:
        return sum(self.prefix[stop] - self.prefix[start] for start, stop in self.runs)


def cut_strip(prefix: Sequence[int], large: Sequence[int], limit: int, world_size: int) -> Strip:
    """Give each tensor above ``limit`` a piece of its own size.

    Args:
        prefix: running sums of the sizes.
        large: ascending positions of at least the tensors above ``limit``.
        limit: the largest size that may share a chunk.
        world_size: own pieces are padded to a multiple of it.
    """
    own: list[Piece] = []
    runs: list[tuple[int, int]] = []
    done = 0
    for index in large:
        numel = prefix[index + 1] - prefix[index]
        if numel <= limit:
            continue
        if done < index:
            runs.append((done, index))
        numel = padded(numel, world_size)
        # A follower that fits into the few elements of padding costs nothing there.
        done = bisect_right(prefix, prefix[index] + numel) - 1
        own.append(Piece(index, done, numel))
    if done < len(prefix) - 1:
        runs.append((done, len(prefix) - 1))
    return Strip(prefix, own, runs)


def next_fit(strip: Strip, numel: int) -> list[Piece]:
    """Fill chunks of ``numel`` elements one after the other; each tensor of a run must fit into one."""
    prefix = strip.prefix
    pieces: list[Piece] = []
    for start, stop in strip.runs:
        while start < stop:
            end = bisect_right(prefix, prefix[start] + numel, start + 1, stop + 1) - 1
            pieces.append(Piece(start, end, numel))
            start = end
    return pieces


def least_total(strip: Strip, candidates: range, ceiling: int) -> tuple[int, int] | None:
    """Find the chunk size whose next-fit packing takes the fewest elements, without trying all.

    Args:
        strip: its oversized tensors must be the same for every candidate, and no other tensor may exceed the
            smallest one.
        candidates: ascending chunk sizes.
        ceiling: only totals below it count.

    Returns:
        The smallest of the best sizes and the total of its chunks, oversized tensors left out; None if no
        candidate goes below the ceiling.
    """
    best: tuple[int, int] | None = None
    stack = [(0, len(candidates) - 1)]
    while stack:
        first, last = stack.pop()
        if first > last:
            continue
        # With `large` the chunks reach farthest, with `small` they are cheapest: together a lower bound for
        # every size between, which often passes the ceiling after a few chunks.
        small, large = candidates[first], candidates[last]
        tie_wins = best is not None and large < best[0]
        counted = count_below(strip, large, small, ceiling + tie_wins)
        if counted is None:
            continue
        # Down to the fullest chunk's need every size cuts the list alike, and the smallest of them costs least.
        count, need = counted
        last = bisect_left(candidates, need, first, last)
        if count * candidates[last] < ceiling + tie_wins:
            ceiling = count * candidates[last]
            best = candidates[last], ceiling
        if first < last:
            middle = (first + last) // 2
            # `last` itself is settled; the lower half goes first because its totals prune the upper one.
            stack.append((middle + 1, last - 1))
            stack.append((first, middle))
    return best


def count_below(strip: Strip, reach: int, price: int, ceiling: int) -> tuple[int, int] | None:
    """Count next-fit chunks of ``reach`` elements, as long as ``price`` for each stays below the ceiling.

    Returns:
        The number of chunks, and the elements in the fullest of them; None where their price is not below.
    """
    prefix = strip.prefix
    count = need = 0
    unplaced = strip.run_numel
    for start, stop in strip.runs:
        while start < stop:
            end = bisect_right(prefix, prefix[start] + reach, start + 1, stop + 1) - 1
            count += 1
            used = prefix[end] - prefix[start]
            if used > need:
                need = used
            unplaced -= used
            if count * price + unplaced >= ceiling:
                return None
            start = end
    return count, need


def choose_classes(demands: Sequence[int], max_classes: int) -> list[int]:
    """Choose at most ``max_classes`` buffer sizes for chunks that need ``demands`` elements.

    Minimises the sum, over the demands, of the smallest chosen size that holds it; exact up to a few hundred
    demands, and beyond that among as many evenly spread ones.
    """
    ordered = sorted(demands)
    stride = -(-len(ordered) // _MAX_CANDIDATES)
    values = sorted({*ordered[::-stride]})
    # counts[j]: how many demands are at most values[j - 1].
    counts = [0] + [bisect_right(ordered, value) for value in values]
    infinite = values[-1] * (len(ordered) + 1)
    totals = [0] + [infinite] * len(values)
    parents: list[list[int]] = []
    for _ in range(max_classes):
        # totals'[j] = min over i < j of totals[i] + values[j - 1] * (counts[j] - counts[i]). As lines in
        # values[j - 1] these have falling slopes and are asked in rising order: a lower hull with one pointer.
        fresh, parent, hull, head = list(totals), list(range(len(values) + 1)), [0], 0
        for j in range(1, len(values) + 1):
            value = values[j - 1]
            while head + 1 < len(hull):
                here, after = hull[head], hull[head + 1]
                if totals[after] - value * counts[after] > totals[here] - value * counts[here]:
                    break
                head += 1
            i = hull[head]
            total = totals[i] + value * (counts[j] - counts[i])
            if total < fresh[j]:
                fresh[j], parent[j] = total, i
            while len(hull) - head > 1:
                a, b = hull[-2], hull[-1]
                crosses_ab = (totals[b] - totals[a]) * (counts[j] - counts[b])
                crosses_bj = (totals[j] - totals[b]) * (counts[b] - counts[a])
                if crosses_bj > crosses_ab:
                    break
                hull.pop()
            hull.append(j)
        parents.append(parent)
        if fresh[-1] == totals[-1]:
            break
        totals = fresh
    chosen: list[int] = []
    j = len(values)
    for parent in reversed(parents):
        # parent[j] == j says that this round added no size for the first j values.
        if parent[j] != j:
            chosen.append(values[j - 1])
            j = parent[j]
    return sorted(chosen)


def cheapest_pieces(strip: Strip, classes: Sequence[int], floor: int) -> tuple[list[Piece], int]:
    """Pack the runs into buffers of the given sizes: least total, then fewest chunks; exact.

    Args:
        strip: no tensor in its runs exceeds the largest class.
        classes: ascending buffer sizes.
        floor: a run of at least so many elements does not use classes below it.

    Returns:
        The pieces, and the number of positions looked at (the work done).
    """
    prefix = strip.prefix
    pieces: list[Piece] = []
    visited = 0
    # Total and number of chunks up to a position in one integer, compared in that order; and the last chunk before it.
    scale = len(prefix)
    prices = [numel * scale + 1 for numel in classes]
    infinite = prices[-1] * scale
    costs = [infinite] * scale
    parents = [0] * scale
    sizes = [0] * scale
    for start, stop in strip.runs:
        run_numel = prefix[stop] - prefix[start]
        smallest = bisect_left(classes, min(floor, run_numel))
        if run_numel <= classes[smallest]:  # one chunk of the smallest size: nothing is cheaper
            pieces.append(Piece(start, stop, classes[smallest]))
            visited += 1
            continue
        moves = list(zip(classes[smallest:], prices[smallest:], strict=True))
        costs[start] = 0
        for position in range(start, stop):
            cost = costs[position]
            if cost == infinite:
                continue
            visited += 1
            base = prefix[position]
            end = position
            # See [Note: Longest runs suffice]. A size that does not hold one tensor leads nowhere, and costs.
            for numel, price in moves:
                end = bisect_right(prefix, base + numel, end, stop + 1) - 1
                if cost + price < costs[end]:
                    costs[end] = cost + price
                    parents[end] = position
                    sizes[end] = numel
        run: list[Piece] = []
        end = stop
        while end > start:
            run.append(Piece(parents[end], end, sizes[end]))
            end = run[-1].start
        pieces.extend(reversed(run))
    return pieces, visited


def align_to_modules(strip: Strip, pieces: Sequence[Piece], inner: Sequence[bool]) -> list[Piece]:
    """Move borders between pieces to where no module is cut, as far as the padding has room.

    Args:
        strip: the strip that the pieces pack.
        pieces: pieces of its runs, in order.
        inner: ``inner[i]`` says that a border before tensor ``i`` would cut a module.

    Returns:
        As many pieces of the same sizes in the same order, with the fewest modules cut; exact.
    """
    prefix = strip.prefix
    aligned: list[Piece] = []
    waiting = list(reversed(pieces))
    for start, stop in strip.runs:
        members: list[Piece] = []
        while waiting and waiting[-1].stop <= stop:
            members.append(waiting.pop())
        # earliest[k]: the first place where piece k may end such that the later ones still hold the rest.
        earliest = [stop] * len(members)
        for k in range(len(members) - 2, -1, -1):
            earliest[k] = bisect_left(prefix, prefix[earliest[k + 1]] - members[k + 1].numel)
        # By position where a piece may end: fewest modules cut so far, then the latest place before it.
        reached: dict[int, tuple[int, int]] = {start: (0, start)}
        layers = [reached]
        for piece, low in zip(members, earliest, strict=True):
            before = sorted(reached, reverse=True)
            high = bisect_right(prefix, prefix[before[0]] + piece.numel, 0, stop + 1) - 1
            # Walk down from `high`: the lower the end, the more of the earlier places are within reach.
            fresh: dict[int, tuple[int, int]] = {}
            nearest, taken = (len(prefix), -1), 0
            for end in range(high, low - 1, -1):
                while taken < len(before) and prefix[end] - prefix[before[taken]] <= piece.numel:
                    place = before[taken]
                    nearest = min(nearest, (reached[place][0], place), key=lambda found: (found[0], -found[1]))
                    taken += 1
                fresh[end] = nearest[0] + (end < stop and inner[end]), nearest[1]
            reached = fresh
            layers.append(reached)
        end, run = stop, list[Piece]()
        for piece, layer in zip(reversed(members), reversed(layers), strict=False):
            begin = layer[end][1]
            run.append(Piece(begin, end, piece.numel))
            end = begin
        aligned.extend(reversed(run))
    return aligned
