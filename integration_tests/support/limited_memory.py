"""Training of a GPT in a process whose memory is limited from outside: ours, plain PyTorch, and FSDP2.

Once the process has imported what it needs, its parent sets its RLIMIT_DATA: the system then refuses private memory
beyond the limit. Mapped files, as the disk tier's, do not count. The model states are those of fp32 training with
Adam: parameter, gradient and two moments, 16 bytes per parameter.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from transformers import GPT2LMHeadModel

from _text import gpt2_config, next_byte_loss, read_text
from gemini_booster import Booster, GeminiPlugin
from gemini_lazy import LazyInitContext
from gemini_optim import HybridAdam

EXAMPLES = Path(__file__).parents[2] / "examples"
MIB = 2**20
LEARNING_RATE = 3e-4
BYTES_PER_PARAMETER = 16
CASES = ("ours in memory", "ours on disk", "PyTorch", "FSDP2 with CPU offload")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The model and the run.

    Attributes:
        layers: transformer blocks.
        width: elements of a hidden state, a multiple of 64.
        seq_len: bytes in the one window of a step.
        steps: training steps.
    """

    layers: int = 24
    width: int = 1024
    seq_len: int = 32
    steps: int = 5

    @property
    def states_bytes(self) -> int:
        """Bytes of model states, without the few of embeddings and norms."""
        return BYTES_PER_PARAMETER * 12 * self.layers * self.width**2


@dataclass(frozen=True)
class Outcome:
    """What became of a case: its losses and, if it failed, the last line of its error."""

    losses: tuple[float, ...]
    error: str | None


def run_case(case: str, shape: Shape, *, limit_bytes: int | None, beyond_imports: bool, directory: str) -> Outcome:
    """Run a case in a process of its own.

    Args:
        case: one of ``CASES``.
        shape: the model and the run.
        limit_bytes: RLIMIT_DATA of the process; None leaves it unlimited.
        beyond_imports: the limit comes on top of what the imports have taken.
        directory: for the files of the disk tier.
    """
    command = [sys.executable, __file__, case, json.dumps(asdict(shape)), directory]
    # glibc keeps what is freed for a next time, up to what was in use at the peak. Under a limit, memory that
    # nobody uses must go back, so larger blocks come from the system one by one.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(MIB // 2)}
    environment["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        if ready and limit_bytes is not None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            used = int(re.findall(r"VmData:\s+(\d+) kB", status)[0]) * 1024
            limit = limit_bytes + (used if beyond_imports else 0)
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (limit, limit))
        output, errors = process.communicate("go\n" if ready else None)
    losses = tuple(float(line) for line in output.split())
    if process.returncode == 0:
        return Outcome(losses, None)
    lines = errors.strip().splitlines() or ["no message"]
    return Outcome(losses, lines[-1] if process.returncode > 0 else f"killed by signal {-process.returncode}")


# -- what runs in the processes ---------------------------------------------------------------------------------------


def gpt2(shape: Shape) -> GPT2LMHeadModel:
    """Return a byte-level GPT-2, the same in every case."""
    config = gpt2_config(width=shape.width, layers=shape.layers, heads=shape.width // 64, length=shape.seq_len)
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def await_limit() -> None:
    """Let the parent set the limit, now that all is imported."""
    print("ready", flush=True)
    sys.stdin.readline()


def take_steps(
    model: nn.Module, shape: Shape, backward: Callable[[Tensor], object], optimizer: torch.optim.Optimizer
) -> None:
    """Train on the bytes of a text and print the loss of each step."""
    text = torch.frombuffer(bytearray(read_text(None)[0]), dtype=torch.uint8)
    for step in range(shape.steps):
        window = text[step * shape.seq_len :][None, : shape.seq_len].long()
        loss = next_byte_loss(model(input_ids=window, use_cache=False).logits, window)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), flush=True)


def train_ours(shape: Shape, directory: str, *, on_disk: bool) -> None:
    """Train with the states in memory or on the disk."""
    with LazyInitContext():
        model = gpt2(shape)
    layer_m = 12 * shape.width**2 / MIB  # elements of a layer in units of 2**20
    plugin = GeminiPlugin(
        precision="fp32",
        hidden_dim=shape.width,
        min_chunk_size_m=layer_m / 3,
        search_range_m=layer_m / 12,
        disk_param_frac=float(on_disk),
        disk_optim_frac=float(on_disk),
        offload_directory=directory if on_disk else None,
    )
    booster = Booster(plugin=plugin)
    wrapped, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=LEARNING_RATE))
    assert optimizer is not None
    take_steps(wrapped, shape, lambda loss: booster.backward(loss, optimizer), optimizer)


def train_torch(shape: Shape) -> None:
    """Train with PyTorch alone."""
    model = gpt2(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    take_steps(model, shape, Tensor.backward, optimizer)


def train_fsdp(shape: Shape, directory: str) -> None:
    """Train with FSDP2: parameters, gradients and moments offloaded to the memory of the CPU."""
    dist.init_process_group("gloo", store=dist.FileStore(str(Path(directory) / "store"), 1), rank=0, world_size=1)
    mesh = dist.init_device_mesh("cpu", (1,))
    offload = CPUOffloadPolicy(pin_memory=False)
    with torch.device("meta"):
        model = gpt2(shape)
    for part in (*model.transformer.h, model):
        fully_shard(part, mesh=mesh, offload_policy=offload)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    take_steps(model, shape, Tensor.backward, optimizer)
    dist.destroy_process_group()


def train(case: str, shape: Shape, directory: str) -> None:
    """Run one case in this process."""
    import torch._dynamo  # noqa: F401 # optimizers import it when they are made: let it count as an import

    threading.stack_size(MIB)  # RLIMIT_DATA counts a thread's stack as a whole: 8 MiB that nothing touches
    await_limit()
    if case == "PyTorch":
        train_torch(shape)
    elif case.startswith("FSDP2"):
        train_fsdp(shape, directory)
    else:
        train_ours(shape, directory, on_disk=case == "ours on disk")


if __name__ == "__main__":
    train(sys.argv[1], Shape(**json.loads(sys.argv[2])), sys.argv[3])
