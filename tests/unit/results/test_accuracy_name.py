"""Facts: R² of targets has that name, and is a number without per cent, wherever people read it:
the table, the live view, the list of runs, the report with its picture, a comparison, the status of
a job in a cluster, and a job in Python with its data frame. Runs of both kinds side by side,
records of older releases and any other name have "accuracy".

Leaves out: who names it R² (tests/unit/worker/training/test_scoring.py).
"""

from __future__ import annotations

import dataclasses
import io
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from dlion.live_display import job_line
from dlion.metrics import metrics_frame
from dlion.result_reader import ResultReader
from dlion_api.document import to_document
from dlion_api.protocol.progress import EvaluationRecord
from dlion_api.status_names import ACCURACY, R_SQUARED
from dlion_cli.__main__ import main
from dlion_cli.comparison.comparison_matrix import Matrix
from dlion_cli.comparison.comparison_table import against_table, comparison_table
from dlion_cli.terminal.table import print_result
from dlion_cli.views.job_status import JobStatus
from dlion_cli.views.job_tables import figures_line, list_table
from dlion_cli.views.live_view import LiveView
from dlion_operator.served_runs.progress import RunProgress
from dlion_results.comparison import (
    Goal,
    VariantRow,
    VariantRun,
    accuracy_name_of,
    relative_result,
    variant_run,
    verdict,
)
from dlion_results.report import curve_charts, progress_charts
from dlion_results.report.comparison_picture import comparison_picture
from dlion_results.report.headline import headline
from dlion_results.report.page import render
from dlion_results.report.runs import LoadedRun, load_run
from dlion_results.report.tiles import tiles
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.summary.accuracy_name import accuracy_text
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


def make(
    path: Path,
    name: str,
    *,
    ends: bool = True,
    between: tuple[float, float] | None = None,
    target: float | None = None,
) -> LoadedRun:
    """A run; `between`: its first and last accuracy, in place of the story's."""
    with ResultFolder.create(path, description(STORY, target=target), now=NOW) as folder:
        for record in named(name):
            if between is not None and isinstance(record, EvaluationRecord):
                done = record.time_s / STORY.seconds
                accuracy = between[0] + done * (between[1] - between[0])
                record = dataclasses.replace(record, accuracy=accuracy)
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
    assert re.search(r"│ +0\.\d\d │", printed)
    assert headline([run]).count("R²") == 1
    assert re.search(r"R² 0\.\d\d on average \(0\.\d\d to 0\.\d\d\)", headline([run]))
    assert re.fullmatch(r"0\.\d\d", tiles([run])[0].values[0].text)
    assert tiles([run])[0].name == "R²"
    chart = curve_charts.accuracy_over_time([run])
    assert (chart.title, chart.spec["label"]) == ("R² over time", "R²")
    assert chart.spec["y"] == "number"
    assert re.search(r"mean ends at 0\.\d\d", chart.alt)
    assert curve_charts.accuracy_over_bytes([run]).title == "R² over bytes sent"
    assert progress_charts.accuracy_against_time([run]).title == "R² against time"
    assert '<th scope="col">R²</th>' in render([run])


def ticks_and_heights(svg: str) -> dict[float, float]:
    """The heights at which a chart has the numbers of its vertical axis."""
    axis = svg[svg.index('id="matplotlib.axis_2"') :]
    found = re.findall(r'<text [^>]*?y="([0-9.]+)"[^>]*>(\u2212?[0-9.]+)</text>', axis)
    return {float(text.replace("\u2212", "-")): -float(y) for y, text in found}


@pytest.mark.parametrize(
    ("between", "target"), [((-3.0, -0.4), None), ((-3.0, 0.5), 0.9), ((0.1, 0.5), 0.9)]
)
def test_charts_of_it_have_all_values_and_the_target(
    tmp_path: Path, between: tuple[float, float], target: float | None
) -> None:
    run = make(tmp_path / "run", R_SQUARED, between=between, target=target)
    for chart in (curve_charts.accuracy_over_time([run]), curve_charts.accuracy_over_bytes([run])):
        values = [y for one in chart.spec["series"] for y in one["y"]] + [target or 0.0]
        assert chart.spec["bottom"] <= min(values) < max(values) <= chart.spec["top"]
    ticks = ticks_and_heights(progress_charts.accuracy_against_time([run]).svg)
    assert len(ticks) >= 3
    assert [*ticks] == sorted(ticks, key=ticks.__getitem__) == sorted(ticks)
    assert min(ticks) <= min(0.0, between[0] + 0.5)
    assert max(ticks) >= max(0.0, (target or 0.0) - 0.5)


@pytest.mark.parametrize(
    ("value", "number", "share"),
    [(-0.001, "0.00", "-0.1 %"), (-1e-6, "0.00", "0.0 %"), (-1e30, "-1e+30", "-1e+32 %"),
     (float("nan"), "—", "—"), (float("-inf"), "—", "—"), (-2.504, "-2.50", "-250.4 %")],
)  # fmt: skip
def test_the_table_and_the_report_spell_a_value_alike(
    run: LoadedRun, value: float, number: str, share: str
) -> None:
    assert (accuracy_text(value, R_SQUARED), accuracy_text(value, ACCURACY)) == (number, share)
    accuracy = {**run.summary["accuracy"], "mean": value}
    found = dataclasses.replace(run, summary={**run.summary, "accuracy": accuracy})
    assert tiles([found])[0].values[0].text == number
    assert f"R² {number} on average" in headline([found])
    assert f"<td>{number}</td>" in render([found, found])


