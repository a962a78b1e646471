"""The picture of a cluster's job in the terminal while `dlion watch` runs.

Owns what is shown and how: on a terminal a live picture, otherwise a line at each change that
tells something. `watching` feeds it documents.
"""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dlion_cli.figures import NOT_KNOWN, duration
from dlion_cli.job_status import JobStatus
from dlion_cli.job_tables import NOT_SEEN, conditions_table, event_line, figures_line, sites_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console, RenderableType

    from dlion_cli.cluster_jobs import Document

_EVENT_COUNT = 5
_UNSEEN_AFTER_S = 10.0
"""A job that no operator has looked at for so long: something is amiss."""


class JobView:
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
        """`prefix` stands before each line, where the output is no terminal."""
        self._prefix = prefix
        self._job = job
        self._console = console
        self._clock = clock
        self._now = now
        self._changed_s = self._began_s = clock()
        self._events: Sequence[Document] = ()
        self._trouble = ""
        self._last_line = ""
        self._said: set[tuple[str, str, str]] = set()
        self._lock = threading.Lock()
        self._live = Live(
            console=console, refresh_per_second=2, get_renderable=self.render, transient=False
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def update(self, job: JobStatus, events: Sequence[Document]) -> None:
        """Takes the job as it is now."""
        with self._lock:
            self._job, self._trouble, self._changed_s = job, "", self._clock()
            self._events = events
        if not self._console.is_terminal:
            self._print_changes()

    def trouble(self, words: str) -> None:
        """Shows that the cluster does not answer; the picture is of before."""
        with self._lock:
            told, self._trouble = bool(self._trouble), words
        if not self._console.is_terminal and not told:
            self._print(f"connection lost, trying again: {words}")

    def render(self) -> RenderableType:
        """The picture as it stands."""
        with self._lock:
            job, now = self._job, self._now()
            parts: list[RenderableType] = [self._header(job), self._bar(job)]
            parts += [Text(figures_line(job)), Text(""), sites_table(job), Text("")]
            if job.conditions:
                parts += [conditions_table(job.conditions, now), Text("")]
            parts += [event_line(event, now) for event in self._events[-_EVENT_COUNT:]]
            if self._trouble:
                parts.append(Text(f"connection lost, trying again: {self._trouble}", "bold yellow"))
            elif not job.was_ever_seen and self._clock() - self._began_s > _UNSEEN_AFTER_S:
                parts.append(Text(NOT_SEEN, style="bold yellow"))
            return Group(*parts)

    def line(self) -> str:
        """The same in one line, for a log."""
        job = self._job
        progress = job.progress_percentage
        words = [f"{job.state}", NOT_KNOWN if progress is None else f"{progress} %"]
        words += [
            f"ETA {duration(self._remaining_s(job))}",
            f"sites {job.ready_sites}",
            f"workers {job.ready_workers}",
            f"{job.steps_per_second} steps/s",
        ]
        return ", ".join(words + [f"{name} {value}" for name, value in job.metrics.items()])

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
        bar = ProgressBar(total=100, completed=progress or 0, width=40, pulse=not known)
        grid.add_row(
            bar if known else Text(""),
            Text(f"{progress} %" if known else ""),
            Text(f"ETA {duration(self._remaining_s(job))}"),
        )
        return grid

    def _remaining_s(self, job: JobStatus) -> float | None:
        """Counted down since the status came, for it is written every ten seconds at most."""
        if job.remaining_s is None or job.outcome is not None:
            return None
        return max(0.0, job.remaining_s - (self._clock() - self._changed_s))

    def _print_changes(self) -> None:
        for said in self._job.conditions:
            key = (said.type, said.status, said.reason)
            if key not in self._said:
                self._said.add(key)
                words = f": {said.message}" if said.message else ""
                self._print(f"{said.type}={said.status} ({said.reason}){words}")
        for event in self._events:
            self._print_event(event)
        if (line := self.line()) != self._last_line:
            self._last_line = line
            self._print(line)

    def _print_event(self, event: dict[str, Any]) -> None:
        metadata = event.get("metadata") or {}
        key = ("event", str(metadata.get("uid")), str(event.get("count")))
        if key not in self._said:
            self._said.add(key)
            self._console.print(event_line(event, self._now()), soft_wrap=True)

    def _print(self, words: str) -> None:
        at = self._now().strftime("%H:%M:%SZ")
        line = f"{at}  {self._prefix}{words}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
