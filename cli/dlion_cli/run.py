"""`dlion run`: a job on this machine, from the manifest to the report.

The training itself is `local_training`'s.
"""

from __future__ import annotations

import logging
import os
from datetime import datetime, timedelta
from pathlib import Path

import click
from rich.console import Console

from dlion_api.document import to_document
from dlion_api.errors import DLionError, ProgramError
from dlion_api.spec import Job
from dlion_cli import options
from dlion_cli.ending import finish_broken, report_in_time
from dlion_cli.interruption import interruptible
from dlion_cli.local_training import Asked, Ended, LocalTraining
from dlion_cli.manifests import (
    STDIN,
    apply_set,
    load_manifest,
    read_document,
    refuse_named_authority,
    refuse_suspended,
)
from dlion_cli.resume_command import ResumeCommand
from dlion_cli.table import print_result
from dlion_operator.issuing import LIFE
from dlion_worker.environments import Environment, load_environment, unlimited_plan
from dlion_worker.results.description import describe
from dlion_worker.results.folder import ResultFolder, kept_program_root
from dlion_worker.results.judgement import EndReason
from dlion_worker.results.summary import Ending, Json

log = logging.getLogger(__name__)

SHORTEST_LIFE_S = 10
"""Of a certificate: processes need some seconds to start, and times in it are whole seconds."""

MOST_NAMED = 8
"""Of an environment's times that never come; more are counted."""


@click.command(short_help="Train a job on this machine.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--environment", "-e", metavar="NAME|FILE",
    help="Cores and links of each worker: the name of a published environment or a file. "
    "Without it every worker gets what the machine gives.",
)  # fmt: skip
@click.option(
    "--set", "assignments", multiple=True, metavar="PATH=VALUE",
    help="Change a field of the manifest, e.g. trainer.optimizer.learningRate=0.1; with no value "
    "it is taken out. Repeatable.",
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
    refuse_without_program(job, program_root)
    now = datetime.now().astimezone()
    with (
        interruptible() as interruption,
        ResultFolder.create(
            resume or out, describe(job), now=now, resume=resume is not None
        ) as folder,
    ):
        training = LocalTraining(
            job=job,
            asked=asked,
            folder=folder,
            console=Console(stderr=output == "json"),
            data_root=data_root.resolve(),
            program_root=program_root,
            resume=resume is not None,
            privileged=False if unprivileged else None,
            certificate_life=timedelta(seconds=certificate_life),
        )
        try:
            ended, summary = _to_the_end(training, now)
        except (DLionError, OSError) as error:
            finish_broken(folder, error, interruption, now=now)
            raise
        report = report_in_time(folder, summary, interruption)
        print_result(Console(), summary, folder=folder.path, report=report, output=output)
        for problem in ended.problems:
            click.echo(f"dlion: {problem}", err=True)
        command = ResumeCommand(file, environment, assignments, data_root, unprivileged)
        _tell_how_to_go_on(ended, command.words(folder.path), folder)
        return ended.exit_code


def _tell_how_to_go_on(ended: Ended, command: str, folder: ResultFolder) -> None:
    """The last line of a run that has not come to its end: the command, to be copied."""
    if ended.reason is EndReason.COMPLETED:
        return
    if not command:
        click.echo("dlion: no checkpoint was saved yet: start afresh, with another --out", err=True)
        return
    if ended.reason is EndReason.PARTIAL:
        click.echo(
            f"dlion: logs are in {folder.path / 'logs'}. With a later trainer.stop "
            "(--set trainer.stop.maxSteps=N) all workers train on:",
            err=True,
        )
    else:
        click.echo("dlion: to go on:", err=True)
    click.echo(command, err=True)


def _to_the_end(training: LocalTraining, now: datetime) -> tuple[Ended, Json]:
    """Trains; how it ended and its summary, which is written whenever a signal comes."""
    try:
        ended = training.run()
        return ended, _summary(training.folder, ended, now)
    except KeyboardInterrupt:  # the only one: what comes after the first signal is not heard
        ended = training.interrupted()
        return ended, _summary(training.folder, ended, now)


def _summary(folder: ResultFolder, ended: Ended, now: datetime) -> Json:
    ending = Ending(
        stop_reason=ended.stop_reason,
        message="; ".join(ended.problems),
        succeeded=ended.succeeded,
        started_at=now.isoformat(timespec="seconds"),
        reason=ended.reason,
        missing=ended.missing,
    )
    return folder.finish(ending)


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


def refuse_without_program(job: Job, root: Path) -> None:
    """Raises: ProgramError where it is not there: each worker would say so, seconds later."""
    program = job.spec.trainer.program.file
    if program and not (root / program).is_file():
        raise ProgramError(
            f"spec.trainer.program.file: no such file: {root / program}. Paths are relative to the "
            "manifest; `dlion init` writes a template"
        )


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
