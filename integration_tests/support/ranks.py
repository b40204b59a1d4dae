"""Run a function on several gloo ranks of this machine.

Every package's tests may use this module: pytest finds it through ``pythonpath`` in the root ``pyproject.toml``. It
needs torch and nothing of ours.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Forked from a server that imported torch once, a rank starts in 0.1 s; spawned, in 6 s or more. Building any optimizer
# imports torch._dynamo, which takes a second; what is not installed is passed over.
multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "numpy", "models"])


def _rank(
    rank: int, body: Callable[..., Any], world_size: int, folder: str, timeout_s: float, args: tuple[Any, ...]
) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    torch.manual_seed(1000 + rank)  # unlike data per rank: a missing reduction must show
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(folder) / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s / 2),  # the collective's error comes before the kill
    )
    try:
        dist.barrier()  # a rank that is done at once must not leave while others still connect
        result = body(rank, world_size, *args)
        Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
    finally:
        dist.destroy_process_group()


def run_ranks(body: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call ``body(rank, world_size, *args)`` on every rank of a new gloo group.

    Args:
        body: a module-level function: it reaches the ranks by name. It returns something that pickles.
        world_size: number of processes.
        args: further arguments; they must pickle.
        timeout_s: all ranks are killed after this many seconds.

    Returns:
        What each rank returned, by rank.

    Raises:
        TimeoutError: a rank still ran at the deadline; the message names the ranks.
        torch.multiprocessing.ProcessRaisedException: the first failing rank's error, with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _rank,
            args=(body, world_size, folder, timeout_s, args),
            nprocs=world_size,
            join=False,
            start_method="forkserver",
        )
        deadline = time.monotonic() + timeout_s
        try:
            while not context.join(timeout=0.2):
                if time.monotonic() > deadline:
                    alive = [r for r, p in enumerate(context.processes) if p.is_alive()]
                    raise TimeoutError(f"{body.__name__}: ranks {alive} still ran after {timeout_s:g} s.")
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(world_size)]
