"""Under a limit that the system enforces, model states of eight times its size train from the disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from limited_memory import EXAMPLES, Outcome, Shape, run_case

SHAPE = Shape(layers=12, width=512, seq_len=16)
LIMIT_BYTES = SHAPE.states_bytes // 8


def run(case: str, folder: Path, limit_bytes: int | None = LIMIT_BYTES) -> Outcome:
    # What Python and torch take when they are imported would dwarf so small a model: the limit is for what comes then.
    return run_case(case, SHAPE, limit_bytes=limit_bytes, beyond_imports=True, directory=str(folder))


def test_states_of_eight_times_the_limit_train_on_disk_with_the_losses_of_unlimited_memory(tmp_path: Path) -> None:
    ours = run("ours on disk", tmp_path)
    assert ours.error is None
    assert ours == run("ours in memory", tmp_path, limit_bytes=None)
    assert len(set(ours.losses)) == SHAPE.steps
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", ["ours in memory", "PyTorch", "FSDP2 with CPU offload"])
def test_the_limit_refuses_what_keeps_the_states_in_memory(case: str, tmp_path: Path) -> None:
    outcome = run(case, tmp_path)
    assert not outcome.losses
    assert outcome.error is not None
    assert "allocate memory" in outcome.error or "MemoryError" in outcome.error, outcome.error


@pytest.mark.parametrize("case", ["PyTorch", "FSDP2 with CPU offload"])
def test_without_the_limit_they_train(case: str, tmp_path: Path) -> None:
    outcome = run_case(case, Shape(layers=1, width=64), limit_bytes=None, beyond_imports=False, directory=str(tmp_path))
    assert outcome.error is None
    assert len(outcome.losses) == Shape().steps


def test_the_example_trains_under_a_limit_of_the_shell_and_tells_its_size(tmp_path: Path) -> None:
    command = f"ulimit -d 524288; exec '{sys.executable}' '{EXAMPLES / 'larger_than_memory.py'}' --layers 3 --width 128"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sh", "-c", command], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"0.1 times the limit|0.0 times the limit", done.stdout)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
