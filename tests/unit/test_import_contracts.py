"""Test that the import contracts of pyproject.toml refuse a planted import.

Left out: this repository (`make check`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOTS = ("api", "operator", "worker", "cli")


def linted(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(root / name) for name in ROOTS)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_simulator_may_not_import_the_trainer(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ROOTS:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    unchanged = linted(tmp_path)
    assert unchanged.returncode == 0, unchanged.stdout + unchanged.stderr
    module = tmp_path / "worker" / "dlion_simulator" / "churn.py"
    module.write_text(f"{module.read_text()}\nimport dlion_worker.trainer\n")
    planted = linted(tmp_path)
    assert planted.returncode == 1, planted.stdout + planted.stderr
    assert "1 broken" in planted.stdout
    assert "dlion_simulator.churn -> dlion_worker.trainer (l." in planted.stdout
