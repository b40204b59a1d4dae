"""Pieces: the flat parameters that the user's optimizer sees in place of the user's own.

[Note: Pieces]
A shard holds slices of parameters. A piece is a run of neighbouring slices of one parameter group, cut at the block
size: a flat view of the master weights that the optimizer updates in one go. Its state lives in buffers of the shard,
one for each parameter group and state name, so that the bytes do not depend on where pieces are cut.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gemini_optim._errors import ShardLayoutError
from gemini_optim.interfaces import OptimShard

__all__ = [
    "Piece",
    "Segment",
    "StateMemory",
    "cut_pieces",
    "list_segments",
    "parts_of",
    "place_numbers",
    "split_pieces",
]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of one parameter's elements in one shard, with the parameter known by its number in the optimizer.

    Attributes:
        shard_index: which shard.
        group_index: which parameter group.
        param_index: the parameter, counted through all groups as in ``state_dict``.
        param_offset: first element, in the flattened parameter.
        start: first element, in the shard.
        packed: first element, in the state buffers of the group in this shard.
        numel: number of elements.
    """

    shard_index: int
    group_index: int
    param_index: int
    param_offset: int
    start: int
    packed: int
    numel: int

    def part(self, offset: int, numel: int) -> Segment:
        """Return ``numel`` elements from ``offset`` on."""
        return replace(
            self,
            param_offset=self.param_offset + offset,
            start=self.start + offset,
            packed=self.packed + offset,
            numel=numel,
        )


@dataclass(eq=False, slots=True)
class Piece:
    """A flat parameter of the wrapped optimizer. [Note: Pieces].

    Attributes:
        segments: what it is made of, in order and without gaps.
        param: stands for the piece in the optimizer, shape ``(numel,)`` during a step.
        state: what the optimizer keeps for it.
        owned: the tensors of ``state`` that lie in the memory of the shard.
        shard_index: which shard the piece lies in.
        group_index: which parameter group it belongs to.
        start: first element, in the shard.
        packed: first element, in the state buffers.
        numel: number of elements.
    """

    segments: tuple[Segment, ...]
    param: Tensor = field(default_factory=lambda: torch.empty(0))
    state: dict[str, object] = field(default_factory=dict)
    owned: dict[str, Tensor] = field(default_factory=dict)
    shard_index: int = field(init=False)
    group_index: int = field(init=False)
    start: int = field(init=False)
    packed: int = field(init=False)
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        first, last = self.segments[0], self.segments[-1]
        self.shard_index, self.group_index = first.shard_index, first.group_index
        self.start, self.packed = first.start, first.packed
        self.numel = last.start + last.numel - first.start

    def offsets(self) -> Iterable[tuple[Segment, int]]:
        """Yield each segment with its first element counted in the piece."""
        return ((segment, segment.start - self.start) for segment in self.segments)


def list_segments(shards: Sequence[OptimShard], place_of: Callable[[Tensor], tuple[int, int] | None]) -> list[Segment]:
    """Number the slices of all shards.

    Args:
        shards: this rank's shards.
        place_of: group and number of a parameter in the optimizer, or None if it is not there.

    Raises:
        ShardLayoutError: the slices of a shard overlap, are out of order or do not fit their parameter.
    """
    segments = []
    for shard_index, shard in enumerate(shards):
        end = 0
        packed: dict[int, int] = {}
        for part in shard.slices:
            if part.start < end or part.numel < 1:
                raise ShardLayoutError(
                    f"The slices of shard {shard.name!r} overlap, are empty or not in order at element "
                    f"{part.start}. OptimShard.slices must be ordered and disjoint."
                )
            if not 0 <= part.param_offset <= part.param.numel() - part.numel:
                raise ShardLayoutError(
                    f"Shard {shard.name!r} has {part.numel} elements from element {part.param_offset} on of a "
                    f"parameter that has only {part.param.numel()}."
                )
            end = part.start + part.numel
            if (place := place_of(part.param)) is None:
                continue
            group_index, param_index = place
            first = packed.get(group_index, 0)
            packed[group_index] = first + part.numel
            segments.append(
                Segment(shard_index, group_index, param_index, part.param_offset, part.start, first, part.numel)
            )
    return segments


def cut_pieces(
    segments: Iterable[Segment], block_numel: int, kind_of: Callable[[int], Hashable] = lambda _: None
) -> list[Piece]:
    """Join neighbouring segments into runs and cut the runs into pieces.

    Args:
        segments: in the order of the shards.
        block_numel: elements of a piece at most.
        kind_of: parameters of unlike kinds, by number, do not share a piece.
    """
    runs: list[list[Segment]] = []
    for segment in segments:
        if runs:
            last = runs[-1][-1]
            if (
                last.shard_index == segment.shard_index
                and last.group_index == segment.group_index
                and last.start + last.numel == segment.start
                and kind_of(last.param_index) == kind_of(segment.param_index)
            ):
                runs[-1].append(segment)
                continue
        runs.append([segment])
    return [Piece(tuple(part)) for run in runs for part in _blocks(run, block_numel)]


