"""Errors that are not the user's mistake."""

__all__ = ["ShardLayoutError", "UnfinishedStepError"]


class ShardLayoutError(RuntimeError):
    """A ``ShardedModel`` broke its contract: its shards hold an element twice or not at all."""


class UnfinishedStepError(RuntimeError):
    """A step has updated a part of the weights, on this rank or another, and waits to be finished.

    Nothing is lost: another call of ``ZeroOptimizer.step`` on every rank goes on where the step failed.
    """
