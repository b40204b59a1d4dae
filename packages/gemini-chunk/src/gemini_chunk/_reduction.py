"""The gradient of a chunk: from local gradients of its tensors to this rank's shard of their mean."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch
from torch import Tensor

from gemini_chunk._collectives import Done, Handle, Waiting
from gemini_chunk._errors import ChunkError, TierFullError
from gemini_chunk._full import settle_states
from gemini_chunk._states import TensorInfo, TensorState
from gemini_chunk._tiers import Tier, fill_with_poison

if TYPE_CHECKING:
    from gemini_chunk._chunk import Chunk

# Smaller gradients are joined first, where they lie side by side: one at a time they cost more than their bytes.
_LARGE_BYTES = 2**16


class BufferPool(Protocol):
    """Where a chunk borrows a gradient buffer for the time between its first gradient and its reduction.

    The buffers are allocations of the compute tier: a chunk of a single rank may keep one as its gradient, and frees it
    there.
    """

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory of the compute tier, of at least ``numel`` elements.

        Raises:
            TierFullError: there is no room, whatever else could be freed.
        """

    def give_back(self, buffer: Tensor) -> None:
        """Take the buffer back; nobody reads it any more."""

    def make_room(self, is_enough: Callable[[], bool]) -> None:
        """Wait for reductions under way and free the buffers that nobody has borrowed.

        Until there is enough room, gradients that wait for others of their chunk are set aside, too.
        """


