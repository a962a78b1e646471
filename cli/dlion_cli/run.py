"""`dlion run`: a job on this machine, from the manifest to the report.

Joins the operator's coordinator, the worker's local runner, the result folder and the terminal.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dlion_api.document import to_document
from dlion_api.errors import DLionError
from dlion_api.exit_codes import ExitCode
from dlion_api.progress import EventRecord, ProgressRecord
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_cli import options
from dlion_cli.ending import finish_broken, report_in_time
from dlion_cli.interruption import Interruption, interruptible
from dlion_cli.live_view import LiveView
from dlion_cli.local_coordinator import LocalCoordinator
from dlion_cli.manifests import (
    STDIN,
    apply_set,
    load_manifest,
    read_document,
    refuse_named_authority,
    refuse_suspended,
)
from dlion_cli.table import print_result
from dlion_operator.issuing import LIFE
from dlion_worker.environments import Environment, Plan, load_environment, unlimited_plan
from dlion_worker.local.measuring import Comparison
from dlion_worker.local.runner import LocalRunner, RunOutcome
from dlion_worker.results.description import describe
from dlion_worker.results.environment import EnvironmentReport, environment_report
from dlion_worker.results.folder import ResultFolder, kept_program_root
from dlion_worker.results.summary import Ending

log = logging.getLogger(__name__)

SHORTEST_LIFE_S = 10
"""Of a certificate: processes need some seconds to start, and times in it are whole seconds."""

MOST_NAMED = 8
"""Of an environment's times that never come; more are counted."""


@dataclass
class Listener:
    """Where records go: result folder and terminal; and what the run's end is told from them."""

    folder: ResultFolder
    view: LiveView
    stop_reasons: list[str] = field(default_factory=list)
    has_trained: bool = False

    def take(self, record: ProgressRecord) -> None:
        """One record, in the order of arrival."""
        self.folder.append(record)
        self.view.update(record)
        if isinstance(record, EventRecord):
            self.has_trained |= record.reason == EventReason.TRAINING_STARTED
            if record.reason == EventReason.TRAINING_STOPPED:
                self.stop_reasons.append(record.message)


@dataclass(frozen=True)
class Ended:
    """How the training ended, for the summary and for the shell."""

    exit_code: ExitCode
    reason: str
    succeeded: bool
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Asked:
    """An environment that is asked for: what it comes to, and the file as it was given."""

    plan: Plan
    document: dict[str, Any]

    def report(
        self, comparisons: tuple[Comparison, ...] = (), notes: tuple[str, ...] = ()
    ) -> EnvironmentReport:
        """That beside what came of it."""
        return environment_report(
            self.plan.environment,
            comparisons,
            document=self.document,
            notes=notes if self.document else (),
        )


@click.command(short_help="Train a job on this machine.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--environment", "-e", metavar="NAME|FILE",
    help="Cores and links of each worker: the name of a published environment or a file. "
    "Without it every worker gets what the machine gives.",
)  # fmt: skip
@click.option(
    "--set", "assignments", multiple=True, metavar="PATH=VALUE",
    help="Change a field of the manifest, e.g. trainer.optimizer.learningRate=0.1. Repeatable.",
)  # fmt: skip
@options.result_folder
@click.option(
    "--resume", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR",
    help="Go on with the run of this result folder, from its checkpoints.",
)  # fmt: skip
@click.option(
    "--data-root", type=click.Path(path_type=Path, file_okay=False), default=Path(), metavar="DIR",
    help="Relative paths of data and startFrom are taken from here (a program's: from the "
    "manifest's folder). Default: the working directory.",
)  # fmt: skip
@click.option(
    "--unprivileged", is_flag=True,
    help="Shape links by relays and CPU by a duty cycle even as root.",
)  # fmt: skip
@click.option(
    "--certificate-life", type=click.IntRange(min=SHORTEST_LIFE_S), metavar="SECONDS",
    default=int(LIFE.total_seconds()),
    help="Life of workers' certificates (86400). At half of it connections are remade with the "
    "next one, which no iteration waits for.",
)  # fmt: skip
@options.output
def run(
    file: Path,
    environment: str | None,
    assignments: tuple[str, ...],
    out: Path | None,
    resume: Path | None,
    data_root: Path,
    unprivileged: bool,
    certificate_life: int,
    output: str,
) -> int:
    """Train the job of manifest FILE on this machine: a trainer and a sidecar per worker.

    As root each worker gets a network namespace with the environment's link rates and a hard CPU
    quota; otherwise relays pace the links and a duty cycle holds the CPU. Ctrl-C ends everything
    within five seconds and leaves a readable result folder; --resume goes on from it.

    \b
    dlion run examples/digits.yaml --environment quickstart
    dlion run job.yaml --set exchange.policy=full --set synchronization.mode=synchronous \\
        --set knowledgeTransfer.policy=none
    dlion run job.yaml --resume runs/digits-20260101-120000
    """
    if resume is not None and out is not None:
        raise click.UsageError("--resume goes on in its own folder: leave --out away")
    document, lines = read_document(file)
    job = load_manifest(
        apply_set(document, assignments), source=str(file), lines=None if assignments else lines
    )
    refuse_suspended(job, str(file))
    refuse_named_authority(job, str(file))
    asked = _asked(job, environment)
    program_root = program_root_of(job, file, resume)
    now = datetime.now().astimezone()
    with (
        interruptible() as interruption,
        ResultFolder.create(
            resume or out, describe(job), now=now, resume=resume is not None
        ) as folder,
    ):
        folder.write_environment(asked.report())
        folder.keep_program_root(program_root)
        try:
            ended = _train(
                job,
                asked,
                folder,
                console=Console(stderr=output == "json"),
                data_root=data_root.resolve(),
                program_root=program_root,
                resume=resume is not None,
                privileged=False if unprivileged else None,
                certificate_life=timedelta(seconds=certificate_life),
            )
        except (DLionError, OSError) as error:
            finish_broken(folder, error, now=now)
            raise
        return _finish(folder, ended, interruption, output=output, now=now)


