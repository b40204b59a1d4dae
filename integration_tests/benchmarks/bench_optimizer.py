"""What the sharded optimizer's step costs beside torch's fused AdamW on one flat tensor of as many elements.

    python integration_tests/benchmarks/bench_optimizer.py

The flat call is the limit: it reads and writes each state once. With bf16 parameters, it casts gradient and parameter.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from against_limit import Beside, beside, show
from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP

MEBI = 2**20


def optimizer_step(precision: Literal["fp32", "bf16"], layers: int, width: int, chunk_m: float) -> Beside:
    """Measure the step of one rank, whose states rest where they are updated."""
    plain = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    numel = sum(param.numel() for param in plain.parameters())
    model = GeminiDDP(plain, precision=precision, min_chunk_size_m=chunk_m, search_range_m=chunk_m, hidden_dim=width)
    optimizer = GeminiAdamOptimizer(model, lr=1e-3)
    flat = nn.Parameter(torch.ones(numel))
    fused = torch.optim.AdamW([flat], lr=1e-3, weight_decay=0.0, fused=True)
    flat.grad = torch.ones(numel)
    working = torch.ones(numel, dtype=torch.bfloat16)
    grad = torch.ones(numel, dtype=torch.bfloat16)
    x = torch.ones(1, width)

    def backward() -> None:
        optimizer.backward(model(x).float().sum())

    def least() -> None:
        if precision == "bf16":
            assert flat.grad is not None  # set above
            flat.grad.copy_(grad)
        fused.step()
        if precision == "bf16":
            working.copy_(flat.detach())

    what = f"{precision}, {2 * layers} tensors, {len(model.chunk_manager.chunks)} chunks"
    size = f"{numel / MEBI:.2f} Mi elements"
    return beside(what, size, optimizer.step, "flat fused AdamW", least, repeats=12, before=backward)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rows = []
    for precision in ("fp32", "bf16"):
        rows += [
            optimizer_step(precision, 256, 64, 1.0),
            optimizer_step(precision, 256, 64, 0.0625),
            optimizer_step(precision, 16, 1024, 1.0),
            optimizer_step(precision, 32, 1024, 32.0),
        ]
    show("optimizer step", rows)


if __name__ == "__main__":
    main()
