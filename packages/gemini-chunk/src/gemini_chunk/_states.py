"""States of a managed tensor and the transitions between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from gemini_chunk._errors import TensorStateError


class TensorState(Enum):
    """What may be done with a tensor of a chunk at this moment."""

    FREE = 0
    """Its bytes are not on the compute device; the tensor is a placeholder."""
    COMPUTE = 1
    """An operator is using it: its chunk must stay gathered."""
    HOLD = 2
    """Gathered and idle."""
    HOLD_AFTER_BWD = 3
    """Used by backward, its gradient not taken yet."""
    READY_FOR_REDUCE = 4
    """Its gradient lies in the chunk's gradient buffer."""

    # Members are compared by identity; Enum's own hash, of their names, is a Python function, and half of a transition.
    __hash__ = object.__hash__


_LEGAL: dict[TensorState, frozenset[TensorState]] = {
    TensorState.FREE: frozenset({TensorState.HOLD, TensorState.COMPUTE}),
    TensorState.COMPUTE: frozenset({TensorState.FREE, TensorState.HOLD, TensorState.HOLD_AFTER_BWD}),
    TensorState.HOLD: frozenset({TensorState.FREE, TensorState.COMPUTE}),
    TensorState.HOLD_AFTER_BWD: frozenset({TensorState.COMPUTE, TensorState.READY_FOR_REDUCE}),
    TensorState.READY_FOR_REDUCE: frozenset({TensorState.HOLD}),
}


@dataclass(slots=True, eq=False)
class TensorInfo:
    """One tensor of a chunk.

    Attributes:
        name: the parameter's path, used in every message.
        tensor: the managed tensor; its identity never changes.
        shape: its shape, also while it is a placeholder.
        offset: index of its first element in the chunk.
        numel: number of elements.
        state: where it stands in the table of transitions.
        users: scopes that use it now.
        version: torch's count of writes to the tensor, up to those that are known and were right.
        address: where the view or the placeholder lies that the tensor was given last.
        forward_generation: the chunk's generation when a forward used it last; kept in debug mode.
        begun_with: its value when its use began; kept in debug mode.
        placeholder_address: where its placeholder lies.
        has_gradient: whether some rank gave a gradient of it since the last `commit` or `discard` of its chunk.
    """

    name: str
    tensor: Tensor
    shape: torch.Size
    offset: int
    numel: int
    state: TensorState = TensorState.HOLD
    users: int = 0
    forward_generation: int | None = field(default=None, repr=False)
    version: int = field(default=0, repr=False)
    address: int = field(default=0, init=False, repr=False)
    begun_with: Tensor | None = field(default=None, init=False, repr=False)
    has_gradient: bool = field(default=False, init=False, repr=False)
    placeholder_address: int = field(default=0, init=False, repr=False)
    placeholder: Tensor = field(repr=False, default_factory=lambda: torch.empty(0))
    view: Tensor = field(repr=False, default_factory=lambda: torch.empty(0))

    @property
    def end(self) -> int:
        """Index one past its last element in the chunk."""
        return self.offset + self.numel

    def to(self, state: TensorState) -> None:
        """Move to ``state``.

        Raises:
            TensorStateError: the table does not allow it; the state is unchanged.
        """
        allowed = _LEGAL[self.state]
        if state not in allowed:
            names = ", ".join(sorted(s.name for s in allowed))
            raise TensorStateError(
                f"Parameter {self.name!r} is {self.state.name} and cannot become {state.name}; from here it may "
                f"become {names}."
            )
        self.state = state
