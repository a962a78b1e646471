"""Tests of one part of benchmarks/paper from its estimate to its page.

Its scale proves only that it runs, and that a second call repeats nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "paper" / "run.py"


def call(out: Path) -> str:
    command = [
        sys.executable, str(RUN), "--data", str(out), "--only", "wrong-labels", "--seeds", "1",
        "--scale", "0.05", "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_part_runs_from_its_estimate_to_its_page_and_is_continued(tmp_path: Path) -> None:
    output = call(tmp_path)
    assert "together:" in output
    root = tmp_path / "scale-0.05"
    results = json.loads((root / "results.json").read_text())
    assert (results["scale"], results["seeds"]) == (0.05, 1)
    rows = results["comparisons"]["wrong-labels"]["rows"]
    assert [row["variant"] for row in rows] == [
        "mean, wrong", "median, wrong", "mean, right", "median, right",
    ]  # fmt: skip
    for row in rows:
        (run,) = row["runs"]
        assert run["curve"]
        assert sum(run["received_bytes"]) == run["sent_bytes"] > 0
    assert [bar["met"] for bar in results["bars"]] == [None]
    page = (root / "paper.md").read_text()
    assert "Only a look" in page
    ElementTree.parse(root / "images" / "paper-wrong-labels-intercontinental.svg")
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("events.jsonl")}
    # Three rates or further ones, with three seeds each; then four columns.
    assert len(times) >= 3 * 3 + 4
    assert (len(times) - 4) % 3 == 0
    call(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in times} == times
