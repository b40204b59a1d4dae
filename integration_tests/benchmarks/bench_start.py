"""What it takes until training can start: filling a lazy model, wrapping a model, importing.

    python integration_tests/benchmarks/bench_start.py

Lazy values are measured against making them eagerly and, where they are constants, against a copy into new memory;
wrapping against twice a copy of the model's bytes and 5 ms for 100 modules; importing against 0.3 s beyond torch's.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import torch
from torch import nn

from against_limit import Beside, beside, show
from gemini_booster.zero import GeminiDDP
from gemini_lazy import LazyInitContext, materialize_value
from training_cases import WORKLOADS

MIB = 2**20
IMPORT_S = 0.3
IMPORT = "import time, torch; start = time.perf_counter(); import gemini_booster; print(time.perf_counter() - start)"


class Constants(nn.Module):
    """Parameters that are filled with a constant."""

    def __init__(self, layers: int, numel: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.ones(numel)) for _ in range(layers))


def linears(layers: int, width: int) -> nn.Module:
    """Return linear layers with torch's own random values."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of a model's parameters."""
    return sum(param.nbytes for param in model.parameters())


def fill(what: str, build: Callable[[], nn.Module]) -> list[Beside]:
    """Measure making the values of a lazy model one after the other, none of which is kept."""
    with LazyInitContext():
        lazy = build()
    params = list(lazy.parameters())
    sources = [torch.ones(param.shape) for param in params]

    def stream() -> None:
        for param in params:
            materialize_value(param)

    def copy() -> None:
        for source in sources:
            source.clone()

    size = f"{bytes_of(lazy) / MIB:.0f} MiB"
    return [
        beside(what, size, stream, "copy into new memory", copy, repeats=5),
        beside(what, size, stream, "eager construction", build, repeats=3),
    ]


def wrap(what: str, build: Callable[[], nn.Module], chunk_m: float) -> Beside:
    """Measure wrapping a model that has its values."""
    fresh = [build()]
    modules, num_bytes = len(list(fresh[0].modules())), bytes_of(fresh[0])
    source = torch.ones(num_bytes // 4)
    target = torch.ones_like(source)
    row = beside(
        what,
        f"{num_bytes / MIB:.0f} MiB, {modules} modules",
        lambda: GeminiDDP(fresh.pop(), precision="fp32", min_chunk_size_m=chunk_m, search_range_m=chunk_m),
        "2 x copy + 5 ms per 100 modules",
        lambda: target.copy_(source),
        repeats=5,
        before=lambda: fresh.append(build()),
    )
    limit_s = 2 * row.limit_s + 5e-3 * modules / 100
    return Beside(what=row.what, size=row.size, taken_s=row.taken_s, limit=row.limit, limit_s=limit_s)


def importing() -> Beside:
    """Measure the import in processes of their own."""
    taken = [
        float(subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    ]
    return Beside(what="import gemini_booster", size="", taken_s=min(taken), limit="target", limit_s=IMPORT_S)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rows = [
        *fill("materialise, constants", lambda: Constants(64, MIB // 4)),
        *fill("materialise, random values", lambda: linears(16, 1024)),
        *fill("materialise, small random values", lambda: linears(1024, 16)),
        wrap("wrap, small layers", lambda: linears(1024, 16), 0.0625),
        wrap("wrap, large layers", lambda: linears(64, 1024), 4.0),
        *(wrap(f"wrap, {case.name}", case.model, case.chunk_m) for case in WORKLOADS),
        importing(),
    ]
    show("start", rows)


if __name__ == "__main__":
    main()
