"""Ends `dlion run` and `dlion simulate` in order after an error, a signal or a closed pipe.

Writes the summary and the report of the run.
"""

import logging
import os
import shlex
import signal
from datetime import datetime
from pathlib import Path

import click
from rich.console import Console

from dlion_api.errors import DLionError
from dlion_cli.terminal.failures import exit_code_of
from dlion_cli.terminal.interruption import Interruption, OutOfTimeError
from dlion_local.runner.deferred_signals import DeferredSignals
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.run_folder.layout import REPORT
from dlion_results.summary.judgement import EndReason
from dlion_results.summary.summary import Ending, Json

log = logging.getLogger(__name__)


class RunConsole(Console):
    """A reader that closes the pipe ends the run in order, as a terminal that hangs up does."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)
        signal.raise_signal(signal.SIGHUP)


def finish_failed_run(
    folder: ResultFolder,
    error: Exception | None,
    interruption: Interruption,
    *,
    now: datetime,
    with_report: bool = True,
    virtual_time: bool = False,
) -> None:
    """Write the summary and the report of a run that an error ended; None: a signal.

    Raises: KeyboardInterrupt, after writing the summary.
    """
    ending = Ending(
        stop_reason="interrupted" if error is None else "an error ended the run",
        message="" if error is None else str(error),
        succeeded=False,
        reason=EndReason.INTERRUPTED if error is None else EndReason.of(exit_code_of(error)),
        started_at=now.isoformat(timespec="seconds"),
        virtual_time=virtual_time,
    )
    try:
        with DeferredSignals():
            summary = folder.finish(ending)
        if with_report:
            write_report_in_time(folder, summary, interruption)
    except (DLionError, OSError) as another:
        log.warning("the result folder could not be finished: %s", another)


def write_report_in_time(
    folder: ResultFolder, summary: Json, interruption: Interruption
) -> Path | None:
    """Write the report; return None without steps, or without time after an interruption."""
    try:
        with interruption.time_limit():
            if not summary["steps"]:
                return None  # nothing to show
            from dlion_results.report.page import write_report

            return write_report([folder.path], folder.path / REPORT)
    except OutOfTimeError:
        click.echo(
            "dlion: no time was left for the report; "
            f"`dlion report {shlex.quote(str(folder.path))}` creates it",
            err=True,
        )
        return None
