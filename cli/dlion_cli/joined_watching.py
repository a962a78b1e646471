"""Following a job at several sites' clusters to its end, for `dlion watch --contexts`.

On a terminal one live table with a row per context; elsewhere a line at each change, with its
context before it. `watching` does the same for one cluster, and shows more of it.
"""

from __future__ import annotations

import json
import sys
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dlion_api.exit_codes import ExitCode
from dlion_cli.following import Gone, TimeUpError, follow
from dlion_cli.job_status import JobStatus, exit_code_of
from dlion_cli.job_tables import list_table
from dlion_cli.job_view import JobView

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from dlion_cli.cluster_jobs import Document, Jobs
    from dlion_cli.contexts import Contexts


def watch_joined(contexts: Contexts, name: str, *, output: str, timeout_s: float | None) -> int:
    """Shows the job until its run has ended at each of them; the first exit code that is not 0."""
    view: JoinedView | JoinedLines = JoinedLines() if output == "json" else JoinedView()

    def watched(jobs: Jobs) -> int:
        return _followed(jobs, name, view, timeout_s)

    try:
        with view:
            codes = contexts.ask(watched)
    except KeyboardInterrupt:
        click.echo(f"dlion: no longer watched. The job {name} goes on", err=True)
        return ExitCode.INTERRUPTED
    return contexts.end(codes)


def _followed(
    jobs: Jobs, name: str, view: JoinedView | JoinedLines, timeout_s: float | None
) -> int:
    """One context's part, in a thread of its own; its exit code. Raises: as `follow` does."""
    context = jobs.cluster.context

    def trouble(words: str) -> None:
        view.trouble(context, words)

    try:
        for found in follow(jobs, name, timeout_s=timeout_s, on_trouble=trouble):
            if isinstance(found, Gone):
                break
            job = JobStatus(found)
            view.update(context, job)
            if job.outcome is not None:
                return exit_code_of(job.outcome)
    except TimeUpError:
        view.say(context, f"{name} has not ended within {timeout_s:g} s and goes on")
        return ExitCode.DEADLINE
    view.say(context, f"DLionJob {name!r} was deleted while it was watched")
    return ExitCode.UNAVAILABLE


class JoinedLines:
    """A document in a line at each change, with its context beside it. For many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, context: str, job: JobStatus) -> None:
        """Takes the job as it is now."""
        document: Document = dict(job.document)
        metadata = document.get("metadata") or {}
        document["metadata"] = {k: v for k, v in metadata.items() if k != "managedFields"}
        with self._lock:
            click.echo(json.dumps({"context": context, "job": document}, ensure_ascii=False))
            sys.stdout.flush()

    def trouble(self, context: str, words: str) -> None:
        """Says that a cluster does not answer."""
        self.say(context, f"connection lost, trying again: {words}")

    def say(self, context: str, words: str) -> None:
        """Says it beside the documents."""
        with self._lock:
            click.echo(f"dlion: context {context}: {words}", err=True)


class JoinedView:
    """Shows the job at each context while it changes. For many threads."""

    def __init__(
        self,
        console: Console | None = None,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._console = console or Console(highlight=False)
        self._now = now
        self._jobs: dict[str, JobStatus] = {}
        self._words: dict[str, str] = {}
        self._logs: dict[str, JobView] = {}
        self._lock = threading.Lock()
        self._live = Live(
            console=self._console, refresh_per_second=2, get_renderable=self.render, transient=False
        )

    def __enter__(self) -> None:
        if self._console.is_terminal:
            self._live.start(refresh=True)

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def update(self, context: str, job: JobStatus) -> None:
        """Takes the job as it is now."""
        with self._lock:
            self._jobs[context] = job
            self._words.pop(context, None)
            if not self._console.is_terminal:
                self._log(context, job).update(job, [])

    def trouble(self, context: str, words: str) -> None:
        """Shows that a cluster does not answer; its row is of before."""
        with self._lock:
            self._words[context] = f"connection lost, trying again: {words}"
            if not self._console.is_terminal:
                self._log(context, self._jobs[context]).trouble(words)

    def say(self, context: str, words: str) -> None:
        """Shows it beside the row."""
        with self._lock:
            self._words[context] = words
            if not self._console.is_terminal:
                click.echo(f"dlion: context {context}: {words}", err=True)

    def render(self) -> RenderableType:
        """The picture as it stands."""
        with self._lock:
            names = sorted(self._jobs)
            jobs = [self._jobs[name] for name in names]
            table = list_table(jobs, self._now(), wide=True, everywhere=False, contexts=names)
            words = [Text(f"{name}: {said}", "bold yellow") for name, said in self._words.items()]
            return Group(table, *words)

    def _log(self, context: str, job: JobStatus) -> JobView:
        if context not in self._logs:
            self._logs[context] = JobView(job, self._console, now=self._now, prefix=f"{context}  ")
        return self._logs[context]
