"""Facts: on a terminal of 80 columns no cell of a list is cut or wrapped: the least important
columns are left out, the most important stay. With `-o wide` and in a pipe all columns are there.
"""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dlion_cli.commands.local.ls import _table
from dlion_cli.terminal.plain_table import plain_table
from dlion_cli.views.load_tables import load_tables
from dlion_cli.views.worker_load import JobLoad, WorkerLoad
from dlion_results.run_folder.listing import StoredRun, StoredState

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
RUNS = [
    StoredRun(
        Path(f"runs/digits-20260131-12040{place}"), state, command="simulate", job="digits",
        reason="ProgramFailed", is_resumable=True, accuracy=0.712, iteration=12_310,
        duration_s=4200.0, started_at=NOW, size_bytes=2_100_000, detail="why it ended " * 9,
    )
    for place, state in enumerate((StoredState.RUNNING, StoredState.FAILED))
]  # fmt: skip


def printed(table: Table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (500, "NAME COMMAND STATE ACCURACY ITERATIONS DURATION AGE SIZE"),
        (100, "NAME COMMAND STATE ACCURACY DURATION AGE"),
        (80, "NAME STATE ACCURACY AGE"),
        (30, "NAME STATE ACCURACY"),
    ],
)
def test_a_narrow_list_of_runs_keeps_the_columns_that_matter_most(width: int, titles: str) -> None:
    lines = printed(_table(RUNS, Path("runs"), NOW, wide=False), width)
    assert len(lines) == 1 + len(RUNS)
    assert lines[0].split() == titles.split() or width == 30
    if width >= 80:
        assert "failed (ProgramFailed), resumable" in lines[2]
        assert "…" not in "".join(lines)
        assert max(map(len, lines)) <= width


def test_a_wide_list_of_runs_has_all_columns() -> None:
    lines = printed(_table(RUNS, Path("runs"), NOW, wide=True), 500)
    assert lines[0].split()[-4:] == ["SIZE", "JOB", "STARTED", "DETAIL"]


def test_a_narrow_table_of_workers_keeps_their_rate_and_what_is_wrong() -> None:
    loads = {
        "": JobLoad([WorkerLoad("digits-0", "plant-a/large-0", 0, problem="no metrics " * 6)], [])
    }
    (narrow,), (piped,) = (load_tables(loads) for _ in range(2))
    lines = printed(narrow, 80)
    assert lines[0].split()[:2] == ["WORKER", "SAMPLES/S"]
    assert lines[0].endswith("NOTE")
    assert "…" not in "".join(lines)
    assert printed(piped, 500)[0].split()[1] == "RANK"


def test_a_long_name_is_cut_before_columns_are_left_out() -> None:
    name = "a-long-name-" * 8
    long = [replace(each, path=Path("runs") / name, reason="") for each in RUNS]
    lines = printed(_table(long, Path("runs"), NOW, wide=False), 80)
    assert lines[0].split() == ["NAME", "STATE", "ACCURACY", "AGE"]
    for line in lines[1:]:
        assert line.startswith(name[:40])
        assert line.count("…") == 1
        assert "71.2" in line
    assert name in printed(_table(long, Path("runs"), NOW, wide=False), 500)[1]


def test_no_cell_is_measured_twice() -> None:
    measured: list[str] = []

    class MeasuredText(Text):
        def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
            measured.append(self.plain)
            return super().__rich_measure__(console, options)

    table = plain_table("NAME", "STATE", "AGE", "SIZE", left_out=("SIZE", "AGE", "STATE"))
    cells = ["a" * 10, "b" * 10, "c" * 10, "d" * 10]
    table.add_row(*map(MeasuredText, cells))
    assert printed(table, 24)[0].split() == ["NAME", "STATE"]
    assert sorted(measured) == cells


def test_a_table_is_whole_again_where_there_is_room() -> None:
    table = plain_table("NAME", "LEAST", left_out=("LEAST", "unknown"))
    table.add_row("a" * 10, "b" * 10)
    widths = (12, 80, 12)
    assert [printed(table, width)[0].split() for width in widths] == [
        ["NAME"], ["NAME", "LEAST"], ["NAME"],
    ]  # fmt: skip
