"""The total gradient norm over ranks, and the coefficient that clips it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from gemini_optim import _collectives

__all__ = ["SUPPORTED_NORMS", "clip_coefficient", "total_norm"]

SUPPORTED_NORMS: Final = (2.0, math.inf)

# [Note: Squares in fp64]
# The product of two fp32 numbers is exact in fp64, where it can neither overflow nor vanish, and the error of the sum
# is far below the last bit of an fp32 norm. So the clip coefficient, which is fp32, does not depend on the sizes of
# chunks and blocks or on the number of ranks. It takes five times as long as in fp32, so it is done for clipping alone:
# elsewhere the norm is for people to read, and for finding out whether all gradients are finite.
# A block of this many elements stays in cache while it is converted.
_BLOCK_NUMEL: Final = 2**16
# What is in the right dtype is read once; the library that adds it up does so in blocks of its own.
_READ_NUMEL: Final = 2**18


def total_norm(
    gradients: Iterable[Tensor],
    norm_type: float,
    process_group: torch.distributed.ProcessGroup | None,
    *,
    exact: bool,
    tag: int,
    may_fail: bool,
) -> tuple[float, bool, bool]:
    """Return the norm of all gradients of all ranks, with one collective and one wait per device.

    Args:
        gradients: flat tensors of this rank, of any floating or complex dtype and any device.
        norm_type: one of ``SUPPORTED_NORMS``.
        process_group: the ranks that hold the other gradients.
        exact: whether a coefficient is computed from it. [Note: Squares in fp64]
        tag: any number from 0 to 2**20; ranks must have the same.
        may_fail: what this rank has to say of itself.

    Returns:
        The norm, infinite if and only if a gradient of any rank is not finite; whether all ranks gave one tag; and
        whether any may fail. All are the same bits on every rank.
    """
    numbers: list[float] = []
    parts: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.is_complex() and norm_type == 2.0:
            gradient = torch.view_as_real(gradient).view(-1)
        if gradient.device.type == "cpu" and norm_type == 2.0:
            numbers.append(_sum_of_squares(gradient, exact))
        else:
            parts.setdefault(gradient.device, []).append(_part(gradient, norm_type, exact))
    for tensors in parts.values():
        numbers += torch.stack(tensors).tolist()
    local = torch.tensor(numbers or [0.0], dtype=torch.float64)
    value = float(local.sum() if norm_type == 2.0 else local.max())
    # A maximum over ranks may lose a NaN, so whether the value is finite travels beside it.
    finite = math.isfinite(value)
    value = value if finite else 0.0
    if norm_type == math.inf:
        value, broken, failing, most, least = _collectives.all_reduce_numbers(
            [value, not finite, may_fail, tag, -tag], "max", process_group
        )
        return math.inf if broken else value, most == -least, failing > 0
    value, broken, failing, total, squares = _collectives.all_reduce_numbers(
        [value, not finite, may_fail, tag, tag**2], "sum", process_group
    )
    # Numbers are equal if the mean of their squares is the square of their mean. All of these sums are exact.
    alike = _collectives.group_size(process_group) * int(squares) == int(total) ** 2
    return math.inf if broken else math.sqrt(value), alike, failing > 0


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return what ``torch.nn.utils.clip_grad_norm_`` multiplies gradients by, in its fp32 arithmetic.

    Args:
        norm: total norm of the unscaled gradients.
        max_norm: the largest norm allowed.
    """
    total = torch.tensor(norm, dtype=torch.float32)
    return float(torch.clamp(max_norm / (total + 1e-6), max=1.0))


def _part(gradient: Tensor, norm_type: float, exact: bool) -> Tensor:
    """Return the sum of squares, or the largest magnitude, of one gradient: 0-dim, on its device."""
    if norm_type == math.inf:
        return gradient.abs().max()
    # MPS is the one device without fp64.
    dtype = torch.float64 if exact and gradient.device.type != "mps" else torch.float32
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=dtype)
    return norm.square()


def _sum_of_squares(gradient: Tensor, exact: bool) -> float:
    """Add up the squares of each block of a tensor on the CPU, and the sums of blocks in fp64."""
    if not exact and gradient.dtype == torch.float32:
        total = 0.0
        for first in range(0, gradient.numel(), _READ_NUMEL):
            block = gradient[first : first + _READ_NUMEL]
            total += torch.dot(block, block).item()
    else:
        dtype = torch.float64 if exact else torch.float32
        scratch = torch.empty(min(gradient.numel(), _BLOCK_NUMEL), dtype=dtype)
        total = 0.0
        for first in range(0, gradient.numel(), _BLOCK_NUMEL):
            block = gradient[first : first + _BLOCK_NUMEL]
            values = scratch[: block.numel()].copy_(block)
            total += torch.dot(values, values).item()
    # Squares of large finite numbers overflow fp32.
    return total if exact or math.isfinite(total) else _sum_of_squares(gradient, exact=True)
