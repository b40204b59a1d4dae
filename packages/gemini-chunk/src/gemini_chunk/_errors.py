"""Errors that the chunk library raises."""

from __future__ import annotations

from collections.abc import Mapping


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
        holder: for whom the memory was asked.
        asked_bytes: bytes that the refused allocation asked for.
        used_bytes: bytes in use when it was refused.
        capacity_bytes: bytes that the tier may hold.
        largest_holders: bytes by holder, of those who hold most; largest first.
    """

    def __init__(
        self,
        tier: str,
        holder: str,
        asked_bytes: int,
        used_bytes: int,
        capacity_bytes: int,
        largest_holders: Mapping[str, int],
    ) -> None:
        largest = ", ".join(f"{name} ({num_bytes:,})" for name, num_bytes in largest_holders.items())
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
        self.largest_holders = dict(largest_holders)

    def __reduce__(self) -> tuple[type[TierFullError], tuple[str, str, int, int, int, dict[str, int]]]:
        """Pickle by arguments: errors travel between processes in tests and launchers."""
        numbers = (self.asked_bytes, self.used_bytes, self.capacity_bytes)
        return type(self), (self.tier, self.holder, *numbers, self.largest_holders)
