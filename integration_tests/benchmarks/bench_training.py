"""Train the same models with plain DDP, its peers and ours, and compare.

    nox -s bench
    nox -s bench -- --quick
    nox -s bench -- --write-readme

Systems are interleaved: each round, every system takes one step on the same batch, so that a drift of the machine meets
all of them. A ratio is the median over rounds of a step's time over that of DDP's in the same round. Bytes and
collectives come from profiled steps of a run that holds nothing else; *model* is the peak of a step on two tokens,
which has next to no activations. Nothing is asserted: the last table says which targets were reached.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from training_cases import ALL, QUICK, WORKLOADS
from training_measure import Measured, measure, read_row, why_missing
from training_report import MIB, geometric_mean, machine, readme_table, targets, write_readme
from training_systems import SYSTEMS

ROOT = Path(__file__).parents[2]


def show(console: Console, case: str, results: Sequence[Measured]) -> None:
    """Print the table of one case."""
    table = Table(title=case, title_justify="left")
    table.add_column("system", no_wrap=True)
    columns = ("step / DDP", "step ms", "host ms", "faults", "start s", "loss diff")
    for column in (*columns, "peak MiB", "model", "rest", "calls", "sent MiB"):
        table.add_column(column, justify="right")
    for row in results:
        cells = [f"{row.ratio:.2f} ± {row.spread:.2f}", f"{row.step_s * 1e3:.0f}", f"{row.host_s * 1e3:.0f}"]
        cells += [f"{row.page_faults:.0f}", f"{row.start_s:.2f}", f"{row.loss_difference:.0e}"]
        if (found := row.counted) is not None:
            held = (found.peak_bytes, found.model_peak_bytes, found.rest_bytes)
            cells += [*(f"{num_bytes / MIB:.0f}" for num_bytes in held)]
            cells += [f"{found.collectives:.0f}", f"{found.sent_bytes / MIB:.1f}"]
        table.add_row(row.system, *cells)
    console.print(table)


def show_targets(console: Console, results: Sequence[Measured]) -> None:
    """Print what was reached."""
    table = Table(title="targets", title_justify="left")
    for column in ("what", "at most", "measured", ""):
        table.add_column(column, justify="right" if column in ("at most", "measured") else "left")
    for target in targets(results):
        measured = "—" if target.measured is None else f"{target.measured:.3f}"
        table.add_row(target.what, f"{target.limit:.2f}", measured, target.verdict)
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


def main() -> None:
    """Measure, print and write ``training.json``, ``training.png`` and ``table.md``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="two workloads, few rounds: under three minutes")
    extent.add_argument("--workloads", action="store_true", help="the four workloads on two ranks in fp32")
    extent.add_argument("--from", dest="earlier", type=Path, help="measure nothing: report on this training.json")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), help="beside DDP")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for the results")
    parser.add_argument("--write-readme", action="store_true", help="put the table into the README")
    args = parser.parse_args()
    if args.write_readme and (args.quick or args.only):
        parser.error("--write-readme needs all four workloads.")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the ranks' profiler tells of each start and stop otherwise
    console = Console(width=160)
    if args.earlier is not None:
        earlier = json.loads(args.earlier.read_text())
        where, results = earlier["machine"], [read_row(row) for row in earlier["results"]]
    else:
        where, results = machine(), []
        cases = QUICK if args.quick else WORKLOADS if args.workloads else ALL
        console.print(where)
        cases = tuple(case for case in cases if args.only in case.name)
        systems = list(dict.fromkeys(["DDP", *args.systems]))
        missing = dict.fromkeys((name, why_missing(name, case)) for name, case in itertools.product(systems, cases))
        for name, reason in missing:
            if reason is not None:
                console.print(f"Not compared: {name} ({reason}).", markup=False)
        for case in cases:
            start = time.perf_counter()
            rows = measure(case, systems)
            show(console, f"{case.name}: {time.perf_counter() - start:.0f} s", rows)
            results += rows
    for system in SYSTEMS:
        mean = geometric_mean(results, system, [case.name for case in WORKLOADS])
        if mean is not None:
            console.print(f"geometric mean over workloads, {system}: {mean:.3f} x DDP")
    if not args.quick:
        show_targets(console, results)
    args.out.mkdir(parents=True, exist_ok=True)
    saved = {"machine": where, "results": [asdict(row) for row in results]}
    (args.out / "training.json").write_text(json.dumps(saved, indent=1))
    table = readme_table(results, where)
    (args.out / "table.md").write_text(table + "\n")
    plot(results, args.out / "training.png")
    if args.write_readme:
        write_readme(ROOT / "README.md", table)
    console.print(f"Written: training.json, training.png and table.md in {args.out}")


if __name__ == "__main__":
    main()
