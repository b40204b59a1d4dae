"""Copies between the compute device and the tiers where shards rest, done while others compute."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from gemini_chunk._collectives import Done, Handle


class Copier(Protocol):
    """Copies in one direction of one link, in the order in which copies are started."""

    def start(self, target: Tensor, source: Tensor) -> Handle:
        """Start to copy ``source`` into ``target``, of the same shape; the dtypes may differ.

        Both stay alive, and are neither freed nor written by others, until the handle's ``wait`` has returned or
        raised. Then nothing reads or writes them any more. What the current stream was given before comes first.
        """


class BackgroundCopier:
    """A thread that copies; on an accelerator in a stream of its own.

    [Note: Copies in a thread]
    Torch's copy releases the interpreter, whether it moves main memory, waits for a disk whose pages it touches or
    hands pageable memory to an accelerator. So one thread for each direction does all of them. It stays with a copy of
    an accelerator until that is over, and so does who waits: the host's end of it may be freed or overwritten then.

    Args:
        smallest_bytes: less is copied at once, by who starts it. Handing a copy over and waiting for it takes 26 us,
            five times what 1/4 MiB takes in main memory.
    """

    def __init__(self, *, smallest_bytes: int = 0) -> None:
        self._smallest_bytes = smallest_bytes
        self._worker: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.Stream] = {}

    @torch.no_grad()
    def start(self, target: Tensor, source: Tensor) -> Handle:
        """See `Copier.start`."""
        if source.nbytes < self._smallest_bytes or not source.numel():
            target.copy_(source)
            return Done()
        if self._worker is None:
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gemini_chunk")
        ready = _event_now(target, source)
        return BackgroundCopy(self._worker.submit(self._run, target, source, ready))

    @torch.no_grad()
    def _run(self, target: Tensor, source: Tensor, ready: torch.Event | None) -> None:
        if ready is None:
            self.copy(target, source)
            return
        device = source.device if target.device.type == "cpu" else target.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.Stream(device)
        with stream:
            stream.wait_event(ready)
            self.copy(target, source)
            stream.synchronize()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy, in the thread."""
        target.copy_(source, non_blocking=True)


class BackgroundCopy:
    """A copy under way."""

    def __init__(self, copied: Future[None]) -> None:
        self._copied = copied

    def wait(self) -> None:
        """Return when the copy is over; raise what it raised."""
        self._copied.result()


def _event_now(*tensors: Tensor) -> torch.Event | None:
    """Return an event behind what the current stream was given so far; None where all tensors are in main memory."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            event = torch.Event(tensor.device.type)
            event.record(torch.accelerator.current_stream(tensor.device))
            return event
    return None
