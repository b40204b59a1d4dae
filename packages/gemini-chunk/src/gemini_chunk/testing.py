"""Collectives and copiers that are late, that fail, or that count: for tests of code that uses chunks.

Each of the collectives wraps others, so they can be combined, over one rank or many:
``ChunkManager(collectives=CountingCollectives(LocalCollectives()))``. A copier takes the place of one of a tier's:
``manager.tier("host").outgoing = LateCopier()``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gemini_chunk._collectives import Collectives, Handle, Waiting
from gemini_chunk._copying import BackgroundCopier
from gemini_chunk._tiers import fill_with_poison

__all__ = [
    "Call",
    "CountingCollectives",
    "DelayedCollectives",
    "FailingCollectives",
    "FailingCopier",
    "LateCopier",
    "Operation",
    "SlowCopier",
]

Operation = Literal["all_gather", "reduce_scatter", "broadcast"]


@dataclass(frozen=True, slots=True)
class Call:
    """One operation that was started.

    Attributes:
        operation: which.
        numel: elements of the larger of its two tensors.
        dtype: dtype of both.
    """

    operation: Operation
    numel: int
    dtype: torch.dtype


class _Wrapper:
    """Passes every operation on; subclasses say what else happens."""

    def __init__(self, inner: Collectives) -> None:
        self._inner = inner

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self._inner.world_size

    def all_gather(self, full: Tensor, shard: Tensor) -> Handle:
        """Start what ``Collectives.all_gather`` says."""
        call = Call("all_gather", full.numel(), full.dtype)
        return self._start(call, (full, shard), lambda: self._inner.all_gather(full, shard))

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Handle:
        """Start what ``Collectives.reduce_scatter`` says."""
        call = Call("reduce_scatter", full.numel(), full.dtype)
        return self._start(call, (shard, full), lambda: self._inner.reduce_scatter(shard, full))

    def broadcast(self, tensor: Tensor) -> None:
        """Do what ``Collectives.broadcast`` says."""
        self._begin(Call("broadcast", tensor.numel(), tensor.dtype))
        self._inner.broadcast(tensor)

    def _start(self, call: Call, tensors: tuple[Tensor, Tensor], start: Callable[[], Handle]) -> Handle:
        """Start a call that writes the first of two tensors from the second."""
        raise NotImplementedError

    def _begin(self, call: Call) -> None:
        """Note a call that ends before it returns."""


class CountingCollectives(_Wrapper):
    """Keeps a list of what was started.

    Args:
        inner: does the work.

    Attributes:
        calls: what was started, in order.
    """

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner)
        self.calls: list[Call] = []

    @property
    def counts(self) -> Counter[Operation]:
        """How often each operation was started."""
        return Counter(call.operation for call in self.calls)

    def _start(self, call: Call, tensors: tuple[Tensor, Tensor], start: Callable[[], Handle]) -> Handle:  # noqa: ARG002
        self.calls.append(call)
        return start()

    def _begin(self, call: Call) -> None:
        self.calls.append(call)


class FailingCollectives(_Wrapper):
    """Raises ``RuntimeError`` in chosen operations.

    Args:
        inner: does the work of the others.
        at: which operations fail, by number from 0 in the order in which they start.
        when: whether starting raises, or waiting. A broadcast has only a start.

    Attributes:
        at: which operations fail; it may be changed.
        started: operations so far.
    """

    def __init__(self, inner: Collectives, at: Collection[int], *, when: Literal["start", "wait"] = "wait") -> None:
        super().__init__(inner)
        self.started = 0
        self.at: Collection[int] = at
        self._when = when

    def _start(self, call: Call, tensors: tuple[Tensor, Tensor], start: Callable[[], Handle]) -> Handle:
        fails = self._fails()
        if fails and self._when == "start":
            self._fail(call)
        if fails:
            fill_with_poison(tensors[0])  # whatever it has written so far
            return Waiting(lambda: self._fail(call))
        return start()

    def _begin(self, call: Call) -> None:
        if self._fails():
            self._fail(call)

    def _fails(self) -> bool:
        self.started += 1
        return self.started - 1 in self.at

    def _fail(self, call: Call) -> None:
        raise RuntimeError(f"{call.operation} of {call.numel} elements was told to fail")


class DelayedCollectives(_Wrapper):
    """Does nothing until somebody waits, as a slow network would: what is read or written too early shows.

    Until then the output is full of NaN. A source that was freed or overwritten, and an output that was freed, is an
    error in `wait`, and stays in ``faults`` for callers that swallow it.

    Args:
        inner: does the work, late.

    Attributes:
        faults: what went wrong.
        open: operations that nobody has waited for.
    """

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner)
        self.faults: list[str] = []
        self.open = 0

    def _start(self, call: Call, tensors: tuple[Tensor, Tensor], start: Callable[[], Handle]) -> Handle:
        return _when_waited_for(self, Watched(call.operation, *tensors), lambda: start().wait())


class LateCopier:
    """Copies when somebody waits, and not before: what is read or written too early shows.

    Until then the target is full of NaN. What must not happen to either end in between is an error in ``wait``, and
    stays in ``faults`` for callers that swallow it.

    Args:
        on_start: is called with the source of each copy when it starts.

    Attributes:
        faults: what went wrong.
        open: copies that nobody has waited for.
        started: copies so far.
    """

    def __init__(self, on_start: Callable[[Tensor], None] | None = None) -> None:
        self._on_start = on_start
        self.faults: list[str] = []
        self.open = 0
        self.started = 0

    def start(self, target: Tensor, source: Tensor) -> Handle:
        """See `gemini_chunk.Copier`."""
        if self._on_start is not None:
            self._on_start(source)
        self.started += 1
        return _when_waited_for(self, Watched("copy", target, source), torch.no_grad()(lambda: target.copy_(source)))


def _when_waited_for(late: DelayedCollectives | LateCopier, watched: Watched, act: Callable[[], object]) -> Handle:
    """Return a handle whose first ``wait`` looks for what must not have happened until then, and acts."""
    late.open += 1
    done = False

    def finish() -> None:
        nonlocal done
        if done:
            return
        done = True
        late.open -= 1
        fault = watched.fault()
        if fault is not None:
            late.faults.append(fault)
            raise AssertionError(fault)
        act()

    return Waiting(finish)


class FailingCopier:
    """Raises ``RuntimeError`` in chosen copies, when they are started or waited for, and leaves NaN in their targets.

    Args:
        at: which copies fail, by number from 0 in the order in which they start.
        when: whether starting raises, or waiting.

    Attributes:
        at: which copies fail; it may be changed.
        started: copies so far.
    """

    def __init__(self, at: Collection[int], *, when: Literal["start", "wait"] = "wait") -> None:
        self.at: Collection[int] = at
        self.started = 0
        self._when = when
        self._inner = BackgroundCopier()

    def start(self, target: Tensor, source: Tensor) -> Handle:
        """See `gemini_chunk.Copier`."""
        self.started += 1
        if self.started - 1 not in self.at:
            return self._inner.start(target, source)
        if self._when == "start":
            self._fail(source)
        fill_with_poison(target)
        return Waiting(lambda: self._fail(source))

    def _fail(self, source: Tensor) -> None:
        raise RuntimeError(f"a copy of {source.numel()} elements was told to fail")


class SlowCopier(BackgroundCopier):
    """Takes a given time for each copy, in the background: a link whose speed is known.

    Args:
        copy_s: seconds for each copy.

    Attributes:
        copies: how many are over.
    """

    def __init__(self, copy_s: float) -> None:
        super().__init__()
        self.copies = 0
        self._copy_s = copy_s

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy, and take the time."""
        time.sleep(self._copy_s)
        super().copy(target, source)
        self.copies += 1


class Watched:
    """The two tensors of an operation under way.

    Args:
        operation: its name.
        output: is filled with NaN, except where it holds the source.
        source: must stay as it is.
    """

    def __init__(self, operation: str, output: Tensor, source: Tensor) -> None:
        self._operation = operation
        self._output = output
        self._source = source
        self._wanted = source.clone()
        self._storages = [(tensor.untyped_storage(), tensor.untyped_storage().nbytes()) for tensor in (output, source)]
        fill_with_poison(output)
        source.copy_(self._wanted)

    def fault(self) -> str | None:
        """Return what was done to the tensors that must not be, or None."""
        if any(storage.nbytes() != num_bytes for storage, num_bytes in self._storages):
            return f"memory of an open {self._operation} was freed"
        if not torch.equal(self._source.view(torch.uint8), self._wanted.view(torch.uint8)):
            return f"the source of an open {self._operation} was overwritten"
        return None
