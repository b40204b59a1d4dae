"""What the measurements say: the README's table, and each target beside what was reached."""

from __future__ import annotations

import os
import platform
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from training_cases import BF16, ONE_RANK, WORKLOADS
from training_measure import Counted, Measured
from training_systems import SYSTEMS

MIB = 2**20
OURS, ZERO_2, PEER = "ours ZeRO-3", "ours ZeRO-2", "FSDP2"
LARGEST = WORKLOADS[-1].name
COLUMNS = ("system", *(case.name for case in WORKLOADS), "geometric mean", "peak MiB", "rest MiB")
BEGIN = "<!-- table of nox -s bench -- --write-readme -->"
END = "<!-- end of table -->"


def machine() -> str:
    """Name the machine in one line."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    name = platform.machine() if model is None else model[1]
    return f"{name}, {os.cpu_count()} cores, {gib:.0f} GiB, torch {torch.__version__}, gloo, one thread a rank"


def geometric_mean(results: Sequence[Measured], system: str, cases: Iterable[str]) -> float | None:
    """Return a system's mean step time over DDP's, or None if it was not measured in all of the cases."""
    ratios = [None if (row := _row(results, system, case)) is None else row.ratio for case in cases]
    present = [ratio for ratio in ratios if ratio is not None]
    return statistics.geometric_mean(present) if len(present) == len(ratios) else None


def readme_table(results: Sequence[Measured], machine_line: str) -> str:
    """Return the README's table, markers included; what was not measured is a dash."""
    names = [case.name for case in WORKLOADS]
    rows = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1))]
    for system in SYSTEMS:
        measured = [_row(results, system, name) for name in names]
        ratios = [None if row is None else row.ratio for row in measured]
        cells = [
            "—" if ratio is None else f"{ratio:.2f}" for ratio in (*ratios, geometric_mean(results, system, names))
        ]
        counted = None if measured[-1] is None else measured[-1].counted
        held = (0, 0) if counted is None else (counted.model_peak_bytes, counted.rest_bytes)
        cells += [f"{num_bytes / MIB:.0f}" if num_bytes else "—" for num_bytes in held]
        rows.append((system, *cells))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([BEGIN, f"Machine: {machine_line}.", "", *lines, END])


def write_readme(readme: Path, table: str) -> None:
    """Put the table into the README, in place of the one that is there."""
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme} lacks the lines {BEGIN!r} and {END!r}, between which the table belongs.")
    readme.write_text(before + table + after)


def _row(results: Sequence[Measured], system: str, case: str) -> Measured | None:
    return next((row for row in results if row.system == system and row.case == case), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What must be reached.

    Attributes:
        what: the quantity.
        limit: what it may be at most.
        measured: what it is; None if what it needs was not measured.
    """

    what: str
    limit: float
    measured: float | None

    @property
    def verdict(self) -> str:
        """Whether it was reached."""
        if self.measured is None:
            return "not measured"
        return "reached" if self.measured <= self.limit else "missed"


def targets(results: Sequence[Measured]) -> list[Target]:
    """Return each target with its value: means over the four workloads on two ranks in fp32, or the worst of them."""
    names = [case.name for case in WORKLOADS]
    one_rank = [case.name for case in ONE_RANK]
    bf16 = [case.name for case in BF16]
    fp32 = names[: len(bf16)]

    def mean(system: str, cases: Iterable[str] = names) -> float | None:
        return geometric_mean(results, system, cases)

    counted = {(row.system, row.case): row.counted for row in results if row.counted is not None and row.case in names}

    def worst(of: Callable[[Counted], float], system: str = OURS) -> float | None:
        return max((of(found) for (name, _), found in counted.items() if name == system), default=None)

    def slowest_over(peer: str) -> float | None:
        ours, others = (ratios_of(system) for system in (OURS, peer))
        return max((ours[name] / others[name] for name in ours.keys() & others.keys()), default=None)

    def ratios_of(system: str) -> dict[str, float]:
        return {row.case: row.ratio for row in results if row.system == system and row.case in names}

    def traffic(gathers: int) -> Callable[[Counted], float]:
        # A rank sends the half of the parameters that the other one lacks, once for each gather and once to reduce.
        # Less is possible: what is still gathered from forward is not gathered again for backward.
        return lambda found: found.sent_bytes / ((gathers + 1) * found.param_bytes / 2)

    peers = [(PEER, 0.70), *((system, 1.00) for system in SYSTEMS if system.startswith("DeepSpeed"))]
    return [
        Target(what="ZeRO-3, step over DDP's, mean", limit=1.15, measured=mean(OURS)),
        Target(what="ZeRO-3, step over FSDP2's, mean", limit=0.52, measured=_over(mean(OURS), mean(PEER))),
        *(
            Target(what=f"ZeRO-3, step over {peer}'s, worst", limit=limit, measured=slowest_over(peer))
            for peer, limit in peers
        ),
        Target(what="ZeRO-2, step over DDP's, mean", limit=1.00, measured=mean(ZERO_2)),
        Target(what="one rank, step over plain PyTorch's, mean", limit=1.03, measured=mean(OURS, one_rank)),
        Target(
            what="bf16: ZeRO-3's step over DDP's, over the same in fp32",
            limit=1.00,
            measured=_over(mean(OURS, bf16), mean(OURS, fp32)),
        ),
        Target(
            what="ZeRO-3, peak model data over FSDP2's, worst",
            limit=0.97,
            measured=max(
                (
                    counted[OURS, name].model_peak_bytes / counted[PEER, name].model_peak_bytes
                    for name in names
                    if (OURS, name) in counted and (PEER, name) in counted
                ),
                default=None,
            ),
        ),
        Target(
            what="ZeRO-3, peak model data over states / ranks + working set, worst",
            limit=1.05,
            measured=worst(lambda found: found.model_peak_bytes / (_states(found) + found.working_set_bytes)),
        ),
        Target(
            what="ZeRO-3, at rest over states / ranks, worst",
            limit=1.02,
            measured=worst(lambda found: found.rest_bytes / _states(found)),
        ),
        Target(
            what="ZeRO-3, at rest over the same without gradients, worst",
            limit=1.02,
            measured=worst(lambda found: found.rest_bytes / (_states(found) - found.param_bytes / 2)),
        ),
        Target(what="ZeRO-3, bytes sent over 3P(N-1)/N, worst", limit=1.001, measured=worst(traffic(2))),
        Target(what="ZeRO-2, bytes sent over 2P(N-1)/N, worst", limit=1.001, measured=worst(traffic(1), ZERO_2)),
        Target(
            what="ZeRO-3, collectives over 3 per chunk + 1, worst",
            limit=1.0,
            measured=worst(lambda found: found.collectives / (3 * found.chunks + 1)),
        ),
    ]


def _states(found: Counted) -> float:
    """Return a rank's share of parameters, gradients and two moments in fp32, of two ranks."""
    return 4 * found.param_bytes / 2


def _over(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value / other
