"""How the host's cost of a step, and of wrapping, grows with modules, chunks, parameters and ranks.

    nox -s scaling

One quantity grows while the others stay. Shards rest on the host, so that each use of a chunk gathers it; processes of
other ranks are played by torch's fake process group, which moves nothing. Times are processor time. The exponent is
that of a power law, fitted over all sizes; the last is that between the two largest, where constants no longer count:
1 is linear, 0 is constant. Prints a table and writes a plot; asserts nothing.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench_overhead import Case
from gemini_booster.zero import GeminiDDP, GeminiOptimizer

WARM_UP = 3
ROUNDS = 7
RANKS = (2, 4, 16, 64, 256, 1024)


@dataclass(frozen=True, slots=True)
class Point:
    """Processor seconds at one size."""

    size: int
    wrap_s: float
    step_s: float


def one_rank(size: int, wrap: Callable[[], GeminiDDP], x: Tensor) -> Point:
    """Measure whole steps, the optimizer's included."""
    model, wrap_s = timed(wrap)
    optimizer = GeminiOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model)

    def step() -> None:
        optimizer.backward(model(x).sum())
        optimizer.step()

    return Point(size, wrap_s, least_s(step))


def many_ranks(size: int) -> Point:
    """Measure forward and backward of rank 0 among others that are not there; gradients are dropped."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        x = torch.ones(1, 32)
        plain = nn.Sequential(*(nn.Linear(32, 32) for _ in range(64)))
        model, wrap_s = timed(
            lambda: GeminiDDP(plain, precision="fp32", min_chunk_size_m=1 / 256, search_range_m=1 / 256, hidden_dim=32)
        )

        def step() -> None:
            model(x).sum().backward()
            model.zero_grad()

        # The control group of the wrapper is gloo's, for which the other ranks would have to be there.
        with mock.patch.object(dist, "new_group", return_value=dist.group.WORLD):
            return Point(size, wrap_s, least_s(step))
    finally:
        dist.destroy_process_group()


def timed(wrap: Callable[[], GeminiDDP]) -> tuple[GeminiDDP, float]:
    """Return a wrapped model and the processor time that it took."""
    gc.collect()  # else the last model goes while this one is made
    start = time.process_time()
    model = wrap()
    return model, time.process_time() - start


def least_s(step: Callable[[], None]) -> float:
    """Return the least processor time of a step, once it has settled."""
    taken = []
    for _ in range(WARM_UP + ROUNDS):
        start = time.process_time()
        step()
        taken.append(time.process_time() - start)
    return min(taken[WARM_UP:])


def with_modules(modules: int) -> Point:
    """Measure a longer chain in as many chunks."""
    return one_rank(modules, Case(modules=modules, chunks=8, offloaded=True).wrapped, torch.ones(1, 2))


def with_chunks(chunks: int) -> Point:
    """Measure the same chain in more chunks."""
    return one_rank(chunks, Case(modules=1024, chunks=chunks, offloaded=True).wrapped, torch.ones(1, 2))


def with_both(modules: int) -> Point:
    """Measure a longer chain in chunks of the same size: work for each pair of the two would show as a square."""
    return one_rank(modules, Case(modules=modules, chunks=modules // 2, offloaded=True).wrapped, torch.ones(1, 2))


def with_params(width: int) -> Point:
    """Measure wider layers, as many of them, in as many chunks."""
    plain = nn.Sequential(*(nn.Linear(width, width) for _ in range(16)))
    chunk_m = 2 * width * (width + 1) / 2**20

    def wrap() -> GeminiDDP:
        return GeminiDDP(
            plain,
            precision="fp32",
            offload_optim_frac=1.0,
            offload_param_frac=1.0,
            min_chunk_size_m=chunk_m,
            search_range_m=0,
            hidden_dim=1,
        )

    return one_rank(16 * width * (width + 1), wrap, torch.ones(1, width))


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the slope of a line through the logarithms, by least squares."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(s) for s in seconds]).slope


def measure() -> dict[str, list[Point]]:
    """Return the points of each quantity."""
    lengths = (64, 128, 256, 512, 1024)
    quantities: dict[str, tuple[Callable[[int], Point], Sequence[int]]] = {
        "modules": (with_modules, lengths),
        "chunks": (with_chunks, (8, 32, 128, 512, 1024)),
        "modules and chunks": (with_both, lengths),
        "parameters": (with_params, (64, 128, 256, 512, 1024)),
        "ranks": (many_ranks, RANKS),
    }
    return {name: [point(size) for size in sizes] for name, (point, sizes) in quantities.items()}


def show(curves: dict[str, list[Point]]) -> None:
    """Print sizes, times and exponents."""
    table = Table(title="processor time", title_justify="left")
    for column in ("against", "from", "to", "step ms", "exponent", "last", "wrap ms", "exponent", "last"):
        table.add_column(column, justify="left" if column == "against" else "right")
    for name, points in curves.items():
        sizes = [point.size for point in points]
        cells = []
        for seconds in ([point.step_s for point in points], [point.wrap_s for point in points]):
            cells += [f"{seconds[0] * 1e3:.1f} .. {seconds[-1] * 1e3:.1f}", f"{exponent(sizes, seconds):.2f}"]
            cells += [f"{exponent(sizes[-2:], seconds[-2:]):.2f}"]
        table.add_row(name, f"{sizes[0]:,}", f"{sizes[-1]:,}", *cells)
    Console(width=120).print(table)


def plot(curves: dict[str, list[Point]], path: Path) -> None:
    """Draw one plot for each quantity."""
    figure = Figure(figsize=(3.2 * len(curves), 3.4), layout="constrained")
    for axes, (name, points) in zip(figure.subplots(1, len(curves)), curves.items(), strict=True):
        sizes = [point.size for point in points]
        for label, seconds in (("step", [p.step_s for p in points]), ("wrapping", [p.wrap_s for p in points])):
            milliseconds = [s * 1e3 for s in seconds]
            axes.loglog(sizes, milliseconds, marker="o", label=f"{label}: exponent {exponent(sizes, seconds):.2f}")
        axes.set_xlabel(name)
        axes.set_ylabel("processor time, ms")
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the plot")
    out = parser.parse_args().out
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with_modules(64)  # what is imported and made once must not count
    curves = measure()
    show(curves)
    plot(curves, out / "scaling.png")


if __name__ == "__main__":
    main()
