"""Errors that the chunk library raises."""

from __future__ import annotations


class ChunkError(RuntimeError):
    """A broken sequence of calls on a chunk or a manager."""


class ChunkFullError(ChunkError):
    """A tensor does not fit into what is left of an open chunk."""


class TensorStateError(ChunkError):
    """A transition that the table of tensor states does not allow; the state is unchanged."""


class TierFullError(RuntimeError):
    """An allocation would exceed a tier's capacity; nothing was allocated.

    Attributes:
        tier: name of the tier.
        asked_bytes: bytes that the refused allocation asked for.
        used_bytes: bytes in use when it was refused.
        capacity_bytes: bytes that the tier may hold.
    """

    def __init__(
        self, tier: str, holder: str, asked_bytes: int, used_bytes: int, capacity_bytes: int, largest: str
    ) -> None:
        super().__init__(
            f"The {tier} tier cannot hold {asked_bytes:,} more bytes for {holder}: {used_bytes:,} of "
            f"{capacity_bytes:,} bytes are in use. Largest holders: {largest or 'none'}. Raise the capacity, use "
            "smaller chunks, or let more rest on another tier."
        )
        self.tier = tier
        self.holder = holder
        self.asked_bytes = asked_bytes
        self.used_bytes = used_bytes
        self.capacity_bytes = capacity_bytes
        self._largest = largest

    def __reduce__(self) -> tuple[type[TierFullError], tuple[str, str, int, int, int, str]]:
        """Pickle by arguments: errors travel between processes in tests and launchers."""
        fields = (self.tier, self.holder, self.asked_bytes, self.used_bytes, self.capacity_bytes, self._largest)
        return type(self), fields
