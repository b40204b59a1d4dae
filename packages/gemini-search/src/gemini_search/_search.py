"""The search: from tensor sizes to a chunk configuration."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final, Literal

from gemini_search._configuration import ChunkConfiguration, ChunkSpec, TensorSlot
from gemini_search._packing import (
    Piece,
    Strip,
    align_to_modules,
    cheapest_pieces,
    choose_classes,
    count_below,
    cut_strip,
    least_total,
    next_fit,
    padded,
)

_MEGA: Final = 2**20
_MAX_CLASSES: Final = 4
# Positions that the class search may look at, in all, before its last round. A count and not a time, so that
# every machine stops at the same point and every rank finds the same configuration.
_VISIT_BUDGET: Final = 8_000
_STARTS: Final = 12


def search_chunk_configuration(
    sizes: Mapping[str, int] | Sequence[tuple[str, int]],
    world_size: int,
    *,
    hidden_dim: int = 1024,
    search_range_m: float = 32,
    min_chunk_size_m: float = 32,
    filter_exlarge_params: bool = True,
    group_by: Callable[[str], Hashable] | None = None,
    method: Literal["best", "sweep"] = "best",
) -> ChunkConfiguration:
    """Cut tensors into chunks that waste little, shard evenly, and keep the order of the tensors.

    Chunk sizes lie between ``min_chunk_size_m`` and ``search_range_m`` above the larger of ``min_chunk_size_m``
    and the largest tensor. A tensor above the chunk size gets a chunk of its own size. A list that holds
    less than ``min_chunk_size_m`` altogether becomes one chunk with ``keep_gathered``. Tensors that must not
    share chunks (other dtype, frozen) are searched in separate calls.

    Args:
        sizes: number of elements of each tensor, in the order in which chunks should hold them.
        world_size: ranks that share a chunk; every chunk size is a multiple of it.
        hidden_dim: the step between candidate sizes, in elements; the sweep tries each step, and the
            range of sizes starts at a multiple of it.
        search_range_m: width of the range of chunk sizes, in 2**20 elements.
        min_chunk_size_m: smallest chunk size, in 2**20 elements. Only a stretch between two large tensors that
            holds less gets a smaller chunk.
        filter_exlarge_params: let tensors beyond the mean plus three standard deviations not raise the
            chunk size.
        group_by: names a tensor's module. Where padding leaves a choice, chunks end between modules.
        method: "best" uses up to four chunk sizes and never wastes more than "sweep", which tries one size
            after the other as ColossalAI's Gemini does and takes its result.

    Returns:
        The configuration: the same value for the same arguments on every rank, machine and Python build.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``sizes`` is empty or has a duplicate name, or a number is out of its range.
    """
    names, numels = _checked_sizes(sizes)
    _check_int("world_size", world_size, 1)
    _check_int("hidden_dim", hidden_dim, 1)
    min_numel = _mega_to_numel("min_chunk_size_m", min_chunk_size_m)
    range_numel = _mega_to_numel("search_range_m", search_range_m)
    if method not in ("best", "sweep"):
        raise ValueError(f'method must be "best" or "sweep", got {method!r}.')
    if group_by is not None and not callable(group_by):
        raise TypeError(
            f"group_by must be a function from a tensor's name to its module, got {type(group_by).__name__}."
        )

    # An empty tensor takes no room: it joins the chunk of the tensor before it once the others are placed.
    filled = [index for index, numel in enumerate(numels) if numel]
    total = sum(numels)
    if total < min_numel or not filled:
        piece = Piece(0, len(filled), padded(max(total, 1), world_size))
        return _configuration([piece], names, numels, filled, piece.numel, world_size, keep_gathered=True)

    lengths = [numels[index] for index in filled]
    prefix = [0, *accumulate(lengths)]
    usual = _without_outliers(lengths) if filter_exlarge_params else lengths
    low = padded(max(min_numel, *usual), hidden_dim)
    large = [index for index, numel in enumerate(lengths) if numel > low]

    if method == "sweep":
        candidates = range(low, low + range_numel + 1, hidden_dim)
        chunk_numel = padded(_swept_size(usual, candidates), world_size)
        strip = cut_strip(prefix, large, chunk_numel, world_size)
        pieces = next_fit(strip, chunk_numel)
    else:
        floor = padded(max(min_numel, hidden_dim), world_size)
        low, high = padded(low, world_size), padded(low + range_numel, world_size)
        strip, pieces = _best_pieces(prefix, large, low, high, floor, world_size)
        chunk_numel = max((piece.numel for piece in pieces), default=low)
        if group_by is not None:
            keys = [group_by(names[index]) for index in filled]
            inner = [False] + [before == after for before, after in pairwise(keys)]
            pieces = align_to_modules(strip, pieces, inner)
    return _configuration(
        sorted(strip.own + pieces), names, numels, filled, chunk_numel, world_size, keep_gathered=False
    )


def _swept_size(lengths: Sequence[int], candidates: range) -> int:
    """Return the first candidate with the least next-fit waste, as trying each in turn would."""
    prefix = [0, *accumulate(lengths)]
    strip = Strip(prefix, [], [(0, len(lengths))])
    found = least_total(strip, candidates, candidates[0] * len(lengths) + 1)
    assert found is not None  # the first candidate needs at most one chunk per tensor
    return found[0]


def _best_pieces(
    prefix: Sequence[int], large: Sequence[int], low: int, high: int, floor: int, world_size: int
) -> tuple[Strip, list[Piece]]:
    """Return the packing with the least waste that was found, never worse than any single size.

    Args:
        prefix: running sums of the sizes.
        large: ascending positions of the tensors that may exceed the chunk size.
        low: the smallest size that the sweep would try, padded to the world size.
        high: the largest one, padded likewise.
        floor: the smallest size of a class.
        world_size: every size is a multiple of it.
    """
    best: tuple[int, int, Strip, list[Piece]] | None = None
    own_sizes = sorted(padded(prefix[i + 1] - prefix[i], world_size) for i in large)
    # Reading a long list costs time too; one round of refinement there always is.
    budget = max(1, _VISIT_BUDGET - len(prefix) // 2)
    bounds = sorted({low, *(numel for numel in own_sizes if numel <= high)})
    # Tensors between `low` and `high`, if there are any, may share chunks or have their own: both ways are tried.
    for limit in (high, low)[: len(bounds)]:
        strip = cut_strip(prefix, large, limit, world_size)
        least = max([low, *(numel for numel in own_sizes if numel <= limit)])
        perfect = sum(padded(prefix[stop] - prefix[start], world_size) for start, stop in strip.runs)
        for step in range(_STARTS):
            # From the largest down: where several waste nothing, the first has the fewest chunks.
            numel = padded(high - (high - least) * step // (_STARTS - 1), world_size)
            pieces, budget = _refined(strip, next_fit(strip, numel), floor, world_size, budget)
            total = sum(piece.numel for piece in pieces)
            key = total + strip.own_numel, len(pieces) + len(strip.own)
            if best is None or key < best[:2]:
                best = *key, strip, pieces
            if total == perfect or budget <= 0:
                break
    assert best is not None
    return _best_single(prefix, large, [*bounds, high + world_size], best[0], world_size) or best[2:]


def _best_single(
    prefix: Sequence[int], large: Sequence[int], bounds: Sequence[int], ceiling: int, world_size: int
) -> tuple[Strip, list[Piece]] | None:
    """Return the packing by the best of all single sizes, if its total goes below a ceiling.

    The classes are found by descent from a dozen starts; it is this exact search that makes the result at least as
    good as the sweep.

    Args:
        prefix: running sums of the sizes.
        large: ascending positions of the tensors that may exceed the chunk size.
        bounds: ascending; the smallest size, each at which one more tensor may share chunks, and the end of all sizes.
        ceiling: only totals below it count, oversized tensors included.
        world_size: every size is a multiple of it.
    """
    best: tuple[Strip, int] | None = None
    stack = [(0, len(bounds) - 1)]
    while stack:
        first, last = stack.pop()
        candidates = range(bounds[first], bounds[last], world_size)
        strip = cut_strip(prefix, large, candidates[-1], world_size)
        if last - first == 1:
            found = least_total(strip, candidates, ceiling - strip.own_numel)
            if found is not None:
                best, ceiling = (strip, found[0]), found[1] + strip.own_numel
        # A smaller size shares no more tensors than the largest does, and its oversized ones cost more than it.
        elif count_below(strip, candidates[-1], candidates[0], ceiling - strip.own_numel) is not None:
            middle = (first + last) // 2
            stack += (middle, last), (first, middle)
    return None if best is None else (best[0], next_fit(*best))


def _refined(strip: Strip, pieces: list[Piece], floor: int, world_size: int, budget: int) -> tuple[list[Piece], int]:
    """Alternate between the best classes for the pieces and the best pieces for the classes.

    Neither half can add waste, so the total falls until it stands still.

    Returns:
        The pieces, and what is left of the budget of positions to look at.
    """
    total = sum(piece.numel for piece in pieces)
    while budget > 0:
        demands = _demands(strip, pieces, floor, world_size)
        candidate, visits = cheapest_pieces(strip, choose_classes(demands, _MAX_CLASSES), floor)
        budget -= visits
        fresh = sum(piece.numel for piece in candidate)
        if fresh > total:
            break
        pieces = candidate
        if fresh == total:
            break
        total = fresh
    return pieces, budget


def _demands(strip: Strip, pieces: Sequence[Piece], floor: int, world_size: int) -> list[int]:
    """Return the least buffer size of each piece: what it uses, but no less than its run's floor."""
    prefix = strip.prefix
    demands: list[int] = []
    position = 0
    for start, stop in strip.runs:
        least = min(floor, prefix[stop] - prefix[start])
        while position < len(pieces) and pieces[position].stop <= stop:
            piece = pieces[position]
            demands.append(padded(max(prefix[piece.stop] - prefix[piece.start], least), world_size))
            position += 1
    return demands


