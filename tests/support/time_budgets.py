"""Keep each folder of fast tests within its budget of CPU time.

Each test reports the CPU seconds of its process and of the children that it waited for. A busy
machine makes a test wait, but does not make it compute more: CPU time can be compared with a bound
where the time of day cannot. The session prints the sum of each folder and fails where one exceeds
its budget. With pytest-xdist the workers measure, and the controller adds up.
"""

from __future__ import annotations

import os
import tomllib
from collections import defaultdict
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest

from process_starter import unwaited_cpu_s

if TYPE_CHECKING:
    from collections.abc import Generator

CPU = "cpu_s"
TESTS = Path(__file__).resolve().parents[1]


class TimeBudgets:
    """A pytest plugin. `budgets_s` maps a folder below `tests/` to CPU seconds."""

    def __init__(self, budgets_s: dict[str, float]) -> None:
        self._budgets_s = budgets_s
        self._used_s: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note where a test starts; its fixtures count as its own."""
        item.stash[_BEFORE] = _cpu_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach what each phase used to its report, which also crosses to the controller."""
        report = yield
        now_s = _cpu_s()
        report.user_properties.append((CPU, now_s - item.stash[_BEFORE]))
        item.stash[_BEFORE] = now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase to the sum of the budget that covers it."""
        folder = self._budget_of(report.nodeid)
        used_s = dict(report.user_properties).get(CPU)
        if folder and isinstance(used_s, float):
            self._used_s[folder] += used_s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what each folder used."""
        if not self._used_s:
            return
        terminalreporter.section("CPU time per folder")
        for folder, used_s in sorted(self._used_s.items()):
            over = "  OVER ITS BUDGET" if used_s > self._budgets_s[folder] else ""
            terminalreporter.write_line(
                f"{folder:<24}{used_s:7.1f} s of {self._budgets_s[folder]:.0f} s{over}"
            )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a session that would pass but for its budgets."""
        over = any(used_s > self._budgets_s[folder] for folder, used_s in self._used_s.items())
        if over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _budget_of(self, nodeid: str) -> str | None:
        """The nearest folder above a test that has a budget."""
        below = PurePosixPath(nodeid.partition("::")[0].removeprefix("tests/"))
        for parent in below.parents:
            if str(parent) in self._budgets_s:
                return str(parent)
        return None


_BEFORE = pytest.StashKey[float]()


def budgets() -> dict[str, float]:
    """Those of `tests/time_budgets.toml`, in CPU seconds."""
    with (TESTS / "time_budgets.toml").open("rb") as file:
        stated = tomllib.load(file)
    return {folder: float(seconds) for folder, seconds in stated.items()}


def _cpu_s() -> float:
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + unwaited_cpu_s()
