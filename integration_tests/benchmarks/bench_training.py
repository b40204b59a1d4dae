"""Train the same models with plain DDP, its peers and ours, and compare.

    nox -s bench
    nox -s bench -- --quick

Systems are interleaved: each round, every system takes one step on the same batch, so that a drift of the machine meets
all of them. A ratio is the median over rounds of a step's time over that of DDP's in the same round. Bytes and
collectives come from one profiled step of a run that holds nothing else. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import resource
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from ranks import run_ranks
from training_cases import ALL, LEARNING_RATE, QUICK, WORKLOADS, Case, loss_of
from training_systems import SYSTEMS, Step, why_missing

MIB = 2**20
_WARM_UP = 3  # the first step plans, the second still allocates
_CHECKED_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one system did in one case; of rank 0, and of the steps after the warm-up.

    Attributes:
        case: name of the case.
        system: name of the system.
        step_s: median time of a step.
        ratio: median over rounds of the time over DDP's in the same round.
        spread: half the distance between the quartiles of that.
        host_s: processor time of a step, of all threads of the process.
        page_faults: pages that a step touched first.
        start_s: time to build the model and wrap it.
        loss_difference: largest over the first steps, to one process in fp32 that has all ranks' batches.
        peak_bytes: most bytes that the process's allocators held during a step, activations included.
        rest_bytes: bytes held between steps.
        collectives: started in a step; transfers to every other rank count as one.
        sent_bytes: sent by this rank in a step.
    """

    case: str
    system: str
    step_s: float
    ratio: float
    spread: float
    host_s: float
    page_faults: float
    start_s: float
    loss_difference: float
    peak_bytes: int
    rest_bytes: int
    collectives: float
    sent_bytes: float


@dataclass(slots=True)
class _Times:
    step_s: list[float]
    host_s: list[float]
    faults: list[int]
    losses: list[float]
    start_s: float


def _take_times(rank: int, world_size: int, case: Case, systems: Sequence[str]) -> dict[str, _Times]:
    """Step all systems in turns; runs on every rank."""
    warnings.simplefilter("ignore")
    steps: dict[str, Step] = {}
    times: dict[str, _Times] = {}
    for name in systems:
        start = time.perf_counter()
        steps[name] = SYSTEMS[name](case)
        times[name] = _Times([], [], [], [], time.perf_counter() - start)
    for index in range(_WARM_UP + case.rounds):
        ids = case.batch(rank, index)
        # Every round starts with another system: each has its turn behind the one that leaves most in the caches.
        turn = index % len(systems)
        for name in (*systems[turn:], *systems[:turn]):
            dist.barrier()
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            start, host = time.perf_counter(), time.process_time()
            loss = steps[name](ids)
            dist.barrier()
            taken = times[name]
            taken.step_s.append(time.perf_counter() - start)
            taken.host_s.append(time.process_time() - host)
            taken.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
            if index < _CHECKED_STEPS:
                mean = loss.clone()
                dist.all_reduce(mean)
                taken.losses.append(float(mean) / world_size)
    return times


