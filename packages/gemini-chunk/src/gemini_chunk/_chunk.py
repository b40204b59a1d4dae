"""The chunk: consecutive tensors of one dtype in one contiguous, shardable buffer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gemini_chunk._collectives import Collectives, Done, Handle, LocalCollectives
from gemini_chunk._errors import ChunkError
from gemini_chunk._full import accept_writes, hide
from gemini_chunk._gathering import Gathering
from gemini_chunk._held import HeldLayout
from gemini_chunk._moving import Mover
from gemini_chunk._reduction import BufferPool, Reduction
from gemini_chunk._states import TensorInfo, TensorState
from gemini_chunk._synchronise import Synchronise, Synchroniser
from gemini_chunk._tensors import assemble, local_value, resting_values, write
from gemini_chunk._tiers import Tier


class Chunk(HeldLayout):
    """A fixed-size, contiguous, single-dtype run of elements that holds consecutive tensors.

    Life: `append` tensors, `close` once, then `gather` and `release` as often as needed. While gathered each tensor's
    ``.data`` is a view of the full buffer; while released it is a NaN-filled placeholder of the same shape and dtype,
    so that a missed gather shows. The tensor objects themselves never change.

    What is started (`start_fetch`, `start_gather`, `start_move`, `start_reduce`) returns a handle. Whatever is called
    before its ``wait`` waits for it first where the two would touch the same memory: nothing is freed or overwritten
    under an open handle.

    An error leaves the chunk as it was, or at rest: with the tensors released, every byte accounted for and, where a
    reduction failed, without the gradient.

    Args:
        numel: elements of the full buffer, a multiple of the world size.
        dtype: dtype of the full buffer. Floating tensors of another floating dtype are cast when the chunk closes.
        device: the tier that computes.
        collectives: the group that shares the chunk; by default a group of one.
        name: how messages and accounts call it; unique in a manager.
        trainable: whether its tensors get gradients; those of integers, booleans and 8-bit floats never do.
        state_numel: fp32 elements of optimizer state to expect per parameter element, for planning (Adam: 2).
        accumulates: sum the gradients of several backwards in fp32 memory of their own.
        reduce_dtype: in which gradients of the ranks are summed; by default the chunk's.
        debug: check at each use in backward that the values are those that forward used.

    Attributes:
        users: tensors in use.
        gathers: collectives that made the full buffer valid, so far.
        sent_bytes: bytes that this rank has sent to others in collectives, so far.
        generation: counts the changes of the tensors' values.

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
        reduce_dtype: torch.dtype | None = None,
        debug: bool = False,
    ) -> None:
        self._collectives = LocalCollectives() if collectives is None else collectives
        super().__init__(
            numel,
            dtype,
            rank=self._collectives.rank,
            world_size=self._collectives.world_size,
            name=name,
            trainable=trainable,
            state_numel=state_numel,
            accumulates=accumulates,
        )
        self._start_empty(device)
        self.users = 0
        self.gathers = 0
        self.sent_bytes = 0
        self.generation = 0
        self.reduce_dtype = dtype if reduce_dtype is None else reduce_dtype
        self._debug = debug
        self._set_open()

    def _set_open(self) -> None:
        self._gathering = Gathering(self)
        self._mover = Mover(self)
        self._reduction = Reduction(self)

    def __repr__(self) -> str:
        where = self.rest.name if self.is_closed else "open"
        return f"Chunk({self.name!r}, {len(self.tensors)} tensors, {self.used_numel}/{self.numel}, {where})"

    # -- facts --------------------------------------------------------------------------------------------------------

    @property
    def is_fetched(self) -> bool:
        """Whether the shard was fetched for a gather that has not started, or is on its way."""
        return self._gathering.is_fetched

    @property
    def can_fetch(self) -> bool:
        """Whether `start_fetch` would start something."""
        return self.is_closed and self._gathering.can_fetch

    @property
    def missing_bytes(self) -> int:
        """Bytes of the compute device that a gather would take now, a gradient that gives its place up included."""
        is_there = self._full is not None and self._full.is_held
        return (0 if is_there else self.full_bytes) + self._reduction.displaced_bytes

    @property
    def stages_gradient(self) -> bool:
        """Whether a reduced gradient comes to the compute device first when the shard rests on another tier."""
        return self._device.device.type != "cpu" or self.dtype != self.reduce_dtype or self.accumulates

    @property
    def has_local_gradient(self) -> bool:
        """Whether gradients of this rank wait for a reduction that has not started."""
        return self._reduction.is_filling

    @property
    def shard(self) -> Tensor:
        """This rank's slice, shape ``(shard_numel,)``, in the tier where the chunk rests."""
        if self._mover.is_under_way:
            self._mover.finish()
        return self._shard

    @property
    def master(self) -> Tensor | None:
        """The weights that an optimizer updates, shape ``(shard_numel,)``.

        Separate fp32 master weights where the chunk has them, otherwise the shard itself; None for a frozen chunk.
        """
        if not self.trainable:
            return None
        if self._master is None:
            return self.shard
        self._mover.finish_update()  # it reads what is about to be changed
        return self._master

    @property
    def gradient(self) -> Tensor | None:
        """This rank's shard of the reduced gradient, shape ``(shard_numel,)``, or None where none came.

        Raises:
            ChunkError: see `wait_gradient`.
        """
        self._reduction.land()
        return self._reduction.result

    # -- building -----------------------------------------------------------------------------------------------------

    def close(
        self,
        rest: Tier | None = None,
        *,
        keep_gathered: bool = False,
        master: Tier | None = None,
        synchronise: Synchronise | None = "broadcast",
    ) -> None:
        """Take the values into shards and release the tensors.

        Values are taken one tensor at a time: beyond the shard, and beyond what the tensors held before, no more than
        one tensor's memory is needed (two with ``synchronise="check"``).

        Args:
            rest: tier of the shard; by default the compute tier.
            keep_gathered: keep the full buffer on the compute device always. ``rest`` must then be that tier.
            master: tier of the master weights of a trainable chunk, in `master_dtype`; None for none. A chunk of that
                dtype needs none of its own where that is the tier it rests on.
            synchronise: ``"broadcast"`` gives every rank rank 0's values, ``"check"`` raises on every rank if they
                differ on any, None takes each rank's as they are.

        Raises:
            ChunkError: the chunk is closed or empty.
            TierFullError: a tier cannot hold its part.
            ValueError: the arguments do not fit together, a value has another shape than its tensor or none at all, or
                values differ between ranks. After this and any other error the chunk is open as before.
        """
        if self.is_closed or not self.tensors:
            raise ChunkError(f"{self.name} is {'closed already' if self.is_closed else 'empty'}.")
        rest = self._device if rest is None else rest
        if keep_gathered and rest is not self._device:
            raise ValueError(f"{self.name} cannot stay gathered and rest on the {rest.name} tier.")
        with torch.inference_mode(False), torch.no_grad():
            synchroniser = Synchroniser(synchronise, self._collectives, self._device.device, self.name, self.tensors)
            try:
                self._allocate(rest, keep_gathered, master)
                for info, source in zip(self.tensors, self._sources.values(), strict=True):
                    write(self, info, synchroniser.value(info, source))
                synchroniser.finish()
            except BaseException:
                self._free_memory()
                self._set_open()
                raise
            self._sources.clear()
            self.is_closed = True
            self._hide()
            accept_writes(self.tensors)
            if self.keeps_gathered:
                self._full_valid = True
                self._show()
            self._page_out()

    def free(self) -> None:
        """Give all memory back. The chunk is empty and open then, and its tensors stay placeholders."""
        if self.is_closed:
            self.reset()
            self.is_gathered = False
            hide(self.tensors)
            self._free_memory()
            self._set_open()
        self._set_tensors(())
        self._sources.clear()

    # -- one tensor ---------------------------------------------------------------------------------------------------

    def local_value(self, info: TensorInfo) -> Tensor | None:
        """Return a copy of one tensor's value if this rank has all of its bytes, without communication.

        Returns:
            New memory on the compute device, shape of the tensor; None where other ranks hold a part of it.
        """
        self._settle()
        return local_value(self, info)

    def read(self, info: TensorInfo) -> Tensor:
        """Return a copy of one tensor's value, without gathering the chunk; every rank calls it in the same order.

        Returns:
            New memory on the compute device, shape of the tensor, in the account of the caller.
        """
        self._settle()
        value = local_value(self, info) if self.is_gathered or self.world_size == 1 else None
        return assemble(self, info, resting_values(self), self.dtype) if value is None else value

    def full_master(self, info: TensorInfo) -> Tensor:
        """Return one tensor's master weights from all ranks, without gathering the chunk.

        Args:
            info: a tensor of this chunk, which must be trainable.

        Returns:
            New memory on the compute device, shape of the tensor, dtype of `master`.

        Raises:
            ChunkError: the chunk is frozen.
        """
        self._settle()
        if (master := self.master) is None:
            raise ChunkError(f"{self.name} is frozen: it has no master weights.")
        return assemble(self, info, master, master.dtype)

    def load(self, info: TensorInfo, value: Tensor) -> None:
        """Overwrite one tensor on every rank, master weights included, without communication; the chunk is released.

        Args:
            info: the tensor.
            value: shape of the tensor, the same on every rank.

        Raises:
            ValueError: the shape is another.
            ChunkError: the chunk is in use or holds gradients of an unfinished step.
        """
        self._need_closed()
        if value.shape != info.shape:
            raise ValueError(f"{info.name!r} has shape {tuple(info.shape)}; its value has {tuple(value.shape)}.")
        self._reduction.wait()
        if self.users or self._reduction.is_filling or self._reduction.result is not None:
            raise ChunkError(f"{info.name!r} cannot be loaded while {self.name} is in use or holds gradients.")
        self._finish_transfers()
        self.release()
        write(self, info, value)
        self.generation += 1
        self._page_out()

    # -- gathering ----------------------------------------------------------------------------------------------------

    def start_fetch(self) -> Handle:
        """Start to bring the shard to the compute device ahead of a gather; no other rank takes part.

        Nothing is started for a chunk that rests there, is gathered or on its way, or whose place a gradient has.
        `release`, and whatever changes or moves the shard, gives back what was fetched.

        Returns:
            A handle; a gather waits for it, too.

        Raises:
            TierFullError: the compute device has no room for the shard (of a single rank, for the full buffer).
            ChunkError: copying failed at once; the chunk is at rest.
        """
        self._need_closed()
        return self._gathering.start_fetch()

    def start_gather(self) -> Handle:
        """Start to make the full buffer valid; a shard that rests elsewhere is fetched first, if nobody has.

        Returns:
            A handle whose ``wait`` finishes the gather that is under way, as `gather` does.

        Raises:
            TierFullError: the compute device has no room for the full buffer, or the tier where the chunk rests none
                for a gradient that lies in the parameters' place.
            ChunkError: the fetch failed, or the collective failed at once; the chunk is released.
        """
        return self._gathering.start()

    def gather(self) -> None:
        """Make the tensors valid on the compute device.

        Raises:
            TierFullError: a tier has no room; see `start_gather`.
            ChunkError: the fetch or the collective failed; the chunk is released.
        """
        self._gathering.start().wait()

    def forget_fetched(self) -> None:
        """Give back what `start_fetch` has brought, or is bringing, unless a gather has started."""
        self._gathering.forget_fetched()

    def release(self) -> None:
        """Give the full buffer's memory back; a chunk that keeps gathered stays as it is.

        Raises:
            ChunkError: a tensor is in use.
        """
        if self.keeps_gathered:
            return
        if self.users:
            raise ChunkError(f"{self.name} cannot be released: {self._used_names()} are in use.")
        if self._gathering.is_under_way:
            self._gathering.settle()
        if self.is_gathered:
            self._hide()
            self._drop_full()
        else:
            self._need_closed()

    # -- moving -------------------------------------------------------------------------------------------------------

    def move(self, tier: Tier) -> None:
        """Carry the shard to another tier; a single rank's chunk stays gathered while it rests on the compute tier.

        Raises:
            ChunkError: the chunk keeps gathered, is in use, or holds a gradient.
            TierFullError: the other tier has no room; the shard stays where it is.
        """
        self.start_move(tier).wait()

    def start_move(self, tier: Tier) -> Handle:
        """Start to carry the shard to another tier; until it is waited for, both tiers hold it.

        Returns:
            A handle; `shard` and whatever else needs the shard wait for it, too.

        Raises:
            ChunkError: the chunk keeps gathered, is in use, or holds a gradient.
            TierFullError: the other tier has no room; the shard stays where it is.
        """
        self._need_closed()
        return self._mover.start(tier)

    @torch.no_grad()
    def move_master(self, tier: Tier) -> None:
        """Carry separate master weights to another tier; both hold them meanwhile. Without any, nothing happens.

        A gradient in memory of its own goes with them.

        Raises:
            TierFullError: the other tier has no room; they stay where they are.
        """
        self._need_closed()
        if self._master is None or self._master_tier is None or tier is self._master_tier:
            return
        self._mover.finish_update()  # it reads them
        target = tier.allocate(self.shard_numel, self.master_dtype, f"{self.name} master weights")
        try:
            self._reduction.move(tier)
        except BaseException:
            tier.free(target)
            raise
        target.copy_(self._master)
        tier.receive(self._master_tier, target.nbytes)
        self._master_tier.free(self._master)
        self._master, self._master_tier = target, tier
        self._page_out()

    @torch.no_grad()
    def _settle_write(self, info: TensorInfo) -> None:
        try:
            super()._settle_write(info)
        except ChunkError:
            if self.keeps_gathered and self._master is not None and not self._reduction.takes_place:
                self._shard.copy_(self._master)  # no gather would undo the write
            raise

    def _finish_transfers(self) -> None:
        """Finish what still reads the shard, which is about to change."""
        if self._mover.is_under_way:
            self._mover.finish()
        if self._gathering.is_under_way:
            self._gathering.settle()

    def _settle(self) -> None:
        """Finish everything under way."""
        self._need_closed()
        self._mover.finish()
        self._gathering.wait()
        self._reduction.wait()

    # -- gradients ----------------------------------------------------------------------------------------------------

    def take_gradients(self, gradients: Sequence[tuple[TensorInfo, Tensor]], pool: BufferPool) -> bool:
        """Add local gradients of tensors, divided by the world size, to the gradient buffer.

        Args:
            gradients: tensors with their gradients, each of the tensor's shape; the tensors become READY_FOR_REDUCE.
            pool: lends the buffer.

        Returns:
            Whether every tensor of the chunk has its gradient now.

        Raises:
            ValueError: a gradient has another shape, or is complex where the tensor is not. None is taken.
            ChunkError: the chunk is frozen, or its last reduction failed.
            TierFullError: there is no room for a buffer.
        """
        for info, gradient in gradients:
            if gradient.shape != info.shape or (gradient.dtype.is_complex and not self.dtype.is_complex):
                raise ValueError(
                    f"{info.name!r} has shape {tuple(info.shape)} and dtype {self.dtype}; its gradient has "
                    f"{tuple(gradient.shape)} and {gradient.dtype}."
                )
        return self._reduction.take(gradients, pool)

    def set_gradient_aside(self, tier: Tier) -> bool:
        """Carry gradients that wait for others of this chunk to another tier, if there are any and it has room.

        Their buffer goes back to who lent it. The next gradient, or the reduction, brings them back into another one.

        Returns:
            Whether they were carried there.
        """
        return self._reduction.set_aside(tier)

    def note_gradients(self, infos: Iterable[TensorInfo]) -> None:
        """Note that some rank gave a gradient of these tensors in this backward."""
        for info in infos:
            info.has_gradient = True

    @property
    def without_gradient(self) -> Sequence[TensorInfo]:
        """The tensors of which no rank gave a gradient since the last `commit` or `discard`, all if `gradient` is None.

        An optimizer must leave them alone: they are not updated with a gradient of zero.
        """
        return [info for info in self.tensors if not info.has_gradient]

    def _forget_gradients(self) -> None:
        for info in self.tensors:
            info.has_gradient = False

    def _need_trainable(self) -> None:
        if not (self.is_closed and self.trainable):
            self._need_closed()
            raise ChunkError(f"{self.name} is frozen: it takes no gradients.")

    def start_reduce(self, pool: BufferPool) -> Handle:
        """Start to turn the gradient buffer into this rank's shard of the averaged gradient.

        A tensor without a gradient counts as zero.

        Returns:
            A handle whose ``wait`` does what `wait_reduce` does.

        Raises:
            ChunkError: the chunk is frozen, or the collective failed at once; then the gradient is dropped.
            TierFullError: there is no room for the result; the gradient buffer stays as it is.
        """
        return self._reduction.start(pool)

    def wait_reduce(self) -> None:
        """Return when the collective of the reduction that was started is over; its result may be on its way yet.

        Raises:
            ChunkError: the collective failed; the gradient is dropped.
            TierFullError: the tier where the chunk rests has no room for it; wait again once it has.
        """
        self._reduction.wait()

    def wait_gradient(self) -> None:
        """Return when a reduced gradient that is on its way to where the chunk rests has arrived, as `gradient` does.

        Raises:
            ChunkError: it could not be carried there; it is dropped.
        """
        self._reduction.land()

    def commit(self) -> None:
        """Take updated master weights into the working parameters, drop the gradient and release.

        Raises:
            ChunkError: a tensor is in use, or copying failed.
        """
        self.start_commit().wait()

    def start_commit(self) -> Handle:
        """Start what `commit` does.

        Returns:
            A handle. The gradient is dropped and the chunk released already; whatever needs the shard, or is given the
            master weights to change them again, waits until they are taken over.

        Raises:
            ChunkError: a tensor is in use.
        """
        self._need_closed()
        if self.users:
            raise ChunkError(f"{self.name} cannot take new weights: {self._used_names()} are in use.")
        self._finish_transfers()
        self._reduction.wait()
        self._reduction.drop()
        updated = None if self._master is None else self._mover.start_update()
        self._forget_gradients()
        self.generation += 1
        if not self.keeps_gathered:
            if self.is_gathered:
                self.release()
        elif self.world_size > 1:
            self._full_valid = False
            if self.is_gathered:
                self._hide()
        else:
            self._show_again()
        if updated is None:
            self._page_out()
            return Done()
        return updated

    def discard(self) -> None:
        """Drop the gradient, reduced or not; the parameters keep the values they had before backward."""
        self._need_closed()
        self._finish_transfers()
        if not self._reduction.is_empty:
            self._reduction.discard()
        self._forget_gradients()
        self._show_again()

    def reset(self) -> None:
        """Return to rest after an interrupted step: nothing in use, released, gradients dropped."""
        self._need_closed()
        self._gathering.abandon()
        with contextlib.suppress(ChunkError):  # a move has left the shard where it was, an update is tried again
            self._mover.finish()
        self._reduction.abandon()
        self.users = 0
        for info in self.tensors:
            info.users = 0
            info.state = TensorState.HOLD if self.is_gathered else TensorState.FREE
        self.release()
        self.discard()