def tell_unreached(environment: Environment, seconds: float | None) -> None:
    """Says what of an environment a run of so many seconds never comes to."""
    if paths := environment.unreached(seconds):
        more = f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else ""
        click.echo(
            f"dlion: environment {environment.name}: the run ends at {seconds:g} s "
            f"(stop.maxSeconds), before {', '.join(paths[:MOST_NAMED])}{more}",
            err=True,
        )


def program_root_of(job: Job, file: Path, resume: Path | None) -> Path:
    """Where `trainer.program` is looked up: the manifest's folder.

    A run's own copy of the manifest leads to the folder of the manifest that the run was started
    with; so does, with `resume`, a manifest from standard input or without its program beside it.
    Without `resume`, standard input stands for the working directory.
    """
    folder = file.parent if str(file) != STDIN else resume or Path()
    root = kept_program_root(folder) or folder.resolve()
    program = job.spec.trainer.program.file
    if resume is not None and program and not (root / program).is_file():
        return kept_program_root(resume) or root
    return root


def _asked(job: Job, environment: str | None) -> Asked:
    if environment is None:
        return Asked(unlimited_plan(job.workers()), {})
    loaded = load_environment(environment)
    plan = loaded.plan(
        job.workers(),
        machine_cores=len(os.sched_getaffinity(0)),
        duration_s=job.spec.trainer.stop.max_seconds,
    )
    tell_unreached(loaded, job.spec.trainer.stop.max_seconds)
    return Asked(plan, to_document(loaded))


def _train(
    job: Job,
    asked: Asked,
    folder: ResultFolder,
    *,
    console: Console,
    data_root: Path,
    program_root: Path,
    resume: bool,
    privileged: bool | None,
    certificate_life: timedelta,
) -> Ended:
    with LiveView(folder.run, console, environment=asked.plan.environment) as view:
        listener = Listener(folder, view)
        runner: LocalRunner | None = None

        def hand_over(record: ProgressRecord) -> None:
            if runner is not None:
                runner.record(record)

        coordinator = LocalCoordinator(job, hand_over, certificate_life=certificate_life)
        runner = LocalRunner(
            job=job,
            plan=asked.plan,
            coordinator=coordinator,
            results_dir=folder.path.resolve(),
            data_root=data_root,
            program_root=program_root,
            on_record=listener.take,
            resume=resume,
            elapsed_s=folder.elapsed_s,
            privileged=privileged,
            on_environment=lambda *found: folder.write_environment(asked.report(*found)),
        )
        try:
            outcome = runner.run()
        except KeyboardInterrupt:
            continuous = job.spec.trainer.stop.continuous
            if continuous and listener.has_trained and not runner.has_failed:
                # It has no other end: who stops it has got what they wanted.
                return Ended(ExitCode.INTERRUPTED, "stopped by a signal", succeeded=True)
            return Ended(ExitCode.INTERRUPTED, "interrupted", succeeded=False)
        finally:
            coordinator.close()
    return _ended(outcome, listener)


def _ended(outcome: RunOutcome, listener: Listener) -> Ended:
    reasons = [*outcome.problems, *listener.stop_reasons, "no worker trained to the end"]
    failures = [f"worker {rank} ended with {why}" for rank, why in sorted(outcome.failed.items())]
    return Ended(
        outcome.exit_code,
        reasons[0],
        succeeded=outcome.exit_code is ExitCode.OK,
        problems=(*outcome.problems, *failures),
    )


def _finish(
    folder: ResultFolder, ended: Ended, interruption: Interruption, *, output: str, now: datetime
) -> int:
    ending = Ending(
        stop_reason=ended.reason,
        message="; ".join(ended.problems),
        succeeded=ended.succeeded,
        started_at=now.isoformat(timespec="seconds"),
    )
    summary = folder.finish(ending)
    report = report_in_time(folder, summary, interruption)
    for problem in ended.problems:
        click.echo(f"dlion: {problem}", err=True)
    print_result(Console(), summary, folder=folder.path, report=report, output=output)
    return ended.exit_code
