"""Errors that are not the user's mistake."""

__all__ = ["ShardLayoutError"]


class ShardLayoutError(RuntimeError):
    """A ``ShardedModel`` broke its contract: its shards hold an element twice or not at all."""
