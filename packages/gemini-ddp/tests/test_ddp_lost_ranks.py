"""A rank that raises, is killed or goes another way: the others raise in time and say where each was seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ddp_checks import OneAhead
from torch import Tensor, nn

from gemini_ddp import ZeroDDP
from gemini_ddp.testing import PlainChunk, PoisonStore
from ranks import run_ranks

TIMEOUT_S = 12.0  # of a test's ranks; their collectives wait half as long


class Halting(PoisonStore):
    """Gathers as a store over ranks does: all must come."""

    def _show(self, chunk: PlainChunk) -> None:
        dist.all_reduce(torch.ones(1 + chunk.index))
        super()._show(chunk)


class Chain(nn.Module):
    """Layers that this rank may leave out, or raise or die at."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor, trouble: str = "") -> Tensor:
        for index, layer in enumerate(self.layers):
            if index == 2 and trouble == "skip":
                continue
            if index == 2 and trouble == "raise":
                raise OSError("this rank's data are gone")
            if index == 2 and trouble == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            x = layer(x).tanh()
        return x


def step(model: nn.Module, trouble: str = "") -> None:
    model(torch.ones(2, 3), trouble).sum().backward()


def wrap() -> ZeroDDP[PlainChunk]:
    torch.manual_seed(0)
    module = Chain()
    store = Halting(module.parameters(), params_per_chunk=2, process_group=dist.group.WORLD)
    return ZeroDDP(module, store, OneAhead(), process_group=dist.group.WORLD)


def check_trouble(rank: int, world_size: int, trouble: str, warm_steps: int) -> str:
    model = wrap()
    for _ in range(warm_steps):
        step(model)
    try:
        step(model, trouble if rank == 1 else "")
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return "nothing happened"


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_rank_that_raises_is_named_by_the_others_with_the_module_it_came_to(world_size: int) -> None:
    texts = run_ranks(check_trouble, world_size, "raise", 2, timeout_s=TIMEOUT_S)
    assert "this rank's data are gone" in texts[1]
    for rank, text in enumerate(texts):
        assert "rank 1: forward of 'layers.1' with PlainChunk(1, 2 parameters), where it raised OSError" in text
        assert rank == 1 or f"rank {rank}: forward of 'layers.2' with PlainChunk(2, 2 parameters)" in text


@pytest.mark.distributed
@pytest.mark.parametrize("warm_steps", [0, 2])
def test_rank_that_skips_a_module_ends_in_an_error_on_every_rank(warm_steps: int) -> None:
    texts = run_ranks(check_trouble, 2, "skip", warm_steps, timeout_s=TIMEOUT_S)
    for text in texts:
        assert "'layers.2' in forward" in text or "rank 0: forward of 'layers.2'" in text
        assert "'layers.3' in forward" in text or "rank 1: forward of 'layers.3'" in text


SCRIPT = """
import sys
from datetime import timedelta
import torch.distributed as dist
from test_ddp_lost_ranks import check_trouble
rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=20))
text = check_trouble(rank, 2, "die", 1)
open(out, "w").write(text)
"""


@pytest.mark.distributed
def test_rank_that_is_killed_is_named_by_the_other_with_the_module_it_came_to(tmp_path: Path) -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store"), str(tmp_path / f"out-{rank}")],
            env={**os.environ, "PYTHONPATH": paths},
        )
        for rank in range(2)
    ]
    try:
        codes = [rank.wait(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, -signal.SIGKILL]
    text = (tmp_path / "out-0").read_text()
    assert "rank 0: forward of 'layers.2'" in text
    assert "rank 1: " in text


SLOW_STORE = """
import threading, time
from gemini_ddp._ranks import Ranks, _keep_writing
class SlowStore:
    def set(self, key, value):
        started.set()
        time.sleep(0.3)
        print("written", flush=True)
started, ranks = threading.Event(), Ranks(None)
ranks._board = SlowStore()
_keep_writing(ranks)
started.wait(30)
"""


def test_a_process_that_ends_lets_its_thread_return_from_the_store() -> None:
    # Torch's stores are C++: a thread that came back from there to an interpreter taken down would abort the process.
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", SLOW_STORE]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "written\n"), done.stderr
