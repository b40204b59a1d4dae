"""The gradient of a chunk: from local gradients of its tensors to this rank's shard of their mean."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch
from torch import Tensor

from gemini_chunk._collectives import Done, Handle
from gemini_chunk._errors import ChunkError, TierFullError
from gemini_chunk._states import TensorInfo, TensorState
from gemini_chunk._tiers import Tier

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
        """Take the buffer back; nobody reads it any more, and where its tier poisons it is filled."""

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
        carrying: the copy to where it waits, while it is on its way.
    """

    def __init__(self, chunk: Chunk) -> None:
        self.result: Tensor | None = None
        self.carrying: Handle | None = None
        self._chunk = chunk
        self._result_tier: Tier | None = None
        self._share = 1 / chunk.world_size
        self._buffer: Tensor | None = None
        self._aside: tuple[Tensor, Tier] | None = None
        self._pool: BufferPool | None = None
        self._num_missing = 0
        self._running: Handle | None = None
        self._sent: Tensor | None = None
        self._target: Tensor | None = None
        self._give_back: Callable[[], None] | None = None

    @property
    def is_filling(self) -> bool:
        """Whether gradients of this rank wait for a reduction that has not started."""
        return self._buffer is not None or self._aside is not None

    @property
    def is_empty(self) -> bool:
        """Whether there is no gradient: none that waits, is under way or reduced."""
        return self.result is None and self._running is None and self._buffer is None and self._aside is None

    @property
    def takes_place(self) -> bool:
        """Whether the gradient has the place of the parameters, or may be about to take it."""
        return self._running is not None or self._is_in_place

    @property
    def _is_in_place(self) -> bool:
        return self.result is self._chunk._shard

    @property
    def displaced_bytes(self) -> int:
        """Bytes of the compute device that a gradient in the parameters' place would take once those are asked for."""
        chunk = self._chunk
        displaces = self._is_in_place and self._own_tier is chunk._device
        return chunk.shard_numel * chunk.master_dtype.itemsize if displaces else 0

    def take(self, gradients: Sequence[tuple[TensorInfo, Tensor]], pool: BufferPool) -> bool:
        """See `Chunk.take_gradients`."""
        buffer = self._borrow(pool) if self._buffer is None else self._buffer
        firsts: list[tuple[int, int, Tensor]] = []
        others: list[tuple[TensorInfo, Tensor]] = []
        for info, gradient in gradients:
            if gradient.layout != torch.strided:
                gradient = gradient.to_dense()
            if gradient.requires_grad:  # so it comes with create_graph
                gradient = gradient.detach()
            if info.state is TensorState.READY_FOR_REDUCE:
                others.append((info, gradient))
            else:
                info.state = TensorState.READY_FOR_REDUCE  # legal from all others, by way of those between
                self._num_missing -= 1
                firsts.append((info.offset, info.numel, gradient))
        share = self._share
        for offset, numel, gradient in _joined(firsts) if len(firsts) > 1 else firsts:
            part = buffer.narrow(0, offset, numel).view(gradient.shape)
            # Both in the buffer's dtype, so that the bits depend on nothing else.
            if share != 1 and gradient.dtype == part.dtype:
                torch.mul(gradient, share, out=part)
            else:
                part.copy_(gradient)
                if share != 1:
                    part.mul_(share)
        for info, gradient in others:
            buffer.narrow(0, info.offset, info.numel).view(info.shape).add_(gradient, alpha=share)
        return self._num_missing == 0

    def _borrow(self, pool: BufferPool) -> Tensor:
        """Take a buffer for gradients that come after the last reduction, with those in it that were set aside."""
        chunk = self._chunk
        chunk._need_trainable()
        if self._running is not None:
            self.wait()
        if self.carrying is not None:  # it has memory of the device
            self.land()
        buffer = pool.take(chunk.numel, chunk.reduce_dtype)
        self._buffer, self._pool = buffer, pool
        if self._aside is not None:
            aside, tier = self._aside
            buffer[: chunk.numel].copy_(aside)
            chunk._device.receive(tier, aside.nbytes)
            self._forget_aside()
        else:
            self._num_missing = len(chunk.tensors)
        return buffer

    def set_aside(self, tier: Tier) -> bool:
        """See `Chunk.set_gradient_aside`."""
        chunk, buffer = self._chunk, self._buffer
        if buffer is None:
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

    def _forget_aside(self) -> None:
        if self._aside is not None:
            aside, tier = self._aside
            self._aside = None
            tier.free(aside)

    def start(self, pool: BufferPool) -> Handle:
        """See `Chunk.start_reduce`."""
        chunk = self._chunk
        if self._buffer is None:
            chunk._need_trainable()
        chunk._finish_transfers()  # they read the shard, which the gradient may replace
        buffer = self._borrow(pool) if self._buffer is None else self._buffer
        if self._num_missing:
            for info in chunk.tensors:
                if info.state is not TensorState.READY_FOR_REDUCE:
                    buffer.narrow(0, info.offset, info.numel).zero_()
        travelling = chunk._travelling(buffer)
        if chunk.shard_numel * chunk.world_size > chunk.used_numel:
            travelling[chunk.used_numel :] = 0
        if chunk.world_size == 1:  # the gradient of a single rank is reduced already
            self._settle_alone(buffer, travelling)
            return self
        self._buffer = None  # nobody sets it aside meanwhile
        try:
            target = self._choose_target(pool)
        except BaseException:
            self._buffer = buffer
            raise
        self._sent, self._target = buffer, target
        try:
            self._running = chunk._collectives.reduce_scatter(target, travelling) if chunk.shard_numel else Done()
        except Exception as error:
            self._fail(error)
        chunk.sent_bytes += target.nbytes * (chunk.world_size - 1)
        return self

    def _settle_alone(self, buffer: Tensor, reduced: Tensor) -> None:
        self.land()
        chunk, pool, self._buffer = self._chunk, self._pool, None
        assert pool is not None, "it has lent the buffer"
        try:
            is_kept = self._settle(reduced, lambda: pool.give_back(buffer))
        except (TierFullError, OSError):  # no room there, or none on the disk
            self._buffer = buffer
            raise
        except ChunkError:
            chunk.settle_states(reduced=True)
            raise
        if is_kept and not reduced.numel():
            pool.give_back(buffer)
        chunk.settle_states(reduced=True)

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
        if chunk._master is None or chunk.accumulates or self.result is not None:
            return False
        return not (chunk.keeps_gathered and chunk.users)  # somebody reads them

    def _replaceable_shard(self) -> Tensor:
        if self._chunk.keeps_gathered and self._chunk.is_gathered:
            self._chunk._hide()
        return self._chunk._shard

    def wait(self) -> None:
        """See `Chunk.wait_reduce`."""
        if self._running is None:
            return
        if self.carrying is not None:
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
            chunk.rest.receive(chunk._device, target.nbytes)
        else:
            try:
                self._settle(target, lambda: chunk._device.free(target))
            except ChunkError:
                self._running = self._target = None
                chunk.settle_states(reduced=True)
                raise
        self._running = self._target = None
        chunk.settle_states(reduced=True)

    def _fail(self, error: Exception) -> NoReturn:
        chunk = self._chunk
        self._running = None
        self._return_buffer()
        self._forget_target()
        chunk.settle_states(reduced=True)
        chunk._show_again()
        raise ChunkError(f"Reducing {chunk.name} failed on rank {chunk._collectives.rank}: {error}") from error

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
        adds = self.result is not None
        if self.result is not None:
            self.give_place_back()
        elif self._may_replace:
            self.result, self._result_tier = self._replaceable_shard(), None
        elif chunk.rest is chunk._device and not chunk.accumulates:
            self.result, self._result_tier = reduced, chunk._device
            return True
        else:
            self.result, self._result_tier = self._own_memory(), self._own_tier
        self._tier.receive(chunk._device, reduced.nbytes)
        self._give_back = give_back
        try:
            self.carrying = self._carry(self.result, reduced, adds=adds)
        except Exception as error:
            self._lose(error)
        if isinstance(self.carrying, Done):
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
        if self.carrying is None:
            return
        try:
            self.carrying.wait()
        except Exception as error:
            self._lose(error)
        self._arrive()
        self._page_out()

    def _arrive(self) -> None:
        give_back, self.carrying, self._give_back = self._give_back, None, None
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
        return self._chunk._master_tier or self._chunk.rest

    @property
    def _tier(self) -> Tier:
        """Where the reduced gradient is."""
        return self._result_tier or self._chunk.rest

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
            self._own_tier.receive(chunk.rest, chunk.shard_bytes)
            self._restore_shard()
            self._page_out()

    def _restore_shard(self) -> None:
        chunk = self._chunk
        assert chunk._master is not None, "only a chunk with master weights gives its shard to a gradient"
        chunk._shard.copy_(chunk._master)
        chunk._page_out()

    def _return_buffer(self) -> None:
        """Return the buffer, which was sent or still fills."""
        buffer = self._sent if self._buffer is None else self._buffer
        self._buffer = self._sent = None
        if buffer is not None:
            assert self._pool is not None, "it has lent the buffer"
            self._pool.give_back(buffer)

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
            self._chunk.settle_states(reduced=True)
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

    def _land_anyhow(self) -> None:
        with contextlib.suppress(ChunkError):  # a gradient that is about to be forgotten may be lost
            self.land()


def _joined(gradients: list[tuple[int, int, Tensor]]) -> Iterator[tuple[int, int, Tensor]]:
    """Join small gradients that lie side by side in the buffer; each comes with its offset and number of elements."""
    first = end = -1
    run: list[Tensor] = []
    for offset, numel, gradient in sorted(gradients, key=itemgetter(0)):
        is_small = gradient.nbytes < _LARGE_BYTES
        if run and not (is_small and offset == end and gradient.dtype == run[0].dtype):
            yield first, end - first, torch._utils._flatten_dense_tensors(run)
            run = []
        if not is_small:
            yield offset, numel, gradient
            continue
        if not run:
            first = offset
        run.append(gradient)
        end = offset + numel
    if run:
        yield first, end - first, torch._utils._flatten_dense_tensors(run)
