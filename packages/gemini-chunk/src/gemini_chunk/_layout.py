"""Where the tensors of a chunk lie in the shards of its ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gemini_chunk._errors import ChunkError, ChunkFullError
from gemini_chunk._states import TensorInfo


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """The elements of one tensor that lie in this rank's shard.

    Attributes:
        info: the tensor.
        start: index of the first of them in the shard.
        numel: how many.
        param_offset: index of the first of them in the flattened tensor.
    """

    info: TensorInfo
    start: int
    numel: int
    param_offset: int

    @property
    def in_shard(self) -> slice:
        """Their place in the shard."""
        return slice(self.start, self.start + self.numel)

    @property
    def in_tensor(self) -> slice:
        """Their place in the flattened tensor."""
        return slice(self.param_offset, self.param_offset + self.numel)


def even_numel(numel: int, world_size: int) -> int:
    """Return ``numel`` rounded up to a positive multiple of ``world_size``."""
    return max(1, math.ceil(numel / world_size)) * world_size


def slice_of(info: TensorInfo, rank: int, shard_numel: int) -> ShardSlice | None:
    """Return the part of a tensor in the shard of ``rank``, or None where it has no element there."""
    first = rank * shard_numel
    start, end = max(info.offset, first), min(info.end, first + shard_numel)
    return ShardSlice(info, start - first, end - start, start - info.offset) if start < end else None


def held_by_rank(info: TensorInfo, world_size: int, shard_numel: int) -> list[int]:
    """Return how many elements of a tensor each rank's shard holds."""
    parts = (slice_of(info, rank, shard_numel) for rank in range(world_size))
    return [0 if part is None else part.numel for part in parts]


