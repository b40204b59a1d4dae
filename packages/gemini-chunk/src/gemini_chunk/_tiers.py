"""Tiers: the places where bytes live, each with its own account."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gemini_chunk._copying import BackgroundCopier, Copier
from gemini_chunk._errors import TierFullError

TierName = Literal["device", "host", "disk"]

_HOLDERS_NAMED = 3

# Below this, a mapping's last page would be a noticeable part of it, and the process's own allocator serves.
_SMALLEST_MAPPING = 1 << 18

_SMALLEST_BACKGROUND_COPY = 1 << 18


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
        used_elsewhere: bytes that another rank has in use here beyond this one's. `fits` counts them, so that all ranks
            answer alike; who knows the ranks sets it.
        received: bytes that came from other tiers so far, by name of the tier.
        has_pages: whether what lives here can leave the process with `page_out` until it is needed: the disk tier.
        poisons: fill memory with NaN when it is allocated and before it is freed; set in debug mode.
        incoming: copies into this tier from others; of the tier that computes it does nothing, for the others' copiers
            do all that goes there or comes from there.
        outgoing: copies from this tier to the one that computes.
    """

    def __init__(
        self, name: TierName, device: torch.device, capacity: int | None, mappings: _Mappings | None = None
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
        self.used_elsewhere = 0
        self.received: dict[TierName, int] = {}
        self.poisons = False
        # A disk may take its time for a single page.
        smallest_bytes = 0 if name == "disk" else _SMALLEST_BACKGROUND_COPY
        self.incoming: Copier = BackgroundCopier(smallest_bytes=smallest_bytes)
        self.outgoing: Copier = BackgroundCopier(smallest_bytes=smallest_bytes)
        self._holders: dict[str, int] = {}
        self._allocated: dict[int, tuple[str, int]] = {}
        self._mappings = mappings
        self.has_pages = isinstance(mappings, _Files)

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

    def fits(self, num_bytes: int) -> bool:
        """Return whether so many more bytes are within the capacity, on the rank where most is in use."""
        return self.capacity is None or self.used + self.used_elsewhere + num_bytes <= self.capacity

    def charge(self, holder: str, num_bytes: int) -> None:
        """Count bytes that ``holder`` is about to take.

        Raises:
            TierFullError: the capacity would be exceeded; nothing is counted.
        """
        if self.capacity is not None and self.used + num_bytes > self.capacity:
            largest = dict(list(self.holders.items())[:_HOLDERS_NAMED])
            raise TierFullError(self.name, holder, num_bytes, self.used, self.capacity, largest)
        if num_bytes == 0:
            return
        self.used += num_bytes
        if self.used > self.peak:
            self.peak = self.used
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
            OSError: the disk has no room for it.
        """
        num_bytes = numel * dtype.itemsize
        peak = self.peak
        self.charge(holder, num_bytes)
        try:
            # Autograd refuses to save memory that was allocated in inference mode for a later backward. Who counts the
            # memory that a model's operations take, by a dispatch mode, must not count what a tier has counted.
            with torch.inference_mode(False), torch._C._DisableTorchDispatch():
                if self._mappings is None or num_bytes < self._mappings.smallest:
                    memory = torch.empty(numel, dtype=dtype, device=self.device)
                else:
                    memory = self._mappings.empty(num_bytes, holder).view(dtype)
        except BaseException:
            self.discharge(holder, num_bytes)
            self.peak = peak
            raise
        if num_bytes:
            self._allocated[memory.data_ptr()] = (holder, num_bytes)
            if self.poisons:
                fill_with_poison(memory)
        return memory

    def free(self, memory: Tensor) -> None:
        """Take back what `allocate` returned; the caller drops its references.

        Raises:
            ValueError: the memory is not allocated here (any more).
        """
        if memory.numel() == 0:
            return
        pointer = memory.data_ptr()
        if pointer not in self._allocated:
            raise ValueError(f"This memory of {memory.nbytes:,} bytes is not allocated in the {self.name} tier.")
        holder, num_bytes = self._allocated.pop(pointer)
        if self.poisons:
            fill_with_poison(memory)
        self.discharge(holder, num_bytes)
        if self._mappings is not None:
            self._mappings.drop(pointer)

    def receive(self, source: Tier, num_bytes: int) -> None:
        """Count bytes that are copied from another tier to this one."""
        if source is not self:
            self.received[source.name] = self.received.get(source.name, 0) + num_bytes

    def page_in(self, memory: Tensor) -> None:
        """Tell that what `allocate` returned is needed soon.

        In the disk tier the system starts to read it, in the background. Elsewhere nothing happens.
        """
        if self._mappings is not None and memory.numel():
            self._mappings.page_in(memory.data_ptr())

    def page_out(self, memory: Tensor) -> None:
        """Tell that what `allocate` returned is not needed soon; its values stay.

        In the disk tier its pages leave the process: the system writes them back, and reads them when they are next
        touched. Elsewhere nothing happens.
        """
        if self._mappings is not None and memory.numel():
            self._mappings.page_out(memory.data_ptr())


def fill_with_poison(memory: Tensor) -> None:
    """Fill with NaN, whatever floating dtype; integers get -1 or their largest value, booleans True."""
    if memory.dtype is torch.bool:
        memory.fill_(True)
    else:
        memory.detach().view(torch.uint8).fill_(0xFF)


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
    return Tier("host", torch.device("cpu"), capacity, _PageLocks() if pin_memory else _Mappings())


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
    return Tier("disk", torch.device("cpu"), capacity, _Files(folder))


def mapped_memory(num_bytes: int) -> Tensor:
    """Return bytes of main memory that leave the process when the tensor does.

    What malloc takes back stays in the process where younger memory lies behind it, as shards do behind a buffer.
    """
    return _Mappings().empty(num_bytes, "")


class _Mappings:
    """Private pages of exactly the size asked for, which leave the process as soon as they are dropped.

    The process's own allocator keeps what is freed below a threshold that it moves by itself.
    """

    smallest = _SMALLEST_MAPPING

    def empty(self, num_bytes: int, holder: str) -> Tensor:
        """Return new bytes, shape ``(num_bytes,)``; an error says for whom they were asked."""
        del holder
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # where the system has no such pages, small ones do
            pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.uint8)

    def drop(self, pointer: int) -> None:
        """Forget bytes that are about to go."""

    def page_in(self, pointer: int) -> None:
        """Let bytes be brought that are needed soon."""

    def page_out(self, pointer: int) -> None:
        """Let bytes leave the process until they are needed."""


class _Files(_Mappings):
    """Pages of files that have no name any more."""

    smallest = 1

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pages: dict[int, mmap.mmap] = {}

    def empty(self, num_bytes: int, holder: str) -> Tensor:
        with tempfile.TemporaryFile(dir=self._folder) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"The disk tier cannot take {num_bytes:,} bytes for {holder}: {error.strerror}; the disk has "
                    f"{shutil.disk_usage(self._folder).free:,} bytes free",
                    str(self._folder),
                ) from error
            pages = mmap.mmap(file.fileno(), num_bytes)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        self._pages[memory.data_ptr()] = pages
        return memory

    def drop(self, pointer: int) -> None:
        self._pages.pop(pointer, None)

    def page_in(self, pointer: int) -> None:
        if pointer in self._pages and hasattr(mmap, "MADV_WILLNEED"):
            self._pages[pointer].madvise(mmap.MADV_WILLNEED)

    def page_out(self, pointer: int) -> None:
        if pointer in self._pages and hasattr(mmap, "MADV_DONTNEED"):
            # Of a shared mapping this drops the process's references only: what was written is the file's already.
            self._pages[pointer].madvise(mmap.MADV_DONTNEED)


class _PageLocks(_Mappings):
    """Page-locked memory in exact sizes, where the accelerator's runtime can register memory."""

    smallest = 1

    def __init__(self) -> None:
        self._warned = False
        self._locked: set[int] = set()

    def empty(self, num_bytes: int, holder: str) -> Tensor:
        memory = super().empty(num_bytes, holder)
        try:
            _register(memory.data_ptr(), num_bytes)
        except RuntimeError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(f"Host memory is not pinned: {error} Moves will be slower.", stacklevel=2)
        else:
            self._locked.add(memory.data_ptr())
        return memory

    def drop(self, pointer: int) -> None:
        if pointer in self._locked:
            self._locked.remove(pointer)
            _unregister(pointer)


def _register(pointer: int, num_bytes: int) -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("this torch has no accelerator that can register host memory.")
    code = int(torch.cuda.cudart().cudaHostRegister(pointer, num_bytes, 0))
    if code:
        raise RuntimeError(f"cudaHostRegister of {num_bytes:,} bytes failed with error {code}.")


def _unregister(pointer: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(pointer)
