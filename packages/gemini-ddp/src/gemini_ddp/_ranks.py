"""The ranks that run one model: what they must agree on beyond the values of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist


class Ranks:
    """The ranks of a process group, which exchange a few numbers apart from the store's collectives.

    [Note: Control group]
    A rank that has lost the others may wait here for numbers while they wait for a parameter. In a group of its own,
    on the CPU, that ends in a timeout on every rank; in the store's group the numbers would be taken for parameters.

    Args:
        process_group: the ranks; None for a single rank.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._group = process_group
        self._control: dist.ProcessGroup | None = None
        self.world_size = 1 if process_group is None else dist.get_world_size(process_group)
        self.rank = 0 if process_group is None else dist.get_rank(process_group)

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return every rank's numbers, by rank; every rank gives as many, each of 64 bits at most."""
        if self._group is None or self.world_size == 1:
            return [list(numbers)]
        if self._control is None:
            self._control = dist.new_group(
                dist.get_process_group_ranks(self._group),
                timeout=timeout_of(self._group),
                backend="gloo",
                use_local_synchronization=True,
            )
        mine = torch.tensor(numbers, dtype=torch.int64)
        everyones = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyones, mine, group=self._control)
        return [numbers.tolist() for numbers in everyones]


def timeout_of(process_group: dist.ProcessGroup) -> timedelta | None:
    """Return how long the group's collectives wait, or None where that cannot be told."""
    for device in ("cpu", torch.accelerator.current_accelerator() or "cpu"):
        try:
            options = process_group._get_backend(torch.device(device)).options
        except RuntimeError:  # the group has no backend for such a device
            continue
        timeout: timedelta | None = getattr(options, "_timeout", None)
        return timeout
    return None
