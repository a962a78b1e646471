"""`dlion replay`: a recorded run again, in virtual time, as it was or under other settings.

Joins the result folder that is replayed, the simulation and the comparison of both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from dlion_api.errors import DataError
from dlion_api.spec import Job
from dlion_cli import options
from dlion_cli.figures import NOT_KNOWN, rate, share
from dlion_cli.finite import FiniteRange
from dlion_cli.manifests import apply_set, load_manifest, refuse_suspended
from dlion_cli.recorded_environment import read_environment, read_object, recorded_environment
from dlion_cli.run import program_root_of
from dlion_cli.simulate import (
    Asked,
    Finished,
    refuse_endless,
    show,
    simulate_into_folder,
)
from dlion_worker.results.description import RunDescription, describe_folder
from dlion_worker.results.events import BadLine, read_events
from dlion_worker.results.folder import EVENTS, JOB, SUMMARY
from dlion_worker.results.renumbered import counted_ranks, renumbered
from dlion_worker.results.replayed import Figure, figures_of, side_by_side
from dlion_worker.results.storage import write_whole
from dlion_worker.results.summary import SCHEMA_VERSION
from dlion_worker.simulation.recorded import Recorded, recorded_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlion_api.progress import ProgressRecord

REPLAY = "replay.json"


@dataclass(frozen=True)
class _Replayed:
    """What is replayed, and how it is to be spoken of."""

    folder: Path
    about: RunDescription
    recorded: Recorded
    assignments: tuple[str, ...]


@click.command(short_help="Simulate a recorded run again, under other settings.")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--set", "assignments", multiple=True, metavar="PATH=VALUE",
    help="A field of the manifest that is to be another, e.g. exchange.policy=full. Repeatable.",
)  # fmt: skip
@click.option(
    "--exchange-cost", "exchange_factor", type=FiniteRange(0, 100), default=1.0,
    metavar="FACTOR", show_default=True,
    help="What the exchange takes of the workers' time, relative to what it took in RUN.",
)  # fmt: skip
@options.threads
@options.no_report
@options.result_folder
@click.option(
    "--data-root", type=click.Path(path_type=Path, file_okay=False), default=Path(), metavar="DIR",
    help="Relative paths of data are taken from here. Default: the working directory.",
)  # fmt: skip
@options.output
def replay(
    folder: Path,
    assignments: tuple[str, ...],
    exchange_factor: float,
    threads: int | None,
    no_report: bool,
    out: Path | None,
    data_root: Path,
    output: str,
) -> int:
    """Simulate the run of result folder RUN again, with its measured speeds and link rates.

    RUN was made by `dlion run` or `dlion simulate`, or is a cluster's (`dlion fetch --all`). Its
    manifest is trained anew with real gradients, under --set in place of what it says; every worker
    is as fast, and every link carries as much, as was measured at that time of the run. Without
    --set the table tells how far off a replay is; with it, what the setting would have changed.

    Under quotas a byte takes as much of a worker's CPU as it took in RUN, else a step's exchange as
    much time: for a policy that computes less or more, give --exchange-cost. A link whose rate was
    never measured is not limited.

    \b
    dlion run examples/digits.yaml --environment quickstart --out runs/a
    dlion replay runs/a
    dlion replay runs/a --set exchange.policy=full -o json
    """
    about = describe_folder(folder)
    _refuse_other_version(folder)
    source = str(folder / JOB)
    job = load_manifest(apply_set(dict(about.document), assignments), source=source, lines=None)
    refuse_suspended(job, source)
    refuse_endless(job, source)
    _refuse_other_workers(job, len(about.workers), folder)
    recorded = _recorded(folder, about)
    asked = Asked(
        job=job,
        plan=recorded.plan,
        environment=recorded_environment(
            recorded.plan.initial, notes=(f"replay of {folder.resolve()}",)
        ),
        program_root=program_root_of(job, folder / JOB, None),
        data_root=data_root.resolve(),
        fixed_core_s=recorded.fixed_core_s,
        exchange_core_s=exchange_factor * recorded.exchange_core_s,
        exchange_core_s_per_byte={
            rank: exchange_factor * seconds
            for rank, seconds in recorded.exchange_core_s_per_byte.items()
        },
        thread_count=threads,
        out=out,
        with_report=not no_report,
        output=output,
    )
    return simulate_into_folder(
        asked, partial(_show, replayed=_Replayed(folder, about, recorded, assignments))
    )


def _recorded(folder: Path, about: RunDescription) -> Recorded:
    """The conditions of that run. Raises: DataError."""
    bad_lines: list[BadLine] = []
    environment, job = read_environment(folder), about.job.with_counted_ranks()
    with Console(stderr=True).status(f"reading {folder}"):
        recorded = recorded_plan(
            _records(folder, about, bad_lines.append),
            job.workers(),
            latencies=environment.latencies(job),
            has_quotas=environment.has_quotas or _had_limits(about.job),
            source=str(folder),
        )
    if bad_lines:
        click.echo(f"dlion: {len(bad_lines)} lines of {folder / EVENTS} cannot be read", err=True)
    return recorded


def _records(
    folder: Path, about: RunDescription, on_bad_line: Callable[[BadLine], None] | None = None
) -> Iterator[ProgressRecord]:
    """Those of the manifest's workers, by counted ranks, as a simulation has them."""
    return renumbered(read_events(folder / EVENTS, on_bad_line), counted_ranks(about.job))


