"""Adam through torch's fused kernels, on every device, with the same bits however a tensor is cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, overload

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

__all__ = ["CPUAdam", "FusedAdam", "HybridAdam", "is_fused", "moment_names", "update"]

# [Note: Padded tails]
# torch's fused kernel for the CPU runs a vector loop and finishes with a scalar one, which rounds differently. Where a
# flat buffer is cut decides which elements come last, so the cut would show in the result. The last `numel % _LANES`
# elements of a tensor therefore go through the vector loop as well, in a zero-padded row of their own. `_LANES` fp32
# elements are a cache line: the widest vector of any CPU, and the unit in which the kernel splits work over threads.
_LANES: Final = 16

# [Note: No bias correction]
# The kernels always divide by 1 - beta**step. With this many steps that is exactly 1; adding 1 does not change it.
_ENDLESS: Final = 1e30


class _Adam(torch.optim.Adam):
    """What the three public classes share."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, object]] | Iterable[tuple[str, Tensor]],
        *,
        lr: float,
        bias_correction: bool,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adamw_mode: bool,
        amsgrad: bool,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            decoupled_weight_decay=adamw_mode,
        )
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Groups saved by torch.optim.Adam do not know bias_correction; those of old releases not even the decay mode.
        defaults = state.get("defaults") or self.defaults
        for group in state["param_groups"]:
            for key in ("bias_correction", "decoupled_weight_decay"):
                group.setdefault(key, defaults[key])
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What ``closure`` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update_group(group)
        return loss

    def _update_group(self, group: dict[str, Any]) -> None:
        members = []
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise RuntimeError("Adam needs dense gradients; use torch.optim.SparseAdam for sparse ones.")
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                state.update((name, torch.zeros_like(param)) for name in moment_names(group))
            members.append((param, param.grad, state))
        update(group, members)


