"""The gradient of a chunk: from local gradients of its tensors to this rank's shard of their mean."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from gemini_chunk._collectives import Handle
from gemini_chunk._errors import ChunkError, TierFullError
from gemini_chunk._states import TensorInfo, TensorState
from gemini_chunk._tiers import Tier

if TYPE_CHECKING:
    from gemini_chunk._chunk import Chunk


class BufferPool(Protocol):
    """Where a chunk borrows a gradient buffer for the time between its first gradient and its reduction."""

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory of the compute device, of at least ``numel`` elements."""

    def give_back(self, buffer: Tensor) -> None:
        """Take the buffer back; nobody reads it any more."""

    def make_room(self) -> None:
        """Wait for reductions under way and free the buffers that nobody has borrowed."""


class Reduction:
    """What a chunk knows of its gradient; the chunk's other half, which reads and hides the chunk's buffers.

    [Note: The gradient takes the place of the parameters]
    Where a separate master weight exists, the reduced gradient is written over this rank's shard of the working
    parameters: nothing reads them until the optimizer casts the new master weights back. Should the parameters be asked
    for earlier (a second backward before the step, an evaluation), the gradient moves to memory of its own and the
    working shard is cast from the master weights again.

    Attributes:
        result: the reduced gradient, shape ``(shard_numel,)``, or None.
    """

    def __init__(self, chunk: Chunk) -> None:
        self.result: Tensor | None = None
        self._chunk = chunk
        self._result_tier: Tier | None = None
        self._buffer: Tensor | None = None
        self._pool: BufferPool | None = None
        self._num_ready = 0
        self._running: Handle | None = None
        self._target: Tensor | None = None

    @property
    def is_filling(self) -> bool:
        """Whether gradients of this rank wait for a reduction that has not started."""
        return self._buffer is not None and self._running is None

    def take(self, info: TensorInfo, gradient: Tensor, pool: BufferPool) -> bool:
        """See `Chunk.take_gradient`."""
        chunk = self._chunk
        buffer = self._buffer_from(pool)
        part = buffer.narrow(0, info.offset, info.numel).view(info.shape)
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        if info.state is TensorState.READY_FOR_REDUCE:
            part.add_(gradient, alpha=1 / chunk.world_size)
        elif chunk.world_size == 1:
            part.copy_(gradient)
        else:
            torch.mul(gradient, 1 / chunk.world_size, out=part)
        if info.state in (TensorState.FREE, TensorState.HOLD):
            info.to(TensorState.COMPUTE)
        if info.state is TensorState.COMPUTE:
            info.to(TensorState.HOLD_AFTER_BWD)
        if info.state is TensorState.HOLD_AFTER_BWD:
            info.to(TensorState.READY_FOR_REDUCE)
            self._num_ready += 1
        return self._num_ready == len(chunk.tensors)

    def _buffer_from(self, pool: BufferPool) -> Tensor:
        self._pool = pool
        if self._buffer is None or self._running is not None:
            self.wait()
            self._buffer = pool.take(self._chunk.numel, self._chunk.dtype)
        return self._buffer

    @torch.no_grad()
    def start(self, pool: BufferPool) -> None:
        """See `Chunk.start_reduce`."""
        chunk = self._chunk
        buffer = self._buffer_from(pool)
        for info in chunk.tensors:
            if info.state is not TensorState.READY_FOR_REDUCE:
                buffer.narrow(0, info.offset, info.numel).zero_()
        travelling = chunk._travelling(buffer)
        travelling[chunk.used_numel :] = 0
        if chunk.world_size == 1:  # the gradient of a single rank is reduced already
            self._buffer = None
            self._finish_states()
            if self._settle(travelling):
                pool.give_back(buffer)
            return
        self._target = self._choose_target(pool)
        self._running = chunk._collectives.reduce_scatter(self._target, travelling)

    def _choose_target(self, pool: BufferPool) -> Tensor:
        """Return what to reduce into: the shard itself where it lies on the compute device and may be replaced."""
        chunk = self._chunk
        if self._may_replace and chunk.shard.device == chunk._device.device:
            return self._replaceable_shard()
        holder = f"{chunk.name} reduced gradient"
        try:
            return chunk._device.allocate(chunk.shard_numel, chunk.dtype, holder)
        except TierFullError:
            pool.make_room()
            return chunk._device.allocate(chunk.shard_numel, chunk.dtype, holder)

    @property
    def _may_replace(self) -> bool:
        """Whether the gradient may take the place of this rank's working parameters now."""
        chunk = self._chunk
        read = chunk.keeps_gathered and chunk.users
        return chunk._master is not None and not chunk.accumulates and self.result is None and not read

    def _replaceable_shard(self) -> Tensor:
        if self._chunk.keeps_gathered and self._chunk.is_gathered:
            self._chunk._hide()
        return self._chunk.shard

    @torch.no_grad()
    def wait(self) -> None:
        """See `Chunk.wait_reduce`."""
        if self._running is None:
            return
        chunk = self._chunk
        handle, self._running = self._running, None
        target, self._target = self._target, None
        assert target is not None
        try:
            handle.wait()
        except RuntimeError as error:
            self._return_buffer()
            if target is not chunk.shard:
                chunk._device.free(target)
            rank = chunk._collectives.rank
            raise ChunkError(f"Reducing {chunk.name} failed on rank {rank}: {error}") from error
        self._return_buffer()
        self._finish_states()
        if target is chunk.shard:
            self.result, self._result_tier = target, None
        elif self._settle(target):
            chunk._device.free(target)

    def _finish_states(self) -> None:
        self._num_ready = 0
        for info in self._chunk.tensors:
            if info.state is TensorState.HOLD_AFTER_BWD:  # its gradient counted as zero
                info.to(TensorState.READY_FOR_REDUCE)
            if info.state is TensorState.READY_FOR_REDUCE:
                info.to(TensorState.HOLD)
                if not self._chunk.is_gathered:
                    info.to(TensorState.FREE)

    def _settle(self, reduced: Tensor) -> bool:
        """Carry a reduced gradient from the compute device to where it waits for the optimizer.

        Returns:
            Whether the memory of ``reduced`` is free again; otherwise it is the gradient now.
        """
        chunk = self._chunk
        self.give_place_back()
        if self.result is not None:
            self.result.add_(reduced.to(self.result.device))
        elif self._may_replace:
            self.result, self._result_tier = self._replaceable_shard().copy_(reduced), None
        elif chunk._rest is chunk._device and not chunk.accumulates:
            self.result, self._result_tier = reduced, chunk._device
            return False
        else:
            self._take_own_memory(reduced)
        return True

    def _take_own_memory(self, value: Tensor) -> None:
        """Give the gradient memory of its own, in fp32: 16 bits would lose the small terms of a sum of backwards."""
        chunk = self._chunk
        memory = chunk._rest.allocate(chunk.shard_numel, torch.float32, f"{chunk.name} gradient")
        self.result, self._result_tier = memory.copy_(value), chunk._rest

    @torch.no_grad()
    def give_place_back(self) -> None:
        """Undo [Note: The gradient takes the place of the parameters]."""
        chunk = self._chunk
        if self.result is not None and self.result is chunk.shard:
            assert chunk._master is not None
            self._take_own_memory(chunk.shard)
            chunk.shard.copy_(chunk._master)

    def _return_buffer(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            assert self._pool is not None
            self._pool.give_back(buffer)

    @torch.no_grad()
    def discard(self) -> None:
        """Forget the reduced gradient, and restore the parameters whose place it took."""
        self.wait()
        chunk = self._chunk
        if self.result is not None and self.result is chunk.shard:
            assert chunk._master is not None
            chunk.shard.copy_(chunk._master)
        self.drop()

    def drop(self) -> None:
        """Forget the reduced gradient."""
        if self.result is not None and self._result_tier is not None:
            self._result_tier.free(self.result)
        self.result = self._result_tier = None

    def abandon(self) -> None:
        """Forget the gradients of an interrupted backward."""
        chunk = self._chunk
        if self._running is not None:
            with contextlib.suppress(RuntimeError):
                self._running.wait()
        if self._target is not None and self._target is chunk.shard:
            self.result, self._result_tier = self._target, None  # what it replaced comes back with `discard`
        elif self._target is not None:
            chunk._device.free(self._target)
        self._running = self._target = None
        self._num_ready = 0
        self._return_buffer()
