"""Starting the ranks."""

from __future__ import annotations

import os
import random
from datetime import timedelta

import torch
import torch.distributed as dist


def launch_from_torch(seed: int = 1024, *, timeout_s: float = 600.0) -> None:
    """Join the process group that ``torchrun`` describes in the environment; without it, start a world of one.

    The backend is the accelerator's (NCCL on CUDA devices), or gloo where there is no accelerator. The accelerator of
    each rank is chosen by its local rank. Calling it again does nothing.

    Args:
        seed: for Python's and torch's generators, the same on every rank, so that models are built alike.
        timeout_s: seconds after which a collective that a rank does not join fails.

    Raises:
        RuntimeError: a group exists whose size differs from the environment's.
    """
    random.seed(seed)
    torch.manual_seed(seed)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():
        check_world_size(None)
        return
    backend = "gloo"
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        backend = dist.get_default_backend_for_device(accelerator)
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        if world_size != 1:
            raise RuntimeError(f"WORLD_SIZE is {world_size}, but RANK is not set. Start the script with torchrun.")
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)


def check_world_size(process_group: dist.ProcessGroup | None) -> None:
    """Compare the default group with what the launcher announced.

    Raises:
        RuntimeError: they differ: the ranks would train models of their own without noticing.
    """
    if process_group is not None or "WORLD_SIZE" not in os.environ:
        return
    announced = int(os.environ["WORLD_SIZE"])
    actual = dist.get_world_size() if dist.is_initialized() else 1
    if announced != actual:
        raise RuntimeError(
            f"The launcher announced WORLD_SIZE={announced}, but the process group has {actual} rank(s). Call "
            "gemini_booster.launch_from_torch() first, or pass the process group to use."
        )


def group_of(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group to communicate in, or None for a single rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(process_group) == 1:
        return None
    return dist.group.WORLD if process_group is None else process_group