def test_the_live_view_has_its_name() -> None:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    view = LiveView(JOB, console, clock=lambda: 0.0)
    for record in named(R_SQUARED):
        view.update(record)
    assert re.search(r", R² 0\.\d\d \(0\.\d\d to 0\.\d\d\)", view.line())
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
    assert re.search(r" R² 0\.\d\d ", capsys.readouterr().out)
    job = ResultReader(tmp_path / "run").read(with_curve=True)
    assert re.search(r", R² 0\.\d\d$", job_line(job))
    html = job._repr_html_()
    assert re.search(r">R²</th><td style='text-align:left'>0\.\d\d<", html)
    assert "aria-label='R², 0 to 1," in html
    assert "accuracy" not in html


@pytest.mark.parametrize(("name", "column"), [(R_SQUARED, "R²"), ("", "accuracy")])
def test_the_column_of_a_data_frame_has_its_name(name: str, column: str) -> None:
    pytest.importorskip("pandas")
    frame = metrics_frame(JOB, named(name))
    assert [each for each in ("R²", "accuracy") if each in frame] == [column]
    assert frame[column].dropna().between(0, 1).all()
    assert frame[column].notna().any()


def test_a_job_of_a_cluster_has_its_name() -> None:
    progress = RunProgress(JOB)
    for record in named(R_SQUARED):
        progress.take(record)
    trainer = progress.trainer_status("2026-01-31T12:00:00Z")
    assert trainer is not None
    status = JobStatus({"status": {"trainerStatus": to_document(trainer)}})
    value = status.metrics["accuracy"]
    assert 0 <= float(value) <= 1
    assert f"R² {value}" in figures_line(status)
    assert "accuracy" not in figures_line(status)
    table = list_table([status], NOW, wide=True, everywhere=False)
    assert f"R² {value}" in [str(cell) for column in table.columns for cell in column.cells]


@pytest.mark.parametrize("name", ["", "r2", 7, None, "R" * 128])
def test_a_job_of_a_cluster_with_another_name_has_an_accuracy(name: object) -> None:
    metrics = [{"name": "accuracy", "value": "0.5"}]
    status = JobStatus({"status": {"trainerStatus": {"metrics": metrics, "accuracyName": name}}})
    assert status.accuracy_name == ACCURACY
    assert "accuracy 0.5" in figures_line(status)


def compared(name: str, *accuracies: float) -> tuple[VariantRow, ...]:
    def figures(accuracy: float) -> VariantRun:
        known = (accuracy, accuracy, accuracy)
        return VariantRun(1, None, None, *known, 0.0, 1e6, 0.5, accuracy_name=name)

    return tuple(
        VariantRow("homo-b", f"column-{place}", 0.1, (figures(accuracy),))
        for place, accuracy in enumerate(accuracies)
    )


def test_a_comparison_has_its_name(run: LoadedRun) -> None:
    assert variant_run(run, Goal(0.8, 20.0), seed=1).accuracy_name == R_SQUARED
    goal, rows = Goal(0.9, 20.0), compared(R_SQUARED, 0.83, 0.71)
    judged = verdict(rows, goal)
    assert judged is not None
    assert judged.text == (
        "no column reaches R² 0.9; column-0 has the highest R²: 0.12 above column-1"
    )
    matrix = Matrix(
        file=Path("job.yaml"), variants=(), environments=("homo-b",), assignments=(), seeds=(1,),
        learning_rates=(0.1,), target_accuracy=0.9, seconds=20,
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(comparison_table("homo-b", rows, matrix, ideal="none"))
    console.print(against_table("column-0", [relative_result(*rows, goal)], R_SQUARED))
    shown = console.file.getvalue()
    for words in ("to R² 0.90", "R²", "0.83", "+0.12"):
        assert words in shown, words
    assert "accuracy" not in shown
    assert "relative" not in shown
    for other in (-0.5, 0.0, 0.05):
        gain = relative_result(*compared(R_SQUARED, 0.1, other), goal)
        assert (gain.points, gain.relative) == (pytest.approx(100 * (0.1 - other)), None)
    picture = comparison_picture(rows, goal)
    assert "R², and time to R² 0.90" in picture
    assert "accuracy" not in picture
    mixed = (*compared(R_SQUARED, 0.8), *compared(ACCURACY, 0.7))
    assert accuracy_name_of(mixed) == ACCURACY


@pytest.mark.parametrize("name", ["", "$\\frac$<b>", "x" * 4096])
def test_any_other_name_and_none_is_accuracy(tmp_path: Path, run: LoadedRun, name: str) -> None:
    other = make(tmp_path / "other", name)
    assert other.summary["accuracy"]["name"] == "accuracy"
    assert tiles([other])[0].name == tiles([run, other])[0].name == "Accuracy"