class Layout:
    """Which tensors a chunk holds, where they lie, and how many bytes follow from it.

    Attributes:
        rank: index of this rank in the group that shares the chunk.
        world_size: ranks of that group.
        is_closed: whether its tensors have been taken into shards.
        full_bytes: bytes of the full buffer.
        shard_numel: elements of a shard: those in use, shared evenly and rounded up.
        valid_numel: elements of this rank's shard that belong to a tensor; the rest is padding.
        shard_bytes: bytes of this rank's shard of the working parameters.
        master_dtype: what master weights and sums of gradients are kept in: fp32, or the chunk's own dtype if that is
            wider.
        is_own_master: whether the shard needs no separate master weights where those would rest on the same tier.
        sums_gradients: whether memory for a sum of several backwards' gradients is to be expected, for planning: from
            the start where they accumulate, and else as soon as somebody knows of it.

    Args:
        numel: elements of the full buffer, a multiple of the world size.
        dtype: dtype of the full buffer.
        rank: index of this rank in the group that shares the chunk.
        world_size: ranks of that group.
        name: how messages and accounts call the chunk.
        trainable: whether its tensors get gradients; those of integers, booleans and 8-bit floats never do.
        state_numel: fp32 elements of optimizer state to expect per parameter element.
        accumulates: whether gradients of several backwards are summed in memory of their own.

    Raises:
        ValueError: ``numel`` does not split evenly.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        rank: int,
        world_size: int,
        name: str,
        trainable: bool,
        state_numel: int,
        accumulates: bool,
    ) -> None:
        if numel < 1 or numel % world_size:
            raise ValueError(
                f"A chunk of {numel} elements does not split evenly over {world_size} ranks. Use "
                f"{even_numel(numel, world_size)}."
            )
        self.numel = numel
        self.dtype = dtype
        self.name = name
        self.trainable = trainable and (dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1))
        self.accumulates = self.sums_gradients = accumulates
        self.rank = rank
        self.world_size = world_size
        self.full_bytes = numel * dtype.itemsize
        self.master_dtype = dtype if dtype.is_complex or dtype.itemsize > 4 else torch.float32
        self.is_own_master = dtype == self.master_dtype
        self.is_closed = False
        self._state_numel = state_numel
        self._sources: dict[Tensor, Callable[[], Tensor] | None] = {}
        self._set_tensors(())

    def _set_tensors(self, tensors: tuple[TensorInfo, ...]) -> None:
        """Hold these tensors, and know how they share out over the ranks."""
        self.tensors = tensors
        self.used_numel = tensors[-1].end if tensors else 0
        self.shard_numel = math.ceil(self.used_numel / self.world_size)
        self.valid_numel = min(max(self.used_numel - self.rank * self.shard_numel, 0), self.shard_numel)
        self.shard_bytes = self.shard_numel * self.dtype.itemsize

    @property
    def optim_bytes(self) -> int:
        """Bytes that rest with the optimizer on this rank, beyond the shard: expected states, and one fp32 shard.

        That is the master weights where they are separate, and otherwise the gradient, whose place they then leave.
        A sum of several backwards' gradients, where one is to be expected, comes on top.
        """
        if not self.trainable:
            return 0
        return self.shard_numel * self.master_dtype.itemsize * (1 + self._state_numel) + self.sum_bytes

    @property
    def sum_bytes(self) -> int:
        """Of ``optim_bytes``, what the sum of several backwards' gradients takes; 0 where none is to be expected."""
        return self.shard_numel * self.master_dtype.itemsize if self.trainable and self.sums_gradients else 0

    @property
    def padding_bytes(self) -> int:
        """Bytes of expected optimizer states that the padding of this rank's shard would take, but does not."""
        if not self.trainable:
            return 0
        return (self.shard_numel - self.valid_numel) * self.master_dtype.itemsize * self._state_numel

    @property
    def slices(self) -> tuple[ShardSlice, ...]:
        """The tensors' elements in this rank's shard, in order."""
        parts = (self._slice_of(info) for info in self.tensors)
        return tuple(part for part in parts if part is not None)

    def _slice_of(self, info: TensorInfo) -> ShardSlice | None:
        return slice_of(info, self.rank, self.shard_numel)

    def _travelling(self, buffer: Tensor) -> Tensor:
        """The part of a full buffer that collectives carry: elements in use, rounded up to the world size."""
        return buffer.narrow(0, 0, self.shard_numel * self.world_size)

    def append(self, tensor: Tensor, name: str | None = None, source: Callable[[], Tensor] | None = None) -> TensorInfo:
        """Add a tensor at the tail; its value is read when the chunk closes.

        Args:
            tensor: what `gather` and `release` will re-point.
            name: its path for messages.
            source: returns the value, shape of ``tensor``; by default the value is ``tensor`` itself.

        Raises:
            ChunkFullError: it does not fit into what is left.
            TypeError: its dtype or its layout cannot be stored in this chunk, it is on the meta device, or it was made
                under ``torch.inference_mode()``.
            ValueError: it is in this chunk already.
        """
        name = f"tensor {len(self.tensors)}" if name is None else name
        if self.is_closed:
            raise ChunkError(f"{self.name} is closed: {name!r} cannot be appended.")
        if tensor in self._sources:
            known = next(info.name for info in self.tensors if info.tensor is tensor)
            raise ValueError(f"{name!r} is in {self.name} already, as {known!r}.")
        if tensor.is_meta:
            raise TypeError(f"{name!r} is on the meta device, which no tensor can leave; build it where it has memory.")
        if tensor.is_inference():
            raise TypeError(
                f"{name!r} was made under torch.inference_mode(); such a tensor is of no use once it has other memory. "
                "Build the model under torch.no_grad(), or clone its parameters outside; it may run under either."
            )
        if tensor.layout != torch.strided:
            raise TypeError(f"{name!r} has layout {tensor.layout}; a chunk holds dense tensors.")
        if tensor.dtype != self.dtype and not (tensor.is_floating_point() and self.dtype.is_floating_point):
            raise TypeError(f"{name!r} has dtype {tensor.dtype}; {self.name} holds {self.dtype}.")
        numel = tensor.numel()
        if self.used_numel + numel > self.numel:
            raise ChunkFullError(
                f"{name!r} has {numel} elements; {self.name} has {self.numel - self.used_numel} of {self.numel} left."
            )
        info = TensorInfo(name, tensor, tensor.shape, self.used_numel, numel)
        self._set_tensors((*self.tensors, info))
        self._sources[tensor] = source
        return info
