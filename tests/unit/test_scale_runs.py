"""Test that `benchmarks/scale.py` keeps each complete run.

Existing runs appear in the table and are not measured again. A run of another size is refused.

Left out: a run itself (tests/cluster/test_scale.py).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "scaling")]

import scale  # noqa: E402
from one_run import Figures, Size  # noqa: E402


def keep(folder: Path, number: int, created_per_s: float) -> None:
    """Write a run of the default size."""
    figures = Figures(
        asdict(Size(rest_s=65.0, probes=120)), load_average=[0.5], created_per_s=created_per_s,
        burst_lags_s=[1.0], probe_lags_s=[0.5],
    )  # fmt: skip
    run = {"commit": f"c{number}", "figures": asdict(figures)}
    (folder / f"this-tree-1000-{number}.json").write_text(json.dumps(run))


def run_scale(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> object:
    """Return its exit code or its message."""
    monkeypatch.setattr(sys, "argv", ["scale.py", "--out", str(folder), "--runs", "2", *options])
    with pytest.raises(SystemExit) as ended:
        scale.main()
    return ended.value.code


def test_existing_runs_are_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, 0, 20.0)
    keep(tmp_path, 1, 30.0)
    assert run_scale(monkeypatch, tmp_path) == 0
    table = capsys.readouterr().out
    assert "| jobs created, per s | >= 20 | 25.0 (20.0 to 30.0) |" in table
    assert "this tree at c0, c1; 2 runs of 1000 jobs with 5 workers each" in table


def test_a_run_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keep(tmp_path, 0, 20.0)
    message = str(run_scale(monkeypatch, tmp_path, "--workers", "2"))
    assert "this-tree-1000-0.json has a run of another size" in message
    assert "give another --out" in message
