"""`dlion events`: list events of a job and of its objects, also as they happen."""

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import click

from dlion_api.exit_codes import ExitCode
from dlion_cli.cluster.cluster_jobs import Document, JobClient
from dlion_cli.cluster.cluster_options import cluster_options, name_argument
from dlion_cli.cluster.documents import without_managed_fields
from dlion_cli.commands.cluster.get import output_console
from dlion_cli.terminal import options
from dlion_cli.views.event_table import COLUMNS, event_cells, events_table, follow_events
from dlion_cli.views.job_status import JobStatus

_TYPES = ("Normal", "Warning")
_WIDTHS = (9, 7, 24, 48)
"""Of the columns in lines that appear one by one."""


def _event_types(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> frozenset[str]:
    """The types of `--types`; all without it. Raises: BadParameter for an unknown one."""
    if value is None:
        return frozenset()
    by_name = {each.lower(): each for each in _TYPES}
    given = [part.strip().lower() for part in value.split(",")]
    if unknown := [part for part in given if part not in by_name]:
        raise click.BadParameter(f"{unknown[0]!r}: allowed: {', '.join(_TYPES)}")
    return frozenset(by_name[part] for part in given)


@click.command()
@name_argument()
@click.option(
    "--types", "types", metavar="TYPE,…", callback=_event_types,
    help="Only events of these types: Warning, Normal. Default: all.",
)  # fmt: skip
@click.option("-w", "--watch", is_flag=True, help="Continue with new events until Ctrl-C.")
@options.output
@cluster_options
def events(jobs: JobClient, name: str, types: frozenset[str], watch: bool, output: str) -> int:
    """List the events of job NAME and of its pods, Jobs, keeper and claim, oldest first.

    Shows events of the run that the manifest names, as far as the cluster still has them (usually
    one hour). With --watch, -o json prints each event on one line.

    \b
    dlion events cifar10
    dlion events cifar10 --types Warning
    dlion events cifar10 --watch
    dlion events cifar10 -o json | jq -r '.[] | .reason'
    """
    run_id = JobStatus(jobs.get(name)).run_id

    def is_wanted(event: Document) -> bool:
        return not types or event.get("type") in types

    if watch:
        return _watch(jobs, name, run_id, is_wanted, output)
    found = [e for e in jobs.related_events(name, {run_id}).items if is_wanted(e)]
    if output == "json":
        shown = [without_managed_fields(each) for each in found]
        click.echo(json.dumps(shown, indent=2, ensure_ascii=False))
    elif found:
        output_console().print(events_table(found, datetime.now(UTC)))
    else:
        click.echo(f"dlion: the cluster has no such events of {name}", err=True)
    return ExitCode.OK


def _watch(
    jobs: JobClient, name: str, run_id: str, is_wanted: Callable[[Document], bool], output: str
) -> int:
    def connection_lost(message: str) -> None:
        click.echo(f"dlion: connection lost, retrying: {message}", err=True)

    if output != "json":
        click.echo(_line(COLUMNS))
    try:
        for event in follow_events(jobs, name, {run_id}, on_disconnect=connection_lost):
            if not is_wanted(event):
                continue
            document: dict[str, Any] = without_managed_fields(event)
            cells = event_cells(event, datetime.now(UTC))
            click.echo(
                json.dumps(document, ensure_ascii=False) if output == "json" else _line(cells)
            )
            sys.stdout.flush()
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return ExitCode.OK


def _line(cells: tuple[str, ...]) -> str:
    *before, last = cells
    padded = [f"{cell:<{width}}" for cell, width in zip(before, _WIDTHS, strict=True)]
    return "  ".join([*padded, last])
