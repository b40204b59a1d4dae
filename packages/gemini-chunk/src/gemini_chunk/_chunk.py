"""The chunk: consecutive tensors of one dtype in one contiguous, shardable buffer."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gemini_chunk._collectives import Collectives, Done, Handle, LocalCollectives
from gemini_chunk._errors import ChunkError, ChunkFullError
from gemini_chunk._reduction import BufferPool, Reduction
from gemini_chunk._states import TensorInfo, TensorState
from gemini_chunk._tiers import Tier, TierName

_MASTER_BYTES = torch.float32.itemsize


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


class Chunk:
    """A fixed-size, contiguous, single-dtype run of elements that holds consecutive tensors.

    Life: `append` tensors, `close` once, then `gather` and `release` as often as needed. While gathered each tensor's
    ``.data`` is a view of the full buffer; while released it is a NaN-filled placeholder of the same shape and dtype,
    so that a missed gather shows. The tensor objects themselves never change.

    [Note: The full buffer keeps its storage]
    Release frees the bytes of the full buffer's storage and gather brings them back, but the storage object lives as
    long as the chunk. Operators save views of a parameter for backward (a linear layer saves ``weight.t()``); those
    views become valid again with the next gather.

    [Note: Bytes held once]
    A chunk that stays gathered, and a chunk of a single rank that rests on the compute device, hold their bytes once:
    the shard is this rank's slice of the full buffer.

    Args:
        numel: elements of the full buffer, a multiple of the world size.
        dtype: dtype of the full buffer. Floating tensors of another floating dtype are cast when the chunk closes.
        device: the tier that computes.
        collectives: the group that shares the chunk; by default a group of one.
        name: how messages and accounts call it; unique in a manager.
        trainable: whether its tensors get gradients.
        state_numel: fp32 elements of optimizer state to expect per parameter element, for planning (Adam: 2).
        accumulates: sum the gradients of several backwards in fp32 memory of their own.

    Raises:
        ValueError: ``numel`` does not split evenly.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        device: Tier,
        collectives: Collectives | None = None,
        name: str = "chunk 0",
        trainable: bool = True,
        state_numel: int = 2,
        accumulates: bool = False,
    ) -> None:
        self._collectives = LocalCollectives() if collectives is None else collectives
        self._world_size = self._collectives.world_size
        if numel < 1 or numel % self._world_size:
            even = max(1, math.ceil(numel / self._world_size)) * self._world_size
            raise ValueError(
                f"A chunk of {numel} elements does not split evenly over {self._world_size} ranks. Use {even}."
            )
        self.numel = numel
        self.dtype = dtype
        self.name = name
        self.trainable = trainable
        self.accumulates = accumulates
        self.tensors: tuple[TensorInfo, ...] = ()
        self.used_numel = 0
        self.users = 0
        self.gathers = 0
        self._device = device
        self._state_numel = state_numel
        self._sources: list[Callable[[], Tensor] | None] = []
        self._closed = False
        self._visible = False
        self._full_valid = False
        self._gathering: Handle | None = None
        self._master: Tensor | None = None
        self._reduction = Reduction(self)

    def __repr__(self) -> str:
        where = self._rest.name if self._closed else "open"
        return f"Chunk({self.name!r}, {len(self.tensors)} tensors, {self.used_numel}/{self.numel}, {where})"

    # -- facts --------------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Ranks that share the chunk."""
        return self._world_size

    @property
    def shard_numel(self) -> int:
        """Elements of a shard: those in use, shared evenly and rounded up."""
        return math.ceil(self.used_numel / self._world_size)

    @property
    def valid_numel(self) -> int:
        """Elements of this rank's shard that belong to a tensor; the rest is padding."""
        start = self._collectives.rank * self.shard_numel
        return min(max(self.used_numel - start, 0), self.shard_numel)

    @property
    def full_bytes(self) -> int:
        """Bytes of the full buffer."""
        return self.numel * self.dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shard of the working parameters."""
        return self.shard_numel * self.dtype.itemsize

    @property
    def optim_bytes(self) -> int:
        """Bytes that rest with the optimizer on this rank, beyond the shard: expected states, and one fp32 shard.

        That is the master weights where they are separate, and otherwise the gradient, whose place they then leave.
        """
        if not self.trainable:
            return 0
        return self.shard_numel * _MASTER_BYTES * (1 + self._state_numel + int(self.accumulates))

    @property
    def tier(self) -> TierName:
        """Where the shard rests."""
        return self._rest.name

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def is_gathered(self) -> bool:
        """Whether the tensors may be read now."""
        return self._visible

    @property
    def keeps_gathered(self) -> bool:
        """Whether release keeps the full buffer."""
        return self._aliased

    @property
    def can_release(self) -> bool:
        """Whether the full buffer is there and nobody uses it."""
        return self._visible and not self._aliased and self.users == 0

    @property
    def missing_bytes(self) -> int:
        """Bytes of the compute device that a gather would take now."""
        there = self._aliased or self._visible or self._gathering is not None
        return 0 if there else self.full_bytes

    @property
    def has_local_gradient(self) -> bool:
        """Whether gradients of this rank wait for a reduction that has not started."""
        return self._reduction.is_filling

    @property
    def shard(self) -> Tensor:
        """This rank's slice, shape ``(shard_numel,)``, in the tier where the chunk rests."""
        return self._shard

    @property
    def master(self) -> Tensor | None:
        """The weights that an optimizer updates, shape ``(shard_numel,)``.

        Separate fp32 master weights where the chunk has them, otherwise the shard itself; None for a frozen chunk.
        """
        if not self.trainable:
            return None
        return self._shard if self._master is None else self._master

    @property
    def gradient(self) -> Tensor | None:
        """This rank's shard of the reduced gradient, shape ``(shard_numel,)``, or None where none came."""
        return self._reduction.result

    @property
    def slices(self) -> tuple[ShardSlice, ...]:
        """The tensors' elements in this rank's shard, in order."""
        return tuple(self._overlaps())

    def _overlaps(self) -> Iterator[ShardSlice]:
        first = self._collectives.rank * self.shard_numel
        for info in self.tensors:
            start, end = max(info.offset, first), min(info.end, first + self.shard_numel)
            if start < end:
                yield ShardSlice(info, start - first, end - start, start - info.offset)

    # -- building -----------------------------------------------------------------------------------------------------

    def append(self, tensor: Tensor, name: str | None = None, source: Callable[[], Tensor] | None = None) -> TensorInfo:
        """Add a tensor at the tail; its value is read when the chunk closes.

        Args:
            tensor: what `gather` and `release` will re-point.
            name: its path for messages.
            source: returns the value, shape of ``tensor``; by default the value is ``tensor`` itself.

        Raises:
            ChunkFullError: it does not fit into what is left.
            TypeError: its dtype cannot be stored in this chunk.
        """
        name = f"tensor {len(self.tensors)}" if name is None else name
        if self._closed:
            raise ChunkError(f"{self.name} is closed: {name!r} cannot be appended.")
        if tensor.dtype != self.dtype and not (tensor.is_floating_point() and self.dtype.is_floating_point):
            raise TypeError(f"{name!r} has dtype {tensor.dtype}; {self.name} holds {self.dtype}.")
        numel = tensor.numel()
        if self.used_numel + numel > self.numel:
            raise ChunkFullError(
                f"{name!r} has {numel} elements; {self.name} has {self.numel - self.used_numel} of {self.numel} left."
            )
        info = TensorInfo(name, tensor, tensor.shape, self.used_numel, numel)
        self.tensors += (info,)
        self._sources.append(source)
        self.used_numel += numel
        return info

    def close(
        self,
        rest: Tier | None = None,
        *,
        keep_gathered: bool = False,
        master: Tier | None = None,
        synchronise: bool = True,
    ) -> None:
        """Take the values into shards and release the tensors.

        Values are taken one tensor at a time: beyond the shard, and beyond what the tensors held before, no more than
        one tensor's memory is needed.

        Args:
            rest: tier of the shard; by default the compute tier.
            keep_gathered: keep the full buffer on the compute device always. ``rest`` must then be that tier.
            master: tier of the fp32 master weights of a trainable chunk; None for none. An fp32 chunk needs none of
                its own where that is the tier it rests on.
            synchronise: give every rank rank 0's values.

        Raises:
            ChunkError: the chunk is closed or empty.
            TierFullError: a tier cannot hold its part.
        """
        if self._closed or not self.tensors:
            raise ChunkError(f"{self.name} is {'closed already' if self._closed else 'empty'}.")
        rest = self._device if rest is None else rest
        if keep_gathered and rest is not self._device:
            raise ValueError(f"{self.name} cannot stay gathered and rest on the {rest.name} tier.")
        self._rest = rest
        self._aliased = keep_gathered or (self._world_size == 1 and rest is self._device)
        self._make_full()
        if self._aliased:
            self._device.charge(self._full_holder, self.full_bytes)
            self._shard = self._full.narrow(0, self._collectives.rank * self.shard_numel, self.shard_numel)
        else:
            self._storage.resize_(0)
            self._shard = rest.allocate(self.shard_numel, self.dtype, f"{self.name} parameters")
        if master is not None and self.trainable and (self.dtype != torch.float32 or master is not rest):
            self._master = master.allocate(self.shard_numel, torch.float32, f"{self.name} master weights")
            self._master[self.valid_numel :] = 0
        self._shard[self.valid_numel :] = 0
        self._closed = True
        for info, source in zip(self.tensors, self._sources, strict=True):
            value = info.tensor.detach() if source is None else source()
            if synchronise and self._world_size > 1:
                value = value.to(self._device.device).contiguous()
                self._collectives.broadcast(value)
            self._write(info, value)
            info.tensor.data = info.placeholder
            info.state = TensorState.FREE
        self._sources.clear()
        # Padding between the used elements and the next multiple of the world size travels in collectives.
        if self._aliased:
            self._full[self.used_numel :] = 0
            self._full_valid = True
            self._show()

    def _make_full(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._full = torch.empty(self.numel, dtype=self.dtype, device=self._device.device)
            nan = float("nan") if self.dtype.is_floating_point or self.dtype.is_complex else 0
            poison = torch.full((), nan, dtype=self.dtype, device=self._device.device)
            for info in self.tensors:
                info.placeholder = poison.expand(info.shape)
                info.view = self._full.narrow(0, info.offset, info.numel).view(info.shape)
        self._storage = self._full.untyped_storage()
        self._full_holder = f"{self.name} full buffer"

    @torch.no_grad()
    def _write(self, info: TensorInfo, value: Tensor) -> None:
        if value.shape != info.shape:
            raise ValueError(f"{info.name!r} has shape {tuple(info.shape)}; its value has {tuple(value.shape)}.")
        flat = value.reshape(-1)
        if self._aliased:
            info.view.copy_(value)
        for part in self._overlaps():
            if part.info is info:
                if not self._aliased:
                    self._shard[part.in_shard].copy_(flat[part.in_tensor])
                if self._master is not None:
                    self._master[part.in_shard].copy_(flat[part.in_tensor])

    @torch.no_grad()
    def full_master(self, info: TensorInfo) -> Tensor:
        """Return one tensor's master weights from all ranks, without gathering the chunk.

        Args:
            info: a tensor of this chunk, which must be trainable.

        Returns:
            New memory on the compute device, shape of the tensor, dtype of `master`.
        """
        master = self.master
        assert master is not None, "a frozen chunk has no master weights"
        width = min(self.shard_numel, info.numel)
        mine = torch.zeros(width, dtype=master.dtype, device=self._device.device)
        for part in self._overlaps():
            if part.info is info:
                mine[: part.numel].copy_(master[part.in_shard])
        parts = mine.new_empty(self._world_size * width)
        self._collectives.all_gather(parts, mine).wait()
        ends = [min(max(rank * self.shard_numel, info.offset), info.end) for rank in range(self._world_size + 1)]
        held = [stop - start for start, stop in itertools.pairwise(ends)]
        rows = parts.view(self._world_size, width)
        return torch.cat([row[:numel] for row, numel in zip(rows, held, strict=True)]).view(info.shape)

    def load(self, info: TensorInfo, value: Tensor) -> None:
        """Overwrite one tensor on every rank, master weights included, without gathering the chunk.

        Args:
            info: the tensor.
            value: shape of the tensor, the same on every rank.

        Raises:
            ChunkError: the chunk is in use or holds gradients of an unfinished step.
        """
        if self.users or self._reduction.is_filling or self._reduction.result is not None:
            raise ChunkError(f"{info.name!r} cannot be loaded while {self.name} is in use or holds gradients.")
        if not self._aliased:
            self.release()
        self._write(info, value)

    # -- gathering ----------------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Start to make the full buffer valid; `gather` waits for it."""
        if self._visible or self._gathering is not None:
            return
        self._reduction.wait()
        self._reduction.give_place_back()
        if self._full_valid:
            self._gathering = Done()
            return
        if not self._aliased:
            self._device.charge(self._full_holder, self.full_bytes)
            self._storage.resize_(self.full_bytes)
        source = self._shard
        if source.device != self._full.device:
            first = self._collectives.rank * self.shard_numel
            source = self._full.narrow(0, first, self.shard_numel).copy_(source, non_blocking=True)
        self._gathering = self._collectives.all_gather(self._travelling(self._full), source)
        self.gathers += 1

    def gather(self) -> None:
        """Make the tensors valid on the compute device.

        Raises:
            TierFullError: the compute device has no room for the full buffer.
            ChunkError: the collective failed; the chunk is released.
        """
        if self._visible:
            return
        self.start_gather()
        assert self._gathering is not None
        handle, self._gathering = self._gathering, None
        try:
            handle.wait()
        except RuntimeError as error:
            self._free_full()
            raise ChunkError(f"Gathering {self.name} failed on rank {self._collectives.rank}: {error}") from error
        self._full_valid = True
        self._show()

    def release(self) -> None:
        """Give the full buffer's memory back; a chunk that keeps gathered stays as it is.

        Raises:
            ChunkError: a tensor is in use.
        """
        if self._aliased:
            return
        if self.users:
            names = [info.name for info in self.tensors if info.users]
            raise ChunkError(f"{self.name} cannot be released: {names} are in use.")
        if self._gathering is not None:
            self.gather()
        if self._visible:
            self._hide()
            self._free_full()

    def move(self, tier: Tier) -> None:
        """Carry the shard to another tier.

        Raises:
            ChunkError: the chunk keeps gathered, is in use, or holds a gradient.
        """
        if tier is self._rest:
            return
        if self._aliased or self.users or self._reduction.result is not None:
            raise ChunkError(f"{self.name} cannot move: it keeps gathered, is in use, or holds a gradient.")
        target = tier.allocate(self.shard_numel, self.dtype, f"{self.name} parameters")
        target.copy_(self._shard)
        self._rest.free(self._shard)
        self._shard, self._rest = target, tier

    def _travelling(self, buffer: Tensor) -> Tensor:
        """The part of a full buffer that collectives carry: elements in use, rounded up to the world size."""
        return buffer.narrow(0, 0, self.shard_numel * self._world_size)

    def _free_full(self) -> None:
        self._full_valid = False
        if not self._aliased:
            self._storage.resize_(0)
            self._device.discharge(self._full_holder, self.full_bytes)

    def _show(self) -> None:
        self._visible = True
        for info in self.tensors:
            info.tensor.data = info.view
            if info.state is TensorState.FREE:
                info.state = TensorState.HOLD

    def _hide(self) -> None:
        self._visible = False
        for info in self.tensors:
            info.tensor.data = info.placeholder
            if info.state is TensorState.HOLD:
                info.state = TensorState.FREE

    # -- gradients ----------------------------------------------------------------------------------------------------

    def take_gradient(self, info: TensorInfo, gradient: Tensor, pool: BufferPool) -> bool:
        """Add one tensor's local gradient, divided by the world size, to the gradient buffer.

        Args:
            info: the tensor; its state becomes READY_FOR_REDUCE.
            gradient: shape of the tensor.
            pool: lends the buffer.

        Returns:
            Whether every tensor of the chunk has its gradient now.
        """
        return self._reduction.take(info, gradient, pool)

    def start_reduce(self, pool: BufferPool) -> None:
        """Start to turn the gradient buffer into this rank's shard of the averaged gradient.

        A tensor without a gradient counts as zero. `wait_reduce` finishes it.
        """
        self._reduction.start(pool)

    def wait_reduce(self) -> None:
        """Return when the reduction that was started has its result in `gradient`.

        Raises:
            ChunkError: the collective failed; the gradient is dropped.
        """
        self._reduction.wait()

    def settle_states(self) -> None:
        """Bring tensors that were used in backward and have no gradient to come back to rest."""
        for info in self.tensors:
            if info.state is TensorState.HOLD_AFTER_BWD:
                info.to(TensorState.READY_FOR_REDUCE)
                info.to(TensorState.HOLD)

    def commit(self) -> None:
        """Take updated master weights into the working parameters and drop the gradient."""
        if self._master is not None:
            self._shard.copy_(self._master)
        self._reduction.drop()
        if not self._aliased:
            self.release()
        elif self._world_size > 1:
            self._full_valid = False
            if self._visible:
                self._hide()
        elif not self._visible:
            self._show()

    def discard(self) -> None:
        """Drop the gradient; the parameters keep the values they had before backward."""
        self._reduction.discard()
        if self._aliased and self._full_valid and not self._visible:
            self._show()

    def reset(self) -> None:
        """Return to rest after an interrupted step: nothing in use, released, gradients dropped."""
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            # What failed has been reported where it was waited for; here only its end matters.
            with contextlib.suppress(RuntimeError):
                gathering.wait()
            if not self._aliased:
                self._free_full()
        self._reduction.abandon()
        self.users = 0
        for info in self.tensors:
            info.users = 0
            info.state = TensorState.HOLD if self._visible else TensorState.FREE
        self.release()
        self.discard()
