"""Test `Client.plot`.

- It shows the figures of a finished job, which are those of its summary: one line in a log, a
  permanent line on a terminal, a table and a curve in a notebook.
- A running job is shown again as it changes, until the time limit. A failed job is returned.

Left out: a browser. The notebook's display is a recorder with the methods of IPython's.
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

import dlion
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.run_folder.lock import FolderLock
from dlion_results.summary.judgement import EndReason
from dlion_results.summary.summary import Ending
from synthetic_run import Story, description, records

STORY = Story(workers=2, seconds=20, killed=None)
NAME = "a-run"


def make(root: Path, ending: Ending | None, until_s: float = 99) -> dict[str, Any]:
    """Write a run with these records and this end; return its summary."""
    with ResultFolder.create(
        root / NAME, description(STORY), now=datetime(2026, 1, 2, tzinfo=UTC)
    ) as folder:
        for record in records(STORY):
            if record.time_s <= until_s:
                folder.append(record)
        if ending is None:
            return {}
        folder.finish(ending)
    summary: dict[str, Any] = json.loads((root / NAME / "summary.json").read_text())
    return summary


def line_of(summary: dict[str, Any]) -> str:
    losses = [worker["last_loss"] for worker in summary["workers"]]
    loss, accuracy = sum(losses) / len(losses), 100 * summary["accuracy"]["mean"]
    return f"{NAME}: Succeeded, 100 %, loss {loss:.4g}, accuracy {accuracy:.1f} %"


class RecordedDisplay:
    """Records the calls of a notebook's display, in order."""

    def __init__(self) -> None:
        self.pages: list[str] = []

    def __call__(self, job: dlion.Job, *, display_id: bool) -> RecordedDisplay:
        assert display_id, "only a display with an ID can be updated"
        assert not self.pages, "later ones replace it"
        self.update(job)
        return self

    def update(self, job: dlion.Job) -> None:
        self.pages.append(job._repr_html_())


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> RecordedDisplay:
    shown = RecordedDisplay()
    shell = SimpleNamespace(kernel=object())
    ipython = SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(display=shown))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return shown


def test_a_log_has_one_line_for_an_ended_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = make(tmp_path, Ending("maxSeconds 20 reached"))
    job = dlion.Client(root=tmp_path).plot(NAME)
    assert (job.state, job.accuracy) == ("Succeeded", summary["accuracy"]["mean"])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"{line_of(summary)}\n"


def test_a_terminal_keeps_the_last_line(tmp_path: Path) -> None:
    summary = make(tmp_path, Ending("maxSeconds 20 reached"))
    code = f"import dlion; dlion.Client(root={str(tmp_path)!r}).plot({NAME!r})"
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stderr=theirs, stdout=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while block := os.read(ours, 4096):
                shown += block
        except OSError:  # the end of the terminal's output
            pass
    os.close(ours)
    assert process.returncode == 0, shown
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert text.rstrip().splitlines()[-1] == line_of(summary)


def test_a_notebook_has_table_and_curve_of_the_records(
    tmp_path: Path, notebook: RecordedDisplay
) -> None:
    summary = make(tmp_path, Ending("maxSeconds 20 reached"))
    client = dlion.Client(root=tmp_path)
    job = client.plot(NAME)
    (page,) = notebook.pages
    root = ElementTree.fromstring(page)
    cells = {str(row[0].text): str(row[1].text) for row in root.iter("tr")}
    assert cells["state"] == "Succeeded (Completed)"
    assert cells["accuracy"] == f"{100 * summary['accuracy']['mean']:.1f} %"
    assert cells["workers"].count("finished") == STORY.workers
    (line,) = root.iter("polyline")
    points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    svg = next(root.iter("svg"))
    width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
    assert points[0][0] == 0.0
    assert points[-1][0] == width
    assert len(points) == len(job.curve)
    frame = client.get_job_metrics(NAME).dropna(subset="accuracy")
    last = frame.groupby("worker")["accuracy"].last().mean()
    assert 1 - points[-1][1] / height == pytest.approx(last, abs=0.01)


def test_a_running_job_is_shown_as_it_changes(
    tmp_path: Path, notebook: RecordedDisplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, None, until_s=10)
    monkeypatch.setattr("dlion.live_display._HTML_INTERVAL_S", 0.0)
    lock = FolderLock(tmp_path / NAME)
    try:
        with pytest.raises(dlion.JobTimeoutError, match="is Training"):
            dlion.Client(root=tmp_path).plot(NAME, timeout_s=0.5)
    finally:
        lock.release()
    assert len(notebook.pages) >= 2
    assert all("Training" in page for page in notebook.pages)


def test_a_job_that_fails_is_shown_and_returned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, Ending("an error", "it [bold]broke", False, reason=EndReason.PROGRAM_FAILED))
    job = dlion.Client(root=tmp_path).plot(NAME)
    assert (job.state, job.reason) == ("Failed", "ProgramFailed")
    assert capsys.readouterr().err.startswith(f"{NAME}: Failed, ")
