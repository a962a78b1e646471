"""A test on clusters that fails is run once more, and the report lists it as rerun.

Such tests share two cores with whatever else the machine does. What fails twice fails the run;
`tools/test-all` then runs it by itself, as what it shares with the other tests of its file, a
cluster that one of them broke, say, goes with that run. Nothing else is run again: neither tests of
local processes nor fast tests nor bars that a measurement is held against.

No fast test is timed: hypothesis would fail an example that took 0.2 s, which is a busy machine's
doing and not the code's.

`--patience=N` gives N times as long to everything that a test waits for: for a crowded machine.

Collecting makes half a million objects that stay, and no garbage: it runs without searches for it,
and later searches leave these objects out.

A shell's background jobs ignore SIGINT, and so would every process that a test sends one to.
"""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from example_counts import examples, factor
from time_budgets import TimeBudgets, budgets

if TYPE_CHECKING:
    from collections.abc import Generator

LONG_FIRST = frozenset(
    f"test_{name}.py"
    for name in (
        *(
            "api_faults",
            "crd",
            "federation",
            "job_authorities",
            "kills_at_requests",
            "operator",
            "rights_in_use",
            "run_ends",
            "upgrade",
        ),
        *("end_of_run", "growing_data", "interrupts", "partial_ends", "pods", "quorum"),
    )
)
"""Files that take minutes: begun last, one of them would run alone on one core."""
CLUSTERS = "cluster"
"""The folder here whose tests use real clusters."""
MOST_BY_THEMSELVES = 3
"""More that fail than this are no accident."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `tools/test-all` says when it runs what has failed by itself."""
    parser.addoption(
        "--by-itself",
        action="store_true",
        help=f"with --lf: at most {MOST_BY_THEMSELVES} tests, and none but on clusters",
    )
    parser.addoption(
        "--patience", type=float, default=1.0, help="times as long for all that tests wait for"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Lets Ctrl-C through to what the tests start; times no example of a property."""
    os.environ["DLION_TEST_PATIENCE"] = str(config.getoption("--patience"))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hypothesis.settings.register_profile("untimed", deadline=None, max_examples=examples(100))
    hypothesis.settings.load_profile("untimed")
    if factor() < 1:  # budgets are those of `make unit` and `make test`
        config.pluginmanager.register(TimeBudgets(budgets()))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects without searching for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks them, and puts long files first."""
    items.sort(key=lambda item: item.path.name not in LONG_FIRST)
    patience = config.getoption("--patience")
    usual_s = float(config.getini("timeout"))
    for item in items:
        if patience != 1:
            own = item.get_closest_marker("timeout")
            longest_s = patience * (own.args[0] if own else usual_s)
            item.add_marker(pytest.mark.timeout(longest_s), append=False)
        if _on_clusters(item) and item.get_closest_marker("measured") is None:
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name each test that was run again: it, or what it tests, has a defect."""
    for nodeid in sorted({report.nodeid for report in terminalreporter.stats.get("rerun", [])}):
        terminalreporter.write_line(f"DEFECT: failed and was run again: {nodeid}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuses `--by-itself` for what is not to be run again."""
    if not session.config.getoption("--by-itself"):
        return
    if len(session.items) > MOST_BY_THEMSELVES:
        pytest.exit(f"{len(session.items)} have failed: that is no accident", returncode=1)
    if others := [item.nodeid for item in session.items if not _on_clusters(item)]:
        pytest.exit(f"not run again: {', '.join(others)}", returncode=1)


def _on_clusters(item: pytest.Item) -> bool:
    return item.path.is_relative_to(Path(__file__).parent / CLUSTERS)
