"""Watches a job in several clusters until its run ends, for `dlion watch --contexts`.

On a terminal it shows a live table with a row per context; otherwise it prints lines that begin
with the context.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime

import click
from rich.console import Console, Group, RenderableType
from rich.text import Text

from dlion_api.exit_codes import ExitCode
from dlion_cli.cluster.cluster_jobs import JobClient
from dlion_cli.cluster.contexts import Contexts
from dlion_cli.cluster.documents import without_managed_fields
from dlion_cli.terminal.interruption import take_interrupt
from dlion_cli.views.job_status import JobStatus, outcome_exit_code
from dlion_cli.views.job_tables import list_table
from dlion_cli.views.job_updates import WaitTimeoutError, follow
from dlion_cli.views.job_view import JobProgressView
from dlion_cli.views.terminal_view import TerminalView


def watch_contexts(contexts: Contexts, name: str, *, output: str, timeout_s: float | None) -> int:
    """Show the job until its run has ended in each cluster; return the first exit code but 0."""
    live = None if output == "json" else MultiContextView()
    view = live or MultiContextJson()
    try:
        with live or nullcontext():
            codes = contexts.query(lambda jobs: _followed(jobs, name, view, timeout_s))
    except KeyboardInterrupt as interrupt:
        click.echo(f"dlion: watch stopped. The job {name} continues", err=True)
        return take_interrupt(interrupt)
    return contexts.report_errors(codes)


def _followed(
    jobs: JobClient, name: str, view: MultiContextView | MultiContextJson, timeout_s: float | None
) -> int:
    """Follow one context, in its own thread; return its exit code. Raises: as `follow`."""
    context = jobs.cluster.context

    def connection_lost(message: str) -> None:
        view.connection_lost(context, message)

    try:
        for job in follow(jobs, name, timeout_s=timeout_s, on_disconnect=connection_lost):
            view.update(context, job)
            if job.outcome is not None:
                return outcome_exit_code(job.outcome)
    except WaitTimeoutError:
        view.show_message(context, f"{name} has not ended within {timeout_s:g} s and continues")
        return ExitCode.DEADLINE
    view.show_message(context, f"DLionJob {name!r} was deleted during the watch")
    return ExitCode.UNAVAILABLE


class MultiContextJson:
    """Prints the context and the job's document in one line after each change. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def update(self, context: str, job: JobStatus) -> None:
        """Print the job's document."""
        document = without_managed_fields(job.document)
        with self._lock:
            click.echo(json.dumps({"context": context, "job": document}, ensure_ascii=False))
            sys.stdout.flush()

    def connection_lost(self, context: str, message: str) -> None:
        """Print that a cluster does not respond."""
        self.show_message(context, f"connection lost, retrying: {message}")

    def show_message(self, context: str, message: str) -> None:
        """Print a message to standard error."""
        with self._lock:
            click.echo(f"dlion: context {context}: {message}", err=True)


class MultiContextView(TerminalView):
    """Shows the job in each context while it changes. Thread-safe."""

    def __init__(
        self,
        console: Console | None = None,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._now = now
        self._jobs: dict[str, JobStatus] = {}
        self._messages: dict[str, str] = {}
        self._logs: dict[str, JobProgressView] = {}
        self._lock = threading.Lock()
        super().__init__(console or Console(highlight=False))

    def update(self, context: str, job: JobStatus) -> None:
        """Show the job's current state."""
        with self._lock:
            self._jobs[context] = job
            self._messages.pop(context, None)
            if not self._console.is_terminal:
                self._log(context, job).update(job, [])

    def connection_lost(self, context: str, message: str) -> None:
        """Show that a cluster does not respond; its row keeps the last state."""
        with self._lock:
            self._messages[context] = f"connection lost, retrying: {message}"
            if not self._console.is_terminal:
                self._log(context, self._jobs[context]).connection_lost(message)

    def show_message(self, context: str, message: str) -> None:
        """Show a message below the table."""
        with self._lock:
            self._messages[context] = message
            if not self._console.is_terminal:
                click.echo(f"dlion: context {context}: {message}", err=True)

    def render(self) -> RenderableType:
        """The live view."""
        with self._lock:
            names = sorted(self._jobs)
            jobs = [self._jobs[name] for name in names]
            table = list_table(jobs, self._now(), wide=True, everywhere=False, contexts=names)
            messages = [Text(f"{n}: {text}", "bold yellow") for n, text in self._messages.items()]
            return Group(table, *messages)

    def _log(self, context: str, job: JobStatus) -> JobProgressView:
        if context not in self._logs:
            self._logs[context] = JobProgressView(
                job, self._console, now=self._now, prefix=f"{context}  "
            )
        return self._logs[context]
