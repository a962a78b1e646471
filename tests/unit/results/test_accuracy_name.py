"""Facts: R² of targets has that name wherever people read it: the table, the live view, the list of
runs, the report with its picture, and a job in Python. Runs of both kinds side by side, records of
older releases and any other name have "accuracy".

Leaves out: who names it R² (tests/unit/worker/training/test_scoring.py).
"""

from __future__ import annotations

import dataclasses
import io
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from dlion.live_display import job_line
from dlion.result_reader import ResultReader
from dlion_api.protocol.progress import R_SQUARED, EvaluationRecord
from dlion_cli.__main__ import main
from dlion_cli.terminal.table import print_result
from dlion_cli.views.live_view import LiveView
from dlion_results.report import curve_charts, progress_charts
from dlion_results.report.headline import headline
from dlion_results.report.page import render
from dlion_results.report.runs import LoadedRun, load_run
from dlion_results.report.tiles import tiles
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.summary.summary import Ending
from synthetic_run import Story, description, records

STORY = Story(workers=2, seconds=20.0, killed=None)
JOB = description(STORY, target=None)
NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def named(name: str) -> list[object]:
    return [
        dataclasses.replace(each, accuracy_name=name, class_accuracy=())
        if isinstance(each, EvaluationRecord) else each
        for each in records(STORY)
    ]  # fmt: skip


def make(path: Path, name: str, *, ends: bool = True) -> LoadedRun:
    with ResultFolder.create(path, JOB, now=NOW) as folder:
        for record in named(name):
            folder.append(record)
        if ends:
            folder.finish(Ending("maxSeconds"))
    return load_run(path, path.name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    return make(tmp_path_factory.mktemp("of") / "targets", R_SQUARED)


def test_the_table_and_the_report_have_its_name(run: LoadedRun) -> None:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    print_result(console, run.summary, folder=Path("runs/a"))
    printed = console.file.getvalue()
    assert "R²" in printed
    assert "accuracy" not in printed
    assert headline([run]).count("R²") == 1
    assert tiles([run])[0].name == "R²"
    chart = curve_charts.accuracy_over_time([run])
    assert (chart.title, chart.spec["label"]) == ("R² over time", "R², %")
    assert curve_charts.accuracy_over_bytes([run]).title == "R² over bytes sent"
    assert progress_charts.accuracy_against_time([run]).title == "R² against time"
    assert '<th scope="col">R²</th>' in render([run])


def test_the_live_view_has_its_name() -> None:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    view = LiveView(JOB, console, clock=lambda: 0.0)
    for record in named(R_SQUARED):
        view.update(record)
    assert ", R² " in view.line()
    console.print(view.render())
    shown = console.file.getvalue()
    assert shown.count("R²") == 2  # above the table and in its head
    assert "accuracy" not in shown


@pytest.mark.parametrize("ends", [True, False])
def test_the_list_of_runs_and_a_job_in_python_have_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ends: bool
) -> None:
    make(tmp_path / "run", R_SQUARED, ends=ends)
    assert main(["ls", str(tmp_path)]) == 0
    assert " R² " in capsys.readouterr().out
    job = ResultReader(tmp_path / "run").read(with_curve=True)
    assert ", R² " in job_line(job)
    assert ">R²<" in job._repr_html_()


@pytest.mark.parametrize("name", ["", "$\\frac$<b>", "x" * 4096])
def test_any_other_name_and_none_is_accuracy(tmp_path: Path, run: LoadedRun, name: str) -> None:
    other = make(tmp_path / "other", name)
    assert other.summary["accuracy"]["name"] == "accuracy"
    assert tiles([other])[0].name == tiles([run, other])[0].name == "Accuracy"