class Reduction:
    """What a chunk knows of its gradient; the chunk's other half, which reads and hides the chunk's buffers.

    [Note: The gradient takes the place of the parameters]
    Where a separate master weight exists, the reduced gradient is written over this rank's shard of the working
    parameters: nothing reads them until the optimizer casts the new master weights back. Should the parameters be asked
    for earlier (a second backward before the step, an evaluation), the gradient moves to memory of its own, beside the
    master weights, and the working shard is cast from those again.

    [Note: The gradient on its way]
    To where it waits off the compute device the reduced gradient is copied in the background. Until it has landed
    `result` is its place and not yet its value, and the memory it comes from is not lent again.

    [Note: A gradient set aside]
    A chunk whose gradients do not all come, for a parameter of it is not used, keeps its buffer until backward is over.
    Where the compute device gets short of room, what came so far goes to another tier, and back for the next gradient
    or the reduction. So a step needs no more of the device than one such buffer at a time.

    Attributes:
        result: the reduced gradient, shape ``(shard_numel,)``, or None.
    """

    def __init__(self, chunk: Chunk) -> None:
        self.result: Tensor | None = None
        self._chunk = chunk
        self._result_tier: Tier | None = None
        self._buffer: Tensor | None = None
        self._aside: tuple[Tensor, Tier] | None = None
        self._pool: BufferPool | None = None
        self._num_ready = 0
        self._running: Handle | None = None
        self._target: Tensor | None = None
        self._starts = 0
        self._carrying: Handle | None = None
        self._give_back: Callable[[], None] | None = None

    @property
    def is_filling(self) -> bool:
        """Whether gradients of this rank wait for a reduction that has not started."""
        return (self._buffer is not None or self._aside is not None) and self._running is None

    @property
    def takes_place(self) -> bool:
        """Whether the gradient has the place of the parameters, or may be about to take it."""
        return self._running is not None or self._is_in_place

    @property
    def _is_in_place(self) -> bool:
        return self.result is not None and self.result is self._chunk._shard

    @property
    def displaced_bytes(self) -> int:
        """Bytes of the compute device that a gradient in the parameters' place would take once those are asked for."""
        chunk = self._chunk
        return chunk.shard_numel * chunk.master_dtype.itemsize * (self._is_in_place and self._own_tier is chunk._device)

    def take(self, gradients: Iterable[tuple[TensorInfo, Tensor]], pool: BufferPool) -> bool:
        """See `Chunk.take_gradients`."""
        buffer = self._buffer_from(pool)
        share = 1 / self._chunk.world_size
        small: list[tuple[int, Tensor]] = []
        others: list[tuple[TensorInfo, Tensor]] = []
        for info, gradient in gradients:
            if gradient.layout != torch.strided:
                gradient = gradient.to_dense()
            if info.state is TensorState.READY_FOR_REDUCE:
                others.append((info, gradient))
                continue
            info.state = TensorState.READY_FOR_REDUCE  # legal from all others, by way of those between
            self._num_ready += 1
            if gradient.nbytes < _LARGE_BYTES:
                small.append((info.offset, gradient))
            else:
                _write_share(_part(buffer, info), gradient, share)
        for offset, run in _runs(small):
            _write_share(buffer.narrow(0, offset, run.numel()), run, share)
        for info, gradient in others:
            _part(buffer, info).add_(gradient, alpha=share)
        return self._num_ready == len(self._chunk.tensors)

    def _buffer_from(self, pool: BufferPool) -> Tensor:
        if self._running is not None:
            self.wait()
        if self._buffer is None:
            self.land()  # the last gradient may be on its way still, and has memory of the device
            chunk = self._chunk
            self._buffer, self._pool = pool.take(chunk.numel, chunk.reduce_dtype), pool
            if chunk._device.poisons:
                fill_with_poison(self._buffer)
            self._bring_back(self._buffer)
        return self._buffer

    def set_aside(self, tier: Tier) -> bool:
        """See `Chunk.set_gradient_aside`."""
        chunk, buffer = self._chunk, self._buffer
        if buffer is None or self._running is not None:
            return False
        try:
            aside = tier.allocate(chunk.numel, chunk.reduce_dtype, f"{chunk.name} gradient set aside")
        except (TierFullError, OSError):
            return False
        aside.copy_(buffer[: chunk.numel])
        tier.receive(chunk._device, aside.nbytes)
        self._aside = (aside, tier)
        self._return_buffer()
        return True

    def _bring_back(self, buffer: Tensor) -> None:
        if self._aside is not None:
            aside, tier = self._aside
            buffer[: self._chunk.numel].copy_(aside)
            self._chunk._device.receive(tier, aside.nbytes)
            self._forget_aside()

    def _forget_aside(self) -> None:
        if self._aside is not None:
            aside, tier = self._aside
            self._aside = None
            tier.free(aside)

    def start(self, pool: BufferPool) -> Handle:
        """See `Chunk.start_reduce`."""
        chunk = self._chunk
        chunk._finish_transfers()  # they read the shard, which the gradient may replace
        buffer = self._buffer_from(pool)
        for info in chunk.tensors:
            if info.state is not TensorState.READY_FOR_REDUCE:
                buffer.narrow(0, info.offset, info.numel).zero_()
        travelling = chunk._travelling(buffer)
        if travelling.numel() > chunk.used_numel:
            travelling[chunk.used_numel :] = 0
        if chunk.world_size == 1:  # the gradient of a single rank is reduced already
            self._settle_alone(buffer, travelling)
            return Done()
        self._buffer = None  # nobody sets it aside meanwhile
        try:
            self._target = self._choose_target(pool)
        finally:
            self._buffer = buffer
        self._starts += 1
        try:
            reduce_scatter = chunk._collectives.reduce_scatter
            self._running = reduce_scatter(self._target, travelling) if chunk.shard_numel else Done()
            chunk.sent_bytes += self._target.nbytes * (chunk.world_size - 1)
        except Exception as error:
            self._fail(error)
        number = self._starts
        return Waiting(lambda: self.wait() if self._starts == number else None)

    def _settle_alone(self, buffer: Tensor, reduced: Tensor) -> None:
        self.land()
        pool, self._buffer = self._pool, None
        assert pool is not None, "it has lent the buffer"
        try:
            is_kept = self._settle(reduced, lambda: self._give_back_buffer(buffer, pool))
        except (TierFullError, OSError):  # no room there, or none on the disk
            self._buffer = buffer
            raise
        except ChunkError:
            self._finish_states()
            raise
        if is_kept and not reduced.numel():
            self._give_back_buffer(buffer, pool)
        self._finish_states()

    def _choose_target(self, pool: BufferPool) -> Tensor:
        """Return what to reduce into: the shard itself where it lies on the compute device and may be replaced."""
        chunk = self._chunk
        alike = (chunk._shard.device, chunk.dtype) == (chunk._device.device, chunk.reduce_dtype)
        if self._may_replace and alike:
            return self._replaceable_shard()
        holder = f"{chunk.name} reduced gradient"
        try:
            return chunk._device.allocate(chunk.shard_numel, chunk.reduce_dtype, holder)
        except TierFullError:
            pool.make_room(lambda: chunk._device.fits(chunk.shard_numel * chunk.reduce_dtype.itemsize))
            return chunk._device.allocate(chunk.shard_numel, chunk.reduce_dtype, holder)

    @property
    def _may_replace(self) -> bool:
        """Whether the gradient may take the place of this rank's working parameters now."""
        chunk = self._chunk
        read = chunk.keeps_gathered and chunk.users
        return chunk._master is not None and not chunk.accumulates and self.result is None and not read

    def _replaceable_shard(self) -> Tensor:
        if self._chunk.keeps_gathered and self._chunk.is_gathered:
            self._chunk._hide()
        return self._chunk._shard

    def wait(self) -> None:
        """See `Chunk.wait_reduce`."""
        if self._running is None:
            return
        self.land()
        chunk, target = self._chunk, self._target
        assert target is not None
        try:
            self._running.wait()
        except Exception as error:
            self._fail(error)
        self._running = Done()  # should a tier be full below, another wait goes on from here
        self._return_buffer()
        if target is chunk._shard:
            self.result, self._result_tier = target, None
            chunk._rest.receive(chunk._device, target.nbytes)
        else:
            try:
                self._settle(target, lambda: chunk._device.free(target))
            except ChunkError:
                self._running = self._target = None
                self._finish_states()
                raise
        self._running = self._target = None
        self._finish_states()

    def _fail(self, error: Exception) -> NoReturn:
        chunk = self._chunk
        self._running = None
        self._return_buffer()
        self._forget_target()
        self._finish_states()
        chunk._show_again()
        raise ChunkError(f"Reducing {chunk.name} failed on rank {chunk._collectives.rank}: {error}") from error

    def _finish_states(self) -> None:
        self._num_ready = 0
        settle_states(self._chunk.tensors, visible=self._chunk.is_gathered)

    def _settle(self, reduced: Tensor, give_back: Callable[[], None]) -> bool:
        """Carry a reduced gradient from the compute device to where it waits for the optimizer.

        Args:
            reduced: the gradient.
            give_back: is called when nobody reads the memory of ``reduced`` any more.

        Returns:
            Whether that memory is the gradient now, and is not given back.

        Raises:
            TierFullError: the tier where the chunk rests has no room; ``reduced`` is as it was.
            ChunkError: copying failed at once; the gradient is dropped.
        """
        chunk = self._chunk
        self.give_place_back()
        if self.result is None and not self._may_replace and chunk._rest is chunk._device and not chunk.accumulates:
            self.result, self._result_tier = reduced, chunk._device
            return True
        adds = self.result is not None
        if self._may_replace:
            self.result, self._result_tier = self._replaceable_shard(), None
        elif self.result is None:
            self.result, self._result_tier = self._own_memory(), self._own_tier
        self._tier.receive(chunk._device, reduced.nbytes)
        self._give_back = give_back
        try:
            self._carrying = self._carry(self.result, reduced, adds=adds)
        except Exception as error:
            self._lose(error)
        if isinstance(self._carrying, Done):
            self.land()
        return False

    def _carry(self, result: Tensor, reduced: Tensor, *, adds: bool) -> Handle:
        """Start to copy, or add, to where the gradient waits."""
        if not adds and self._tier is not self._chunk._device:
            return self._tier.incoming.start(result, reduced)
        if adds:
            result.add_(reduced.to(result.device))
        else:
            result.copy_(reduced)
        return Done()

    def land(self) -> None:
        """Wait until the reduced gradient is where it waits for the optimizer. [Note: The gradient on its way].

        Raises:
            ChunkError: copying failed; the gradient is dropped.
        """
        if self._carrying is None:
            return
        try:
            self._carrying.wait()
        except Exception as error:
            self._lose(error)
        self._arrive()
        self._page_out()

    def _arrive(self) -> None:
        give_back, self._carrying, self._give_back = self._give_back, None, None
        if give_back is not None:
            give_back()

    def _lose(self, error: Exception) -> NoReturn:
        chunk, tier = self._chunk, self._tier
        self._arrive()
        if self.result is chunk._shard:
            self._restore_shard()
        self.drop()
        chunk._show_again()
        raise ChunkError(f"Carrying the gradient of {chunk.name} to the {tier.name} tier failed: {error}") from error

    def _own_memory(self) -> Tensor:
        """Return memory of the gradient's own, in fp32: 16 bits would lose the small terms of a sum of backwards."""
        chunk = self._chunk
        return self._own_tier.allocate(chunk.shard_numel, chunk.master_dtype, f"{chunk.name} gradient")

    @property
    def _own_tier(self) -> Tier:
        """Where memory of the gradient's own is: with the master weights, whose update is all that reads a sum."""
        return self._chunk._master_tier or self._chunk._rest

    @property
    def _tier(self) -> Tier:
        """Where the reduced gradient is."""
        return self._result_tier or self._chunk._rest

    def _page_out(self) -> None:
        if self.result is not None:
            self._tier.page_out(self.result)

    def move(self, tier: Tier) -> None:
        """Carry a gradient in memory of its own to another tier, as the master weights go there.

        Raises:
            TierFullError: the other tier has no room; it stays where it is.
        """
        self.land()
        old, result = self._result_tier, self.result
        if result is None or old is None or old is tier:
            return
        self.result = tier.allocate(result.numel(), result.dtype, f"{self._chunk.name} gradient").copy_(result)
        self._result_tier = tier
        tier.receive(old, result.nbytes)
        old.free(result)
        self._page_out()

    def give_place_back(self) -> None:
        """Undo [Note: The gradient takes the place of the parameters].

        Raises:
            TierFullError: the gradient has no other place; nothing has changed.
        """
        chunk = self._chunk
        if self._is_in_place:
            self.land()
            self.result, self._result_tier = self._own_memory().copy_(chunk._shard), self._own_tier
            self._own_tier.receive(chunk._rest, chunk.shard_bytes)
            self._restore_shard()
            self._page_out()

    def _restore_shard(self) -> None:
        chunk = self._chunk
        assert chunk._master is not None, "only a chunk with master weights gives its shard to a gradient"
        chunk._shard.copy_(chunk._master)
        chunk._page_out()

    def _return_buffer(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            assert self._pool is not None, "it has lent the buffer"
            self._give_back_buffer(buffer, self._pool)

    def _give_back_buffer(self, buffer: Tensor, pool: BufferPool) -> None:
        if self._chunk._device.poisons:
            fill_with_poison(buffer)
        pool.give_back(buffer)

    def _forget_target(self) -> None:
        target, self._target = self._target, None
        if target is not None and target is self._chunk._shard:
            self._restore_shard()
        elif target is not None:
            self._chunk._device.free(target)

    def discard(self) -> None:
        """Forget the gradient, reduced or not, and restore the parameters whose place it took."""
        self.wait()
        if self.is_filling:
            self._return_buffer()
            self._forget_aside()
            self._finish_states()
        self._land_anyhow()
        if self._is_in_place:
            self._restore_shard()
        self.drop()

    def drop(self) -> None:
        """Forget the reduced gradient."""
        self._land_anyhow()
        if self.result is not None and self._result_tier is not None:
            self._result_tier.free(self.result)
        self.result = self._result_tier = None

    def abandon(self) -> None:
        """Forget the gradients of an interrupted backward, taken or under way."""
        if self._running is not None:
            with contextlib.suppress(Exception):  # it was, or will be, reported where it is waited for
                self._running.wait()
        self._running = None
        self._land_anyhow()
        self._forget_target()
        self._return_buffer()
        self._forget_aside()
        self._num_ready = 0

    def _land_anyhow(self) -> None:
        with contextlib.suppress(ChunkError):  # a gradient that is about to be forgotten may be lost
            self.land()


def _part(buffer: Tensor, info: TensorInfo) -> Tensor:
    return buffer.narrow(0, info.offset, info.numel).view(info.shape)


def _write_share(part: Tensor, gradient: Tensor, share: float) -> None:
    """Write a gradient times ``share``; both in the dtype of ``part``, so that the bits depend on nothing else."""
    if share != 1 and part.dtype == gradient.dtype:
        torch.mul(gradient, share, out=part)
        return
    part.copy_(gradient)
    if share != 1:
        part.mul_(share)


def _runs(gradients: list[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """Join gradients that lie side by side in the buffer, given with their offsets; yield flat ones with theirs."""
    first = end = -1
    run: list[Tensor] = []
    for offset, gradient in sorted(gradients, key=lambda pair: pair[0]):
        if run and (offset != end or gradient.dtype != run[0].dtype):
            yield first, torch._utils._flatten_dense_tensors(run)
            run = []
        if not run:
            first = end = offset
        run.append(gradient)
        end += gradient.numel()
    if run:
        yield first, torch._utils._flatten_dense_tensors(run)
