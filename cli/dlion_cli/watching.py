"""Following a job to its end before the user's eyes, for `dlion watch` and `submit --wait`."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Final

import click
from rich.console import Console

from dlion_api.errors import AbsentError
from dlion_api.exit_codes import ExitCode
from dlion_cli.following import Gone, TimeUpError, follow
from dlion_cli.job_status import JobStatus, exit_code_of
from dlion_cli.job_view import JobView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlion_cli.cluster_jobs import Document, Jobs
    from dlion_cli.job_status import Said

_EVENTS_EVERY_S: Final = 5.0
_HEADLINES: Final = {
    ExitCode.ENDED_EARLY: "has ended before its stop rule was met",
    ExitCode.PARTIAL: "has ended with a model that lacks a worker's replica",
}


def watch_to_end(jobs: Jobs, name: str, *, output: str, timeout_s: float | None) -> int:
    """Shows the job until its run has ended; the exit code of its outcome.

    Ctrl-C, and the time being up, leave the job as it is.
    """
    try:
        if output == "json":
            return _as_json(jobs, name, timeout_s)
        return _as_picture(jobs, name, timeout_s)
    except TimeUpError:
        click.echo(
            f"dlion: {name} has not ended within {timeout_s:g} s. {_goes_on(name)}", err=True
        )
        return ExitCode.DEADLINE
    except KeyboardInterrupt:
        click.echo(f"dlion: no longer watched. {_goes_on(name)}", err=True)
        return ExitCode.INTERRUPTED


def _goes_on(name: str) -> str:
    return (
        f"The job goes on: `dlion watch {name}` shows it again, `dlion suspend {name}` stops its "
        f"workers, `dlion delete {name}` ends it"
    )


def _as_json(jobs: Jobs, name: str, timeout_s: float | None) -> int:
    """One document a line at each change."""
    for document in _documents(jobs, name, timeout_s, on_trouble=_say_trouble):
        document.get("metadata", {}).pop("managedFields", None)
        click.echo(json.dumps(document, ensure_ascii=False))
        sys.stdout.flush()
        outcome = JobStatus(document).outcome
        if outcome is not None:
            return exit_code_of(outcome)
    raise _deleted(name)


def _as_picture(jobs: Jobs, name: str, timeout_s: float | None) -> int:
    console = Console(highlight=False)
    view: JobView | None = None
    asked_s = float("-inf")
    events: list[Document] = []
    outcome: Said | None = None

    def trouble(words: str) -> None:
        if view is not None:
            view.trouble(words)

    try:
        for document in _documents(jobs, name, timeout_s, on_trouble=trouble):
            job = JobStatus(document)
            outcome = job.outcome
            if view is None:
                view = JobView(job, console)
                view.__enter__()
            if outcome is not None or time.monotonic() >= asked_s + _EVENTS_EVERY_S:
                events, asked_s = jobs.events(name), time.monotonic()
            view.update(job, events)
            if outcome is not None:
                break
    finally:
        if view is not None:
            view.__exit__()
    if outcome is None:
        raise _deleted(name)
    return tell_outcome(name, outcome)


def _documents(
    jobs: Jobs, name: str, timeout_s: float | None, *, on_trouble: Callable[[str], None]
) -> Iterator[Document]:
    for found in follow(jobs, name, timeout_s=timeout_s, on_trouble=on_trouble):
        if isinstance(found, Gone):
            return
        yield found


def _say_trouble(words: str) -> None:
    click.echo(f"dlion: connection lost, trying again: {words}", err=True)


def _deleted(name: str) -> AbsentError:
    return AbsentError(f"DLionJob {name!r} was deleted while it was watched")


def tell_outcome(name: str, outcome: Said) -> int:
    """Prints how a run ended; the exit code that goes with it."""
    code = exit_code_of(outcome)
    why = f": {outcome.message}" if outcome.message else ""
    if code is ExitCode.OK:
        click.echo(f"{name} has succeeded{why}. `dlion fetch {name}` brings its model")
    else:
        click.echo(
            f"dlion: {name} {_HEADLINES.get(code, 'has failed')} ({outcome.reason}){why}. "
            f"`dlion logs {name}` and "
            f"`dlion get {name}` say more",
            err=True,
        )
    return code
