"""The account is what the process really holds: resident memory, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")

COMMON = """
import gc, os, sys
import torch
from gemini_chunk import ChunkManager, device_tier, disk_tier, host_tier

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

MIB = 2**20
COUNT, NUMEL = 64, 4 * MIB  # 64 chunks of 16 MiB
TOTAL = COUNT * NUMEL * 4

def build(manager, rest, numel=NUMEL, count=COUNT):
    for index in range(count):
        tensor = torch.full((numel,), float(index))
        manager.register([(str(index), tensor)], numel, rest=rest)
        yield tensor

warm = ChunkManager(device=device_tier("cpu"))
for _ in build(warm, "host", 1000, 2):
    pass
for chunk in warm.chunks:
    warm.gather(chunk)
"""

HOST = """
manager = ChunkManager(device=device_tier("cpu"), host=host_tier())
before = resident()
kept = list(build(manager, "host"))
built = resident() - before
assert manager.tiers["host"].used == TOTAL == 2**30
assert abs(built - TOTAL) < 0.03 * TOTAL, f"{built / TOTAL:.3f} of the account is resident"
for chunk in manager.chunks:
    manager.remove(chunk)
assert manager.tiers["host"].used == 0
freed = resident() - before
assert freed < 0.03 * TOTAL, f"{freed / TOTAL:.3f} of the account is resident after freeing"
"""

BUILD = """
manager = ChunkManager(device=device_tier("cpu", capacity=0), host=host_tier())
tensors = [torch.zeros(()).expand(NUMEL) for _ in range(COUNT // 2)]
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts again from what is resident now
before = resident()
for index, tensor in enumerate(tensors):
    chunk = manager.add_chunk([(str(index), tensor)], sources={str(index): lambda: torch.full((NUMEL,), 1.0)})
    manager.close(chunk, rest="host")
most = peak() - before
shards = manager.tiers["host"].used
assert shards == TOTAL // 2
assert most < 1.03 * shards + NUMEL * 4, f"{(most - shards) / NUMEL / 4:.2f} chunks more than the shards were resident"
"""

DISK = """
folder = sys.argv[1]
manager = ChunkManager(device=device_tier("cpu", capacity=2 * NUMEL * 4), disk=disk_tier(folder))
before = resident()
kept = []
most = 0
for tensor in build(manager, "disk"):
    kept.append(tensor)
    most = max(most, resident() - before)
assert manager.tiers["disk"].used == TOTAL
for round in range(2):
    for index, chunk in enumerate(manager.chunks):
        manager.gather(chunk)
        assert kept[index][7] == index + round
        most = max(most, resident() - before)
        manager.release(chunk)
        chunk.load(chunk.tensors[0], torch.full((NUMEL,), float(index + 1)))
        most = max(most, resident() - before)
most -= 2 * NUMEL * 4  # what is on the compute device: a tensor, and a full buffer
assert most < 0.05 * TOTAL, f"resident memory grew by {most / TOTAL:.3f} of what is on disk"
assert os.listdir(folder) == []
"""


def run(script: str, *arguments: str) -> None:
    command = [sys.executable, "-c", COMMON + script, *arguments]
    # What the script itself frees must leave the process, too; by default malloc keeps blocks of up to 32 MiB.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**18)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr


def test_resident_memory_follows_the_account_of_the_host_tier() -> None:
    run(HOST)


def test_building_holds_the_shards_and_no_more_than_one_chunk_beside_them() -> None:
    run(BUILD)


def test_the_disk_tier_takes_no_resident_memory(tmp_path: Path) -> None:
    run(DISK, str(tmp_path))
