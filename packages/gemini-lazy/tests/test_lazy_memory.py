"""Bytes: a lazy model takes none, and streaming it into shards takes the shards and one parameter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lazy_checks import SEED, peak_bytes
from torch import Tensor, nn

from gemini_lazy import LazyInitContext, forget, is_lazy, materialize, materialize_value
from ranks import run_ranks

WIDTH, DEPTH = 256, 12
WEIGHT_BYTES = 4 * WIDTH * WIDTH
# Placeholders, biases, and the default generator's state while another one is in force.
SMALL_BYTES = 2**14
MIB = 2**20


class Deep(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(DEPTH))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.02)


def stream(module: nn.Module, *, rank: int, world_size: int) -> list[Tensor]:
    shards = []
    for parameter in module.parameters():
        value = materialize_value(parameter)
        shards.append(value.flatten().tensor_split(world_size)[rank].clone())
        forget(parameter)
    return shards


MEASURE = """
import sys
import torch
from gemini_lazy import LazyInitContext
from test_lazy_memory import Deep, stream

def status(field):
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

def growth(run):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts anew
    before = status("VmRSS")
    kept = run()
    return status("VmHWM") - before, status("VmRSS") - before

torch.set_num_threads(1)
with LazyInitContext():
    Deep(8)  # loads what the first use loads

def build():
    with LazyInitContext():
        return Deep(1536)

made = []
peak, held = growth(lambda: made.append(build()))
print(peak, held, *growth(lambda: stream(made[0], rank=1, world_size=8)))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_process_never_holds_more_than_its_shards_and_one_parameter() -> None:
    # The process's own memory: torch's count does not see the holes that an allocator leaves between what is kept.
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    build_peak, build_held, stream_peak, _ = map(int, done.stdout.split())
    weight_bytes = 4 * 1536 * 1536
    shard_bytes = DEPTH * weight_bytes // 8
    slack = 5 * MIB  # pages of code, and of the tape: 5 kB for each draw that counts
    assert weight_bytes - MIB <= build_peak <= weight_bytes + slack
    assert build_held <= slack
    assert shard_bytes + weight_bytes - MIB <= stream_peak <= shard_bytes + weight_bytes + slack


def test_whole_module_peaks_at_its_own_size() -> None:
    with LazyInitContext():
        module = Deep()
    model_bytes = sum(4 * parameter.numel() for parameter in module.parameters())
    peak = peak_bytes(lambda: LazyInitContext.materialize(module))
    assert model_bytes <= peak <= model_bytes + SMALL_BYTES


def test_overwritten_initialisation_is_never_computed() -> None:
    with LazyInitContext():
        weight = torch.randn(WIDTH, WIDTH)
        for _ in range(5):
            weight = weight @ weight
        weight.fill_(1)
        like = torch.zeros_like(torch.randn(WIDTH, WIDTH) * 2)
        once_read = torch.randn(WIDTH, WIDTH)
        once_read.add_(once_read @ once_read)
        copied = once_read.clone()
        once_read.fill_(1)
    assert is_lazy(copied)
    for tensor in (weight, like, once_read):
        assert peak_bytes(lambda tensor=tensor: materialize(tensor)) <= WEIGHT_BYTES + 64


def test_intermediate_values_are_let_go() -> None:
    with LazyInitContext():
        weight = torch.ones(WIDTH, WIDTH) * 2
        for _ in range(8):
            weight = weight * 2
    assert 2 * WEIGHT_BYTES <= peak_bytes(lambda: materialize(weight)) <= 2 * WEIGHT_BYTES + SMALL_BYTES


def check_shards(rank: int, world_size: int) -> None:
    torch.manual_seed(SEED)
    with LazyInitContext():
        module = Deep()
    shards = stream(module, rank=rank, world_size=world_size)
    torch.manual_seed(SEED)
    for shard, wanted in zip(shards, Deep().parameters(), strict=True):
        gathered: list[Tensor | None] = [None] * world_size
        dist.all_gather_object(gathered, shard)
        assert torch.equal(torch.cat([part for part in gathered if part is not None]), wanted.flatten())


@pytest.mark.distributed
def test_shards_of_three_ranks_make_up_the_eager_model() -> None:
    run_ranks(check_shards, 3)
