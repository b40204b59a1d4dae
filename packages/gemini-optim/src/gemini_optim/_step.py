"""One step over all shards, which can be finished if a part of it fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from gemini_optim import _collectives
from gemini_optim._pieces import Piece, parts_of
from gemini_optim._update import BlockUpdate
from gemini_optim.interfaces import OptimShard

__all__ = ["BegunStep", "Failure", "agree_on_failure", "take_grads"]

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
        with_gradient: the shards that have a gradient, by number and in order.
        pieces: what to update, in the order of those shards.
        grads: the gradient of each piece.
        multiplier: see `BlockUpdate.run`.
        may_fail: whether a part of the step can fail on any rank.
        loss: what the step's closure returned.

    Attributes:
        loss: as given.
        may_fail: as given.
        can_go_on: whether `run` may be called again after it has raised.
        failure: what has failed, on any rank; empty as long as nothing has.
    """

    def __init__(
        self,
        shards: Sequence[OptimShard],
        blocks: BlockUpdate,
        with_gradient: Sequence[int],
        pieces: Sequence[Piece],
        grads: Sequence[Tensor],
        *,
        multiplier: float,
        may_fail: bool,
        loss: float | None,
    ) -> None:
        self.loss = loss
        self.may_fail = may_fail
        self.can_go_on = True
        self.failure = ""
        self._shards = shards
        self._blocks = blocks
        self._with_gradient = with_gradient
        self._multiplier = multiplier
        # A product would leave the cache before it is used.
        self._batches = deque(blocks.batches(pieces, grads, at_once=not may_fail and multiplier == 1.0))
        self._updated: Sequence[Piece] = ()
        self._runs = False
        self._pieces_left = [0] * len(shards)
        for piece in pieces:
            self._pieces_left[piece.shard_index] += 1
        # A gradient may be of parameters that are not optimized, or of padding. Other ranks may update their part of
        # that chunk, and all must do the same to it.
        self._uncommitted = deque(with_gradient)

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
        masters: dict[int, Tensor] = {}
        while self._batches:
            pieces, grads = self._batches[0]
            for piece in pieces:
                if piece.shard_index not in masters:
                    masters[piece.shard_index] = self._shards[piece.shard_index].master()
            grads = self._blocks.prepare(pieces, parts_of(pieces, masters), grads)
            self.can_go_on = False
            self._blocks.run(pieces, grads, self._multiplier)
            self.can_go_on = True
            self._updated = pieces
            self._batches.popleft()
            self._keep_updated()
        for index in self._with_gradient:
            self._shards[index].wait_commit()

    def _device(self) -> torch.device:
        """Return where the first shard is updated."""
        return self._shards[0].master().device if self._shards else torch.device("cpu")

    def _keep_updated(self) -> None:
        """Adopt new states of the pieces updated last, and commit the shards of which nothing is left to update."""
        self._blocks.adopt(self._updated)
        for piece in self._updated:
            self._pieces_left[piece.shard_index] -= 1
        self._updated = ()
        while self._uncommitted and not self._pieces_left[self._uncommitted[0]]:
            self._shards[self._uncommitted[0]].commit()
            self._uncommitted.popleft()


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


def take_grads(shards: Sequence[OptimShard]) -> tuple[dict[int, Tensor], Exception | None, bool]:
    """Return the gradients of shards, by number, or none, what was raised, and whether one is lost with that."""
    grads: dict[int, Tensor] = {}
    for index, shard in enumerate(shards):
        try:
            grad = shard.grad()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            return {}, error, _has_none(shard)
        if grad is not None:
            grads[index] = grad
    return grads, None, False


def _has_none(shard: OptimShard) -> bool:
    try:
        return shard.grad() is None
    except Exception:  # it has what it had, and cannot give it yet
        return False
