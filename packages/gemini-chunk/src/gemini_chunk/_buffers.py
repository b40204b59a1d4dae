"""Gradient buffers of the compute device that chunks borrow in turn."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gemini_chunk._pages import touch_in_huge_pages
from gemini_chunk._tiers import Tier, fill_with_poison


class GradientBuffers:
    """Buffers of the compute device, lent to chunks and reused: fresh memory costs more than the copy into it.

    Args:
        device: the tier they are taken from.
        land: waits for gradients that are on their way off the device; buffers that they come from then come back.
        finish_reductions: waits for all reductions under way as well, whose buffers then come back.
        release_unused: releases the chunks that nobody uses.
        set_aside: brings the gradients of a chunk that waits for more of them off the device, and its buffer back;
            returns False where there is none.
    """

    def __init__(
        self,
        device: Tier,
        land: Callable[[], None],
        finish_reductions: Callable[[], None],
        release_unused: Callable[[], None],
        set_aside: Callable[[], bool],
    ) -> None:
        self._device = device
        self._land = land
        self._finish_reductions = finish_reductions
        self._release_unused = release_unused
        self._set_aside = set_aside
        self._idle: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `BufferPool.take`."""
        buffer = self._take_idle(numel, dtype)
        if buffer is None:
            self._land()
            buffer = self._take_idle(numel, dtype)
        if buffer is not None:
            return buffer
        self.clear()  # those are too small, or of another dtype: they would only hold memory
        if not self._device.fits(numel * dtype.itemsize):
            self._finish_reductions()
            if (buffer := self._take_idle(numel, dtype)) is not None:
                return buffer
            self.make_room(lambda: self._device.fits(numel * dtype.itemsize))
        if not self._device.fits(numel * dtype.itemsize):
            # This comes last, for it must come on all ranks or on none: what is released here is gathered again.
            self._release_unused()
        return self._allocate(numel, dtype)

    def _take_idle(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        for index, buffer in enumerate(self._idle):
            if buffer.dtype == dtype and buffer.nbytes >= numel * dtype.itemsize:
                return self._idle.pop(index)
        return None

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        buffer = self._device.allocate(numel, dtype, "gradient buffers")
        touch_in_huge_pages(buffer)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """See `BufferPool.give_back`."""
        if self._device.poisons:
            fill_with_poison(buffer)
        self._idle.append(buffer)

    def make_room(self, is_enough: Callable[[], bool]) -> None:
        """See `BufferPool.make_room`."""
        self._finish_reductions()
        self.clear()
        while not is_enough() and self._set_aside():
            self.clear()

    def clear(self) -> None:
        """Free the buffers that nobody has borrowed."""
        while self._idle:
            self._device.free(self._idle.pop())
