"""Optimizer state in torch's format: gathered from pieces parameter by parameter, and cut into pieces again."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import torch
from torch import Tensor

from gemini_optim import _collectives
from gemini_optim._pieces import Piece, Segment, StateMemory, cut_pieces, place_numbers

__all__ = ["SavedStates", "gather_states", "pieces_with_states"]

# Single numbers among the states of torch's optimizers; asked only for parameters that are single numbers themselves.
_NUMBERS: Final = frozenset({"step", "eta", "mu", "mu_product"})


@dataclass(slots=True)
class _Layout:
    """What one rank holds of one parameter's state.

    Attributes:
        runs: (first element in the flattened parameter, elements) of each run, in order.
        dtypes: of each element-wise state, by name.
        numbers: states that hold for the parameter as a whole.
    """

    runs: list[tuple[int, int]] = field(default_factory=list)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    numbers: dict[str, object] = field(default_factory=dict)


def gather_states(
    pieces: Sequence[Piece],
    params: Sequence[Tensor],
    process_group: torch.distributed.ProcessGroup | None,
    *,
    only_rank_0: bool,
) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the state of one parameter after the other, in the memory of the CPU, byte for byte.

    Every rank of the group must take all that it yields.

    Args:
        pieces: of this rank.
        params: the parameters of the optimizer, in order; only their shapes are read.
        process_group: the ranks that hold the pieces.
        only_rank_0: other ranks send what they hold and yield nothing.

    Yields:
        The number of a parameter that has state, and its state in full shape.
    """
    rank = _collectives.group_rank(process_group)
    parts = _parts_by_param(pieces)
    mine = {index: _layout(segments) for index, segments in parts.items()}
    layouts = cast(  # what the line above made, on each rank
        "list[dict[int, _Layout]]", _collectives.all_gather_objects(mine, process_group)
    )
    for index, param in enumerate(params):
        holders = [(source, held[index]) for source, held in enumerate(layouts) if index in held]
        if not holders:
            continue
        state: dict[str, object] = dict(holders[0][1].numbers)
        for name, dtype in holders[0][1].dtypes.items():
            local = [cast("Tensor", piece.state[name])[at:][: part.numel] for part, piece, at in parts.get(index, ())]
            if rank == 0:
                full = torch.zeros(param.numel(), dtype=dtype)
                for source, layout in holders:
                    for run, (offset, numel) in enumerate(layout.runs):
                        target = full[offset:][:numel]
                        if source == 0:
                            target.copy_(local[run])
                        else:
                            _collectives.receive(target, source, process_group)
            else:
                for tensor in local:
                    _collectives.send(tensor, 0, process_group)
                if only_rank_0:
                    continue
                full = torch.empty(param.numel(), dtype=dtype)
            if not only_rank_0:
                _collectives.broadcast(full, 0, process_group)
            state[name] = full.view(param.shape)
        if rank == 0 or not only_rank_0:
            yield index, state


def _parts_by_param(pieces: Sequence[Piece]) -> dict[int, list[tuple[Segment, Piece, int]]]:
    parts: dict[int, list[tuple[Segment, Piece, int]]] = {}
    for piece in pieces:
        if piece.state:
            for segment, at in piece.offsets():
                parts.setdefault(segment.param_index, []).append((segment, piece, at))
    return parts


def _layout(parts: list[tuple[Segment, Piece, int]]) -> _Layout:
    layout = _Layout([(segment.param_offset, segment.numel) for segment, _, _ in parts])
    for name, value in parts[0][1].state.items():
        if not isinstance(value, Tensor):
            layout.numbers[name] = value
        elif value.dim() == 0:
            layout.numbers[name] = value.detach().clone().cpu()
        else:
            layout.dtypes[name] = value.dtype
    return layout


class SavedStates:
    """Optimizer states in torch's format, checked and sorted into element-wise states and single numbers.

    Args:
        states: by number of the parameter, each as in ``state_dict()["state"]``.
        params: the parameters of the optimizer, in order.
        steps_are_tensors: whether a plain number under ``"step"`` becomes a tensor, as torch's optimizers want it.

    Raises:
        ValueError: a state belongs to no parameter, or has another shape.
    """

    def __init__(
        self, states: Mapping[int, Mapping[str, object]], params: Sequence[Tensor], *, steps_are_tensors: bool
    ) -> None:
        self.elements: dict[int, dict[str, Tensor]] = {}
        self.numbers: dict[int, dict[str, object]] = {}
        if unknown := [index for index in states if index not in range(len(params))]:
            raise ValueError(
                f"The state belongs to parameters {unknown[:5]}, but this optimizer has {len(params)} parameters, "
                "numbered from 0."
            )
        numbers = _NUMBERS | {
            name
            for index, state in states.items()
            for name, value in state.items()
            if params[index].dim() > 0 and isinstance(value, Tensor) and value.dim() == 0
        }
        for index, state in states.items():
            elements = self.elements.setdefault(index, {})
            others = self.numbers.setdefault(index, {})
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    tensor = name == "step" and steps_are_tensors and isinstance(value, int | float)
                    others[name] = torch.tensor(float(cast("float", value))) if tensor else value
                elif value.dim() == 0 and (params[index].dim() > 0 or name in numbers):
                    others[name] = value
                elif value.numel() == params[index].numel():
                    elements[name] = value
                else:
                    raise ValueError(
                        f"The state {name!r} of parameter {index} has shape {tuple(value.shape)}, the parameter "
                        f"has {tuple(params[index].shape)}."
                    )

    def kind_of(self, index: int) -> Hashable:
        """Return what parameters must have in common to share a piece: names of states, and the single numbers."""
        if index not in self.elements:
            return None
        numbers = sorted(self.numbers[index].items())
        return (
            tuple(sorted(self.elements[index])),
            tuple((name, float(v) if isinstance(v, Tensor) else repr(v)) for name, v in numbers),
        )


def pieces_with_states(
    segments: Sequence[Segment],
    block_numel: int,
    saved: SavedStates,
    memory: StateMemory,
    groups: Sequence[Mapping[str, object]],
) -> list[Piece]:
    """Cut pieces so that each has one state, and fill it.

    Args:
        segments: all that the optimizer updates on this rank.
        block_numel: elements of a piece at most.
        saved: the states of all parameters.
        memory: where states go.
        groups: the parameter groups; they say where the optimizer wants its step counts.
    """
    pieces = cut_pieces(segments, block_numel, saved.kind_of)
    for piece in pieces:
        first = piece.segments[0].param_index
        if first not in saved.elements:
            continue
        for name in saved.elements[first]:
            # torch keeps states in the dtype of what it updates, which is the master weight here.
            dtype, master_dtype = saved.elements[first][name].dtype, memory.dtype_of(piece)
            cast_it = dtype.is_floating_point and master_dtype.is_floating_point
            view = memory.take(piece, name, master_dtype if cast_it else dtype)
            for segment, at in piece.offsets():
                values = saved.elements[segment.param_index][name].reshape(-1)
                view[at:][: segment.numel].copy_(values[segment.param_offset :][: segment.numel])
        for name, value in saved.numbers[first].items():
            piece.state[name] = value.detach().clone() if isinstance(value, Tensor) else value
        place_numbers(piece, groups)
    return pieces
