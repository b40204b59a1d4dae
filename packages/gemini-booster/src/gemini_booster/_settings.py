"""What settings mean: precisions and amounts of memory written in words, and the policy that the keywords choose."""

from __future__ import annotations

import re
import tempfile
from typing import Literal

import torch

from gemini_placement import AutoPlacementPolicy, StaticPlacementPolicy

Precision = Literal["fp16", "bf16", "fp32"]
PolicyName = Literal["static", "auto"]

PRECISIONS: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}ib": 2 ** (10 * power) for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {f"{letter}b": 10 ** (3 * power) for power, letter in enumerate("kmgt", start=1)}


def compute_dtype(precision: str) -> torch.dtype:
    """Return the dtype of working parameters.

    Raises:
        ValueError: the precision is unknown.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {sorted(PRECISIONS)}, got {precision!r}.")
    return PRECISIONS[precision]


def to_bytes(amount: int | str | None, what: str) -> int | None:
    """Return a number of bytes from a number or from text such as ``"2GiB"`` or ``"500 MB"``; None stays None.

    Raises:
        ValueError: the amount is not understood or negative.
    """
    if amount is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(amount))
    if isinstance(amount, bool) or match is None or match[2].lower() not in _UNITS:
        raise ValueError(
            f"{what} must be a number of bytes, or text such as '2GiB' or '500MB', with a unit of B, KB, MB, GB, TB, "
            f"KiB, MiB, GiB or TiB; got {amount!r}."
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def writable(directory: str) -> str:
    """Return a folder's path if files can be made in it.

    Raises:
        OSError: they cannot.
    """
    try:
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError as error:
        what = f"offload_directory must be an existing folder that can be written to: {error.strerror}"
        raise OSError(error.errno, what, directory) from error


def make_policy(
    name: str,
    *,
    shard_param_frac: float,
    offload_optim_frac: float,
    offload_param_frac: float,
    disk_optim_frac: float,
    disk_param_frac: float,
    offload_directory: str | None,
    warmup_non_model_data_ratio: float,
    steady_cuda_cap_ratio: float,
    gpu_margin_mem_ratio: float,
    max_prefetch: int,
    max_fetch: int,
    max_held: int,
) -> StaticPlacementPolicy | AutoPlacementPolicy:
    """Return the policy that the keywords of `GeminiDDP` describe.

    Raises:
        ValueError: the name is unknown, a share is out of its range, or the disk gets one and has no directory.
        TypeError: ``max_prefetch``, ``max_fetch`` or ``max_held`` is no int.
    """
    if name == "static":
        if offload_directory is None and (disk_optim_frac or disk_param_frac):
            raise ValueError(
                f"disk_optim_frac={disk_optim_frac} and disk_param_frac={disk_param_frac} send model states to the "
                "disk: give offload_directory, an existing folder on a local disk."
            )
        return StaticPlacementPolicy(
            shard_param_frac=shard_param_frac,
            offload_optim_frac=offload_optim_frac,
            offload_param_frac=offload_param_frac,
            disk_optim_frac=disk_optim_frac,
            disk_param_frac=disk_param_frac,
            max_prefetch=max_prefetch,
            max_fetch=max_fetch,
            max_held=max_held,
        )
    if name == "auto":
        if max_held:
            raise ValueError(
                f"max_held={max_held} is of the static policy: auto holds what there is room for. Leave it out."
            )
        return AutoPlacementPolicy(
            warmup_non_model_data_ratio=warmup_non_model_data_ratio,
            steady_cuda_cap_ratio=steady_cuda_cap_ratio,
            gpu_margin_mem_ratio=gpu_margin_mem_ratio,
            max_prefetch=max_prefetch,
            max_fetch=max_fetch,
        )
    raise ValueError(f"placement_policy must be 'static' or 'auto', got {name!r}.")
