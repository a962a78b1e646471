"""Test that the wheel of `make dist`, installed alone, trains what `dlion init` writes.

The folder has no other files of the repository. Left out: the wheel's content
(tests/unit/cli/test_wheel).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from built_wheel import build_wheel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_an_installed_wheel_trains(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    python = tmp_path / "installed" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    install = ["pip", "install", "-q", "--python", str(python), f"{wheel}[worker,cluster]"]
    subprocess.run([sys.executable, "-m", "uv", *install], check=True)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    dlion = str(python.parent / "dlion")
    (folder := tmp_path / "empty").mkdir()
    for words in ("init mine", "validate mine/job.yaml", "run mine/job.yaml --out out"):
        ended = subprocess.run(
            [dlion, *words.split()], cwd=folder, env=clean, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr
    assert json.loads((folder / "out" / "summary.json").read_text())["accuracy"]["min"] > 0.9
    subprocess.run([python.parent / "kubectl-dlion", "--version"], env=clean, check=True)
