"""The live view of a cluster's job during `dlion watch`.

On a terminal it updates in place; otherwise it prints a line after each change.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dlion_cli.cluster.cluster_jobs import Document
from dlion_cli.terminal.formatting import UNKNOWN
from dlion_cli.views.job_status import JobStatus
from dlion_cli.views.job_tables import (
    NOT_OBSERVED,
    conditions_table,
    event_line,
    figures_line,
    sites_table,
)
from dlion_cli.views.terminal_view import TerminalView

_EVENT_COUNT = 5
_UNOBSERVED_AFTER_S = 10.0
"""After this time, the view warns that no operator has observed the job."""


class JobProgressView(TerminalView):
    """Shows one job while it changes."""

    def __init__(
        self,
        job: JobStatus,
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        prefix: str = "",
    ) -> None:
        """`prefix` precedes each line if the output is not a terminal."""
        self._prefix = prefix
        self._job = job
        self._clock = clock
        self._now = now
        self._changed_s = self._began_s = clock()
        self._events: Sequence[Document] = ()
        self._trouble = ""
        self._last_line = ""
        self._printed: set[tuple[str, str, str]] = set()
        self._lock = threading.Lock()
        super().__init__(console)

    def update(self, job: JobStatus, events: Sequence[Document]) -> None:
        """Show the job's current state."""
        with self._lock:
            self._job, self._trouble, self._changed_s = job, "", self._clock()
            self._events = events
        if not self._console.is_terminal:
            self._print_changes()

    def connection_lost(self, message: str) -> None:
        """Show that the cluster does not respond; the view keeps the last state."""
        with self._lock:
            was_lost, self._trouble = bool(self._trouble), message
        if not self._console.is_terminal and not was_lost:
            self._print(f"connection lost, retrying: {message}")

    def render(self) -> RenderableType:
        """The live view."""
        with self._lock:
            job, now = self._job, self._now()
            parts: list[RenderableType] = [self._header(job), self._bar(job)]
            parts += [Text(figures_line(job)), Text(""), sites_table(job), Text("")]
            if job.conditions:
                parts += [conditions_table(job.conditions, now), Text("")]
            parts += [event_line(event, now) for event in self._events[-_EVENT_COUNT:]]
            if self._trouble:
                parts.append(Text(f"connection lost, retrying: {self._trouble}", "bold yellow"))
            elif not job.was_ever_observed and self._clock() - self._began_s > _UNOBSERVED_AFTER_S:
                parts.append(Text(NOT_OBSERVED, style="bold yellow"))
            return Group(*parts)

    def line(self) -> str:
        """The state in one line, for logs."""
        job = self._job
        parts = [
            job.state,
            job.progress,
            f"ETA {self._eta(job)}",
            f"sites {job.ready_sites}",
            f"workers {job.ready_workers}",
            f"{job.steps_per_second} steps/s",
            *(f"{name} {value}" for name, value in job.named_metrics.items()),
        ]
        return ", ".join(parts)

    def _header(self, job: JobStatus) -> Text:
        header = Text()
        header.append(job.name, style="bold")
        header.append(f"  {job.namespace}", style="dim")
        header.append(f"  ·  {job.state}", style="bold")
        header.append(f"  ·  sites {job.ready_sites}  ·  workers {job.ready_workers}")
        header.append(f"  ·  {job.steps_per_second} steps/s  ·  age {job.age(self._now())}")
        return header

    def _bar(self, job: JobStatus) -> RenderableType:
        progress = job.progress_percentage
        grid = Table.grid(padding=(0, 1))
        known = progress is not None
        grid.add_row(
            ProgressBar(total=100, completed=progress or 0, width=40) if known else Text(""),
            Text(job.progress if known else ""),
            Text(f"ETA {self._eta(job)}"),
        )
        return grid

    def _eta(self, job: JobStatus) -> str:
        """Counted down locally: the operator updates the status at most every ten seconds."""
        return UNKNOWN if job.outcome is not None else job.eta(self._clock() - self._changed_s)

    def _print_changes(self) -> None:
        for each in self._job.conditions:
            key = (each.type, each.status, each.reason)
            if key not in self._printed:
                self._printed.add(key)
                message = f": {each.message}" if each.message else ""
                self._print(f"{each.type}={each.status} ({each.reason}){message}")
        for event in self._events:
            self._print_event(event)
        if (line := self.line()) != self._last_line:
            self._last_line = line
            self._print(line)

    def _print_event(self, event: dict[str, Any]) -> None:
        metadata = event.get("metadata") or {}
        key = ("event", str(metadata.get("uid")), str(event.get("count")))
        if key not in self._printed:
            self._printed.add(key)
            self._console.print(event_line(event, self._now()), soft_wrap=True)

    def _print(self, text: str) -> None:
        at = self._now().strftime("%H:%M:%SZ")
        line = f"{at}  {self._prefix}{text}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
