"""`dlion ls`: list the result folders below a folder, newest first."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlion_api.errors import DataError
from dlion_api.status_names import ACCURACY
from dlion_cli.inputs.named_folder import is_readable_folder, run_document
from dlion_cli.terminal.formatting import (
    UNKNOWN,
    format_bytes,
    format_duration,
    printable,
)
from dlion_cli.terminal.plain_table import plain_table
from dlion_cli.views.job_status import age
from dlion_results.run_folder.listing import MAX_FOLDERS, ResultFinder, StoredRun, StoredState
from dlion_results.summary.accuracy_name import accuracy_text, common_name

_PIPE_COLUMNS: Final = 500
"""Width of output that is not a terminal, so that nothing is cut."""
_OPTIONAL: Final = ("SIZE", "ITERATIONS", "COMMAND", "DURATION", "AGE")
"""Columns that a narrow terminal lacks, the first one first; `-o wide` has all."""
_STYLES: Final = {
    StoredState.RUNNING: "cyan",
    StoredState.SUCCEEDED: "green",
    StoredState.FAILED: "red",
    StoredState.INTERRUPTED: "yellow",
    StoredState.DAMAGED: "bold red",
    StoredState.UNREADABLE: "bold red",
    StoredState.FOREIGN: "dim",
}


@click.command(name="ls")
@click.argument("folder", type=click.Path(path_type=Path), default=Path("runs"))
@click.option(
    "-o", "--output", type=click.Choice(["table", "wide", "json"]), default="table",
    help="wide adds job, start and end of the run.",
)  # fmt: skip
def list_results(folder: Path, output: str) -> None:
    """List the result folders below FOLDER (default: runs), newest first.

    A `resumable` run has a checkpoint: `dlion run FILE --resume DIR` continues it.

    \b
    dlion ls -o json | jq -r '.runs[] | select(.resumable) | .path'
    """
    if not is_readable_folder(folder):
        what = "is not a folder" if folder.exists() else "there is no such folder"
        raise DataError(
            f"{folder}: {what}. `dlion run` makes runs/; name the folder of your results"
        )
    finder = ResultFinder()
    runs = finder.find(folder)
    now = datetime.now(UTC)
    if output == "json":
        document = {
            "folder": str(folder),
            "complete": not finder.is_cut,
            "runs": [run_document(run, _name(run, folder)) for run in runs],
        }
        click.echo(json.dumps(document, indent=2))  # ASCII: a name may be no Unicode text
    elif runs:
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=_PIPE_COLUMNS)
        console.print(_table(runs, folder, now, wide=output == "wide"))
    else:
        click.echo(f"dlion: {folder} has no results", err=True)
    if finder.is_cut:
        click.echo(
            f"dlion: only the first {MAX_FOLDERS:,} folders were looked at: name a smaller folder",
            err=True,
        )


def _table(runs: Sequence[StoredRun], folder: Path, now: datetime, *, wide: bool) -> Table:
    titles = ["NAME", "COMMAND", "STATE", "ACCURACY", "ITERATIONS", "DURATION", "AGE", "SIZE"]
    if wide:
        table = plain_table(*titles, "JOB", "STARTED", folded="DETAIL")
    else:
        table = plain_table(*titles, left_out=_OPTIONAL)
    for run in runs:
        cells: list[str | Text] = [
            Text(printable(_name(run, folder))),  # no markup: a name may have brackets
            run.command or UNKNOWN,
            Text(_state(run), style=_STYLES[run.state]),
            _accuracy(run),
            UNKNOWN if run.iteration is None else f"{run.iteration:,}",
            format_duration(run.duration_s),
            UNKNOWN if run.started_at is None else age((now - run.started_at).total_seconds()),
            format_bytes(run.size_bytes),
        ]
        if wide:
            started = f"{run.started_at.astimezone():%Y-%m-%d %H:%M}" if run.started_at else UNKNOWN
            cells += [Text(printable(run.job) or UNKNOWN), started, Text(printable(run.detail))]
        table.add_row(*cells)
    return table


def _accuracy(run: StoredRun) -> str:
    """The accuracy, or with its name what stands for it."""
    name = common_name([run.accuracy_name])
    text = accuracy_text(run.accuracy, name)
    return text if name == ACCURACY or run.accuracy is None else f"{name} {text}"


def _state(run: StoredRun) -> str:
    shows_reason = run.state is StoredState.FAILED and run.reason
    reason = f" ({printable(run.reason)})" if shows_reason else ""
    return f"{run.state}{reason}{', resumable' if run.is_resumable else ''}"


def _name(run: StoredRun, folder: Path) -> str:
    """The path below the listed folder."""
    return str(run.path if run.path == folder else run.path.relative_to(folder))
