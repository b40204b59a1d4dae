"""Whether the ranks that share a chunk start from the same values."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from gemini_chunk._collectives import Collectives
from gemini_chunk._states import TensorInfo
from gemini_chunk._tensors import same_bits
from gemini_chunk._tiers import mapped_memory

Synchronise = Literal["broadcast", "check"]


class Synchroniser:
    """Gives every rank rank 0's values, or finds those that differ.

    Args:
        mode: ``"broadcast"`` gives every rank rank 0's values; ``"check"`` compares them with rank 0's, bit for bit;
            None does neither.
        collectives: the group.
        device: where its collectives find tensors.
        chunk: name of the chunk.
        tensors: what it holds, in order.

    Raises:
        ValueError: another mode; the ranks' tensors differ in name, shape or dtype ("check" only).
    """

    def __init__(
        self,
        mode: Synchronise | None,
        collectives: Collectives,
        device: torch.device,
        chunk: str,
        tensors: Sequence[TensorInfo],
    ) -> None:
        if mode not in ("broadcast", "check", None):
            raise ValueError(f'synchronise must be "broadcast", "check" or None, got {mode!r}.')
        self._mode = mode if collectives.world_size > 1 else None
        self._collectives = collectives
        self._device = device
        self._chunk = chunk
        self._tensors = tensors
        self._unlike: list[bool] = []
        self._scratch: Tensor | None = None
        if self._mode == "check":
            self._compare_facts()

    def _compare_facts(self) -> None:
        # Values of unlike shapes must not meet in a collective.
        facts = ";".join(f"{info.name} {tuple(info.shape)} {info.tensor.dtype}" for info in self._tensors)
        digests = self._from_every_rank(torch.tensor([zlib.crc32(facts.encode())], device=self._device))
        others = [rank for rank, digest in enumerate(digests.flatten().tolist()) if digest != digests[0]]
        if others:
            raise ValueError(
                f"Ranks {others} put other tensors into {self._chunk} than rank 0: names, shapes and dtypes must be "
                f"the same everywhere. Here they are {facts}."
            )

    def _from_every_rank(self, mine: Tensor) -> Tensor:
        """Return every rank's tensor, shape ``(world_size, *)``."""
        everyones = mine.new_empty(self._collectives.world_size * mine.numel())
        self._collectives.all_gather(everyones, mine).wait()
        return everyones.view(self._collectives.world_size, mine.numel())

    def value(self, info: TensorInfo, source: Callable[[], Tensor] | None) -> Tensor:
        """Return the value to take for a tensor; every rank calls it for each tensor in order.

        Args:
            info: the tensor.
            source: returns this rank's value; None for what the tensor holds.

        Raises:
            ValueError: this rank's value has another shape, or none at all.
        """
        if self._mode == "broadcast" and self._collectives.rank > 0 and info.numel:
            self._unlike.append(False)
            return self._receive(info)  # this rank's own value is not even made
        mine = info.tensor.detach() if source is None else source().detach()
        if mine.shape != info.shape:
            raise ValueError(f"{info.name!r} has shape {tuple(info.shape)}; its value has {tuple(mine.shape)}.")
        if mine.is_meta:
            raise ValueError(f"{info.name!r} is on the meta device: a value lies in memory.")
        if self._mode is None or info.numel == 0:
            self._unlike.append(False)
            return mine
        if self._collectives.rank == 0:
            mine = mine.to(self._device, info.tensor.dtype).contiguous()
            self._collectives.broadcast(mine)
            self._unlike.append(False)
            return mine
        rank_0s = self._receive(info)
        self._unlike.append(not same_bits(mine, rank_0s))
        return rank_0s

    def _receive(self, info: TensorInfo) -> Tensor:
        """Return rank 0's value, in memory that the next call uses again.

        It is memory of its own: this rank's tensor may be shared, or mapped from a file that cannot be written.
        """
        if self._scratch is None:
            most = max(other.numel * other.tensor.dtype.itemsize for other in self._tensors)
            on_host = self._device.type == "cpu"
            self._scratch = (
                mapped_memory(most) if on_host else torch.empty(most, dtype=torch.uint8, device=self._device)
            )
        dtype = info.tensor.dtype
        value = self._scratch[: info.numel * dtype.itemsize].view(dtype).view(info.shape)
        self._collectives.broadcast(value)
        return value

    def finish(self) -> None:
        """Raise on every rank if "check" found a difference on any.

        Raises:
            ValueError: names the tensors and the ranks.
        """
        if self._mode != "check":
            return
        unlike = self._from_every_rank(torch.tensor(self._unlike, dtype=torch.uint8, device=self._device))
        found = [
            f"{info.name!r} on ranks {ranks}"
            for info, column in zip(self._tensors, unlike.T.tolist(), strict=True)
            if (ranks := [rank for rank, flag in enumerate(column) if flag])
        ]
        if found:
            raise ValueError(
                f"{self._chunk} would start from values that differ from rank 0's: {'; '.join(found)}. Seed every rank "
                'alike, or let synchronise="broadcast" give them rank 0\'s.'
            )
