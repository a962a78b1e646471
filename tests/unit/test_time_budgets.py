"""Test that a session fails only if a folder exceeds its budget of CPU time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
SETTINGS = {
    "PYTHONPATH": str(SUPPORT), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"
}  # fmt: skip
CONFTEST = """
from time_budgets import TimeBudgets

def pytest_configure(config):
    config.pluginmanager.register(TimeBudgets({{"unit": {budget_s}, "unit/costly": 60.0}}))
"""
BURNS = """
import time

def test_burns():
    end_s = time.process_time() + 0.3
    while time.process_time() < end_s:
        pass
"""


@pytest.mark.parametrize(
    ("folder", "budget_s", "workers", "code"),
    [
        ("unit", 60.0, [], pytest.ExitCode.OK),
        ("unit/below", 0.05, ["-n", "1"], pytest.ExitCode.TESTS_FAILED),
        ("unit/costly", 0.05, [], pytest.ExitCode.OK),
    ],
)
def test_only_a_budget_that_is_exceeded_fails_a_session(
    tmp_path: Path, folder: str, budget_s: float, workers: list[str], code: pytest.ExitCode
) -> None:
    (tests := tmp_path / "tests" / folder).mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST.format(budget_s=budget_s))
    (tests / "test_burns.py").write_text(BURNS)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist", *workers, "--durations=3", "tests"],
        cwd=tmp_path,
        env=os.environ | SETTINGS,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert "budgets are multiplied by" in ended.stdout
    is_over = code != pytest.ExitCode.OK
    assert ("OVER ITS BUDGET" in ended.stdout) == is_over
    assert ("the session fails: " in ended.stdout.partition("slowest 3 durations")[2]) == is_over
