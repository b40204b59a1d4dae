"""Tiers: the places where bytes live, each with its own account."""

from __future__ import annotations

import mmap
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gemini_chunk._errors import TierFullError

TierName = Literal["device", "host", "disk"]

_HOLDERS_NAMED = 3


class Tier:
    """A place for bytes with an account of who holds how many.

    Use `device_tier`, `host_tier` or `disk_tier` to make one. Every allocation names its holder; ``used``, ``peak``
    and ``capacity`` count the bytes asked for, which are the bytes taken.

    Attributes:
        name: ``"device"``, ``"host"`` or ``"disk"``.
        device: torch device of the tensors that live here.
        capacity: bytes that may be in use at a time, or None.
        used: bytes in use.
        peak: largest value of ``used`` so far, or since `reset_peak`.
    """

    def __init__(
        self,
        name: TierName,
        device: torch.device,
        capacity: int | None,
        empty: Callable[[int], Tensor] | None = None,
        drop: Callable[[Tensor], None] | None = None,
    ) -> None:
        if type(capacity) not in (int, type(None)):
            raise TypeError(f"capacity of the {name} tier is a number of bytes (int) or None, got {capacity!r}.")
        if capacity is not None and capacity < 0:
            raise ValueError(f"capacity of the {name} tier must not be negative, got {capacity}.")
        self.name: TierName = name
        self.device = device
        self.capacity = capacity
        self.used = 0
        self.peak = 0
        self._holders: dict[str, int] = {}
        self._allocated: dict[int, tuple[str, int]] = {}
        self._empty = empty
        self._drop = drop

    def __repr__(self) -> str:
        limit = "no capacity" if self.capacity is None else f"capacity {self.capacity:,}"
        return f"Tier({self.name!r}, {self.device}, {self.used:,} bytes used, peak {self.peak:,}, {limit})"

    @property
    def holders(self) -> dict[str, int]:
        """Bytes by holder, largest first."""
        return dict(sorted(self._holders.items(), key=lambda item: (-item[1], item[0])))

    def reset_peak(self) -> None:
        """Let ``peak`` start again from ``used``."""
        self.peak = self.used

    def charge(self, holder: str, num_bytes: int) -> None:
        """Count bytes that ``holder`` is about to take.

        Raises:
            TierFullError: the capacity would be exceeded; nothing is counted.
        """
        if self.capacity is not None and self.used + num_bytes > self.capacity:
            largest = ", ".join(f"{name} ({size:,})" for name, size in list(self.holders.items())[:_HOLDERS_NAMED])
            raise TierFullError(self.name, holder, num_bytes, self.used, self.capacity, largest)
        self.used += num_bytes
        self.peak = max(self.peak, self.used)
        self._holders[holder] = self._holders.get(holder, 0) + num_bytes

    def discharge(self, holder: str, num_bytes: int) -> None:
        """Count bytes that ``holder`` has given back."""
        left = self._holders.get(holder, 0) - num_bytes
        assert left >= 0, f"{holder} gives back more bytes to the {self.name} tier than it took"
        self.used -= num_bytes
        if left:
            self._holders[holder] = left
        else:
            self._holders.pop(holder, None)

    def allocate(self, numel: int, dtype: torch.dtype, holder: str) -> Tensor:
        """Return uninitialised memory, shape ``(numel,)``, counted for ``holder``.

        Raises:
            TierFullError: the capacity would be exceeded.
        """
        num_bytes = numel * dtype.itemsize
        self.charge(holder, num_bytes)
        try:
            # Autograd refuses to save memory that was allocated in inference mode for a later backward.
            with torch.inference_mode(False):
                if self._empty is None or num_bytes == 0:
                    memory = torch.empty(numel, dtype=dtype, device=self.device)
                else:
                    memory = self._empty(num_bytes).view(dtype)
        except BaseException:
            self.discharge(holder, num_bytes)
            raise
        if num_bytes:
            self._allocated[memory.data_ptr()] = (holder, num_bytes)
        return memory

    def free(self, memory: Tensor) -> None:
        """Take back what `allocate` returned; the caller drops its references."""
        if memory.numel() == 0:
            return
        holder, num_bytes = self._allocated.pop(memory.data_ptr())
        self.discharge(holder, num_bytes)
        if self._drop is not None:
            self._drop(memory)


def device_tier(device: torch.device | str | None = None, capacity: int | None = None) -> Tier:
    """Return the tier that computes.

    Args:
        device: torch device; by default the current accelerator, or the CPU on a machine without one. Then the tier
            is ordinary memory with an account of its own, so that offloading is real and testable.
        capacity: bytes, or None for no limit.
    """
    if device is None:
        if torch.accelerator.is_available():
            accelerator = torch.accelerator.current_accelerator()
            assert accelerator is not None
            device = torch.device(accelerator.type, torch.accelerator.current_device_index())
        else:
            device = "cpu"
    return Tier("device", torch.device(device), capacity)


def host_tier(capacity: int | None = None, *, pin_memory: bool = False) -> Tier:
    """Return the tier in main memory.

    Args:
        capacity: bytes, or None for no limit.
        pin_memory: page-lock what is allocated, in exact sizes (torch's own pinned allocator rounds every block up to
            a power of two). Where locking is not available or fails, one warning, and pageable memory.
    """
    if not pin_memory:
        return Tier("host", torch.device("cpu"), capacity)
    lock = _PageLock()
    return Tier("host", torch.device("cpu"), capacity, lock.empty, lock.drop)


def disk_tier(directory: str | os.PathLike[str], capacity: int | None = None) -> Tier:
    """Return the tier in memory-mapped files.

    Each allocation is one file, given its blocks at once (so a full disk shows here, not as a crash later), mapped, and
    without a name: whatever ends the process, nothing stays behind.

    Args:
        directory: an existing folder on a local disk.
        capacity: bytes, or None for no limit.

    Raises:
        NotADirectoryError: ``directory`` is not a folder.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise NotADirectoryError(f"The disk tier needs an existing folder, got {str(folder)!r}.")

    def empty(num_bytes: int) -> Tensor:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)

    return Tier("disk", torch.device("cpu"), capacity, empty)


class _PageLock:
    """Page-locked memory in exact sizes, where the accelerator's runtime can register memory."""

    def __init__(self) -> None:
        self._warned = False
        self._locked: set[int] = set()

    def empty(self, num_bytes: int) -> Tensor:
        memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        try:
            _register(memory.data_ptr(), num_bytes)
        except RuntimeError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(f"Host memory is not pinned: {error} Moves will be slower.", stacklevel=2)
        else:
            self._locked.add(memory.data_ptr())
        return memory

    def drop(self, memory: Tensor) -> None:
        if memory.data_ptr() in self._locked:
            self._locked.remove(memory.data_ptr())
            _unregister(memory.data_ptr())


def _register(pointer: int, num_bytes: int) -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("this torch has no accelerator that can register host memory.")
    code = int(torch.cuda.cudart().cudaHostRegister(pointer, num_bytes, 0))
    if code:
        raise RuntimeError(f"cudaHostRegister of {num_bytes:,} bytes failed with error {code}.")


def _unregister(pointer: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(pointer)