def split_pieces(pieces: Iterable[Piece], apart: Callable[[Segment], bool], memory: StateMemory) -> Iterable[Piece]:
    """Cut pieces where ``apart`` changes from one segment to the next; each part goes on with the state it has."""
    for piece in pieces:
        runs = [tuple(run) for _, run in itertools.groupby(piece.segments, apart)]
        if len(runs) == 1:
            yield piece
            continue
        for run in runs:
            part = Piece(run)
            for name, value in piece.state.items():
                if name in piece.owned:
                    memory.take(part, name, piece.owned[name].dtype)
                else:
                    part.state[name] = copy.deepcopy(value)
            yield part


def parts_of(pieces: Iterable[Piece], shards: Mapping[int, Tensor]) -> list[Tensor]:
    """Return the elements of each piece.

    Args:
        pieces: what to look for.
        shards: one flat tensor of each of their shards, by the number of the shard.
    """
    parts = []
    for piece in pieces:
        whole = shards[piece.shard_index]
        parts.append(whole if piece.numel == whole.numel() else whole.narrow(0, piece.start, piece.numel))
    return parts


def place_numbers(piece: Piece, groups: Sequence[Mapping[str, object]]) -> None:
    """Put single numbers among the states of ``piece`` where its parameter group wants them: fused, on its device."""
    group = groups[piece.group_index]
    on_device = group.get("fused") or group.get("capturable")
    device = next((view.device for view in piece.owned.values() if on_device), torch.device("cpu"))
    for name, value in piece.state.items():
        if isinstance(value, Tensor) and name not in piece.owned:
            piece.state[name] = value.to(device)


def _blocks(run: list[Segment], block_numel: int) -> Iterable[list[Segment]]:
    block: list[Segment] = []
    room = block_numel
    for segment in run:
        offset = 0
        while offset < segment.numel:
            numel = min(room, segment.numel - offset)
            block.append(segment.part(offset, numel))
            offset += numel
            room -= numel
            if room == 0:
                yield block
                block, room = [], block_numel
    if block:
        yield block


class StateMemory:
    """Buffers for optimizer states, taken from the shards. [Note: Pieces].

    Args:
        shards: this rank's shards.
        segments: all that the optimizer updates on this rank.
    """

    def __init__(self, shards: Sequence[OptimShard], segments: Iterable[Segment]) -> None:
        self._shards = shards
        self._numel: dict[tuple[int, int], int] = {}
        self._buffers: dict[tuple[int, int, str, torch.dtype], Tensor] = {}
        self._pointers: list[int] = []
        self.extend(segments)

    def extend(self, segments: Iterable[Segment]) -> None:
        """Make room for the segments of a new parameter group."""
        for segment in segments:
            key = (segment.shard_index, segment.group_index)
            self._numel[key] = max(self._numel.get(key, 0), segment.packed + segment.numel)

    def take(self, piece: Piece, name: str, dtype: torch.dtype) -> Tensor:
        """Return the memory of one state of ``piece``, shape ``(piece.numel,)``, and put it into ``piece.state``.

        It holds zeros, or what an earlier piece left there.
        """
        key = (piece.shard_index, piece.group_index, name, dtype)
        if key not in self._buffers:
            numel = self._numel[key[:2]]
            self._buffers[key] = self._shards[piece.shard_index].new_state(numel, dtype, name)
        view = self._buffers[key].narrow(0, piece.packed, piece.numel)
        piece.state[name] = piece.owned[name] = view
        return view

    def follow(self, pieces: Iterable[Piece], groups: Sequence[Mapping[str, object]]) -> None:
        """Let the states of all pieces lie where the shards have carried their memory.

        Args:
            pieces: all that have states here.
            groups: the parameter groups; they say where the optimizer wants its step counts.
        """
        pointers = [buffer.data_ptr() for buffer in self._buffers.values()]
        if pointers == self._pointers:
            return
        self._pointers = pointers
        for piece in pieces:
            for name, view in list(piece.owned.items()):
                self.take(piece, name, view.dtype)
            place_numbers(piece, groups)

    def dtype_of(self, piece: Piece) -> torch.dtype:
        """Return the dtype of the master weights of ``piece``."""
        return self._shards[piece.shard_index].master().dtype

    def adopt(self, piece: Piece) -> None:
        """Carry the state tensors that the optimizer allocated for ``piece`` into the memory of its shard.

        Raises:
            ValueError: a state is neither one number nor one number per element.
        """
        for name, value in list(piece.state.items()):
            if value is piece.owned.get(name) or not isinstance(value, Tensor) or value.dim() == 0:
                continue
            if value.shape != (piece.numel,):
                raise ValueError(
                    f"The optimizer keeps the state {name!r} of shape {tuple(value.shape)} for a flat parameter of "
                    f"{piece.numel} elements. ZeroOptimizer shards parameters, so it takes only element-wise "
                    "optimizers, whose states have the shape of the parameter or are single numbers."
                )
            self.take(piece, name, value.dtype).copy_(value)
