"""Optimizer states on the disk tier are not held in memory between steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gemini_booster._shards import ChunkShard, WriteBehind
from gemini_chunk import ChunkManager, device_tier, disk_tier


def resident_bytes(folder: Path) -> int:
    """Return what the process holds of the files, without names, that were made in ``folder``."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    mine = (next(line for line in lines if line.startswith("Rss:")) for line in lines if str(folder) in line)
    return sum(int(line.split()[1]) * 1024 for line in mine)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="resident memory is read from /proc")
def test_states_on_disk_leave_memory_when_a_shard_is_committed(tmp_path: Path) -> None:
    param = nn.Parameter(torch.ones(2**18))
    manager = ChunkManager(device=device_tier("cpu"), disk=disk_tier(tmp_path))
    (chunk,) = manager.register([("a", param)], 2**18, rest="disk")
    shard = ChunkShard(chunk, manager.tier("disk"), manager.tier("host"), None, WriteBehind())
    state = shard.new_state(2**18, torch.float32, "exp_avg")
    state.add_(3.0)
    assert resident_bytes(tmp_path) >= 2**20
    shard.commit()
    assert resident_bytes(tmp_path) == 0
    assert state.sum() == 3 * 2**18
