"""The ranks that run one model: what they tell each other beyond the values of parameters."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

_PULSE_S = 0.5
_LAST_WRITE_S = 5.0  # a store that takes longer is given up when the ranks object or the process ends


class Ranks:
    """The ranks of a process group, which exchange a few numbers apart from the store's collectives.

    [Note: Control group]
    A rank that has lost the others may wait here for numbers while they wait for a parameter. In a group of its own,
    on the CPU, that ends in a timeout on every rank; in the store's group the numbers would be taken for parameters.

    [Note: Where each rank is]
    A collective that fails says nothing of the rank that did not come. So each rank writes down twice a second, in the
    key-value store through which the process group was made, where it is; a rank whose collective fails reads that.

    Args:
        process_group: the ranks; None for a single rank.

    Attributes:
        place: tells where this rank is.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._group = process_group
        self._control: dist.ProcessGroup | None = None
        self._board: dist.Store | None = None
        self._written = ""
        self.world_size = 1 if process_group is None else dist.get_world_size(process_group)
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.place: Callable[[], str] = lambda: "before its first step"

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return every rank's numbers, by rank; every rank gives as many, each of 64 bits at most."""
        if self._group is None or self.world_size == 1:
            return [list(numbers)]
        if self._control is None:
            self._control = _control_group(self._group)
            self._board = _board(self._control)
            _keep_writing(self)
        with torch._C._DisableTorchDispatch():  # who counts what the model's operations take must not count this
            mine = torch.tensor(numbers, dtype=torch.int64)
            everyones = [torch.empty_like(mine) for _ in range(self.world_size)]
            self._control.allgather([everyones], [mine]).wait()  # torch's function around it takes as long again
            return [numbers.tolist() for numbers in everyones]

    def write_down(self, what: str = "") -> None:
        """Let the other ranks read where this one is, and ``what`` became of it there."""
        place = self.place()
        if self._board is not None and (what or place != self._written):
            self._board.set(str(self.rank), place + what)
            self._written = place

    def explain(self, error: BaseException) -> None:
        """Add to an error of this rank where each rank was last seen."""
        if self._board is None or hasattr(error, "__notes__"):
            return
        places = []
        try:
            self.write_down(f", where it raised {type(error).__name__}")
            for rank in range(self.world_size):
                known = self._board.check([str(rank)])
                places.append(f"  rank {rank}: {self._board.get(str(rank)).decode() if known else 'nothing known'}")
        except Exception as failure:  # the store is gone with the process that held it
            places.append(f"  the others: unknown, for the process group's store does not answer ({failure})")
        error.add_note("\n".join([f"Where each rank was last seen, as of rank {self.rank}:", *places]))


def _keep_writing(ranks: Ranks) -> None:
    """Write down where the ranks object is until it is gone, or the store is, or the process ends.

    The end of the process waits for the thread: one that returns from torch's code to an interpreter that is being
    taken down aborts the process (https://docs.python.org/3.11/c-api/init.html#c.Py_FinalizeEx).
    """
    over = threading.Event()
    thread = threading.Thread(target=_write_down, args=(weakref.ref(ranks), over), daemon=True, name="gemini_ddp")
    thread.start()
    weakref.finalize(ranks, _end, thread, over)


def _write_down(reference: weakref.ref[Ranks], over: threading.Event) -> None:
    while not over.is_set() and (ranks := reference()) is not None:
        try:
            ranks.write_down()
        except Exception:  # the store is gone: the process group was destroyed
            return
        del ranks
        over.wait(_PULSE_S)


def _end(thread: threading.Thread, over: threading.Event) -> None:
    over.set()
    if thread is not threading.current_thread():  # which may hold the ranks object last
        thread.join(_LAST_WRITE_S)


def _control_group(process_group: dist.ProcessGroup) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(process_group)
    timeout = _timeout_of(process_group)
    control: dist.ProcessGroup = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
    return control


def _board(process_group: dist.ProcessGroup) -> dist.Store:
    """Return a part of the key-value store that is this group's own."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(f"gemini_ddp/{process_group.group_name}", store)


def _timeout_of(process_group: dist.ProcessGroup) -> timedelta | None:
    """Return how long the group's collectives wait, or None where that cannot be told."""
    for device in ("cpu", torch.accelerator.current_accelerator() or "cpu"):
        try:
            options = process_group._get_backend(torch.device(device)).options
        except RuntimeError:  # the group has no backend for such a device
            continue
        timeout: timedelta | None = getattr(options, "_timeout", None)
        return timeout
    return None
