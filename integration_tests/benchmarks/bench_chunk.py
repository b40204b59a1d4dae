"""What a chunk costs above the work itself: gather and release against the bare collective, and time per call.

    python integration_tests/benchmarks/bench_chunk.py
    torchrun --standalone --nproc-per-node 2 integration_tests/benchmarks/bench_chunk.py

Prints ratios and times; asserts nothing, for it depends on the machine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from gemini_chunk import ChunkManager, LocalCollectives, ProcessGroupCollectives, device_tier

MIB = 2**20
REPEATS = 60


def alternating_s(first: Callable[[], None], second: Callable[[], None]) -> tuple[float, float]:
    """Return the median seconds of each, taken in turns so that both see the same machine."""
    taken: tuple[list[float], list[float]] = ([], [])
    for repeat in range(REPEATS + 5):
        for call, times in zip((first, second), taken, strict=True):
            start = time.perf_counter()
            call()
            if repeat >= 5:
                times.append(time.perf_counter() - start)
    return statistics.median(taken[0]), statistics.median(taken[1])


def call_us(call: Callable[[], object], calls: int = 2000) -> float:
    """Return the microseconds of one call."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def gather_ratio(chunk_mib: int) -> tuple[float, float]:
    """Return milliseconds of gather and release of one chunk, and their ratio to collective and allocation alone."""
    numel = chunk_mib * MIB // 4
    collectives = ProcessGroupCollectives() if dist.is_initialized() else LocalCollectives()
    manager = ChunkManager(device=device_tier("cpu"), collectives=collectives)
    (chunk,) = manager.register([("weight", nn.Parameter(torch.ones(numel)))], numel, rest="host")

    def ours() -> None:
        manager.gather(chunk)
        manager.release(chunk)

    def bare() -> None:
        collectives.all_gather(torch.empty(numel), chunk.shard).wait()

    ours_s, bare_s = alternating_s(ours, bare)
    return ours_s * 1e3, ours_s / bare_s


def main() -> None:
    """Print the table on rank 0."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    lines = []
    for chunk_mib in (1, 8, 32, 64):
        ms, ratio = gather_ratio(chunk_mib)
        lines.append(f"gather and release of {chunk_mib:>3} MiB: {ms:>8.3f} ms, {ratio:.3f} x bare")

    params = [nn.Parameter(torch.ones(4)) for _ in range(4)]
    manager = ChunkManager(device=device_tier("cpu"))
    (chunk,) = manager.register([(str(i), p) for i, p in enumerate(params)], 16, rest="host")
    manager.gather(chunk)

    def use() -> None:
        manager.begin_use(params[:1])
        manager.end_use(params[:1], in_backward=False)

    def gather_and_release() -> None:
        manager.gather(chunk)
        manager.release(chunk)

    lines += [
        f"gather of a gathered chunk: {call_us(lambda: manager.gather(chunk)):.2f} us a call",
        f"begin_use and end_use of one tensor: {call_us(use) / 2:.2f} us a call",
    ]
    if not dist.is_initialized():
        manager.release(chunk)
        lines.append(f"gather and release of 4 tensors in 64 bytes: {call_us(gather_and_release) / 2:.2f} us a call")
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("\n".join(lines))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
