"""One pass over the master weights: cast the gradient of a block, update the block, go on to the next.

What needs no cast and no memory is one block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gemini_optim import _adam
from gemini_optim._adam import CPUAdam, FusedAdam, HybridAdam
from gemini_optim._pieces import Piece, Segment, StateMemory
from gemini_optim._shared import SharedValues

__all__ = ["BlockUpdate"]

_OUR_ADAMS = (HybridAdam, CPUAdam, FusedAdam)
_KNOWN_ADAMS = (*_OUR_ADAMS, torch.optim.Adam, torch.optim.AdamW)

Batch = tuple[list[Piece], list[Tensor]]


class BlockUpdate:
    """Run the arithmetic of the user's optimizer on pieces.

    [Note: One step, many calls]
    The optimizer's step is called once per block, without the hooks that torch wraps around it: the user's hooks and
    torch's global ones see one step per step, from ``ZeroOptimizer.step``. Of our own Adams only the arithmetic is
    called: they need not find the pieces in their groups, nor keep states.

    Args:
        optim: the user's optimizer. Outside of ``run`` it shows the user's parameters and no state.
        memory: where states go.
        block_numel: elements of one block.
    """

    def __init__(self, optim: torch.optim.Optimizer, memory: StateMemory, block_numel: int) -> None:
        self._optim = optim
        self._memory = memory
        self._block_numel = block_numel
        self._is_ours = type(optim) in _OUR_ADAMS
        self._is_known = type(optim) in _KNOWN_ADAMS
        # torch's own keep all that they change in the states of parameters.
        shares_none = self._is_known or type(optim).__module__.startswith("torch.optim.")
        self._shared = None if shares_none else SharedValues(optim)
        self._scratch: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def begin_step(self, device_of: Callable[[], torch.device]) -> None:
        """Learn what the step makes of values that parameters share. [Note: Values that parameters share].

        Args:
            device_of: returns a device on which the optimizer works; it is asked only where that matters.
        """
        if self._shared is None:
            return
        device = device_of()
        stand_ins = []
        for index in range(len(self._optim.param_groups)):
            stand_ins.append(Piece((Segment(0, index, 0, 0, 0, 0, 1),), torch.ones(1, device=device)))
        self._shared.learn(lambda: self._call_optimizer(stand_ins, [torch.ones(1, device=device) for _ in stand_ins]))

    def end_step(self) -> None:
        """Let those values be as a step leaves them; once, when all pieces are updated."""
        if self._shared is not None:
            self._shared.finish()

    def takes_memory(self, pieces: Iterable[Piece], grads: Iterable[Tensor]) -> bool:
        """Return whether an update takes memory that it did not take before: for states, or to cast gradients.

        Args:
            pieces: what is to be updated, where it was in the last update.
            grads: the gradient of each, shape ``(piece.numel,)``.
        """
        if not self._is_ours:
            return True  # nobody knows
        kinds = set()
        for piece, grad in zip(pieces, grads, strict=True):
            kind = (piece.param.device, piece.param.dtype)
            is_cast = (grad.device, grad.dtype) != kind
            if piece.param.numel() != piece.numel or (is_cast and kind not in self._scratch):
                return True
            kinds.add(kind)
        return not all(_adam.is_fused(*kind) for kind in kinds)

    def batches(self, pieces: Iterable[Piece], grads: Iterable[Tensor], *, at_once: bool) -> list[Batch]:
        """Join consecutive pieces while they fit into one block together: small chunks share one call of the optimizer.

        Args:
            pieces: what is to be updated.
            grads: the gradient of each, shape ``(piece.numel,)``.
            at_once: count only gradients that are cast. `takes_memory` must have said no.

        Returns:
            Pieces and their gradients.
        """
        batches: list[Batch] = []
        room = 0
        for piece, grad in zip(pieces, grads, strict=True):
            is_cast = (grad.device, grad.dtype) != (piece.param.device, piece.param.dtype)
            numel = piece.numel if is_cast or not at_once else 0
            if not batches or numel > room:
                batches.append(([], []))
                room = self._block_numel
            batches[-1][0].append(piece)
            batches[-1][1].append(grad)
            room -= numel
        return batches

    def prepare(self, batch: Sequence[Piece], masters: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """Take the memory that an update needs; where that fails, it may be called again.

        Args:
            batch: one of `batches`.
            masters: the master weights of each piece, shape ``(piece.numel,)``.
            grads: the gradient of each piece, same shape.

        Returns:
            The gradients beside the master weights and in their dtype, for `run`; those that were so already are the
            same tensors.
        """
        used: defaultdict[tuple[torch.device, torch.dtype], int] = defaultdict(int)
        prepared = []
        for piece, master, grad in zip(batch, masters, grads, strict=True):
            if self._is_known and "step" not in piece.state:
                self._allocate_ahead(piece, master)
            piece.param.data = master
            kind = (master.device, master.dtype)
            if (grad.device, grad.dtype) != kind:
                first = used[kind]
                used[kind] += piece.numel
                # 16-bit elements cross between devices as 16 bits, and are cast where they arrive.
                grad = self._block(*kind)[first:][: piece.numel].copy_(grad.to(master.device))
            prepared.append(grad)
        return prepared

    def run(self, batch: Sequence[Piece], grads: Sequence[Tensor], multiplier: float) -> None:
        """Update the pieces of one batch.

        Args:
            batch: the pieces that were prepared last.
            grads: what `prepare` returned; it is overwritten.
            multiplier: gradients are multiplied by it, in the dtype of the master weights; 1.0 leaves their bits alone.
        """
        if multiplier != 1.0:
            for grad in grads:
                grad.mul_(multiplier)
        if self._is_ours:
            self._call_adam(batch, grads)
        else:
            self._call_optimizer(batch, grads)
        if self._shared is not None:
            self._shared.undo(piece.group_index for piece in batch)

    def adopt(self, batch: Iterable[Piece]) -> None:
        """Carry states that the optimizer allocated into the memory of their shards; what fails may be called again.

        Raises:
            ValueError: see `StateMemory.adopt`.
        """
        if not self._is_ours:  # whose states are there before the update, and stay where they are
            for piece in batch:
                self._memory.adopt(piece)

    def _block(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        if (device, dtype) not in self._scratch:
            self._scratch[device, dtype] = torch.empty(self._block_numel, dtype=dtype, device=device)
        return self._scratch[device, dtype]

    def _allocate_ahead(self, piece: Piece, master: Tensor) -> None:
        """Create the state of the Adams that we know, so that not even the first step holds it twice.

        The count of steps comes last: where there is no room for the rest, a later step goes on from there.
        """
        group = self._optim.param_groups[piece.group_index]
        on_device = group["fused"] or group["capturable"]
        for name in _adam.moment_names(group):
            self._memory.take(piece, name, master.dtype).zero_()
        piece.state["step"] = torch.zeros((), dtype=torch.float32, device=master.device if on_device else "cpu")

    def _call_adam(self, batch: Sequence[Piece], grads: Sequence[Tensor]) -> None:
        groups: defaultdict[int, list[tuple[Tensor, Tensor, dict[str, object]]]] = defaultdict(list)
        for piece, grad in zip(batch, grads, strict=True):
            groups[piece.group_index].append((piece.param, grad, piece.state))
        for group_index, members in groups.items():
            _adam.update(self._optim.param_groups[group_index], members)

    def _call_optimizer(self, batch: Sequence[Piece], grads: Sequence[Tensor]) -> None:
        groups: list[dict[str, Any]] = self._optim.param_groups
        users_params = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = []
            for piece, grad in zip(batch, grads, strict=True):
                piece.param.grad = grad
                groups[piece.group_index]["params"].append(piece.param)
                if piece.state:
                    self._optim.state[piece.param] = piece.state
            _unhooked_step(self._optim)(self._optim)
        finally:
            for piece in batch:
                piece.state = self._optim.state.pop(piece.param, piece.state)
                piece.param.grad = None
            for group, params in zip(groups, users_params, strict=True):
                group["params"] = params


def _unhooked_step(optim: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], object]:
    """Return the optimizer's own step. [Note: One step, many calls]."""
    step: Callable[[torch.optim.Optimizer], object] = type(optim).step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
