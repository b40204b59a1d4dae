"""What a wrapped module costs the host: microseconds per module and training step beyond plain PyTorch.

    python integration_tests/benchmarks/bench_overhead.py
    python integration_tests/benchmarks/bench_overhead.py --quick

One rank, blocks of eight layers and tensors of four elements, so that next to nothing but the host's own work is left.
Plain and wrapped chain take their steps in turns. Times are processor time, which other programs on the machine change
less than the clock's; every number is the median over rounds. Prints a table; asserts nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from gemini_booster.zero import GeminiDDP, GeminiOptimizer
from gemini_search import ChunkConfiguration, ChunkSpec, TensorSlot

WIDTH = 2
BLOCK = 8  # about what a transformer's block has
MODULE_NUMEL = WIDTH * WIDTH + WIDTH
LEARNING_RATE = 1e-6  # nothing is to be learned, and nothing to overflow
WARM_UP = 5  # the first step records, the second is the first to follow the plan
LIMIT_US = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A chain to measure.

    Attributes:
        modules: linear layers in it, in blocks of `BLOCK`.
        chunks: chunks that their parameters lie in.
        offloaded: whether shards rest on the host, so that every use gathers; else they rest on the device, gathered.
    """

    modules: int
    chunks: int
    offloaded: bool

    def chain(self) -> nn.Sequential:
        """Return the plain chain."""
        blocks = range(self.modules // BLOCK)
        return nn.Sequential(*(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCK))) for _ in blocks))

    def wrapped(self) -> GeminiDDP:
        """Return the wrapped chain, its modules spread evenly over the chunks."""
        share = self.modules // self.chunks
        specs = []
        for first in range(0, self.modules, share):
            slots = [
                slot
                for place, index in enumerate(range(first, first + share))
                for slot in (
                    TensorSlot(f"{index // BLOCK}.{index % BLOCK}.weight", place * MODULE_NUMEL, WIDTH * WIDTH),
                    TensorSlot(f"{index // BLOCK}.{index % BLOCK}.bias", place * MODULE_NUMEL + WIDTH * WIDTH, WIDTH),
                )
            ]
            specs.append(ChunkSpec(numel=share * MODULE_NUMEL, tensors=tuple(slots)))
        frac = 1.0 if self.offloaded else 0.0
        return GeminiDDP(
            self.chain(),
            precision="fp32",
            offload_optim_frac=frac,
            offload_param_frac=frac,
            chunk_configuration=ChunkConfiguration(chunks=tuple(specs), chunk_numel=share * MODULE_NUMEL, world_size=1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Microseconds of one step.

    Attributes:
        plain_us: of the plain chain, per module.
        passes_us: what forward and backward take beyond that, per module.
        step_us: what forward, backward and the optimizer take beyond that, per module.
    """

    plain_us: float
    passes_us: float
    step_us: float


def measure(case: Case, rounds: int) -> Overhead:
    """Train both chains in turns."""
    plain, wrapped = case.chain(), case.wrapped()
    optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    sharded = GeminiOptimizer(torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE), wrapped)
    x = torch.ones(1, WIDTH)

    def update_plain() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def update_wrapped() -> None:
        sharded.step()
        sharded.zero_grad()

    plain_us, passes_us, step_us = [], [], []
    for index in range(WARM_UP + rounds):
        passes, update = _step_us(plain, x, update_plain)
        own_passes, own_update = _step_us(wrapped, x, update_wrapped)
        if index >= WARM_UP:
            plain_us.append(passes + update)
            passes_us.append(own_passes - passes)
            step_us.append(own_passes + own_update - passes - update)
    per_module = [statistics.median(taken) / case.modules for taken in (plain_us, passes_us, step_us)]
    return Overhead(plain_us=per_module[0], passes_us=per_module[1], step_us=per_module[2])


def _step_us(model: nn.Module, x: Tensor, update: Callable[[], None]) -> tuple[float, float]:
    """Return the microseconds of forward and backward, and those of the update."""
    start = time.process_time_ns()
    model(x).sum().backward()
    middle = time.process_time_ns()
    update()
    return (middle - start) / 1e3, (time.process_time_ns() - middle) / 1e3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds and only short chains")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths = (16, 64) if options.quick else (16, 64, 256)
    table = Table(title=f"Host time beyond plain PyTorch; to stay below {LIMIT_US} us a module and step")
    for heading in ("shards rest", "modules", "chunks", "plain us/module", "forward, backward", "whole step"):
        table.add_column(heading, justify="left" if heading == "shards rest" else "right")
    for offloaded in (False, True):
        for modules in lengths:
            for chunks in (1, modules // BLOCK, 2 * modules // BLOCK, modules):
                case = Case(modules=modules, chunks=chunks, offloaded=offloaded)
                found = measure(case, rounds=20 if options.quick else 60)
                cells = (f"{us:.1f}" for us in (found.plain_us, found.passes_us, found.step_us))
                table.add_row("on the host" if offloaded else "gathered", str(modules), str(chunks), *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
