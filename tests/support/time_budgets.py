"""CPU budgets for each folder of fast tests.

Each test reports the CPU seconds of its process and of the children that it waited for. On a busy
machine a test waits, but computes no more. So CPU time can have a bound; wall time cannot.

A shared core computes less in a second. So the session also measures a fixed piece of work, among
the tests, and multiplies each budget by the slowdown against the quiet machine of the budgets. The
session prints the sum of each folder and fails if one exceeds its budget. With pytest-xdist the
workers measure, and the controller adds.
"""

from __future__ import annotations

import os
import statistics
import time
import tomllib
from collections import defaultdict
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from process_starter import unwaited_cpu_s

if TYPE_CHECKING:
    from collections.abc import Generator

CPU = "cpu_s"
FIXED_WORK = "fixed_work_s"
FIXED_WORK_S = 0.0055  # CPU seconds on the machine of the budgets: median of 200
TESTS_PER_FIXED_WORK = 50
TESTS = Path(__file__).resolve().parents[1]


class TimeBudgets:
    """A pytest plugin. `budgets_s` maps a folder below `tests/` to CPU seconds."""

    def __init__(self, budgets_s: dict[str, float]) -> None:
        self._budgets_s = budgets_s
        self._used_s: defaultdict[str, float] = defaultdict(float)
        self._reports = 0
        self._fixed_work_s: list[float] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Record the start of a test; its fixtures count as its own."""
        item.stash[_BEFORE] = _cpu_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the use of each phase to its report, which also reaches the controller."""
        report = yield
        now_s = _cpu_s()
        report.user_properties.append((CPU, now_s - item.stash[_BEFORE]))
        if self._reports % (3 * TESTS_PER_FIXED_WORK) == 0:  # a test has three reports
            report.user_properties.append((FIXED_WORK, fixed_work_s()))
        self._reports += 1
        item.stash[_BEFORE] = _cpu_s()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase to the sum of the budget that covers it."""
        folder = self._budget_of(report.nodeid)
        measured = dict(report.user_properties)
        if isinstance(work_s := measured.get(FIXED_WORK), float):
            self._fixed_work_s.append(work_s)
        used_s = measured.get(CPU)
        if folder and isinstance(used_s, float):
            self._used_s[folder] += used_s

    @pytest.hookimpl(trylast=True)  # after the durations: a log that is cut off still has it
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the use of each folder, and whether it fails the session."""
        if not self._used_s:
            return
        terminalreporter.section("CPU time per folder")
        terminalreporter.write_line(
            f"budgets are multiplied by {self._slowness():.2f}: the machine is slow"
        )
        for folder, used_s in sorted(self._used_s.items()):
            over = "  OVER ITS BUDGET" if self._is_over(folder) else ""
            terminalreporter.write_line(
                f"{folder:<24}{used_s:7.1f} s of {self._budget_s(folder):.0f} s{over}"
            )
        if self._over():
            terminalreporter.write_line(
                "the session fails: make these tests cheaper, or raise tests/time_budgets.toml"
            )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a successful session that exceeds a budget."""
        if self._over() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _over(self) -> bool:
        return any(self._is_over(folder) for folder in self._used_s)

    def _is_over(self, folder: str) -> bool:
        return self._used_s[folder] > self._budget_s(folder)

    def _budget_s(self, folder: str) -> float:
        return self._budgets_s[folder] * self._slowness()

    def _slowness(self) -> float:
        """The duration of the fixed work relative to a quiet machine, at least 1."""
        median_s = statistics.median(self._fixed_work_s or [FIXED_WORK_S])
        return max(median_s / FIXED_WORK_S, 1.0)

    def _budget_of(self, nodeid: str) -> str | None:
        """The nearest folder above a test that has a budget."""
        below = PurePosixPath(nodeid.partition("::")[0].removeprefix("tests/"))
        for parent in below.parents:
            if str(parent) in self._budgets_s:
                return str(parent)
        return None


_BEFORE = pytest.StashKey[float]()


def budgets() -> dict[str, float]:
    """The budgets of `tests/time_budgets.toml`, in CPU seconds."""
    with (TESTS / "time_budgets.toml").open("rb") as file:
        stated = tomllib.load(file)
    return {folder: float(seconds) for folder, seconds in stated.items()}


def fixed_work_s() -> float:
    """CPU seconds of a fixed piece of work, as mixed as that of the tests."""
    before_s = time.thread_time()
    total = sum(len(str(number)) for number in range(30_000))
    values = np.arange(2**17, dtype=np.float32) % 1009
    np.argsort(values, kind="stable")
    assert total > 0
    return time.thread_time() - before_s


def _cpu_s() -> float:
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + unwaited_cpu_s()
