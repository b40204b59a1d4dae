"""The README's table of speed is what the benchmark writes: its columns, its systems, the machine's name."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from training_cases import WORKLOADS
from training_measure import Counted, Measured, read_row
from training_report import BEGIN, COLUMNS, END, geometric_mean, readme_table, targets, write_readme
from training_systems import SYSTEMS

README = Path(__file__).parents[1] / "README.md"
COUNTED = Counted(
    peak_bytes=9 * 2**20,
    model_peak_bytes=8 * 2**20,
    rest_bytes=7 * 2**20,
    collectives=9,
    sent_bytes=6e6,
    param_bytes=4_000_000,
    chunks=3,
    working_set_bytes=2**20,
)


def measured(system: str, case: str, ratio: float) -> Measured:
    return Measured(
        case=case,
        system=system,
        step_s=0.1,
        ratio=ratio,
        spread=0.01,
        host_s=0.1,
        page_faults=0.0,
        start_s=0.1,
        loss_difference=0.0,
        counted=COUNTED,
    )


RESULTS = [
    measured(system, case.name, ratio)
    for system, ratios in {"FSDP2": (2.0, 2.0, 2.0, 2.0), "ours ZeRO-3": (1.0, 1.0, 1.0, 1.5)}.items()
    for case, ratio in zip(WORKLOADS, ratios, strict=True)
]


def table_of(text: str) -> tuple[str, list[list[str]]]:
    """Return the line that names the machine, and the cells of each row but the one under the heading."""
    _, _, rest = text.partition(BEGIN)
    content, end, _ = rest.partition(END)
    assert end, f"There is no table between {BEGIN} and {END}."
    machine, *lines = content.strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return machine, [rows[0], *rows[2:]]


def test_readme_holds_a_table_as_the_benchmark_writes_it() -> None:
    machine, (columns, *rows) = table_of(README.read_text())
    assert re.fullmatch(r"Machine: .+, \d+ cores, \d+ GiB, torch \S+, gloo, one thread a rank\.", machine)
    assert tuple(columns) == COLUMNS
    assert [row[0] for row in rows] == list(SYSTEMS)
    numbers = r"\d+\.\d\d|—"
    for row in rows:
        assert len(row) == len(COLUMNS)
        assert all(re.fullmatch(numbers, cell) for cell in row[1:-2]), row
        assert all(re.fullmatch(r"\d+|—", cell) for cell in row[-2:]), row


def test_table_has_a_row_for_each_system_and_a_dash_for_what_was_not_measured() -> None:
    machine, (columns, *rows) = table_of(readme_table(RESULTS, "a machine"))
    assert machine == "Machine: a machine."
    assert tuple(columns) == COLUMNS
    cells = {row[0]: row[1:] for row in rows}
    assert list(cells) == list(SYSTEMS)
    assert cells["ours ZeRO-3"] == ["1.00", "1.00", "1.00", "1.50", "1.11", "8", "7"]
    assert cells["DDP"] == ["—"] * 7


def test_writing_the_readme_replaces_the_table_and_nothing_else(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_readme(readme, readme_table(RESULTS, "a machine"))
    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN}\nMachine: a machine.\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    readme.write_text("no table")
    with pytest.raises(ValueError, match="lacks the lines"):
        write_readme(readme, "")


def test_each_target_is_reached_missed_or_not_measured() -> None:
    verdicts = {target.what: target.verdict for target in targets(RESULTS)}
    assert verdicts["ZeRO-3, step over DDP's, mean"] == "reached"
    assert verdicts["ZeRO-3, step over FSDP2's, mean"] == "missed"
    assert verdicts["ZeRO-3, step over FSDP2's, worst"] == "missed"
    assert verdicts["ZeRO-3, bytes sent over 3P(N-1)/N, worst"] == "reached"
    assert verdicts["ZeRO-3, collectives over 3 per chunk + 1, worst"] == "reached"
    assert verdicts["ZeRO-2, step over DDP's, mean"] == "not measured"


def test_results_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "training.json"
    path.write_text(json.dumps([asdict(row) for row in RESULTS]))
    assert [read_row(row) for row in json.loads(path.read_text())] == RESULTS
    assert geometric_mean(RESULTS, "FSDP2", [case.name for case in WORKLOADS]) == pytest.approx(2.0)
