"""How `dlion run` and `dlion simulate` end: summary and page, also when an error ended the run."""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path

import click

from dlion_api.errors import DLionError
from dlion_cli.failures import exit_code_of
from dlion_cli.interruption import Interruption, OutOfTimeError
from dlion_worker.local.held_signals import HeldSignals
from dlion_worker.results.folder import ResultFolder
from dlion_worker.results.judgement import EndReason
from dlion_worker.results.summary import Ending, Json

log = logging.getLogger(__name__)


def finish_broken(
    folder: ResultFolder,
    error: Exception | None,
    interruption: Interruption,
    *,
    now: datetime,
    with_report: bool = True,
) -> None:
    """Summary and page of a run that an error ended (None: a signal), where there is room for them.

    Raises: KeyboardInterrupt, when the summary stands.
    """
    ending = Ending(
        stop_reason="interrupted" if error is None else "an error ended the run",
        message="" if error is None else str(error),
        succeeded=False,
        reason=EndReason.INTERRUPTED if error is None else EndReason.of(exit_code_of(error)),
        started_at=now.isoformat(timespec="seconds"),
    )
    try:
        with HeldSignals():
            summary = folder.finish(ending)
        if with_report:
            report_in_time(folder, summary, interruption)
    except (DLionError, OSError) as another:
        log.warning("the result folder could not be finished: %s", another)


def report_in_time(folder: ResultFolder, summary: Json, interruption: Interruption) -> Path | None:
    """The page; None where the user, who has interrupted the run, would wait too long for it."""
    try:
        with interruption.in_time():
            return _report(folder, summary)
    except OutOfTimeError:
        click.echo(
            f"dlion: no time was left for the report; `dlion report {folder.path}` makes it",
            err=True,
        )
        return None


def _report(folder: ResultFolder, summary: Json) -> Path | None:
    """The page, where there is anything to show: a run that never trained has none."""
    if not summary["steps"]:
        return None
    from dlion_worker.results.report.page import write_report  # Matplotlib: only at the end

    return write_report([folder.path], folder.report_path)
