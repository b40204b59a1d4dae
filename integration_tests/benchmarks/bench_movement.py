"""What movement costs a step beyond its compute, by link and depth of fetches: milliseconds that nothing hides.

    python integration_tests/benchmarks/bench_movement.py
    python integration_tests/benchmarks/bench_movement.py --quick

One rank, a chain of layers with one chunk each whose compute is a wait, so that moving has the processor to itself.
Shards rest on the host or on the disk; copies take as long as they take on this machine, or with ``--copy-ms`` a given
time each. A layer's compute is as long as the copy of its chunk by default. Exposed time is that of forward and
backward less their compute; the optimizer's own step does not count. Each number is the least over rounds. Prints a
table; asserts nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from gemini_booster.zero import GeminiDDP, GeminiOptimizer
from gemini_chunk.testing import SlowCopier
from waiting import waiting_chain, wrapped_chain

LEARNING_RATE = 1e-6  # nothing is to be learned
LINKS: dict[str, dict[str, Any]] = {
    "host": {"offload_param_frac": 1.0, "offload_optim_frac": 1.0},
    "disk": {"disk_param_frac": 1.0, "disk_optim_frac": 1.0},
}
DEPTHS = (0, 1, 2)


def least_s(step: Callable[[], object], rounds: int, after: Callable[[], object] = lambda: None) -> float:
    """Return the least time of ``step``; ``after`` follows each time and is not measured."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
        after()
    return min(times)


def plain_s(model: nn.Module, numel: int, rounds: int) -> float:
    """Return the time of forward and backward of a plain chain."""
    x = torch.ones(numel, requires_grad=True)
    return least_s(lambda: model(x).sum().backward(), rounds)


def wrapped_s(model: GeminiDDP, numel: int, rounds: int) -> float:
    """Return the time of forward and backward of a wrapped chain that follows its plan."""
    optimizer = GeminiOptimizer(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), model)
    x = torch.ones(numel, requires_grad=True)

    def passes() -> None:
        optimizer.backward(model(x).sum())

    least_s(passes, 2, optimizer.step)
    return least_s(passes, rounds, optimizer.step)


def copy_s(numel: int) -> float:
    """Return the time that the copy of a chunk takes in main memory."""
    source, target = torch.ones(numel), torch.zeros(numel)
    return least_s(lambda: target.copy_(source), 20)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few layers and rounds, small chunks")
    parser.add_argument("--copy-ms", type=float, help="let each copy take so long")
    parser.add_argument("--compute-ms", type=float, help="let each layer take so long, in forward and in backward")
    options = parser.parse_args()
    torch.set_num_threads(1)
    layers, rounds, numel = (6, 5, 2**18) if options.quick else (12, 9, 2**21)
    compute_s = copy_s(numel) if options.copy_ms is None else options.copy_ms / 1e3
    if options.compute_ms is not None:
        compute_s = options.compute_ms / 1e3
    step_compute_s = plain_s(waiting_chain(layers, numel, compute_s), numel, rounds)
    table = Table(
        title=f"{layers} chunks of {numel * 4 / 2**20:g} MiB, compute {step_compute_s * 1e3:.1f} ms a step; exposed ms"
    )
    for heading in ("link", "max_prefetch", *(f"max_fetch {depth}" for depth in DEPTHS)):
        table.add_column(heading, justify="left" if heading == "link" else "right")
    with tempfile.TemporaryDirectory() as folder:
        for rest, settings in LINKS.items():
            for prefetch in (0, 1):
                cells = []
                for fetch in DEPTHS:
                    depths = {"max_prefetch": prefetch, "max_fetch": fetch}
                    model = wrapped_chain(layers, numel, compute_s, 1, offload_directory=folder, **settings, **depths)
                    if options.copy_ms is not None:
                        tier = model.chunk_manager.tier("disk" if rest == "disk" else "host")
                        tier.outgoing = SlowCopier(options.copy_ms / 1e3)
                        tier.incoming = SlowCopier(options.copy_ms / 1e3)
                    exposed_s = wrapped_s(model, numel, rounds) - step_compute_s
                    cells.append(f"{exposed_s * 1e3:.1f}")
                table.add_row(f"{rest}->device", str(prefetch), *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
