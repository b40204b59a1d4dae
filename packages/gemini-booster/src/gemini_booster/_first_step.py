"""The first training step of a model: what it uses, and the memory that it takes beside the model states."""

from __future__ import annotations

import torch
from torch import nn

from gemini_chunk import Tier
from gemini_placement import MemStats
from gemini_placement.tracer import MemoryMeter, StepRecorder


class FirstStep:
    """Records one training step of a real model, from its first forward to the end of its backward.

    [Note: Counting on the CPU]
    There memory is counted by a dispatch mode that sees the results of all operations. It must be on in the loss and in
    backward, too, which the user calls, and autograd takes the modes for backward from where it was called. So it is
    entered in forward and left when the optimizer steps, or at the next forward; after backward it counts nothing.
    Modes are left in the reverse order. So one of another model that has counted all it should is left by whoever comes
    next, and where modes of the user's are on, ours is on in forward only.

    Args:
        module: the model.
        device: the tier that computes.
    """

    def __init__(self, module: nn.Module, device: Tier) -> None:
        self._module = module
        self._device = device
        self._recorder: StepRecorder | None = None
        self._meter: MemoryMeter | None = None
        self._is_entered = False
        self._stays = False

    @property
    def is_recording(self) -> bool:
        """Whether a step is being recorded."""
        return self._recorder is not None

    def enter(self) -> None:
        """Begin a forward of the step."""
        if self._recorder is None:
            on_cpu = self._device.device.type == "cpu"
            self._meter = MemoryMeter() if on_cpu else None
            self._recorder = StepRecorder(self._module, self._meter or _AcceleratorMeter(self._device))
            self._recorder.start()
        _leave_idle()
        if self._meter is not None and not self._is_entered:
            self._stays = all(isinstance(mode, MemoryMeter) for mode in _modes())
            self._meter.is_on = True
            self._meter.__enter__()  # type: ignore[no-untyped-call] # torch's modes are untyped
            self._is_entered = True

    def leave(self) -> None:
        """End a forward."""
        if not self._stays:
            self.leave_mode()

    def finish(self) -> MemStats:
        """End the step, and return what was recorded."""
        assert self._recorder is not None, "a step is finished that was begun"
        stats = self._recorder.stop()
        self._recorder = None
        if self._meter is not None:
            self._meter.is_on = False
        return stats

    def cancel(self) -> None:
        """Forget a step that failed."""
        if self._recorder is not None:
            self._recorder.stop()
        self._recorder = None
        self.leave_mode()

    def leave_mode(self) -> None:
        """Leave the dispatch mode, if it is still on."""
        if self._is_entered and self._meter is not None:
            self._is_entered = self._meter.is_on = False
            _leave_idle()


def _modes() -> list[object]:
    """Return the dispatch modes that are on, the innermost last."""
    return [torch._C._get_dispatch_stack_at(index) for index in range(torch._C._len_torch_dispatch_stack())]


def _leave_idle() -> None:
    """Leave the innermost modes of ours that count nothing any more."""
    for mode in reversed(_modes()):
        if not isinstance(mode, MemoryMeter) or mode.is_on:
            return
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call] # torch's modes are untyped


class _AcceleratorMeter:
    """What an accelerator's allocator holds at most beside the model states.

    Of model states that come and go between two looks, the smaller amount is taken off: that never says too little.
    """

    def __init__(self, device: Tier) -> None:
        self._device = device
        self._before = device.used

    def lap(self) -> int:
        """See `Meter`."""
        peak = torch.accelerator.max_memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        model_bytes = min(self._before, self._device.used)
        self._before = self._device.used
        return max(0, peak - model_bytes)
