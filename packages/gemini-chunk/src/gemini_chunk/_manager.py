"""The chunk manager: registers tensors, finds their chunks, and keeps the account."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gemini_chunk._chunk import Chunk
from gemini_chunk._collectives import Collectives, Done, Handle, make_collectives
from gemini_chunk._describe import table
from gemini_chunk._errors import ChunkError, TierFullError
from gemini_chunk._layout import even_numel
from gemini_chunk._read_ahead import ReadAhead
from gemini_chunk._reductions import Reductions
from gemini_chunk._states import TensorInfo
from gemini_chunk._synchronise import Synchronise
from gemini_chunk._tiers import Tier, TierName, device_tier, host_tier

_ResultT = TypeVar("_ResultT")
_DONE = Done()

# Groups of tensors whose chunks a manager remembers; it begins anew where somebody asks for ever new ones.
_MOST_REMEMBERED = 2**14


class ChunkManager:
    """All chunks of one or several models, with their tiers and their collectives.

    The manager answers to tensors as well as to chunks. Use it in three steps: `add_chunk` or `register` tensors,
    `close` each chunk (or let `register` do it), then work: either `gather` and `release`, or, for training,
    `begin_use`, `end_use`, `take_gradient` and `finish_backward`.

    A manager, with its chunks and tiers, is not for several threads at a time: nothing in it is locked, and two threads
    of one rank would start collectives in an order that other ranks do not have. Let one thread make all calls, or put
    one lock around them. Backward on an accelerator, which autograd runs in a thread of its own while the caller waits,
    is one thread at a time.

    Args:
        device: the tier that computes; by default ``device_tier()``. On a machine without an accelerator any tier may.
        host: main memory; by default ``host_tier()``.
        disk: memory-mapped files; None where there are none.
        process_group: ranks that share the chunks; None is the default group, or one rank where none is initialised.
        collectives: takes the place of the process group's own collectives.
        debug: fill freed and unfilled memory of the tiers with NaN, and check at each use in backward that the values
            are those that forward used; by default whether the environment has ``GEMINI_DEBUG=1``.
    """

    def __init__(
        self,
        *,
        device: Tier | None = None,
        host: Tier | None = None,
        disk: Tier | None = None,
        process_group: dist.ProcessGroup | None = None,
        collectives: Collectives | None = None,
        debug: bool | None = None,
    ) -> None:
        self.tiers: dict[TierName, Tier] = {"device": device or device_tier(), "host": host or host_tier()}
        if disk is not None:
            self.tiers["disk"] = disk
        self.collectives = make_collectives(process_group) if collectives is None else collectives
        self.debug = os.environ.get("GEMINI_DEBUG", "0") not in ("", "0") if debug is None else debug
        for tier in self.tiers.values():
            tier.poisons = tier.poisons or self.debug
        self._chunks: list[Chunk] = []
        self._groups: dict[str, list[Chunk]] = {}
        self._numbers = itertools.count()
        # By id, for a tensor's own hash is a Python function; the chunks keep the tensors alive.
        self._chunk_of: dict[int, tuple[Chunk, TensorInfo]] = {}
        # By the ids of tensors used together, what each chunk has of them: a scope uses the same ones in every step.
        self._by_chunk: dict[tuple[int, ...], Sequence[tuple[Chunk, Sequence[TensorInfo]]]] = {}
        computes, *others = self.tiers.values()
        self._reductions = Reductions(self._chunks, computes, others, self.release)
        self._read_ahead = ReadAhead() if any(tier.has_pages for tier in self.tiers.values()) else None
        # A chunk leaves when another gradient comes (a parameter used again by re-entrant recompute).
        self._reduced: set[Chunk] = set()

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
        reduce_dtype: torch.dtype | None = None,
        sources: Mapping[str, Callable[[], Tensor]] | None = None,
        group: str = "",
    ) -> Chunk:
        """Add one open chunk that holds these tensors.

        Args:
            tensors: names and tensors, in order.
            numel: elements of the full buffer; by default what the tensors need, rounded up to the world size.
            dtype: of the chunk; by default the first tensor's.
            trainable: whether the tensors get gradients.
            state_numel: fp32 elements of optimizer state per element, for planning.
            accumulates: sum the gradients of several backwards in memory of their own.
            reduce_dtype: in which gradients of the ranks are summed; by default the chunk's.
            sources: by name, where a tensor's value comes from when the chunk closes.
            group: what `group` finds it by, say the name of one of several models.

        Raises:
            ValueError: a tensor is managed already, or there is none.
            ChunkFullError: they do not fit.
            TypeError: the dtype or layout of one cannot be stored with the others.
        """
        named = list(tensors)
        if not named:
            raise ValueError("A chunk needs at least one tensor.")
        for name, tensor in named:
            if id(tensor) in self._chunk_of:
                raise ValueError(
                    f"{name!r} is managed already, as {self.info_of(tensor).name!r}. Register a tied tensor once."
                )
        used = sum(tensor.numel() for _, tensor in named)
        chunk = Chunk(
            even_numel(used, self.world_size) if numel is None else numel,
            named[0][1].dtype if dtype is None else dtype,
            device=self.tiers["device"],
            collectives=self.collectives,
            name=f"chunk {next(self._numbers)}",
            trainable=trainable,
            state_numel=state_numel,
            accumulates=accumulates,
            reduce_dtype=reduce_dtype,
            debug=self.debug,
        )
        infos = [(t, chunk.append(t, name, sources.get(name) if sources else None)) for name, t in named]
        self._chunks.append(chunk)
        self._groups.setdefault(group, []).append(chunk)
        for tensor, info in infos:
            self._chunk_of[id(tensor)] = (chunk, info)
        return chunk

    def register(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        chunk_numel: int,
        *,
        rest: TierName = "device",
        master: TierName | None = None,
        keep_gathered: bool = False,
        trainable: bool | None = None,
        synchronise: Synchronise | None = "broadcast",
        group: str = "",
    ) -> list[Chunk]:
        """Pack tensors in the order given into chunks of ``chunk_numel`` elements, and close them.

        A chunk holds one dtype, and is frozen or not. A tensor larger than ``chunk_numel`` has a chunk of its own size.

        Args:
            tensors: names and tensors, in order.
            chunk_numel: elements of a full buffer, rounded up to the world size.
            rest: tier of the shards.
            master: tier of the master weights of trainable chunks; None for none.
            keep_gathered: keep the full buffers on the compute device always.
            trainable: whether the tensors get gradients; by default those that require them.
            synchronise: see `Chunk.close`.
            group: what `group` finds the chunks by.

        Returns:
            The new chunks, in order of their first tensors.

        Raises:
            ValueError: a tensor is managed already, ``chunk_numel`` is not positive, or the arguments do not fit.
            TierFullError: a tier is full. Here and after any other error, what is closed is managed; the rest is not.
        """
        if chunk_numel < 1:
            raise ValueError(f"chunk_numel must be positive, got {chunk_numel}.")
        packed: list[list[tuple[str, Tensor]]] = []
        last: dict[tuple[torch.dtype, bool], tuple[list[tuple[str, Tensor]], int]] = {}
        for name, tensor in tensors:
            kind = (tensor.dtype, tensor.requires_grad if trainable is None else trainable)
            members, left = last.get(kind, ([], 0))
            if not members or tensor.numel() > left:
                members, left = [], max(chunk_numel, tensor.numel())
                packed.append(members)
            members.append((name, tensor))
            last[kind] = (members, left - tensor.numel())
        chunks = []
        for members in packed:
            chunk = self.add_chunk(
                members,
                numel=even_numel(max(chunk_numel, sum(tensor.numel() for _, tensor in members)), self.world_size),
                trainable=members[0][1].requires_grad if trainable is None else trainable,
                group=group,
            )
            try:
                self.close(chunk, rest=rest, master=master, keep_gathered=keep_gathered, synchronise=synchronise)
            except BaseException:
                self.remove(chunk)
                raise
            chunks.append(chunk)
        return chunks

    def close(
        self,
        chunk: Chunk,
        *,
        rest: TierName = "device",
        master: TierName | None = None,
        keep_gathered: bool = False,
        synchronise: Synchronise | None = "broadcast",
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

    def remove(self, chunk: Chunk) -> None:
        """Forget a chunk and give its memory back; tensors of a closed chunk stay placeholders.

        Raises:
            ValueError: the chunk is not one of this manager.
        """
        if chunk not in self._chunks:
            raise ValueError(f"{chunk.name} is not managed here.")
        for info in chunk.tensors:
            del self._chunk_of[id(info.tensor)]
        self._by_chunk.clear()
        self._reductions.forget(chunk)
        chunk.free()
        if self._read_ahead is not None:
            self._read_ahead.forget()
        self._chunks.remove(chunk)
        for name, group in list(self._groups.items()):
            if chunk in group:
                group.remove(chunk)
                if not group:
                    del self._groups[name]
        self._reduced.discard(chunk)

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

    def group(self, name: str) -> Sequence[Chunk]:
        """Return the chunks that were added under this group, in order.

        Raises:
            KeyError: there is no such group.
        """
        if name not in self._groups:
            raise KeyError(f"There is no group {name!r} here, only {sorted(self._groups)}.")
        return tuple(self._groups[name])

    @property
    def world_size(self) -> int:
        """Ranks that share the chunks."""
        return self.collectives.world_size

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._chunk_of

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

    def _chunk(self, which: Chunk | Tensor) -> Chunk:
        return which if isinstance(which, Chunk) else self.chunk_of(which)

    def _entry(self, tensor: Tensor) -> tuple[Chunk, TensorInfo]:
        entry = self._chunk_of.get(id(tensor))
        if entry is None:
            raise KeyError(f"A tensor of shape {tuple(tensor.shape)} is not managed here; register it first.")
        return entry

    def _split_by_chunk(self, tensors: Sequence[Tensor]) -> Sequence[tuple[Chunk, Sequence[TensorInfo]]]:
        """Return these tensors by chunk, and remember it."""
        infos_of: dict[Chunk, list[TensorInfo]] = {}
        for chunk, info in map(self._entry, tensors):
            infos_of.setdefault(chunk, []).append(info)
        by_chunk = [(chunk, tuple(infos)) for chunk, infos in infos_of.items()]
        if len(self._by_chunk) >= _MOST_REMEMBERED:
            self._by_chunk.clear()
        self._by_chunk[tuple(map(id, tensors))] = by_chunk
        return by_chunk

    # -- gathering ----------------------------------------------------------------------------------------------------

    def gather(self, chunk: Chunk | Tensor) -> None:
        """Make a chunk's tensors valid on the compute device; here and below, a tensor stands for its chunk."""
        if not isinstance(chunk, Chunk):
            chunk = self.chunk_of(chunk)
        if not chunk.is_gathered:
            self._with_room(chunk, chunk.gather)

    def start_fetch(self, chunk: Chunk | Tensor) -> Handle:
        """Start to bring a chunk's shard from where it rests to the compute device, ahead of its gather.

        No other rank takes part. Where the device has no room for it nothing is started, and where it gets short of
        room for something else, what was fetched is given back.
        """
        chunk = self._chunk(chunk)
        if not chunk.can_fetch:
            return _DONE
        if self._read_ahead is not None:
            self._read_ahead.gathering(chunk)
        try:
            return chunk.start_fetch()
        except TierFullError:
            return _DONE

    def start_gather(self, chunk: Chunk | Tensor) -> Handle:
        """Start to gather; the handle waits, and so do a later `gather` and `begin_use`."""
        if not isinstance(chunk, Chunk):
            chunk = self.chunk_of(chunk)
        return _DONE if chunk.is_gathered else self._with_room(chunk, chunk.start_gather)

    def _with_room(self, chunk: Chunk, gather: Callable[[], _ResultT]) -> _ResultT:
        """Gather a chunk; where the device is full, first give back what is fetched, and buffers of gradients."""
        if self._read_ahead is not None and chunk.missing_bytes and not chunk.is_fetched:
            self._read_ahead.gathering(chunk)
        try:
            return gather()
        except TierFullError as error:
            self._forget_fetched(())
            self._reductions.buffers.make_room(partial(self.tiers["device"].fits, error.asked_bytes))
            return gather()

    def has_room(self, chunks: Iterable[Chunk]) -> bool:
        """Whether these chunks can be gathered now within the device's capacity.

        Where it is short, reductions are finished and their buffers given back first, gradients that wait for others
        are set aside, and what was fetched is given back, that of these chunks last; what is gathered stays. So the
        answer depends neither on fetches nor on which gradients this rank has.
        """
        device = self.tiers["device"]
        if device.capacity is None:
            return True
        chunks = list(chunks)

        def fits() -> bool:
            return device.fits(sum(chunk.missing_bytes for chunk in chunks))

        if fits():
            return True
        self._reductions.buffers.make_room(fits)
        for kept in (chunks, ()):
            if not fits():
                self._forget_fetched(kept)
        return fits()

    def _forget_fetched(self, kept: Collection[Chunk]) -> None:
        for chunk in self._chunks:
            if chunk not in kept:
                chunk.forget_fetched()

    def release(self, chunk: Chunk | Tensor) -> None:
        """Give the chunk's full buffer back, unless it keeps gathered or one of its tensors is in use."""
        if not isinstance(chunk, Chunk):
            chunk = self.chunk_of(chunk)
        if chunk.users == 0:
            chunk.release()

    def move(self, chunk: Chunk | Tensor, tier: TierName) -> None:
        """Carry the chunk's shard to another tier."""
        self._chunk(chunk).move(self.tier(tier))

    def start_move(self, chunk: Chunk | Tensor, tier: TierName) -> Handle:
        """Start to carry the chunk's shard to another tier."""
        return self._chunk(chunk).start_move(self.tier(tier))

    def full_value(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor's full value on the compute device; every rank calls it in the same order.

        The chunk is not gathered for it: no more than this tensor's bytes travel.
        """
        chunk, info = self._entry(tensor)
        return chunk.read(info)

    def full_master(self, tensor: Tensor) -> Tensor:
        """Return the tensor's full master weights on the compute device; every rank calls it in the same order.

        Where there are no separate ones, that is the full value.
        """
        chunk, info = self._entry(tensor)
        return self.full_value(tensor) if chunk.master is None else chunk.full_master(info)

    def load_value(self, tensor: Tensor, value: Tensor) -> None:
        """Overwrite a tensor, its master weights included, from its full value, the same on every rank.

        Its chunk is released, unless it keeps gathered: gather it again to read the new value. See `Chunk.load`.
        """
        chunk, info = self._entry(tensor)
        chunk.load(info, value)

    # -- training -----------------------------------------------------------------------------------------------------

    def begin_use(self, tensors: Iterable[Tensor]) -> None:
        """Gather what these tensors need and keep it gathered until `end_use`; calls nest.

        Raises:
            KeyError: a tensor is not managed.
            TierFullError: the compute device has no room. Here and after any other error nothing is in use that was
                not, and nothing gathered.
        """
        tensors = tuple(tensors)
        ids = tuple(map(id, tensors))
        by_chunk = self._by_chunk[ids] if ids in self._by_chunk else self._split_by_chunk(tensors)
        gathered: list[Chunk] = []
        try:
            for chunk, _ in by_chunk:
                if not chunk.is_gathered:
                    gathered.append(chunk)
                    self.gather(chunk)
        except BaseException:
            for chunk, _ in by_chunk:
                if chunk in gathered or not chunk.is_gathered:
                    self.release(chunk)
            raise
        for chunk, infos in by_chunk:
            chunk.begin_use(infos)

    def end_use(self, tensors: Iterable[Tensor], *, in_backward: bool) -> None:
        """Undo one `begin_use` of these tensors.

        Args:
            tensors: what a `begin_use` was called with.
            in_backward: whether their gradients are to come.

        Raises:
            KeyError: a tensor is not managed.
            ChunkError: a tensor is not in use; the others' uses end. In debug mode also if values changed between
                forward and backward.
        """
        tensors = tuple(tensors)
        ids = tuple(map(id, tensors))
        by_chunk = self._by_chunk[ids] if ids in self._by_chunk else self._split_by_chunk(tensors)
        failed: ChunkError | None = None
        for chunk, infos in by_chunk:
            try:
                chunk.end_use(infos, in_backward=in_backward)
            except ChunkError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def take_gradient(self, tensor: Tensor, gradient: Tensor) -> bool:
        """Take a local gradient into its chunk's gradient buffer.

        Returns:
            Whether every tensor of the chunk has a gradient now: `start_reduce` may follow, on all ranks or on none.
        """
        chunk, info = self._entry(tensor)
        self._reduced.discard(chunk)
        return chunk.take_gradients([(info, gradient)], self._reductions.buffers)

    def take_gradients(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take local gradients of several tensors: many small ones take less time together.

        Args:
            gradients: pairs of a managed tensor and a gradient of its shape; parts of one gradient add up.
        """
        by_chunk: dict[Chunk, list[tuple[TensorInfo, Tensor]]] = {}
        for tensor, gradient in gradients:
            chunk, info = self._chunk_of.get(id(tensor)) or self._entry(tensor)
            if chunk not in by_chunk:
                by_chunk[chunk] = []
                if chunk in self._reduced:
                    self._reduced.remove(chunk)
            by_chunk[chunk].append((info, gradient))
        with torch._C._DisableTorchDispatch():  # see `Tier.allocate`
            for chunk, taken in by_chunk.items():
                chunk.take_gradients(taken, self._reductions.buffers)

    def start_reduce(self, chunk: Chunk | Tensor) -> Handle:
        """Start to average a chunk's gradients over the ranks; every rank calls it for the same chunks in one order.

        A tensor without a gradient on this rank counts as zero. `finish_backward` reduces what was not reduced before
        it, so calling this is a matter of memory and overlap only.
        """
        chunk = self._chunk(chunk)
        reduction = self._reductions.start(chunk)
        self._reduced.add(chunk)
        return reduction

    def finish_backward(self, unused: Set[Tensor] = frozenset(), *, keep_local: bool = False) -> None:
        """Reduce what is left and bring every chunk to rest; every rank calls it after each backward.

        Args:
            unused: tensors that got no gradient on any rank since the last backward that was reduced, the same on
                every rank: `Chunk.without_gradient` tells an optimizer to leave them alone, and a chunk of such tensors
                only is not reduced. All others count as zero where they have none.
            keep_local: reduce nothing; this rank's gradients wait for those of the next backward.
        """
        for chunk in self._chunks:
            if chunk.users:
                used = [info for info in chunk.tensors if info.users]
                for info in used:
                    info.users = 1
                chunk.end_use(used, in_backward=chunk.trainable)
        if not keep_local:
            self._reduce_rest(unused)
        self._reduced.clear()
        self.rest()

    def _reduce_rest(self, unused: Set[Tensor]) -> None:
        for chunk in reversed(self._chunks):
            if not chunk.trainable:
                continue
            used = [info for info in chunk.tensors if info.tensor not in unused] if unused else chunk.tensors
            chunk.note_gradients(used)
            if used and chunk not in self._reduced:
                self._reductions.start(chunk)
        self._reductions.finish()

    def rest(self) -> None:
        """Release every chunk that nobody uses and give the gradient buffers back."""
        self._reductions.land()
        for chunk in self._chunks:
            if chunk.is_closed:
                chunk.settle_states()
                if chunk.users == 0:
                    chunk.release()
        self._reductions.buffers.clear()

    def reset(self) -> None:
        """Return to rest after an interrupted step; gradients of that step are dropped."""
        for chunk in self._chunks:
            if chunk.is_closed:
                chunk.reset()
        self._reductions.forget_all()
        self._reduced.clear()

    # -- accounts -----------------------------------------------------------------------------------------------------

    def memory_usage(self) -> dict[str, dict[str, int | None]]:
        """Return bytes in use, peak and capacity of each tier."""
        return {
            name: {"used": tier.used, "peak": tier.peak, "capacity": tier.capacity} for name, tier in self.tiers.items()
        }

    def traffic(self) -> dict[str, int]:
        """Return the bytes moved so far, by link.

        ``"host->device"`` and the like are copies from tier to tier; ``"ranks"`` is what this rank sent in collectives
        over parameters and gradients.
        """
        moved = {f"{source}->{tier.name}": n for tier in self.tiers.values() for source, n in tier.received.items()}
        return moved | {"ranks": sum(chunk.sent_bytes for chunk in self._chunks)}

    def describe(self) -> str:
        """Return a table that a person can read: one row per chunk."""
        return table(self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks)
