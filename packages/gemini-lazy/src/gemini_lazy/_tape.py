"""The tape: what was done to memory that does not exist yet, and how to do it for real.

[Note: Histories and operations] Every piece of deferred memory has a `History`: its layout and the operations that
wrote to it, oldest first. An operation knows the histories it reads. There is no global list: the tape is the graph
that these references span, so it lives exactly as long as something deferred can still ask for it. Views are no
operations; a `Ref` is a history seen through sizes, strides and an offset.

[Note: Replaying a slice] A value at a moment depends on the writes to its history up to that moment, back to the last
one that replaced everything, and on whatever those writes read at their own moments. These operations run in the order
in which they were recorded, on one buffer per history, so that a buffer always holds what eager construction would
have held at that point. What was overwritten before it was read is never run.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Beyond this many bytes an ordinary tensor that a deferred operation reads is held, not copied.
_COPY_BYTES = 2**20

# Transient memory of at least this many bytes is mapped on its own.
_MAPPED_BYTES = 2**17

_clock = itertools.count()


class LazyError(RuntimeError):
    """A deferred value cannot be had as eager construction would have given it."""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Run the body as plain kernels: no mode (ours or the user's), no autocast, no autograd."""
    with (
        torch._C._DisableTorchDispatch(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableAutocast(),
        torch.no_grad(),
    ):
        yield


@dataclass(frozen=True, slots=True)
class RandomState:
    """Where a generator stood before an operation drew from it."""

    device: torch.device
    state: Tensor
    private: bool  # the operation was handed a generator of its own

    @classmethod
    def now(cls, device: torch.device, generator: torch.Generator | None) -> RandomState:
        """Save the state of ``generator``, or of the default generator of ``device``."""
        if generator is not None:
            return cls(generator.device, generator.get_state(), private=True)
        return cls(device, _default_state(device), private=False)

    def generator(self) -> torch.Generator:
        """Return a new generator in this state."""
        generator = torch.Generator(self.device)
        generator.set_state(self.state)
        return generator

    @contextlib.contextmanager
    def as_default(self) -> Iterator[None]:
        """Draw from this state in the body; the default generator comes back unchanged."""
        saved = _default_state(self.device)
        _set_default_state(self.device, self.state)
        try:
            yield
        finally:
            _set_default_state(self.device, saved)


def _default_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_default_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def transient_like(meta: Tensor, device: torch.device) -> Tensor:
    """Return uninitialised memory in the layout of ``meta`` that goes back to the system when it is freed.

    What is kept from one large block after another (a shard, the state of a generator) would land in the hole that the
    last block left in the heap. The next block would not fit there, and a model would take its full size after all.
    """
    nbytes = meta.untyped_storage().nbytes()
    if device.type != "cpu" or nbytes < _MAPPED_BYTES:
        return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=meta.dtype).set_(storage, 0, meta.shape, meta.stride())


class History:
    """Deferred memory: its layout and what was written to it.

    Attributes:
        meta: a meta tensor of the memory's shape, strides and dtype. Its storage is this history's alone: an operation
            whose meta result shares it returned a view.
        device: where the memory will be.
        writes: the operations that wrote to it, oldest first.
        is_read: an operation on other memory reads it, perhaps as it was before later writes.
    """

    __slots__ = ("device", "is_read", "meta", "writes")

    def __init__(self, like: Tensor, device: torch.device) -> None:
        self.meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        self.device = device
        self.is_read = False
        self.writes: list[Operation] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return self.meta.untyped_storage().nbytes()

    def new_buffer(self) -> Tensor:
        """Return real, uninitialised memory of this layout."""
        meta = self.meta
        return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=self.device)

    def new_transient_buffer(self) -> Tensor:
        """Return the same, in memory that goes back to the system when it is freed."""
        return transient_like(self.meta, self.device)

    def in_layout(self, real: Tensor) -> Tensor:
        """Return ``real`` in the layout of ``meta``: itself, or a copy if a kernel laid it out otherwise."""
        if real.stride() == self.meta.stride() and real.storage_offset() == 0:
            return real
        return self.new_buffer().copy_(real)


