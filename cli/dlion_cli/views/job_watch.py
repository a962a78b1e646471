"""Watches a job until its run ends, for `dlion watch` and `dlion submit --wait`."""

import json
import sys
import time
from contextlib import ExitStack
from typing import Final

import click
from rich.console import Console

from dlion_api.errors import AbsentError
from dlion_api.exit_codes import ExitCode
from dlion_cli.cluster.cluster_jobs import Document, JobClient
from dlion_cli.cluster.documents import without_managed_fields
from dlion_cli.terminal.interruption import take_interrupt
from dlion_cli.views.job_status import ConditionView, outcome_exit_code
from dlion_cli.views.job_updates import WaitTimeoutError, follow
from dlion_cli.views.job_view import JobProgressView

_EVENTS_EVERY_S: Final = 5.0
_HEADLINES: Final = {
    ExitCode.ENDED_EARLY: "ended before its stop condition was met",
    ExitCode.PARTIAL: "ended with a model that lacks a worker's replica",
}


def watch_to_end(jobs: JobClient, name: str, *, output: str, timeout_s: float | None) -> int:
    """Show the job until its run ends; return the outcome's exit code.

    Ctrl-C and the time limit leave the job unchanged.
    """
    try:
        if output == "json":
            return _watch_json(jobs, name, timeout_s)
        return _watch_view(jobs, name, timeout_s)
    except WaitTimeoutError:
        click.echo(
            f"dlion: {name} has not ended within {timeout_s:g} s. {_continues_message(name)}",
            err=True,
        )
        return ExitCode.DEADLINE
    except KeyboardInterrupt as interrupt:
        click.echo(f"dlion: watch stopped. {_continues_message(name)}", err=True)
        return take_interrupt(interrupt)


def _continues_message(name: str) -> str:
    return (
        f"The job continues: `dlion watch {name}` shows it, `dlion suspend {name}` stops its "
        f"workers, `dlion delete {name}` deletes it"
    )


def _watch_json(jobs: JobClient, name: str, timeout_s: float | None) -> int:
    """Print the document in one line after each change."""

    def connection_lost(message: str) -> None:
        click.echo(f"dlion: connection lost, retrying: {message}", err=True)

    for job in follow(jobs, name, timeout_s=timeout_s, on_disconnect=connection_lost):
        click.echo(json.dumps(without_managed_fields(job.document), ensure_ascii=False))
        sys.stdout.flush()
        if job.outcome is not None:
            return outcome_exit_code(job.outcome)
    raise _deleted(name)


def _watch_view(jobs: JobClient, name: str, timeout_s: float | None) -> int:
    view: JobProgressView | None = None
    queried_s = float("-inf")
    events: list[Document] = []

    def connection_lost(message: str) -> None:
        if view is not None:
            view.connection_lost(message)

    with ExitStack() as stack:
        for job in follow(jobs, name, timeout_s=timeout_s, on_disconnect=connection_lost):
            outcome = job.outcome
            if view is None:
                view = stack.enter_context(JobProgressView(job, Console(highlight=False)))
            if outcome is not None or time.monotonic() >= queried_s + _EVENTS_EVERY_S:
                events, queried_s = jobs.events(name, job.uid), time.monotonic()
            view.update(job, events)
            if outcome is not None:
                break
        else:
            raise _deleted(name)
    return print_outcome(name, outcome)


def _deleted(name: str) -> AbsentError:
    return AbsentError(f"DLionJob {name!r} was deleted during the watch")


def print_outcome(name: str, outcome: ConditionView) -> int:
    """Print how a run ended; return its exit code."""
    code = outcome_exit_code(outcome)
    why = f": {outcome.message}" if outcome.message else ""
    if code is ExitCode.OK:
        click.echo(f"{name} has succeeded{why}. `dlion fetch {name}` downloads its model")
    else:
        click.echo(
            f"dlion: {name} {_HEADLINES.get(code, 'has failed')} ({outcome.reason}){why}. "
            f"`dlion logs {name}` and "
            f"`dlion get {name}` show details",
            err=True,
        )
    return code
