"""What saving and loading cost beside writing and reading files of the same bytes.

    python integration_tests/benchmarks/bench_checkpoint.py
    python integration_tests/benchmarks/bench_checkpoint.py --directory /mnt/disk

The written file is synchronised with the disk; what is saved is not, so it may take less.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

from against_limit import Beside, beside, show
from gemini_booster import Booster, GeminiPlugin
from gemini_optim import HybridAdam

MIB = 2**20


def write_plain(path: Path, content: memoryview) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        os.fsync(file.fileno())


def read_plain(path: Path, into: memoryview) -> None:
    """Read a file into memory that is there."""
    with path.open("rb", buffering=0) as file:
        while file.readinto(into):
            pass


def measure(folder: Path, layers: int, width: int) -> list[Beside]:
    """Measure model and optimizer of one rank."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    booster = Booster(plugin=GeminiPlugin(precision="fp32", min_chunk_size_m=1, search_range_m=1))
    wrapped, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-3))
    assert optimizer is not None  # one was given
    booster.backward(wrapped(torch.ones(1, width)).sum(), optimizer)
    optimizer.step()

    states = folder / "states.pt"
    files = {"model.safetensors": True, "model.pt": False}
    calls = {
        name: (
            partial(booster.save_model, wrapped, folder / name, use_safetensors=safe),
            partial(booster.load_model, wrapped, folder / name),
        )
        for name, safe in files.items()
    }
    calls["states.pt"] = (
        partial(booster.save_optimizer, optimizer, states),
        partial(booster.load_optimizer, optimizer, states),
    )
    rows = []
    for name, (save, load) in calls.items():
        save()
        content = memoryview(bytearray((folder / name).read_bytes()))
        size = f"{len(content) / MIB:.0f} MiB"
        write, read = (partial(call, folder / "plain", content) for call in (write_plain, read_plain))
        for what, call, limit, limit_call in (("save", save, "fsync'd write", write), ("load", load, "read", read)):
            row = beside(f"{what} {name}", size, call, limit, limit_call, repeats=4, clock=time.perf_counter)
            rows.append(row)
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="a folder on a local disk")
    directory = parser.parse_args().directory
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        rows = measure(Path(folder), 24, 1024) + measure(Path(folder), 1024, 64)
    show("checkpoints", rows)


if __name__ == "__main__":
    main()