@dataclass(frozen=True, slots=True)
class Ref:
    """A history seen through the shape, strides, offset and dtype of ``meta``, which shares its meta storage."""

    history: History
    meta: Tensor

    def of(self, buffer: Tensor) -> Tensor:
        """Return a new tensor: this view of ``buffer``, memory in the layout of the history."""
        meta = self.meta
        view = torch.empty(0, dtype=meta.dtype, device=buffer.device)
        return view.set_(buffer.untyped_storage(), meta.storage_offset(), meta.shape, meta.stride())

    def is_all(self) -> bool:
        """Tell whether this is the history's memory exactly as it was made."""
        meta, whole = self.meta, self.history.meta
        return (
            meta.dtype == whole.dtype
            and meta.shape == whole.shape
            and meta.stride() == whole.stride()
            and meta.storage_offset() == 0
        )

    def covers_all(self) -> bool:
        """Tell whether a write through this view replaces every byte of the history."""
        meta = self.meta
        return meta.numel() * meta.element_size() == self.history.nbytes and _is_dense(meta)


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    for size, stride in sorted((d for d in dims if d[0] != 1), key=lambda d: d[1]):
        if stride != expected:
            return False
        expected *= size
    return True


class Captured:
    """An ordinary tensor that a deferred operation reads, as it was when the operation was recorded."""

    __slots__ = ("_origin", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._origin: Tensor | None = None
        self._version = 0
        if tensor.numel() * tensor.element_size() <= _COPY_BYTES:
            self._tensor = tensor.detach().clone()
        else:
            self._tensor = tensor.detach()
            if not tensor.is_inference():
                # Below the dispatcher's mode, a detached tensor does not share the count of writes.
                self._origin, self._version = tensor, tensor._version

    def tensor(self) -> Tensor:
        """Return it; raise `LazyError` if it was changed since."""
        if self._origin is not None and self._origin._version != self._version:
            raise LazyError(
                f"An ordinary tensor of shape {tuple(self._tensor.shape)} was changed in place after a deferred "
                "operation had read it. Materialise the module before changing that tensor, or hand a clone of it to "
                "the construction."
            )
        return self._tensor


@dataclass(frozen=True, slots=True)
class StandIn:
    """An argument of which only the layout matters, as in ``zeros_like``."""

    meta: Tensor
    device: torch.device

    def tensor(self) -> Tensor:
        """Return a tensor of that layout; one element of memory where the layout is the usual one."""
        meta = self.meta
        if meta.is_contiguous():
            return torch.empty((), dtype=meta.dtype, device=self.device).expand(meta.shape)
        return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=self.device)


class GeneratorSlot:
    """Takes the place of a ``generator=`` argument."""


def map_leaves(function: Callable[[object], object], value: object) -> object:
    """Apply ``function`` to every leaf of nested lists, tuples and dicts."""
    if isinstance(value, list):
        return [map_leaves(function, item) for item in value]
    if isinstance(value, tuple):
        return tuple(map_leaves(function, item) for item in value)
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    return function(value)


