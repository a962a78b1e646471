"""Test that a benchmark states the commit of the code that it measures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def commit(*folders: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (*folders, BENCHMARKS)))
    return subprocess.run(
        [sys.executable, "-c", "import local_runs; print(local_runs.commit())"],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_no_commit_is_stated_for_packages_of_another_tree(tmp_path: Path) -> None:
    assert commit().returncode == 0
    (tmp_path / "dlion_core").mkdir()
    (tmp_path / "dlion_core" / "__init__.py").touch()
    other = commit(tmp_path)
    assert other.returncode == 1
    assert f"dlion_core is imported from {tmp_path}" in other.stderr
