"""One pass over the master weights: cast the gradient of a block, update the block, go on to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gemini_optim._adam import CPUAdam, FusedAdam, HybridAdam
from gemini_optim._pieces import Piece, Segment, StateMemory
from gemini_optim._shared import SharedValues

__all__ = ["BlockUpdate", "batches"]

_KNOWN_ADAMS = (HybridAdam, CPUAdam, FusedAdam, torch.optim.Adam, torch.optim.AdamW)


def batches(pieces: Iterable[Piece], block_numel: int) -> Iterator[list[Piece]]:
    """Join consecutive pieces while they fit into one block together: small chunks share one call of the optimizer."""
    batch: list[Piece] = []
    numel = 0
    for piece in pieces:
        if batch and numel + piece.numel > block_numel:
            yield batch
            batch, numel = [], 0
        batch.append(piece)
        numel += piece.numel
    if batch:
        yield batch


class BlockUpdate:
    """Run the arithmetic of the user's optimizer on pieces.

    [Note: One step, many calls]
    The optimizer's step is called once per block, without the hooks that torch wraps around it: the user's hooks and
    torch's global ones see one step per step, from ``ZeroOptimizer.step``.

    Args:
        optim: the user's optimizer. Outside of ``run`` it shows the user's parameters and no state.
        memory: where states go.
        block_numel: elements of one block.
    """

    def __init__(self, optim: torch.optim.Optimizer, memory: StateMemory, block_numel: int) -> None:
        self._optim = optim
        self._memory = memory
        self._block_numel = block_numel
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
            piece = Piece((Segment(0, index, 0, 0, 0, 0, 1),), torch.ones(1, device=device))
            piece.param.grad = torch.ones(1, device=device)
            stand_ins.append(piece)
        self._shared.learn(lambda: self._call_optimizer(stand_ins))

    def end_step(self) -> None:
        """Let those values be as a step leaves them; once, when all pieces are updated."""
        if self._shared is not None:
            self._shared.finish()

    def prepare(self, batch: Sequence[Piece], masters: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """Take the memory that an update needs; where that fails, it may be called again.

        Args:
            batch: together no more elements than a block.
            masters: the master weights of each piece, shape ``(piece.numel,)``.
            grads: the gradient of each piece, same shape.

        Returns:
            The gradients beside the master weights and in their dtype, for `run`; those that were so already are the
            same tensors.
        """
        used: Counter[tuple[torch.device, torch.dtype]] = Counter()
        prepared = []
        for piece, master, grad in zip(batch, masters, grads, strict=True):
            piece.param.data = master
            if self._is_known and "step" not in piece.state:
                self._allocate_ahead(piece)
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
        for piece, grad in zip(batch, grads, strict=True):
            if multiplier != 1.0:
                grad.mul_(multiplier)
            piece.param.grad = grad
        self._call_optimizer(batch)
        if self._shared is not None:
            self._shared.undo(piece.group_index for piece in batch)

    def _block(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        if (device, dtype) not in self._scratch:
            self._scratch[device, dtype] = torch.empty(self._block_numel, dtype=dtype, device=device)
        return self._scratch[device, dtype]

    def _allocate_ahead(self, piece: Piece) -> None:
        """Create the state of the Adams that we know, so that not even the first step holds it twice.

        The count of steps comes last: where there is no room for the rest, a later step goes on from there.
        """
        group = self._optim.param_groups[piece.group_index]
        on_device = group["fused"] or group["capturable"]
        for name in ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]:
            self._memory.take(piece, name, piece.param.dtype).zero_()
        piece.state["step"] = torch.zeros((), dtype=torch.float32, device=piece.param.device if on_device else "cpu")

    def _call_optimizer(self, batch: Sequence[Piece]) -> None:
        groups: list[dict[str, Any]] = self._optim.param_groups
        users_params = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = []
            for piece in batch:
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