def _without_outliers(lengths: Sequence[int]) -> list[int]:
    """Drop sizes above the mean plus three standard deviations; exact, so that no rounding can decide."""
    count, total = len(lengths), sum(lengths)
    variance = count * sum(numel * numel for numel in lengths) - total * total
    limit = (total + math.isqrt(9 * variance)) // count
    return [numel for numel in lengths if numel <= limit]


def _configuration(
    pieces: Sequence[Piece],
    names: Sequence[str],
    numels: Sequence[int],
    filled: Sequence[int],
    chunk_numel: int,
    world_size: int,
    *,
    keep_gathered: bool,
) -> ChunkConfiguration:
    chunks: list[ChunkSpec] = []
    begin = 0
    for piece in pieces:
        end = filled[piece.stop] if piece.stop < len(filled) else len(names)
        offsets = accumulate(numels[begin:end], initial=0)
        slots = tuple(map(TensorSlot, names[begin:end], offsets, numels[begin:end]))
        chunks.append(ChunkSpec(numel=piece.numel, tensors=slots, keep_gathered=keep_gathered))
        begin = end
    return ChunkConfiguration(chunks=tuple(chunks), chunk_numel=chunk_numel, world_size=world_size)


def _checked_sizes(sizes: object) -> tuple[list[str], list[int]]:
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, (Mapping, Sequence)):
        raise TypeError(
            f"sizes must map names to numbers of elements, or list (name, numel) pairs in a fixed order; "
            f"got {type(sizes).__name__}."
        )
    if isinstance(sizes, Mapping):
        names, numels = list(sizes.keys()), list(sizes.values())
    else:
        for position, pair in enumerate(sizes):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TypeError(f"Entry {position} of sizes must be a pair (name, numel), got {pair!r}.")
        names, numels = [name for name, _ in sizes], [numel for _, numel in sizes]
    if not names:
        raise ValueError("sizes is empty: there is nothing to cut into chunks. Give at least one tensor.")
    for name, numel in zip(names, numels, strict=True):
        if not isinstance(name, str):
            raise TypeError(f"A tensor's name must be a str, got {name!r} of type {type(name).__name__}.")
        if isinstance(numel, bool) or not isinstance(numel, int):
            raise TypeError(f"The size of {name!r} must be an int, a number of elements; got {numel!r}.")
        if numel < 0:
            raise ValueError(f"The size of {name!r} must not be negative, got {numel}.")
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"The name {twice!r} occurs twice in sizes. List a shared tensor once.")
    return names, numels


def _check_int(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")


def _mega_to_numel(name: str, value: float) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, in units of 2**20 elements; got {value!r}.")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and not negative, in units of 2**20 elements; got {value}.")
    return round(value * _MEGA)