def map_arguments(
    function: Callable[[object], object], args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Apply ``function`` to every leaf of a call's arguments."""
    return (
        tuple(map_leaves(function, arg) for arg in args),
        {name: map_leaves(function, arg) for name, arg in kwargs.items()},
    )


def leaves(value: object) -> list[object]:
    """List the leaves of nested lists, tuples and dicts, in order."""
    found: list[object] = []
    map_leaves(found.append, value)
    return found


@dataclass(slots=True, eq=False)
class Operation:
    """One recorded call.

    Attributes:
        function: what to call.
        args: its positional arguments; `Ref`, `Captured`, `StandIn` and `GeneratorSlot` stand for the real ones.
        kwargs: its keyword arguments, likewise.
        reads: histories whose contents it needs.
        replaces: histories of which it leaves no earlier byte.
        outputs: for each leaf of its result, the history of the new memory, or None.
        random: the state of the generator it draws from.
        default_dtype: torch's default dtype at the call.
        moment: its place in the order of all recorded calls.
    """

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    reads: tuple[History, ...]
    replaces: tuple[History, ...]
    outputs: tuple[History | None, ...] = ()
    random: RandomState | None = None
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    moment: int = field(default_factory=_clock.__next__)

    def touches(self) -> tuple[History, ...]:
        """Return every history that has a part in the call."""
        return (*self.reads, *self.replaces)

    def run(self, buffers: dict[History, Tensor], new_buffer: Callable[[History], Tensor]) -> None:
        """Make the call on ``buffers``; what it writes to and what it makes is added to them."""

        def resolve(leaf: object) -> object:
            if isinstance(leaf, Ref):
                if leaf.history not in buffers:
                    buffers[leaf.history] = new_buffer(leaf.history)
                if leaf.is_all():
                    # As the kernel laid it out: what the next one computes may depend on the layout it is given.
                    return buffers[leaf.history]
                buffers[leaf.history] = leaf.history.in_layout(buffers[leaf.history])
                return leaf.of(buffers[leaf.history])
            if isinstance(leaf, (Captured, StandIn)):
                return leaf.tensor()
            if isinstance(leaf, GeneratorSlot):
                assert self.random is not None
                return self.random.generator()
            return leaf

        args, kwargs = map_arguments(resolve, self.args, self.kwargs)
        with contextlib.ExitStack() as stack:
            if self.random is not None and not self.random.private:
                stack.enter_context(self.random.as_default())
            if (dtype := torch.get_default_dtype()) != self.default_dtype:
                stack.callback(torch.set_default_dtype, dtype)
                torch.set_default_dtype(self.default_dtype)
            result = self.function(*args, **kwargs)
        if self.outputs:
            for history, real in zip(self.outputs, leaves(result), strict=True):
                if history is not None:
                    assert isinstance(real, Tensor)
                    _check_foretold(real, history.meta)
                    buffers[history] = real


def record(operation: Operation, changed: Iterable[History]) -> None:
    """Add ``operation`` to the histories that it writes to."""
    histories = dict.fromkeys(changed)
    for read in operation.reads:
        read.is_read |= any(history is not read for history in histories)
    for history in histories:
        if not history.is_read and any(replaced is history for replaced in operation.replaces):
            history.writes.clear()  # with the states of generators that they hold
        history.writes.append(operation)


def _check_foretold(real: Tensor, meta: Tensor) -> None:
    if real.shape != meta.shape or real.dtype != meta.dtype:
        raise LazyError(
            f"A deferred operation gave {real.dtype} of shape {tuple(real.shape)} where {meta.dtype} of shape "
            f"{tuple(meta.shape)} was foretold. Build this module outside LazyInitContext."
        )


def replay(history: History, *, transient: bool) -> Tensor:
    """Return new memory with what ``history`` holds now. See [Note: Replaying a slice].

    Args:
        history: whose contents.
        transient: the caller will soon let it go.
    """
    new_buffer = History.new_transient_buffer if transient else History.new_buffer
    operations = _slice(history)
    last_use = {touched: operation for operation in operations for touched in operation.touches()}
    buffers: dict[History, Tensor] = {}
    for operation in operations:
        operation.run(buffers, new_buffer)
        for touched in operation.touches():
            if touched is not history and last_use[touched] is operation:
                buffers.pop(touched, None)
    return buffers[history] if history in buffers else new_buffer(history)


def _slice(history: History) -> list[Operation]:
    needed: dict[int, Operation] = {}
    walked: dict[History, set[int]] = {}
    demands = [(history, history.writes[-1].moment)] if history.writes else []
    while demands:
        wanted, moment = demands.pop()
        seen = walked.setdefault(wanted, set())
        index = bisect.bisect_right(wanted.writes, moment, key=lambda operation: operation.moment)
        # Whoever walked past an index before has walked on to the replacing write already.
        while index > 0 and (index := index - 1) not in seen:
            seen.add(index)
            operation = wanted.writes[index]
            if operation.moment not in needed:
                needed[operation.moment] = operation
                demands.extend((read, operation.moment - 1) for read in operation.reads)
            if any(replaced is wanted for replaced in operation.replaces):
                break
    return [needed[moment] for moment in sorted(needed)]
