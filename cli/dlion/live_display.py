"""Shows a job while it lasts: as HTML in a notebook, else as a line of a terminal or log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from dlion.job import JobSnapshot
from dlion_results.summary.accuracy_name import accuracy_text

_HTML_INTERVAL_S: Final = 1.0
_LINE_INTERVAL_S: Final = 10.0
"""Between two lines if output is not a terminal."""


@contextmanager
def live_display() -> Iterator[Callable[[JobSnapshot], None]]:
    """Inside, the function shows a job in place of the last one."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and hasattr(shell, "kernel"):
        yield _HtmlView(ipython.display.display).show
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _Lines(console).show
        return
    last = [""]

    def show(job: JobSnapshot) -> None:
        last[0] = job_line(job)
        status.update(escape(last[0]))

    try:
        with console.status("starting") as status:
            yield show
    finally:
        console.print(last[0], soft_wrap=True, markup=False)  # stays visible


def job_line(job: JobSnapshot) -> str:
    """The job in one line.

    >>> job_line(JobSnapshot(name="digits-1", backend="local", state="Training", progress=0.5))
    'digits-1: Training, 50 %'
    """
    parts = [f"{job.name}: {job.state}"]
    if job.progress is not None:
        parts.append(f"{100 * job.progress:.0f} %")
    if job.eta_s is not None:
        parts.append(f"ETA {job.eta_s:.0f} s")
    if job.loss is not None:
        parts.append(f"loss {job.loss:.4g}")
    if job.accuracy is not None:
        parts.append(f"{job.accuracy_name} {accuracy_text(job.accuracy, job.accuracy_name)}")
    return ", ".join(parts)


class _HtmlView:
    def __init__(self, display: Any) -> None:
        self._display, self._due_s = display, 0.0
        self._handle: Any = None

    def show(self, job: JobSnapshot) -> None:
        if self._handle is None:
            self._handle = self._display(job, display_id=True)
        elif time.monotonic() >= self._due_s or job.has_ended:
            self._handle.update(job)
        else:
            return
        self._due_s = time.monotonic() + _HTML_INTERVAL_S


class _Lines:
    def __init__(self, console: Any) -> None:
        self._console, self._state, self._due_s = console, "", 0.0

    def show(self, job: JobSnapshot) -> None:
        if job.state != self._state or time.monotonic() >= self._due_s:
            self._console.print(job_line(job), soft_wrap=True, markup=False)
            self._state, self._due_s = job.state, time.monotonic() + _LINE_INTERVAL_S
