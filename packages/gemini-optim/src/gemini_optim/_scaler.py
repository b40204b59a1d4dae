"""The dynamic loss scale of fp16 training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["DynamicLossScaler"]

_COUNTERS: Final = ("growth_step", "hysteresis_step")
_SETTINGS: Final = (
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
    "min_scale",
    "max_scale",
)


class DynamicLossScaler:
    """Grow the loss scale while gradients stay finite, and back off when they overflow.

    Every overflow restarts the count of clean steps. The first ``hysteresis - 1`` overflows since the last growth
    leave the scale alone; each further one multiplies it by ``backoff_factor``. After ``growth_interval`` clean steps
    in a row the scale is multiplied by ``growth_factor`` and overflows are forgotten.

    Args:
        initial_scale: the scale of the first step.
        growth_factor: above 1.
        backoff_factor: between 0 and 1, both excluded.
        growth_interval: clean steps in a row before the scale grows, at least 1.
        hysteresis: overflows that it takes for the scale to back off, at least 1.
        min_scale: lower bound of the scale, above 0.
        max_scale: upper bound of the scale.

    Raises:
        ValueError: an argument is outside of these bounds.
    """

    def __init__(
        self,
        initial_scale: float = 2**16,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        min_scale: float = 1,
        max_scale: float = 2**32,
    ) -> None:
        if not 0 < min_scale <= initial_scale <= max_scale < float("inf"):
            raise ValueError(
                "The loss scale needs 0 < min_scale <= initial_scale <= max_scale, all finite; got "
                f"min_scale={min_scale}, initial_scale={initial_scale}, max_scale={max_scale}."
            )
        if not 1 < growth_factor < float("inf"):
            raise ValueError(f"growth_factor must be finite and above 1, got {growth_factor}.")
        if not 0 < backoff_factor < 1:
            raise ValueError(f"backoff_factor must lie between 0 and 1, got {backoff_factor}.")
        if growth_interval < 1:
            raise ValueError(f"growth_interval must be at least 1 step, got {growth_interval}.")
        if hysteresis < 1:
            raise ValueError(f"hysteresis must be at least 1 overflow, got {hysteresis}.")
        self._scale = float(initial_scale)
        self.growth_factor = float(growth_factor)
        self.backoff_factor = float(backoff_factor)
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self.min_scale = float(min_scale)
        self.max_scale = float(max_scale)
        self._growth_step = 0
        self._hysteresis_step = 0

    @property
    def scale(self) -> float:
        """What the loss is multiplied by."""
        return self._scale

    def update(self, overflow: bool) -> None:
        """Take note of one step.

        Args:
            overflow: whether any gradient of the step, on any rank, was not finite.
        """
        if overflow:
            self._growth_step = 0
            self._hysteresis_step += 1
            if self._hysteresis_step >= self.hysteresis:
                self._scale = max(self._scale * self.backoff_factor, self.min_scale)
            return
        self._growth_step += 1
        if self._growth_step >= self.growth_interval:
            self._growth_step = 0
            self._hysteresis_step = 0
            self._scale = min(self._scale * self.growth_factor, self.max_scale)

    def state_dict(self) -> dict[str, float]:
        """Return the scale, the settings and both counters: all that the next steps depend on."""
        settings = {name: getattr(self, name) for name in _SETTINGS}
        counters = {name: getattr(self, f"_{name}") for name in _COUNTERS}
        return {"scale": self._scale, **settings, **counters}

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Continue from ``state_dict()`` of another scaler.

        Raises:
            ValueError: a key is missing or unknown, or a value is out of bounds.
        """
        expected = {"scale", *_SETTINGS, *_COUNTERS}
        if state_dict.keys() != expected:
            raise ValueError(f"A loss scaler's state has the keys {sorted(expected)}, got {sorted(state_dict)}.")
        restored = DynamicLossScaler(
            initial_scale=state_dict["scale"],
            growth_factor=state_dict["growth_factor"],
            backoff_factor=state_dict["backoff_factor"],
            growth_interval=int(state_dict["growth_interval"]),
            hysteresis=int(state_dict["hysteresis"]),
            min_scale=state_dict["min_scale"],
            max_scale=state_dict["max_scale"],
        )
        restored._growth_step = int(state_dict["growth_step"])
        restored._hysteresis_step = int(state_dict["hysteresis_step"])
        vars(self).update(vars(restored))
