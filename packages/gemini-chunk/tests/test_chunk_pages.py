"""What a warm step costs in fresh pages of main memory."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from gemini_chunk import ChunkManager, device_tier, host_tier

MIB = 2**20
PAGE_BYTES = resource.getpagesize()


def page_faults(call: Callable[[], None]) -> int:
    """Return the pages that a call touched first; the least of several, for others may want memory, too."""
    taken = []
    for _ in range(12):  # it takes the C library some steps to have blocks of all sizes
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        call()
        taken.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(taken)


def step_of(chunk_mib: int) -> Callable[[], None]:
    """Return one use and one gradient of a chunk that rests on the host."""
    param = nn.Parameter(torch.ones(chunk_mib * MIB // 4))
    manager = ChunkManager(device=device_tier("cpu"), host=host_tier())
    (chunk,) = manager.register([("weight", param)], param.numel(), rest="host")
    gradient = torch.ones_like(param)

    def step() -> None:
        manager.begin_use([param])
        manager.end_use([param], in_backward=True)
        manager.take_gradient(param, gradient)
        manager.finish_backward()
        chunk.commit()

    return step


def huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


@pytest.mark.skipif(not huge_pages(), reason="the system has no huge pages")
def test_large_buffers_are_touched_in_huge_pages() -> None:
    step = step_of(chunk_mib=64)
    step()
    # Three buffers of this size: the values, their gradient, and the gradient at rest, which the host tier maps.
    assert page_faults(step) < 3 * 64 * MIB // PAGE_BYTES // 8


def test_buffers_that_the_c_library_keeps_are_not_touched_anew() -> None:
    del_first = torch.empty(31 * MIB, dtype=torch.uint8)  # freed, it lets the library keep blocks of its size
    del del_first
    step = step_of(chunk_mib=8)
    step()
    # The gradient at rest is mapped by the host tier, in huge pages where there are any.
    assert page_faults(step) < (2 if huge_pages() else 9) * MIB // PAGE_BYTES
