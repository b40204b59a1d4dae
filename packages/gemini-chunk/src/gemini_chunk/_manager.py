"""The chunk manager: registers tensors, finds their chunks, and keeps the account."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gemini_chunk._chunk import Chunk
from gemini_chunk._collectives import Collectives, make_collectives
from gemini_chunk._errors import ChunkError, TierFullError
from gemini_chunk._states import TensorInfo, TensorState
from gemini_chunk._tiers import Tier, TierName, device_tier, host_tier

# One buffer is filled while one is being reduced: more would only hold memory.
_REDUCTIONS_IN_FLIGHT = 1


class ChunkManager:
    """All chunks of one or several models, with their tiers and their collectives.

    The manager answers to tensors as well as to chunks. Use it in three steps: `add_chunk` or `register` tensors,
    `close` each chunk (or let `register` do it), then work: either `gather` and `release`, or, for training,
    `begin_use`, `end_use`, `take_gradient` and `finish_backward`.

    Args:
        device: the tier that computes; by default ``device_tier()``.
        host: main memory; by default ``host_tier()``.
        disk: memory-mapped files; None where there are none.
        process_group: ranks that share the chunks; None is the default group, or one rank where none is initialised.
        collectives: takes the place of the process group's own collectives.
    """

    def __init__(
        self,
        *,
        device: Tier | None = None,
        host: Tier | None = None,
        disk: Tier | None = None,
        process_group: dist.ProcessGroup | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        tiers = [device or device_tier(), host or host_tier(), *([disk] if disk is not None else [])]
        self.tiers: dict[TierName, Tier] = {tier.name: tier for tier in tiers}
        self.collectives = make_collectives(process_group) if collectives is None else collectives
        self._chunks: list[Chunk] = []
        self._chunk_of: dict[Tensor, tuple[Chunk, TensorInfo]] = {}
        self._buffers = _GradientBuffers(self.tiers["device"], self._finish_reductions, self._release_unused)
        self._in_flight: deque[Chunk] = deque()
        self._order: list[Chunk] | None = None
        self._completed: list[Chunk] = []
        self._next_reduce = 0
        self._complete: set[Chunk] = set()

    # -- building -----------------------------------------------------------------------------------------------------

    def add_chunk(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        numel: int | None = None,
        dtype: torch.dtype | None = None,
        trainable: bool = True,
        state_numel: int = 2,
        accumulates: bool = False,
        sources: Mapping[str, Callable[[], Tensor]] | None = None,
    ) -> Chunk:
        """Add one open chunk that holds these tensors.

        Args:
            tensors: names and tensors, in order.
            numel: elements of the full buffer; by default what the tensors need, rounded up to the world size.
            dtype: of the chunk; by default the first tensor's.
            trainable: whether the tensors get gradients.
            state_numel: fp32 elements of optimizer state per element, for planning.
            accumulates: sum the gradients of several backwards in memory of their own.
            sources: by name, where a tensor's value comes from when the chunk closes.

        Raises:
            ValueError: a tensor is managed already, or there is none.
            ChunkFullError: they do not fit.
        """
        named = list(tensors)
        if not named:
            raise ValueError("A chunk needs at least one tensor.")
        for name, tensor in named:
            if tensor in self._chunk_of:
                raise ValueError(
                    f"{name!r} is managed already, as {self.info_of(tensor).name!r}. Register a tied tensor once."
                )
        used = sum(tensor.numel() for _, tensor in named)
        world_size = self.collectives.world_size
        chunk = Chunk(
            max(1, -(-used // world_size)) * world_size if numel is None else numel,
            named[0][1].dtype if dtype is None else dtype,
            device=self.tiers["device"],
            collectives=self.collectives,
            name=f"chunk {len(self._chunks)}",
            trainable=trainable,
            state_numel=state_numel,
            accumulates=accumulates,
        )
        infos = [(t, chunk.append(t, name, sources.get(name) if sources else None)) for name, t in named]
        self._chunks.append(chunk)
        for tensor, info in infos:
            self._chunk_of[tensor] = (chunk, info)
        self._order = None
        return chunk

    def register(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        chunk_numel: int,
        *,
        rest: TierName = "device",
        master: TierName | None = None,
        keep_gathered: bool = False,
        trainable: bool = True,
        synchronise: bool = True,
    ) -> list[Chunk]:
        """Pack tensors in order into chunks of ``chunk_numel`` elements, one dtype each, and close them.

        A tensor larger than that has a chunk of its own size.

        Returns:
            The new chunks, in order.
        """
        packed: list[list[tuple[str, Tensor]]] = []
        left = 0
        for name, tensor in tensors:
            if not packed or tensor.numel() > left or packed[-1][0][1].dtype != tensor.dtype:
                packed.append([])
                left = max(chunk_numel, tensor.numel())
            packed[-1].append((name, tensor))
            left -= tensor.numel()
        chunks = []
        for group in packed:
            numel = max(chunk_numel, sum(tensor.numel() for _, tensor in group))
            even = -(-numel // self.collectives.world_size) * self.collectives.world_size
            chunks.append(self.add_chunk(group, numel=even, trainable=trainable))
            self.close(chunks[-1], rest=rest, master=master, keep_gathered=keep_gathered, synchronise=synchronise)
        return chunks

    def close(
        self,
        chunk: Chunk,
        *,
        rest: TierName = "device",
        master: TierName | None = None,
        keep_gathered: bool = False,
        synchronise: bool = True,
    ) -> None:
        """Close a chunk; the arguments are those of `Chunk.close`, with tiers by name.

        Raises:
            ValueError: the manager has no such tier.
        """
        chunk.close(
            self.tier(rest),
            master=None if master is None else self.tier(master),
            keep_gathered=keep_gathered,
            synchronise=synchronise,
        )

    def tier(self, name: TierName) -> Tier:
        """Return a tier by name.

        Raises:
            ValueError: there is none of that name.
        """
        if name not in self.tiers:
            raise ValueError(f"There is no {name!r} tier here, only {sorted(self.tiers)}.")
        return self.tiers[name]

    # -- looking up ---------------------------------------------------------------------------------------------------

    @property
    def chunks(self) -> Sequence[Chunk]:
        """All chunks, in the order they were added."""
        return tuple(self._chunks)

    @property
    def world_size(self) -> int:
        """Ranks that share the chunks."""
        return self.collectives.world_size

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._chunk_of

    def chunk_of(self, tensor: Tensor) -> Chunk:
        """Return the chunk of a managed tensor.

        Raises:
            KeyError: the tensor is not managed.
        """
        return self._entry(tensor)[0]

    def info_of(self, tensor: Tensor) -> TensorInfo:
        """Return what is known of a managed tensor.

        Raises:
            KeyError: the tensor is not managed.
        """
        return self._entry(tensor)[1]

    def _entry(self, tensor: Tensor) -> tuple[Chunk, TensorInfo]:
        entry = self._chunk_of.get(tensor)
        if entry is None:
            raise KeyError(f"A tensor of shape {tuple(tensor.shape)} is not managed here; register it first.")
        return entry

    # -- gathering ----------------------------------------------------------------------------------------------------

    def gather(self, chunk: Chunk) -> None:
        """Make the chunk's tensors valid on the compute device."""
        self._with_room(chunk.gather)

    def start_gather(self, chunk: Chunk) -> None:
        """Start to gather; a later `gather` or `begin_use` waits."""
        self._with_room(chunk.start_gather)

    def _with_room(self, gather: Callable[[], None]) -> None:
        """Gather; where the device is full, first wait for reductions and give their buffers back."""
        try:
            gather()
        except TierFullError:
            self._buffers.make_room()
            gather()

    def has_room(self, chunks: Iterable[Chunk]) -> bool:
        """Whether these chunks can be gathered now within the device's capacity.

        Where it is short, reductions are finished and their buffers given back first; chunks stay as they are.
        """
        device = self.tiers["device"]
        if device.capacity is None:
            return True
        needed = sum(chunk.missing_bytes for chunk in chunks)
        if device.used + needed > device.capacity:
            self._buffers.make_room()
        return device.used + needed <= device.capacity

    def _release_unused(self) -> None:
        for chunk in self._chunks:
            self.release(chunk)

    def _finish_reductions(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().wait_reduce()

    def release(self, chunk: Chunk) -> None:
        """Give the chunk's full buffer back, unless it keeps gathered or one of its tensors is in use."""
        if chunk.users == 0:
            chunk.release()

    def move(self, chunk: Chunk, tier: TierName) -> None:
        """Carry the chunk's shard to another tier."""
        chunk.move(self.tier(tier))

    def full_value(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor's full value on the compute device; every rank calls it in the same order."""
        chunk, info = self._entry(tensor)
        gathered = chunk.is_gathered
        chunk.gather()
        value = info.view.clone()
        if not gathered:
            self.release(chunk)
        return value

    def full_master(self, tensor: Tensor) -> Tensor:
        """Return the tensor's full master weights on the compute device; every rank calls it in the same order.

        Where there are no separate ones, that is the full value.
        """
        chunk, info = self._entry(tensor)
        return self.full_value(tensor) if chunk.master is None else chunk.full_master(info)

    def load_value(self, tensor: Tensor, value: Tensor) -> None:
        """Overwrite a tensor, its master weights included, from its full value, the same on every rank."""
        chunk, info = self._entry(tensor)
        chunk.load(info, value)

    # -- training -----------------------------------------------------------------------------------------------------

    def begin_use(self, tensors: Iterable[Tensor]) -> None:
        """Gather what these tensors need and keep it gathered until `end_use`; calls nest."""
        for tensor in tensors:
            chunk, info = self._entry(tensor)
            self.gather(chunk)
            if info.users == 0:
                chunk.users += 1
                if info.state is not TensorState.READY_FOR_REDUCE:
                    info.to(TensorState.COMPUTE)
            info.users += 1

    def end_use(self, tensors: Iterable[Tensor], *, in_backward: bool) -> None:
        """Undo one `begin_use` of these tensors.

        Args:
            tensors: what a `begin_use` was called with.
            in_backward: whether their gradients are to come.
        """
        for tensor in tensors:
            chunk, info = self._entry(tensor)
            if info.users == 0:
                raise ChunkError(f"The use of {info.name!r} ended more often than it began.")
            info.users -= 1
            if info.users == 0:
                chunk.users -= 1
                if info.state is TensorState.COMPUTE:
                    info.to(TensorState.HOLD_AFTER_BWD if in_backward else TensorState.HOLD)
        if in_backward and self._complete:
            self._reduce_complete()

    def take_gradient(self, tensor: Tensor, gradient: Tensor) -> None:
        """Take a local gradient; the chunk is reduced once it is complete and those before it in order are.

        All ranks reduce in the same order, whatever order their gradients come in: [Note: Order of reductions].
        """
        chunk, info = self._entry(tensor)
        if chunk.take_gradient(info, gradient, self._buffers):
            if chunk not in self._complete:
                self._complete.add(chunk)
                self._completed.append(chunk)
            self._reduce_complete()

    def _reduce_complete(self) -> None:
        order = self.reduce_order
        while self._next_reduce < len(order) and order[self._next_reduce] in self._complete:
            chunk = order[self._next_reduce]
            if chunk.keeps_gathered and chunk.users:
                return  # its gradient takes the place of parameters that are still read
            self._next_reduce += 1
            self._reduce(chunk)

    def _reduce(self, chunk: Chunk) -> None:
        while len(self._in_flight) >= _REDUCTIONS_IN_FLIGHT:
            self._in_flight.popleft().wait_reduce()
        chunk.start_reduce(self._buffers)
        self._in_flight.append(chunk)
        self.release(chunk)

    @property
    def reduce_order(self) -> Sequence[Chunk]:
        """The order in which trainable chunks are reduced.

        [Note: Order of reductions]
        A collective must be the same call on every rank, but gradients need not complete in the same order everywhere:
        one rank may not use a parameter at all. So there is one order, last registered first, until
        `adopt_reduce_order` takes over the order in which rank 0 completed its chunks. A chunk waits for those before
        it; what is left at the end of backward is reduced with zeros.
        """
        if self._order is None:
            self._order = [chunk for chunk in reversed(self._chunks) if chunk.trainable]
        return self._order

    def adopt_reduce_order(self) -> None:
        """Let chunks be reduced in the order in which rank 0 completed them in its last backward."""
        trainable = [chunk for chunk in reversed(self._chunks) if chunk.trainable]
        seen = dict.fromkeys([*self._completed, *trainable])
        index = torch.tensor([self._chunks.index(chunk) for chunk in seen], device=self.tiers["device"].device)
        self.collectives.broadcast(index)
        self._order = [self._chunks[i] for i in index.tolist()]

    def finish_backward(self) -> None:
        """Reduce what is left and bring every chunk to rest; every rank calls it after each backward.

        A chunk that got no gradient on any tensor takes part with zeros where there are several ranks: another rank
        may have one. A single rank leaves such a chunk without a gradient.
        """
        for chunk in self._chunks:
            for info in chunk.tensors:
                if info.users:
                    info.users = 1
                    self.end_use((info.tensor,), in_backward=chunk.trainable)
        for chunk in self.reduce_order[self._next_reduce :]:
            if self.world_size > 1 or chunk.has_local_gradient:
                self._reduce(chunk)
        self._finish_reductions()
        # Gradients that came after their chunk had been reduced (a parameter used again by re-entrant recompute).
        for chunk in self.reduce_order:
            if chunk.has_local_gradient:
                self._reduce(chunk)
                chunk.wait_reduce()
        self._in_flight.clear()
        self._next_reduce = 0
        self._complete.clear()
        self.rest()

    def start_backward(self) -> None:
        """Forget the order in which the last backward completed its chunks."""
        self._completed.clear()

    def rest(self) -> None:
        """Release every chunk that nobody uses and give the gradient buffers back."""
        for chunk in self._chunks:
            chunk.settle_states()
            self.release(chunk)
        self._buffers.clear()

    def reset(self) -> None:
        """Return to rest after an interrupted step; gradients of that step are dropped."""
        for chunk in self._chunks:
            if chunk.is_closed:
                chunk.reset()
        self._in_flight.clear()
        self._complete.clear()
        self._completed.clear()
        self._next_reduce = 0
        self._buffers.clear()

    # -- accounts -----------------------------------------------------------------------------------------------------

    def memory_usage(self) -> dict[str, dict[str, int | None]]:
        """Return bytes in use, peak and capacity of each tier."""
        return {
            name: {"used": tier.used, "peak": tier.peak, "capacity": tier.capacity} for name, tier in self.tiers.items()
        }

    def describe(self) -> str:
        """Return a table that a person can read: one row per chunk."""
        rows: list[tuple[str, ...]] = [("chunk", "tensors", "elements", "of", "bytes", "tier", "state", "first tensor")]
        rows += [self._row(chunk) for chunk in self._chunks]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def _row(self, chunk: Chunk) -> tuple[str, ...]:
        state = "open" if not chunk.is_closed else "gathered" if chunk.is_gathered else "released"
        return (
            chunk.name,
            str(len(chunk.tensors)),
            f"{chunk.used_numel:,}",
            f"{chunk.numel:,}",
            f"{chunk.full_bytes:,}",
            chunk.tier if chunk.is_closed else "-",
            state if chunk.trainable else f"{state}, frozen",
            chunk.tensors[0].name,
        )

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks)


class _GradientBuffers:
    """Buffers of the compute device, lent to chunks and reused: fresh memory costs more than the copy into it.

    Args:
        device: the tier they are taken from.
        finish_reductions: waits for all reductions under way, whose buffers then come back.
        release_unused: releases the chunks that nobody uses.
    """

    def __init__(self, device: Tier, finish_reductions: Callable[[], None], release_unused: Callable[[], None]) -> None:
        self._device = device
        self._finish_reductions = finish_reductions
        self._release_unused = release_unused
        self._idle: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        buffer = self._take_idle(numel, dtype)
        if buffer is not None:
            return buffer
        self.clear()  # those are too small, or of another dtype: they would only hold memory
        try:
            return self._allocate(numel, dtype)
        except TierFullError:
            self._finish_reductions()
            buffer = self._take_idle(numel, dtype)
            if buffer is None:
                self.clear()
                self._release_unused()
                buffer = self._allocate(numel, dtype)
            return buffer

    def _take_idle(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        for index, buffer in enumerate(self._idle):
            if buffer.dtype == dtype and buffer.numel() >= numel:
                return self._idle.pop(index)
        return None

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._device.allocate(numel, dtype, "gradient buffers")

    def give_back(self, buffer: Tensor) -> None:
        self._idle.append(buffer)

    def make_room(self) -> None:
        self._finish_reductions()
        self.clear()

    def clear(self) -> None:
        for buffer in self._idle:
            self._device.free(buffer)
        self._idle.clear()
