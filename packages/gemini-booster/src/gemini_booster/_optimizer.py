"""The optimizers of a `GeminiDDP`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import overload

import torch

from gemini_booster._gemini_ddp import GeminiDDP
from gemini_optim import HybridAdam, ZeroOptimizer


class GeminiOptimizer(ZeroOptimizer):
    """An optimizer over the shards of a `GeminiDDP`.

    Args:
        optim: any element-wise optimizer, built on the model's parameters; it keeps its identity. Step, save and load
            by this one: ``optim.step()`` finds no gradients, and ``optim.state_dict()`` no states.
        module: the wrapped model.
        initial_scale: first loss scale (fp16).
        min_scale: smallest loss scale.
        max_scale: largest loss scale.
        growth_factor: what the scale is multiplied by after ``growth_interval`` steps without overflow.
        backoff_factor: what it is multiplied by at an overflow, once ``hysteresis`` overflows have come.
        growth_interval: steps without overflow before the scale grows.
        hysteresis: overflows before the scale backs off.
        max_norm: clip the gradient's total norm to this; 0.0 for no clipping.
        norm_type: which norm.
        verbose: log overflows.
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        module: GeminiDDP,
        *,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        max_scale: float = 2**32,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        verbose: bool = False,
    ) -> None:
        if not isinstance(module, GeminiDDP):
            raise TypeError(f"module must be a GeminiDDP, got {type(module).__name__}. Wrap the model first.")
        self.module = module
        super().__init__(
            optim,
            module,
            initial_scale=initial_scale,
            min_scale=min_scale,
            max_scale=max_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            max_norm=max_norm,
            norm_type=norm_type,
            verbose=verbose,
        )
        module.optimizers.add(self)  # once it is complete: the model asks it whether it has finished its step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters; see `ZeroOptimizer.step`.

        After a step that was skipped the model watches the next one, for it may be that a branch taken for the first
        time has used a weight outside the module that owns it, and found NaN there.
        """
        loss = None
        if closure is None:
            self.module.end_recording()
            super().step()
        else:
            loss = super().step(closure)
        if self.get_grad_norm() == math.inf:
            self.module.watch_next_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used, those of backwards under ``no_sync`` as well.

        Args:
            set_to_none: has no effect: dropped gradients take no memory either way.
        """
        self.module.zero_grad(set_to_none)


class GeminiAdamOptimizer(GeminiOptimizer):
    """`HybridAdam` over the shards of a `GeminiDDP`.

    Args:
        model: the wrapped model.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled where ``adamw_mode``, else added to the gradient.
        bias_correction: whether the moments are corrected for their start at zero.
        adamw_mode: AdamW rather than Adam.
        initial_scale: and all that follow: those of `GeminiOptimizer`.
    """

    def __init__(
        self,
        model: GeminiDDP,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        adamw_mode: bool = True,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        max_scale: float = 2**32,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        verbose: bool = False,
    ) -> None:
        optim = HybridAdam(
            model.parameters(),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            adamw_mode=adamw_mode,
        )
        super().__init__(
            optim,
            model,
            initial_scale=initial_scale,
            min_scale=min_scale,
            max_scale=max_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            max_norm=max_norm,
            norm_type=norm_type,
            verbose=verbose,
        )
