"""`dlion run`: train a job on this machine, from the manifest to the report."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from dlion_api.bounds import INT32_MAX
from dlion_api.document import to_document
from dlion_api.errors import DLionError
from dlion_cli.inputs.manifests import STDIN, read_job
from dlion_cli.inputs.required_files import find_program_root
from dlion_cli.inputs.runnable import prepare_run
from dlion_cli.inputs.unreached import warn_unreached
from dlion_cli.terminal import options
from dlion_cli.terminal.completion import complete_environments
from dlion_cli.terminal.formatting import printable
from dlion_cli.terminal.interruption import interruptible
from dlion_cli.terminal.table import print_result
from dlion_cli.views.run_ending import RunConsole, finish_failed_run, write_report_in_time
from dlion_operator.pki.certificate_issuer import LIFE
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.run_folder.layout import CHECKPOINTS, JOB
from dlion_results.summary.judgement import EndReason
from dlion_results.summary.summary import Json
from dlion_worker.trainer.process_times import process_age_s

if TYPE_CHECKING:
    from dlion_cli.local_runs.local_training import LocalTraining, RunResult


def resume_command(
    folder: Path,
    file: Path,
    environment: str | None = None,
    assignments: Sequence[str] = (),
    data_root: Path = Path(),
    unprivileged: bool = False,
) -> str:
    """The command that continues in that result folder; empty if it has no checkpoint.

    The other arguments are the options of `dlion run` that a resumed run needs again.
    """
    if not any(folder.glob(CHECKPOINTS)):
        return ""
    if str(file) == STDIN or not _is_kept(file):
        file, assignments = folder / JOB, ()  # which has them already
    command_line = ["dlion", "run", str(file), "--resume", str(folder)]
    if environment is not None:
        command_line += ["--environment", environment]
    for assignment in assignments:
        command_line += ["--set", assignment]
    if data_root != Path():
        command_line += ["--data-root", str(data_root)]
    if unprivileged:
        command_line.append("--unprivileged")
    return shlex.join(command_line)


def _is_kept(file: Path) -> bool:
    """Whether a later command can read this file again, unlike a pipe or a redirected input."""
    is_of_process = str(file.absolute()).startswith(("/dev/", "/proc/"))
    return not is_of_process and os.path.isfile(file)  # noqa: PTH113 - never PermissionError


log = logging.getLogger(__name__)

MIN_CERTIFICATE_LIFE_S = 10
"""Processes need some seconds to start, and certificates have whole seconds."""


@click.command(short_help="Train a job on this machine.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--environment", "-e", metavar="NAME|FILE", shell_complete=complete_environments,
    help="A published environment's name, or a file: cores and links of each worker. "
    "Default: no limits.",
)  # fmt: skip
@options.assignments("the manifest, e.g. exchange.policy=full")
@options.result_folder
@click.option(
    "--resume", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR",
    help="Continue the run in this result folder.",
)  # fmt: skip
@options.data_root
@click.option(
    "--unprivileged", is_flag=True,
    help="Use relays and a duty cycle, even as root.",
)  # fmt: skip
@click.option(
    "--certificate-life", type=click.IntRange(MIN_CERTIFICATE_LIFE_S, INT32_MAX), metavar="SECONDS",
    default=int(LIFE.total_seconds()),
    help="Lifetime of workers' certificates, renewed at half of it (default 86400).",
)  # fmt: skip
@options.no_report
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
    no_report: bool,
    output: str,
) -> int:
    """Train the job of manifest FILE on this machine, with a trainer and a sidecar per worker.

    As root, network namespaces and CPU quotas impose the environment; otherwise relays and a duty
    cycle do. Ctrl-C ends the run within five seconds; --resume continues it.

    \b
    dlion run examples/digits.yaml --environment quickstart
    dlion run job.yaml --set exchange.policy=full
    dlion run job.yaml --resume runs/digits-20260101-120000
    """
    if resume is not None and out is not None:
        raise click.UsageError("--resume continues in its own folder: remove --out")
    job = read_job(file, assignments)
    program_root = find_program_root(job, file, resume)
    plan, loaded = prepare_run(
        job, environment, source=str(file), program_root=program_root, data_root=data_root
    )
    if loaded is not None:
        warn_unreached(loaded, job.spec.trainer.stop.max_seconds)
    from dlion_cli.local_runs.local_training import LocalTraining  # numba

    now = datetime.now().astimezone()
    with (
        interruptible() as interruption,
        ResultFolder.create(resume or out, job, now=now, resume=resume is not None) as folder,
    ):
        training = LocalTraining(
            job=job,
            plan=plan,
            environment={} if loaded is None else to_document(loaded),
            folder=folder,
            console=RunConsole(stderr=output == "json"),
            data_root=data_root.resolve(),
            program_root=program_root,
            resume=resume is not None,
            privileged=False if unprivileged else None,
            certificate_life=timedelta(seconds=certificate_life),
        )
        resume_here = partial(
            resume_command, folder.path, file, environment, assignments, data_root, unprivileged
        )
        try:
            ended, summary = _train(training, now)
        except (DLionError, OSError) as error:
            with_report = not no_report
            finish_failed_run(folder, error, interruption, now=now, with_report=with_report)
            if command := resume_here():
                click.echo(f"dlion: once this is solved, continue:\n{command}", err=True)
            raise
        report = None if no_report else write_report_in_time(folder, summary, interruption)
        print_result(Console(), summary, folder=folder.path, report=report, output=output)
        for line in ended.traceback.splitlines():
            click.echo(printable(line), err=True)
        for problem in ended.problems:
            click.echo(f"dlion: {problem}", err=True)
        if ended.problems and ended.ending.reason != EndReason.PARTIAL:
            click.echo(f"dlion: logs are in {folder.path / 'logs'}", err=True)
        print_resume_command(ended, resume_here(), folder.path, out)
        return ended.exit_code


def print_resume_command(ended: RunResult, command: str, folder: Path, out: Path | None) -> None:
    """Print the command that continues an unfinished run, as the last line.

    `out`: the result folder that the user has named, if any.
    """
    if ended.ending.reason == EndReason.COMPLETED:
        return
    if not command:
        again = "" if out is None else " with another --out"
        click.echo(f"dlion: no checkpoint was saved: start again{again}", err=True)
        return
    if ended.ending.reason == EndReason.PARTIAL:
        click.echo(
            f"dlion: logs are in {folder / 'logs'}. With a later trainer.stop "
            "(--set trainer.stop.maxSteps=N) all workers continue:",
            err=True,
        )
    else:
        click.echo("dlion: to continue:", err=True)
    click.echo(command, err=True)


def _train(training: LocalTraining, now: datetime) -> tuple[RunResult, Json]:
    """Train, also when a signal interrupts; return the result and the summary."""
    started_at, command_s = now.isoformat(timespec="seconds"), process_age_s()

    def finished(ended: RunResult) -> tuple[RunResult, Json]:
        ending = replace(ended.ending, started_at=started_at, command_s=command_s)
        return ended, training.folder.finish(ending)

    try:
        return finished(training.run())
    except KeyboardInterrupt:  # at most one: later signals are ignored
        return finished(training.interrupted())