def _reference_losses(rank: int, world_size: int, case: Case) -> list[float]:
    """Train in one process in fp32 on the batches of all ranks; runs on one rank."""
    del rank, world_size
    warnings.simplefilter("ignore")
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    losses = []
    for index in range(_CHECKED_STEPS):
        loss = loss_of(model, torch.cat([case.batch(rank, index) for rank in range(case.world_size)]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@dataclass(frozen=True, slots=True)
class _Bytes:
    peak: int
    rest: int
    collectives: float
    sent: float


def _take_bytes(rank: int, world_size: int, case: Case, system: str) -> _Bytes:
    """Run one system alone, with every allocation recorded; runs on every rank."""
    warnings.simplefilter("ignore")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as building:
        step = SYSTEMS[system](case)
        for index in range(_WARM_UP):
            step(case.batch(rank, index))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as stepping:
        step(case.batch(rank, _WARM_UP))
    rest = sum(_allocations(building))
    held = peak = rest
    for num_bytes in _allocations(stepping):
        held += num_bytes
        peak = max(peak, held)
    sent = [_sent(event, world_size) for event in _events(stepping) if event.name().startswith("gloo:")]
    return _Bytes(peak, held, sum(count for count, _ in sent), sum(num_bytes for _, num_bytes in sent))


def _events(profiled: profile) -> list[torch._C._autograd._KinetoEvent]:
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    return profiled.profiler.kineto_results.events()


def _allocations(profiled: profile) -> list[int]:
    # torch's stubs do not know of nbytes.
    return [int(getattr(event, "nbytes")()) for event in _events(profiled) if event.name() == "[memory]"]  # noqa: B009


def _sent(event: torch._C._autograd._KinetoEvent, world_size: int) -> tuple[float, float]:
    """Return how many collectives an operation of gloo is, and the bytes that this rank must send for it."""
    operation = event.name().removeprefix("gloo:")
    itemsize = {"double": 8, "long": 8, "float": 4, "int": 4, "bfloat16": 2, "half": 2}
    sizes = zip(event.shapes(), event.dtypes(), strict=True)
    num_bytes = sum(math.prod(shape) * itemsize.get(str(dtype), 1) for shape, dtype in sizes)
    others = world_size - 1
    if operation == "send":
        return 1 / others, num_bytes
    if operation in ("recv", "barrier"):
        return 0.0, 0.0
    share = {"all_reduce": 2 * others / world_size, "all_gather": others}
    return 1.0, num_bytes * share.get(operation, others / world_size)


def measure(case: Case, systems: Sequence[str]) -> list[Measured]:
    """Return what each system did in one case."""
    present = [name for name in systems if why_missing(name, case) is None]
    times: dict[str, _Times] = run_ranks(_take_times, case.world_size, case, present, timeout_s=900.0)[0]
    losses: list[float] = run_ranks(_reference_losses, 1, case, timeout_s=300.0)[0]
    results = []
    for name in present:
        taken = times[name]
        rounds = zip(taken.step_s[_WARM_UP:], times["DDP"].step_s[_WARM_UP:], strict=True)
        ratios = sorted(own / ddp for own, ddp in rounds)
        quartiles = statistics.quantiles(ratios, n=4)
        counted: _Bytes = run_ranks(_take_bytes, case.world_size, case, name, timeout_s=300.0)[0]
        results.append(
            Measured(
                case=case.name,
                system=name,
                step_s=statistics.median(taken.step_s[_WARM_UP:]),
                ratio=statistics.median(ratios),
                spread=(quartiles[2] - quartiles[0]) / 2,
                host_s=statistics.median(taken.host_s[_WARM_UP:]),
                page_faults=statistics.median(taken.faults[_WARM_UP:]),
                start_s=taken.start_s,
                loss_difference=max(abs(own - wanted) for own, wanted in zip(taken.losses, losses, strict=True)),
                peak_bytes=counted.peak,
                rest_bytes=counted.rest,
                collectives=counted.collectives,
                sent_bytes=counted.sent,
            )
        )
    return results


def show(console: Console, case: str, results: Sequence[Measured]) -> None:
    """Print the table of one case."""
    table = Table(title=case, title_justify="left")
    table.add_column("system")
    columns = ("step / DDP", "step ms", "host ms", "page faults", "peak MiB", "rest MiB", "collectives", "sent MiB")
    for column in (*columns, "start s", "loss diff"):
        table.add_column(column, justify="right")
    for row in results:
        table.add_row(
            row.system,
            f"{row.ratio:.2f} ± {row.spread:.2f}",
            f"{row.step_s * 1e3:.0f}",
            f"{row.host_s * 1e3:.0f}",
            f"{row.page_faults:.0f}",
            f"{row.peak_bytes / MIB:.0f}",
            f"{row.rest_bytes / MIB:.0f}",
            f"{row.collectives:.0f}",
            f"{row.sent_bytes / MIB:.1f}",
            f"{row.start_s:.2f}",
            f"{row.loss_difference:.0e}",
        )
    console.print(table)


def plot(results: Sequence[Measured], path: Path) -> None:
    """Draw step times over DDP's, one group of bars for each case."""
    cases = list(dict.fromkeys(row.case for row in results))
    systems = list(dict.fromkeys(row.system for row in results))
    figure = Figure(figsize=(2 + 1.8 * len(cases), 5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(systems)
    for offset, system in enumerate(systems):
        rows = [row for row in results if row.system == system]
        places = [cases.index(row.case) + (offset - len(systems) / 2 + 0.5) * width for row in rows]
        axes.bar(places, [row.ratio for row in rows], width, yerr=[row.spread for row in rows], label=system)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(cases)), cases, rotation=20, ha="right")
    axes.set_ylabel("step time over DDP's")
    axes.legend(ncols=2)
    figure.savefig(path, dpi=120)


def geometric_means(results: Sequence[Measured]) -> dict[str, float]:
    """Return each system's mean step time over DDP's, over the four workloads on two ranks in fp32."""
    names = {case.name for case in WORKLOADS}
    ratios: dict[str, list[float]] = {}
    for row in results:
        if row.case in names:
            ratios.setdefault(row.system, []).append(row.ratio)
    return {system: statistics.geometric_mean(values) for system, values in ratios.items()}


def main() -> None:
    """Measure, print and write ``training.json`` and ``training.png``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two workloads, few rounds: under three minutes")
    parser.add_argument("--workloads", action="store_true", help="the four workloads on two ranks in fp32")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), help="beside DDP")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the results")
    args = parser.parse_args()
    cases = [case for case in (QUICK if args.quick else WORKLOADS if args.workloads else ALL) if args.only in case.name]
    systems = list(dict.fromkeys(["DDP", *args.systems]))
    console = Console(width=150)
    console.print(f"{platform.machine()}, torch {torch.__version__}, gloo, one thread a rank")
    missing = {(name, why_missing(name, case)): None for name, case in itertools.product(systems, cases)}
    for name, reason in missing:
        if reason is not None:
            console.print(f"Not compared: {name} ({reason}).")
    results: list[Measured] = []
    for case in cases:
        rows = measure(case, systems)
        show(console, case.name, rows)
        results += rows
    for system, mean in geometric_means(results).items():
        console.print(f"geometric mean over workloads, {system}: {mean:.3f} x DDP")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "training.json").write_text(json.dumps([asdict(row) for row in results], indent=1))
    plot(results, args.out / "training.png")
    console.print(f"Written: {args.out / 'training.json'}, {args.out / 'training.png'}")


if __name__ == "__main__":
    main()
