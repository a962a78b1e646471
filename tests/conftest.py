"""A test of real processes that fails is run once more, and the report lists it as rerun.

Such tests share two cores with whatever else the machine does. What fails twice fails the run.
Nothing else is run again: neither the fast tests nor bars that a measurement is held against.

A shell's background jobs ignore SIGINT, and so would every process that a test sends one to.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

REAL_PROCESSES = ("local", "cluster")
"""Folders here whose tests start processes of the project."""


def pytest_configure() -> None:
    """Lets Ctrl-C through to what the tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks them."""
    here = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        if folder in REAL_PROCESSES and item.get_closest_marker("measured") is None:
            item.add_marker(pytest.mark.flaky(reruns=1))
