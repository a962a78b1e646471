"""`dlion replay`: simulate a recorded run again, as it was or with other settings."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dlion_api.errors import DataError
from dlion_api.protocol.progress import ProgressRecord
from dlion_api.spec import Job
from dlion_api.status_names import ACCURACY, R_SQUARED
from dlion_cli.commands.local.simulate import (
    FinishedSimulation,
    SimulationRequest,
    print_simulation,
    simulate_into_folder,
)
from dlion_cli.comparison.recorded_environment import (
    read_environment,
    read_object,
    recorded_environment,
)
from dlion_cli.inputs.downloads import fetch_downloads
from dlion_cli.inputs.manifests import apply_set, load_manifest, reject_suspended
from dlion_cli.inputs.required_files import find_program_root
from dlion_cli.inputs.runnable import check_can_simulate
from dlion_cli.terminal import options
from dlion_cli.terminal.formatting import UNKNOWN, format_rate
from dlion_results.replay_comparison import ReplayFigure, compare_figures, replay_figures
from dlion_results.run_folder.events import read_events
from dlion_results.run_folder.layout import EVENTS, JOB, REPLAY, SUMMARY
from dlion_results.run_folder.manifest import read_job
from dlion_results.run_folder.storage import write_whole
from dlion_results.summary.accuracy_name import accuracy_text
from dlion_results.summary.rank_mapping import consecutive_ranks, map_ranks
from dlion_results.summary.summary import SCHEMA_VERSION
from dlion_simulator.calibration.recorded_run import RecordedConditions, recorded_plan

MIN_TRAINED_S = 30.0
"""Speeds are means over some seconds, and links are first probed: a replay of a run of 5 s was 30 %
too fast."""


@dataclass(frozen=True)
class _ReplayedRun:
    """The recorded run and the settings that are changed."""

    folder: Path
    about: Job
    recorded: RecordedConditions
    assignments: tuple[str, ...]


@click.command(short_help="Simulate a recorded run again, with other settings.")
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@options.assignments("the manifest, e.g. exchange.policy=full")
@click.option(
    "--exchange-cost", "exchange_factor", type=options.FiniteFloatRange(0, 100), default=1.0,
    metavar="FACTOR", show_default=True,
    help="Cost of the exchange relative to that in RUN.",
)  # fmt: skip
@options.threads
@options.no_report
@options.result_folder
@options.data_root
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

    RUN may be fetched from a cluster (`dlion fetch --all`). Without --set, the table shows the
    error of the replay; with it, the effect of the settings.

    \b
    dlion replay runs/a --set exchange.policy=full -o json
    """
    about = read_job(folder)
    _check_version(folder)
    source = str(folder / JOB)
    job = load_manifest(apply_set(about.to_document(), assignments), source=source, lines=None)
    reject_suspended(job, source)
    check_can_simulate(job, source)
    _check_worker_count(job, len(about.workers()), folder)
    recorded = _recorded(folder, about)
    if recorded.trained_s < MIN_TRAINED_S:
        click.echo(
            f"dlion: {folder} trained for {recorded.trained_s:.1f} s only, so its speeds and link "
            f"rates are rough, and the replay may be tens of percent off. Record at least "
            f"{MIN_TRAINED_S:g} s",
            err=True,
        )
    fetch_downloads(job)
    request = SimulationRequest(
        job=job,
        plan=recorded.plan,
        environment=recorded_environment(
            recorded.plan.initial, notes=(f"replay of {folder.resolve()}",)
        ),
        program_root=find_program_root(job, folder / JOB, None),
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
        request, partial(_show, replayed=_ReplayedRun(folder, about, recorded, assignments))
    )


def _recorded(folder: Path, about: Job) -> RecordedConditions:
    """The conditions of the recorded run. Raises: DataError."""
    bad_lines: list[str] = []
    environment, job = read_environment(folder), about.with_counted_ranks()
    with Console(stderr=True).status(escape(f"reading {folder}")):
        recorded = recorded_plan(
            _records(folder, about, bad_lines.append),
            job.workers(),
            latencies=environment.latencies(job),
            has_quotas=environment.has_quotas or _had_cpu_limits(about),
            source=str(folder),
        )
    if bad_lines:
        click.echo(f"dlion: {len(bad_lines)} lines of {folder / EVENTS} cannot be read", err=True)
    return recorded


def _records(
    folder: Path, about: Job, on_bad_line: Callable[[str], None] | None = None
) -> Iterator[ProgressRecord]:
    """The records of the manifest's workers, by counted ranks as in a simulation."""
    return map_ranks(read_events(folder / EVENTS, on_bad_line), consecutive_ranks(about))


def _had_cpu_limits(job: Job) -> bool:
    """Whether each worker was a container with a CPU limit."""
    groups = [group for site in job.spec.sites for group in site.groups]
    return job.may_grow and all("cpu" in group.resources.limits for group in groups)


def _check_version(folder: Path) -> None:
    """Raises: DataError if another version of DLion wrote the folder."""
    path = folder / SUMMARY
    if not path.exists():
        return  # the run has not ended or was killed: its records suffice
    document = read_object(path, json.loads)
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise DataError(
            f"{path}: is of version {version!r} (allowed: {SCHEMA_VERSION}). Replay it with the "
            "version of DLion that wrote it"
        )


def _check_worker_count(job: Job, count: int, folder: Path) -> None:
    if len(job.workers()) != count:
        raise click.UsageError(
            f"--set makes {len(job.workers())} workers of the {count} in {folder}: the speeds and "
            "links of others are not recorded. Keep the workers, or use dlion simulate"
        )


def _show(
    request: SimulationRequest, finished: FinishedSimulation, *, replayed: _ReplayedRun
) -> None:
    """Print the result of the replay, then the comparison of both runs."""
    ranks = [worker.rank for worker in request.job.workers()]
    before = replay_figures(_records(replayed.folder, replayed.about), ranks)
    after = replay_figures(read_events(finished.folder / EVENTS), ranks)
    rows = compare_figures(before, after)
    document = {
        "run": str(replayed.folder),
        "settings": list(replayed.assignments),
        "exchangeCoreS": request.exchange_core_s,
        "exchangeCoreSPerByte": {str(r): s for r, s in request.exchange_core_s_per_byte.items()},
        "fixedCoreS": request.fixed_core_s,
        "samplesPerSPerCore": request.plan.samples_per_s_per_core,
        "changes": len(replayed.recorded.plan.changes),
        "unknownLinks": [list(link) for link in replayed.recorded.unknown_links],
        "figures": [row.document() for row in rows],
    }
    write_whole(finished.folder / REPLAY, (json.dumps(document, indent=2) + "\n").encode())
    print_simulation(request, replace(finished, summary={**finished.summary, "replay": document}))
    if request.output == "json":
        return
    changed = ", ".join(replayed.assignments) or "no setting changed"
    table = Table(title=escape(f"{replayed.folder}, recorded and replayed: {changed}"))
    for column in ("figure", "recorded", "replayed", "difference"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for row in rows:
        difference = UNKNOWN if row.difference is None else f"{row.difference:+.1%}"
        table.add_row(row.name, _cell(row, row.recorded), _cell(row, row.replayed), difference)
    Console().print(table)
    if replayed.recorded.unknown_links:
        click.echo(
            f"{len(replayed.recorded.unknown_links)} links had no measured rate: not limited"
        )


def _cell(figure: ReplayFigure, value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if figure.unit in (ACCURACY, R_SQUARED):
        return accuracy_text(value, figure.unit)
    return f"{format_rate(value)} {figure.unit}".rstrip()
