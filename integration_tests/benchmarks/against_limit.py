"""Measure a call beside what the machine could do at best, in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A measured call and its limit.

    Attributes:
        what: the call.
        size: of what it works on.
        taken_s: the least of several times: processor time, or by the clock where it waits for something else.
        limit: what it is measured against.
        limit_s: the least of several times of that.
    """

    what: str
    size: str
    taken_s: float
    limit: str
    limit_s: float


def beside(
    what: str,
    size: str,
    call: Callable[[], object],
    limit: str,
    limit_call: Callable[[], object],
    *,
    repeats: int = 9,
    before: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.process_time,
) -> Beside:
    """Measure a call and its limit in turns, so that both see the same machine.

    Args:
        what: the call.
        size: of what it works on.
        call: it.
        limit: what it is measured against.
        limit_call: that.
        repeats: how often each is measured; the least counts.
        before: what each of the calls needs before it; not measured.
        clock: seconds; by default those of the processor, which other programs change less.
    """
    taken, limits = [], []
    for _ in range(repeats):
        before()
        taken.append(_seconds(call, clock))
        limits.append(_seconds(limit_call, clock))
    return Beside(what=what, size=size, taken_s=min(taken), limit=limit, limit_s=min(limits))


def _seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    result = call()
    taken = clock() - start
    del result  # giving memory back is not measured
    return taken


def show(title: str, rows: Sequence[Beside]) -> None:
    """Print the table."""
    table = Table(title=title, title_justify="left")
    for column in ("what", "size", "ms", "limit", "limit ms", "ratio"):
        table.add_column(column, justify="left" if column in ("what", "limit") else "right")
    for row in rows:
        times = (f"{row.taken_s * 1e3:.2f}", row.limit, f"{row.limit_s * 1e3:.2f}", f"{row.taken_s / row.limit_s:.2f}")
        table.add_row(row.what, row.size, *times)
    Console(width=120).print(table)
