"""Which optimizer a model has, and which one takes its place."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemini_optim._zero import ZeroOptimizer

__all__ = ["replace", "replaceable_by"]

# [Note: One optimizer for a model]
# A step takes the gradients of all shards and drops them: a second optimizer, over other parameters of the model, would
# find none, and nothing would move. Over the same parameters it takes the place of the first.
_living: weakref.WeakSet[ZeroOptimizer] = weakref.WeakSet()


def replaceable_by(optimizer: ZeroOptimizer) -> list[ZeroOptimizer]:
    """Return the optimizers that its model has, if it may take their place. [Note: One optimizer for a model].

    Raises:
        ValueError: it lacks some of their parameters.
        UnfinishedStepError: one of them has to finish a step.
    """
    if _lacking(optimizer):
        gc.collect()  # what the user has let go of may be in a cycle, as a scheduler makes one
    if lacking := _lacking(optimizer):
        raise ValueError(
            f"The model already has an optimizer, and {lacking} of its trainable parameters are not in this one. "
            "The first of the two to step would drop the gradients of the other: put both into one optimizer, as "
            "parameter groups, or let go of the first."
        )
    others = _beside(optimizer)
    for other in others:
        other.check_finished()
    return others


def replace(others: Iterable[ZeroOptimizer], optimizer: ZeroOptimizer) -> None:
    """Let one be its model's optimizer in the place of others."""
    for other in others:
        other._is_replaced = True
    _living.add(optimizer)


def _beside(optimizer: ZeroOptimizer) -> list[ZeroOptimizer]:
    return [other for other in _living if other._model is optimizer._model and not other._is_replaced]


def _lacking(optimizer: ZeroOptimizer) -> int:
    """Count the trainable parameters of the model's optimizers that this one does not have."""
    theirs = {param for other in _beside(optimizer) for param in other._params()}
    return sum(param.requires_grad for param in theirs - set(optimizer._params()))