def _had_limits(job: Job) -> bool:
    """Whether each worker was a container with a limit on CPU."""
    groups = [group for site in job.spec.sites for group in site.groups]
    return job.may_grow and all("cpu" in group.resources.limits for group in groups)


def _refuse_other_version(folder: Path) -> None:
    """Raises: DataError where the folder's records may mean something else."""
    path = folder / SUMMARY
    if not path.exists():
        return  # still going on, or broken off: the records tell all the same
    document = read_object(path, json.loads)
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise DataError(
            f"{path}: is of version {version!r} (allowed: {SCHEMA_VERSION}). Replay it with the "
            "DLion that made it"
        )


def _refuse_other_workers(job: Job, count: int, folder: Path) -> None:
    if len(job.workers()) != count:
        raise click.UsageError(
            f"--set makes {len(job.workers())} workers of the {count} in {folder}: nothing is "
            "known of others' speeds and links. Keep the workers, or use dlion simulate"
        )


def _show(asked: Asked, finished: Finished, *, replayed: _Replayed) -> None:
    """The replay's own end, then both runs beside each other."""
    ranks = [worker.rank for worker in asked.job.workers()]
    before = figures_of(_records(replayed.folder, replayed.about), ranks)
    after = figures_of(read_events(finished.folder / EVENTS), ranks)
    rows = side_by_side(before, after)
    document = {
        "run": str(replayed.folder),
        "settings": list(replayed.assignments),
        "exchangeCoreS": asked.exchange_core_s,
        "exchangeCoreSPerByte": {str(r): s for r, s in asked.exchange_core_s_per_byte.items()},
        "fixedCoreS": asked.fixed_core_s,
        "samplesPerSPerCore": asked.plan.samples_per_s_per_core,
        "changes": len(replayed.recorded.plan.changes),
        "unknownLinks": [list(link) for link in replayed.recorded.unknown_links],
        "figures": [row.document() for row in rows],
    }
    write_whole(finished.folder / REPLAY, (json.dumps(document, indent=2) + "\n").encode())
    show(asked, replace(finished, summary={**finished.summary, "replay": document}))
    if asked.output == "json":
        return
    changed = ", ".join(replayed.assignments) or "no setting changed"
    table = Table(title=f"{replayed.folder}, recorded and replayed: {changed}")
    for column in ("figure", "recorded", "replayed", "difference"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for row in rows:
        table.add_row(row.name, _cell(row, row.recorded), _cell(row, row.replayed), _off(row))
    Console().print(table)
    if replayed.recorded.unknown_links:
        click.echo(
            f"{len(replayed.recorded.unknown_links)} links had no measured rate: not limited"
        )


def _cell(figure: Figure, value: float | None) -> str:
    if value is None:
        return NOT_KNOWN
    if figure.unit == "accuracy":
        return share(value)
    return f"{rate(value)} {figure.unit}".rstrip()


def _off(figure: Figure) -> str:
    return NOT_KNOWN if figure.difference is None else f"{figure.difference:+.1%}"
