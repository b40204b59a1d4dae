"""One step over all shards, which can be finished if a part of it fails."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from gemini_optim import _collectives
from gemini_optim._pieces import Piece, StateMemory
from gemini_optim._update import BlockUpdate, batches
from gemini_optim.interfaces import OptimShard

__all__ = ["BegunStep", "Failure", "agree_on_failure", "part_of", "take_grads"]

Failure = Literal["none", "repeatable", "final"]
_FAILURES: tuple[Failure, ...] = ("none", "repeatable", "final")


class BegunStep:
    """The update of all shards from gradients that are known to be finite.

    [Note: A step that fails]
    Memory for states may be refused, and new weights may not get to where they rest. Each part of the work is taken off
    its list once it is done, and what may fail comes before what must not be done twice: so `run` can be called again,
    and goes on from there. The optimizer's own arithmetic is the exception. Where that raises, nobody knows which
    elements it has updated.

    Args:
        shards: this rank's shards.
        blocks: updates pieces.
        memory: where states go.
        active: the pieces to update, in the order of their shards.
        grads: the gradient of each shard.
        multiplier: see `BlockUpdate.run`.
        block_numel: elements that are updated at a time.
        loss: what the step's closure returned.

    Attributes:
        loss: as given.
        can_go_on: whether `run` may be called again after it has raised.
        failure: what has failed, on any rank; empty as long as nothing has.
    """

    def __init__(
        self,
        shards: Sequence[OptimShard],
        blocks: BlockUpdate,
        memory: StateMemory,
        active: Iterable[Piece],
        grads: Sequence[Tensor | None],
        *,
        multiplier: float,
        block_numel: int,
        loss: float | None,
    ) -> None:
        self.loss = loss
        self.can_go_on = True
        self.failure = ""
        self._shards = shards
        self._blocks = blocks
        self._memory = memory
        self._grads = grads
        self._multiplier = multiplier
        pieces = list(active)
        self._with_gradient = [index for index, grad in enumerate(grads) if grad is not None]
        self._left = Counter(piece.shard_index for piece in pieces)
        self._batches = deque(batches(pieces, block_numel))
        self._updated: Sequence[Piece] = ()
        self._runs = False
        # A gradient may be of parameters that are not optimized, or of padding. Other ranks may update their part of
        # that chunk, and all must do the same to it.
        self._complete = deque(index for index in self._with_gradient if not self._left[index])

    def run(self) -> None:
        """Do what is left to be done.

        Raises:
            Exception: whatever a shard or the optimizer has raised; see `can_go_on`.
        """
        if not self._runs:
            self.can_go_on = False  # it calls the optimizer, too
            self._blocks.begin_step(self._device)
            self.can_go_on = self._runs = True
        self._keep_updated()
        while self._batches:
            batch = self._batches[0]
            masters = [part_of(self._shards[piece.shard_index].master(), piece) for piece in batch]
            grads = [part_of(self._grads[piece.shard_index], piece) for piece in batch]
            grads = self._blocks.prepare(batch, masters, grads)
            self.can_go_on = False
            self._blocks.run(batch, grads, self._multiplier)
            self.can_go_on = True
            self._updated = self._batches.popleft()
            self._keep_updated()
        for index in self._with_gradient:
            self._shards[index].wait_commit()

    def _device(self) -> torch.device:
        """Return where the first shard is updated."""
        return self._shards[0].master().device if self._shards else torch.device("cpu")

    def _keep_updated(self) -> None:
        """Adopt new states of the pieces updated last, and commit the shards of which nothing is left to update."""
        for piece in self._updated:
            self._memory.adopt(piece)
        for piece in self._updated:
            self._left[piece.shard_index] -= 1
            if not self._left[piece.shard_index]:
                self._complete.append(piece.shard_index)
        self._updated = ()
        while self._complete:
            self._shards[self._complete[0]].commit()
            self._complete.popleft()


def agree_on_failure(
    error: Exception | None, *, can_go_on: bool, process_group: torch.distributed.ProcessGroup | None
) -> tuple[Failure, str]:
    """Tell every rank whether a part of a step failed on any, and why. Collective.

    Args:
        error: what was raised on this rank.
        can_go_on: whether the work of this rank can be continued after it.
        process_group: the ranks.

    Returns:
        The worst that befell any rank, and the errors of all in words.
    """
    mine = 0 if error is None else 1 if can_go_on else 2
    (worst,) = _collectives.all_reduce_numbers([mine], "max", process_group)
    if not worst:
        return "none", ""
    text = None if error is None else f"{type(error).__name__}: {error}"
    texts = _collectives.all_gather_objects(text, process_group)
    return _FAILURES[int(worst)], " ".join(f"Rank {rank}: {text}" for rank, text in enumerate(texts) if text)


def take_grads(shards: Sequence[OptimShard]) -> tuple[list[Tensor | None], Exception | None, bool]:
    """Return the gradient of every shard, or none, what was raised, and whether a gradient is lost with that."""
    grads: list[Tensor | None] = []
    for shard in shards:
        try:
            grads.append(shard.grad())
        except Exception as error:  # whatever it is, the other ranks must hear of it
            return [None] * len(shards), error, _has_none(shard)
    return grads, None, False


def _has_none(shard: OptimShard) -> bool:
    try:
        return shard.grad() is None
    except Exception:  # it has what it had, and cannot give it yet
        return False


def part_of(tensor: Tensor | None, piece: Piece) -> Tensor:
    """Return the elements of a shard's tensor that a piece has; it is there where pieces are updated."""
    whole = cast("Tensor", tensor)  # pieces without a gradient were left out
    return whole if piece.numel == whole.numel() else whole.narrow(0, piece.start, piece.numel)
