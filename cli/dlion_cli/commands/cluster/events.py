"""`dlion events`: list events of a job and of its objects, also as they happen."""

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import click

from dlion_api.errors import DeniedError, UnavailableError
from dlion_api.exit_codes import ExitCode
from dlion_cli.cluster.cluster_jobs import Document, JobClient
from dlion_cli.cluster.cluster_options import cluster_options, name_argument
from dlion_cli.cluster.documents import without_managed_fields
from dlion_cli.commands.cluster.get import output_console
from dlion_cli.terminal import options
from dlion_cli.terminal.failures import message_of
from dlion_cli.terminal.interruption import take_interrupt
from dlion_cli.views.event_table import (
    COLUMNS,
    event_cells,
    events_table,
    follow_events,
    kept_events_table,
)
from dlion_cli.views.job_status import JobStatus

_TYPES = ("Normal", "Warning")
_WIDTHS = (9, 7, 24, 48)
"""Widths of the columns in lines that appear one by one."""


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
    help="Only these types: Warning, Normal.",
)  # fmt: skip
@click.option(
    "-w", "--watch", is_flag=True, help="Continue until Ctrl-C; json prints one per line."
)
@click.option(
    "--run", "run_id", metavar="RUN",
    help="List the keeper's events of this run, such as an earlier one.",
)  # fmt: skip
@options.output
@cluster_options
def events(
    jobs: JobClient,
    name: str,
    types: frozenset[str],
    watch: bool,
    run_id: str | None,
    output: str,
) -> int:
    """List the events of job NAME and of its pods, Jobs, keeper and claim, oldest first.

    Once the cluster has none of the present run (usually after an hour), it shows those that the
    site's keeper has.

    \b
    dlion events cifar10 --types Warning
    """
    if watch and run_id is not None:
        raise click.UsageError("--run lists events of the past: remove --watch")
    document = jobs.get(name)
    job = JobStatus(document)

    def is_wanted(event: Document) -> bool:
        return not types or event.get("type") in types

    if watch:
        return _watch(jobs, document, job.run_id, is_wanted, output)
    found = [] if run_id is not None else jobs.related_events(document, job.run_id).items
    is_kept = not found
    if is_kept:
        found = _kept(jobs, job, run_id)
    shown = [without_managed_fields(each) for each in found if is_wanted(each)]
    if output == "json":
        click.echo(json.dumps(shown, indent=2, ensure_ascii=False))
    elif shown:
        table = kept_events_table(shown) if is_kept else events_table(shown, datetime.now(UTC))
        output_console().print(table)
    elif found:
        click.echo(f"dlion: there are no such events of {name}", err=True)
    return ExitCode.OK


def _kept(jobs: JobClient, job: JobStatus, run_id: str | None) -> list[Document]:
    """The keeper's events. Raises: UnavailableError, DeniedError, if the user asked for them."""
    from dlion_cli.pod_streams.kept_records import kept_events  # few runs need it

    try:
        found = kept_events(jobs, job, run_id or job.run_id)
        why = "(any more): these are the keeper's"
    except (DeniedError, UnavailableError) as error:
        if run_id is not None:
            raise
        found, why = [], f"(any more), and none of the keeper: {message_of(error)}"
    if run_id is None:
        click.echo(f"dlion: the cluster has no such events of {job.name} {why}", err=True)
    return found


def _watch(
    jobs: JobClient, job: Document, run_id: str, is_wanted: Callable[[Document], bool], output: str
) -> int:
    def connection_lost(message: str) -> None:
        click.echo(f"dlion: connection lost, retrying: {message}", err=True)

    if output != "json":
        click.echo(_line(COLUMNS))
    try:
        for event in follow_events(jobs, job, run_id, on_disconnect=connection_lost):
            if not is_wanted(event):
                continue
            document: dict[str, Any] = without_managed_fields(event)
            cells = event_cells(event, datetime.now(UTC))
            click.echo(
                json.dumps(document, ensure_ascii=False) if output == "json" else _line(cells)
            )
            sys.stdout.flush()
    except KeyboardInterrupt as interrupt:
        return take_interrupt(interrupt)
    return ExitCode.OK


def _line(cells: tuple[str, ...]) -> str:
    *before, last = cells
    padded = [f"{cell:<{width}}" for cell, width in zip(before, _WIDTHS, strict=True)]
    return "  ".join([*padded, last])
