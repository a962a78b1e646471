"""Options and settings of all tests.

A test on clusters that fails is run once more, and the report lists it as rerun. Such tests share
two cores with other load on the machine. A second failure fails the run. `tools/test-all` then runs
that test separately, because the tests of one file may share a broken cluster. No other test is
repeated: neither tests of local processes, nor fast tests, nor comparisons of a measurement with a
bar.

hypothesis has no deadline: an example of 0.2 s is due to a busy machine, not to the code.

`--patience=N` multiplies all waiting times of tests by N, for a busy machine.

Collection creates half a million permanent objects and no garbage. It runs without garbage
collection, and later collections skip these objects. Half of collection is compiling the tests: the
bytecode is kept, also under $PYTHONDONTWRITEBYTECODE. Otherwise each process of each session would
compile them.

A shell's background jobs ignore SIGINT, and so would every process to which a test sends one.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
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
            "failure_rules",
            "federation",
            "hostile_connections",
            "job_authorities",
            "kills_at_requests",
            "multikueue",
            "operator",
            "rights_in_use",
            "run_ends",
            "tenancy",
            "upgrade",
        ),
        *("end_of_run", "growing_data", "interrupts", "partial_ends", "pods", "quorum"),
    )
)
"""Files that take minutes. Started last, one of them would run alone on one core."""
CLUSTERS = "cluster"
"""The folder whose tests use real clusters."""
MAX_BY_ITSELF = 3
"""With more failures than this, a rerun is refused."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option with which `tools/test-all` runs failed tests separately."""
    parser.addoption(
        "--by-itself",
        action="store_true",
        help=f"with --lf: at most {MAX_BY_ITSELF} tests, and none but on clusters",
    )
    parser.addoption(
        "--patience", type=float, default=1.0, help="factor for all waiting times of tests"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C through to the processes of tests; set no deadline for hypothesis."""
    os.environ["DLION_TEST_PATIENCE"] = str(config.getoption("--patience"))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hypothesis.settings.register_profile("untimed", deadline=None, max_examples=examples(100))
    hypothesis.settings.load_profile("untimed")
    if factor() < 1:  # budgets are those of `make unit` and `make test`
        config.pluginmanager.register(TimeBudgets(budgets()))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collection, and keep the tests' bytecode."""
    dont_write_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        sys.dont_write_bytecode = dont_write_bytecode


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests, and put long files first."""
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
    """Name each test that was rerun: it, or the code under test, has a defect."""
    for nodeid in sorted({report.nodeid for report in terminalreporter.stats.get("rerun", [])}):
        terminalreporter.write_line(f"DEFECT: failed and was run again: {nodeid}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse `--by-itself` for tests that must not be rerun."""
    if not session.config.getoption("--by-itself"):
        return
    if len(session.items) > MAX_BY_ITSELF:
        pytest.exit(f"{len(session.items)} tests have failed: too many for a rerun", returncode=1)
    if others := [item.nodeid for item in session.items if not _on_clusters(item)]:
        pytest.exit(f"no rerun is allowed: {', '.join(others)}", returncode=1)


def _on_clusters(item: pytest.Item) -> bool:
    return item.path.is_relative_to(Path(__file__).parent / CLUSTERS)
