"""The examples run as a user starts them, and what they share is exact."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2LMHeadModel

import train_gpt
from _text import VALIDATION_WINDOWS, Windows, gpt2_config, read_text, validation_loss
from ranks import run_ranks

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def start(script: str, *arguments: str, ranks: int = 0, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run an example with plain Python, or under torchrun if ``ranks`` is given, in ``folder``."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, str(ROOT / "examples" / script), *arguments]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=150)


def succeed(script: str, *arguments: str, ranks: int = 0, folder: Path) -> str:
    """Run an example, and return what it printed."""
    done = start(script, *arguments, ranks=ranks, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def losses(output: str) -> dict[str, float]:
    """Return the validation losses that ``train_gpt.py`` printed: before, after, and of the loaded model."""
    found = re.findall(r"validation loss (before|after|of .*?): ([\d.]+) nats", output.replace("\n", " "))
    return {name.split()[0]: float(value) for name, value in found}


SHORT = ("--steps", "3", "--batch-size", "2", "--seq-len", "32")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options",
    [
        ("--offload-optim-frac", "1", "--offload-param-frac", "1", "--checkpoint-activations"),
        ("--precision", "fp16", "--shard-param-frac", "0"),
        ("--precision", "bf16", "--placement-policy", "auto", "--device-capacity", "64MiB"),
    ],
    ids=["offloaded", "fp16", "auto"],
)
def test_train_gpt_trains_and_saves_on_two_ranks(options: tuple[str, ...], tmp_path: Path) -> None:
    found = losses(succeed("train_gpt.py", *SHORT, *options, "--out", "saved", ranks=2, folder=tmp_path))
    assert found["before"] > 5
    assert found["after"] < found["before"]
    assert found["of"] == pytest.approx(found["after"], abs=2e-4 if "--precision" not in options else 0.05)
    assert (tmp_path / "saved" / "config.json").exists()


def test_train_gpt_runs_as_plain_python_on_a_text_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    output = succeed("train_gpt.py", *SHORT, "--text", "text.txt", "--out", "saved", folder=tmp_path)
    found = losses(output)
    assert found["after"] < found["before"]
    assert found["of"] == pytest.approx(found["after"], abs=2e-4)
    assert "generated text:" in output


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--shard-param-frac", "1.5"), "shard_param_frac must be a number in [0, 1], got 1.5."),
        (("--device-capacity", "10KiB"), "The model states do not fit: device needs"),
    ],
)
def test_every_rank_of_train_gpt_says_which_setting_is_wrong(
    options: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    done = start("train_gpt.py", *options, ranks=2, folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count(f"train_gpt.py: {sentence}") == 2
    assert not (tmp_path / "out").exists()


def test_train_gpt_says_when_the_text_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 7)
    done = start("train_gpt.py", "--seq-len", "64", "--text", "text.txt", folder=tmp_path)
    assert done.returncode == 1
    assert "The text has 32 bytes, a window 64" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--precision", "fp8"), "invalid choice: 'fp8'"),
        (("--placement-policy", "auto", "--shard-param-frac", "0.5"), "--shard-param-frac: fractions are for"),
        (("--text", "absent.txt"), "absent.txt is not a file"),
        (("--steps", "0"), "at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_train_gpt_refuses_what_does_not_fit_together(
    options: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *options])
    with pytest.raises(SystemExit, match="2"):
        train_gpt.parse_arguments()
    assert sentence in capsys.readouterr().err


@pytest.mark.distributed
def test_low_level_trains_on_two_ranks(tmp_path: Path) -> None:
    output = succeed("low_level.py", "--steps", "3", ranks=2, folder=tmp_path)
    before, after = map(float, re.findall(r"([\d.]+) nats per byte before, ([\d.]+) after", output)[0])
    assert after < before


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [0, 2])
def test_chunk_manager_alone_keeps_within_its_limit(ranks: int, tmp_path: Path) -> None:
    output = succeed("chunk_manager_alone.py", ranks=ranks, folder=tmp_path)
    peak, capacity = re.findall(r"device, at most: +([\d,]+) bytes of ([\d,]+)", output)[0]
    assert peak == capacity
    assert "a third chunk at once: The device tier cannot hold" in output


def test_chunk_manager_alone_needs_the_chunk_package_and_the_model_that_it_runs() -> None:
    tree = ast.parse((ROOT / "examples" / "chunk_manager_alone.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {
        "torch",
        "transformers",
        "gemini_chunk",
    }


def test_validation_text_follows_the_training_text() -> None:
    train, validation = read_text(None)
    assert len(validation) == pytest.approx((len(train) + len(validation)) / 10, abs=1)
    path = Path(__file__)
    assert b"".join(read_text(path)) == path.read_bytes()


def test_windows_cover_the_text_and_no_more() -> None:
    windows = Windows(bytes(range(10)), 4, stride=3)
    assert [window.tolist() for window in (windows[0], windows[1], windows[2])] == [
        [0, 1, 2, 3],
        [3, 4, 5, 6],
        [6, 7, 8, 9],
    ]
    assert len(windows) == 3
    with pytest.raises(ValueError, match="3 bytes, a window 4"):
        Windows(b"abc", 4, stride=1)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = GPT2LMHeadModel(gpt2_config(width=16, layers=1, heads=2, length=16))
    return model


def validate(model: nn.Module, text: bytes, rank: int, world_size: int) -> float:
    windows, cpu = Windows(text, 16, stride=16), torch.device("cpu")
    return validation_loss(model, windows, batch_size=3, device=cpu, rank=rank, world_size=world_size)


def check_validation(rank: int, world_size: int, texts: list[bytes]) -> list[float]:
    return [validate(small_model(), text, rank, world_size) for text in texts]


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_validation_loss_does_not_depend_on_the_number_of_ranks(world_size: int) -> None:
    texts = [read_text(None)[1][: 16 * windows] for windows in (1, 7, VALIDATION_WINDOWS + 5)]
    alone = check_validation(0, 1, texts)
    for found in run_ranks(check_validation, world_size, texts):
        assert found == pytest.approx(alone, abs=1e-6)


def test_validation_takes_every_window_once() -> None:
    model, seen = small_model(), []
    model.register_forward_pre_hook(lambda _, __, inputs: seen.append(inputs["input_ids"]), with_kwargs=True)
    text = read_text(None)[1]
    validate(model, text, 0, 1)
    windows = Windows(text, 16, stride=16)
    assert torch.equal(torch.cat(seen), torch.stack([windows[index] for index in range(VALIDATION_WINDOWS)]))