class HybridAdam(_Adam):
    """Adam or AdamW, fused, for parameters on the CPU and on accelerators at once.

    The arithmetic is that of ``torch.optim.AdamW(fused=True)`` (``foreach`` where torch has no fused kernel for a
    device or the memory layout is unusual). For fp32 parameters on the CPU the result does not depend on how a flat
    tensor is cut into parameters, nor on the number of threads. Nothing is compiled at import or construction.
    States rest where the parameter is; to keep them on disk, let the plan put a chunk's states there.

    Args:
        model_params: parameters, named parameters or parameter groups, as for any ``torch.optim.Optimizer``.
        lr: learning rate.
        bias_correction: False leaves out the correction of both moments for their start at zero.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: see ``adamw_mode``.
        adamw_mode: decay the weights themselves (AdamW); False adds the decay to the gradient (Adam with L2).

    Raises:
        ValueError: a hyper-parameter is out of range.
    """

    def __init__(
        self,
        model_params: Iterable[Tensor] | Iterable[dict[str, object]] | Iterable[tuple[str, Tensor]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            adamw_mode=adamw_mode,
            amsgrad=False,
        )


class CPUAdam(HybridAdam):
    """``HybridAdam`` by the name that users know for parameters on the host; it takes any device."""


class FusedAdam(_Adam):
    """``HybridAdam`` with the signature that users know for parameters on the accelerator; it takes any device.

    Args:
        params: see ``HybridAdam``.
        lr: see ``HybridAdam``.
        bias_correction: see ``HybridAdam``.
        betas: see ``HybridAdam``.
        eps: see ``HybridAdam``.
        adamw_mode: see ``HybridAdam``.
        weight_decay: see ``HybridAdam``.
        amsgrad: divide by the largest second moment so far.
        set_grad_none: whether ``zero_grad()`` drops gradients or fills them with zeros.

    Raises:
        ValueError: a hyper-parameter is out of range.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, object]] | Iterable[tuple[str, Tensor]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            adamw_mode=adamw_mode,
            amsgrad=amsgrad,
        )
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or fill them with zeros.

        Args:
            set_to_none: whether to drop them; None means ``set_grad_none`` of the constructor.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


def moment_names(group: Mapping[str, Any]) -> list[str]:
    """Return the names of the states that parameters of this group have beside the count of steps."""
    return ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"] if group["amsgrad"] else ["exp_avg", "exp_avg_sq"]


def is_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch has a fused kernel, which takes no memory, for parameters of this kind."""
    return dtype.is_floating_point and device.type in _get_fused_kernels_supported_devices()


def update(group: Mapping[str, Any], members: Iterable[tuple[Tensor, Tensor, dict[str, Any]]]) -> None:
    """Update parameters by the hyper-parameters of a group: one kernel call for each device and dtype.

    Args:
        group: hyper-parameters; whatever parameters are there are not looked at.
        members: parameters of any devices and dtypes, each with its gradient, dense and in the same place and dtype,
            and its state: what `moment_names` says, in the form of the parameter, and ``"step"``, 0-dim. A count of
            steps on another device is replaced by one beside the parameter.
    """
    names = moment_names(group)
    alike: dict[tuple[torch.device, torch.dtype, bool], list[tuple[Tensor, ...]]] = defaultdict(list)
    for param, grad, state in members:
        if state["step"].device != param.device:
            state["step"] = state["step"].to(param.device)
        row = (param, grad, *map(state.__getitem__, names), state["step"])
        alike[param.device, param.dtype, all(map(Tensor.is_contiguous, row))].append(row)
    other: list[tuple[Tensor, ...]] = []
    for (device, dtype, are_contiguous), rows in alike.items():
        # The fused kernels walk memory in order and do not compare strides.
        if are_contiguous and is_fused(device, dtype):
            _fused_update(rows, group)
        else:
            other += rows
    if other:
        _foreach_update(other, group)


def _fused_update(rows: list[tuple[Tensor, ...]], group: Mapping[str, Any]) -> None:
    """Run the fused kernel on rows of (parameter, gradient, moments..., step), all of one device and dtype."""
    *columns, steps = map(list, zip(*rows, strict=True))
    torch._foreach_add_(steps, 1)
    if not group["bias_correction"]:  # [Note: No bias correction]
        steps = [torch.full_like(steps[0], _ENDLESS)] * len(steps)
    first = rows[0][0]
    if first.device.type == "cpu" and first.dtype == torch.float32:
        _without_scalar_tails(columns, steps, group)
    else:
        _call_kernel(columns, steps, group)


def _without_scalar_tails(columns: list[list[Tensor]], steps: list[Tensor], group: Mapping[str, Any]) -> None:
    """Call the kernel so that every element takes its vector loop. [Note: Padded tails]."""
    numels = list(map(Tensor.numel, columns[0]))
    ragged = [i for i, numel in enumerate(numels) if numel % _LANES]
    if not ragged:
        return _call_kernel(columns, steps, group)
    padded = torch.zeros(len(columns), len(ragged), _LANES)
    tails = [[column[i].view(-1)[numels[i] - numels[i] % _LANES :] for i in ragged] for column in columns]
    copies = [[row[: tail.numel()] for row, tail in zip(rows, tails[0], strict=True)] for rows in padded.unbind()]
    for copied, tail in zip(copies, tails, strict=True):
        torch._foreach_copy_(copied, tail)
    whole = [i for i, numel in enumerate(numels) if numel >= _LANES]
    _call_kernel(
        [
            [column[i].view(-1)[: numels[i] - numels[i] % _LANES] for i in whole] + list(rows.unbind())
            for column, rows in zip(columns, padded.unbind(), strict=True)
        ],
        [steps[i] for i in whole] + [steps[i] for i in ragged],
        group,
    )
    for column_index in range(len(columns)):
        if column_index != 1:  # the kernel does not change gradients
            torch._foreach_copy_(tails[column_index], copies[column_index])
    return None


def _call_kernel(columns: list[list[Tensor]], steps: list[Tensor], group: Mapping[str, Any]) -> None:
    params, grads, exp_avgs, exp_avg_sqs, *maxima = columns
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    kernel(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        maxima[0] if maxima else [],
        steps,
        lr=float(group["lr"]),
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        weight_decay=float(group["weight_decay"]),
        eps=float(group["eps"]),
        amsgrad=bool(maxima),
        maximize=group["maximize"],
    )


def _foreach_update(rows: list[tuple[Tensor, ...]], group: Mapping[str, Any]) -> None:
    params, grads, exp_avgs, exp_avg_sqs, *maxima, steps = map(list, zip(*rows, strict=True))
    counters = steps
    if not group["bias_correction"]:  # [Note: No bias correction]
        torch._foreach_add_(steps, 1)
        counters = [torch.full_like(step, _ENDLESS) for step in steps]
    adam(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        maxima[0] if maxima else [],
        counters,
        foreach=True,
        has_complex=any(param.is_complex() for param in params),
        amsgrad=bool(maxima),
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        lr=float(group["lr"]),
        weight_decay=float(group["weight_decay"]),
        eps=float(group["eps"]),
        maximize=group["maximize"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
    )
