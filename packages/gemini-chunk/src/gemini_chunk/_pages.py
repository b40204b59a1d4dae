"""Huge pages for large buffers in main memory."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

from torch import Tensor

# The C library keeps what is freed of blocks up to this size. Larger ones it maps anew each time.
_SMALLEST_BYTES = 2**25


def touch_in_huge_pages(memory: Tensor) -> None:
    """Let memory that was just allocated come into the process two MiB at a time, where the system can.

    [Note: The cost of fresh memory]
    The system gives and clears a page when it is first touched. In steps of 4 KiB that takes more time than the copy
    that fills the page: 64 MiB fill at 2.0 GB/s, in huge pages at 3.8, and at 5.7 if they were touched before. Main
    memory of up to 32 MiB stays in the process and is used again, so it has no such cost; torch keeps an accelerator's.

    Args:
        memory: a contiguous tensor; nothing happens if it is small, or not in main memory.
    """
    if memory.nbytes <= _SMALLEST_BYTES or memory.device.type != "cpu":
        return
    advise = _madvise()
    if advise is not None:
        first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        advise(first, memory.data_ptr() + memory.nbytes - first, mmap.MADV_HUGEPAGE)


@functools.cache
def _madvise() -> Callable[[int, int, int], object] | None:
    """Return the C library's ``madvise``, or None on a system without huge pages."""
    function = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
