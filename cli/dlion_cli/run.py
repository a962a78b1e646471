"""`dlion run`: a job on this machine, from the manifest to the report.

Joins the operator's coordinator, the worker's local runner, the result folder and the terminal.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from dlion_api.exit_codes import ExitCode
from dlion_api.progress import EventRecord, ProgressRecord
from dlion_api.spec import Job, load_job
from dlion_cli.live_view import LiveView
from dlion_cli.local_coordinator import LocalCoordinator
from dlion_cli.manifests import apply_set, read_document
from dlion_cli.table import print_result
from dlion_worker.environments import Plan, load_environment, unlimited_plan
from dlion_worker.local.runner import LocalRunner, RunOutcome
from dlion_worker.results.description import describe
from dlion_worker.results.environment import environment_report
from dlion_worker.results.folder import ResultFolder
from dlion_worker.results.summary import Ending, Json


@dataclass
class Listener:
    """Where records go: result folder and terminal; and what the run's end is told from them."""

    folder: ResultFolder
    view: LiveView
    stop_reasons: list[str] = field(default_factory=list)

    def take(self, record: ProgressRecord) -> None:
        """One record, in the order of arrival."""
        self.folder.append(record)
        self.view.update(record)
        if isinstance(record, EventRecord) and record.reason == "TrainingStopped":
            self.stop_reasons.append(record.message)


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
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR",
    help="Result folder (new or empty). Default: runs/<job>-<time>.",
)  # fmt: skip
@click.option(
    "--resume", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR",
    help="Go on with the run of this result folder, from its checkpoints.",
)  # fmt: skip
@click.option(
    "--data-root", type=click.Path(path_type=Path, file_okay=False), default=Path(), metavar="DIR",
    help="Relative paths of the manifest are taken from here. Default: the working directory.",
)  # fmt: skip
@click.option(
    "--unprivileged", is_flag=True,
    help="Shape links by relays and CPU by a duty cycle even as root.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table",
    help="What is printed at the end.",
)  # fmt: skip
def run(
    file: Path,
    environment: str | None,
    assignments: tuple[str, ...],
    out: Path | None,
    resume: Path | None,
    data_root: Path,
    unprivileged: bool,
    output: str,
) -> int:
    """Train the job of manifest FILE on this machine: a trainer and a sidecar per worker.

    As root each worker gets a network namespace with the environment's link rates and a hard CPU
    quota; otherwise relays pace the links and a duty cycle holds the CPU. Ctrl-C ends everything
    within five seconds and leaves a readable result folder; --resume goes on from it.

    \b
    dlion run examples/digits.yaml --environment quickstart
    dlion run job.yaml --set exchange.policy=full --set synchronization.mode=synchronous
    dlion run job.yaml --resume runs/digits-20260101-120000
    """
    if resume is not None and out is not None:
        raise click.UsageError("--resume goes on in its own folder: leave --out away")
    document, lines = read_document(file)
    job = load_job(
        apply_set(document, assignments), source=str(file), lines=None if assignments else lines
    )
    plan = _plan(job, environment)
    now = datetime.now().astimezone()
    with (
        interruptible(),
        ResultFolder.create(
            resume or out, describe(job), now=now, resume=resume is not None
        ) as folder,
    ):
        folder.write_environment(environment_report(plan.environment))
        outcome, reason = _train(
            job,
            plan,
            folder,
            console=Console(stderr=output == "json"),
            data_root=data_root.resolve(),
            resume=resume is not None,
            privileged=False if unprivileged else None,
        )
        return _finish(folder, plan, outcome, reason, output=output, now=now)


def _plan(job: Job, environment: str | None) -> Plan:
    if environment is None:
        return unlimited_plan(job.workers())
    return load_environment(environment).plan(
        job.workers(),
        machine_cores=len(os.sched_getaffinity(0)),
        duration_s=job.spec.trainer.stop.max_seconds,
    )


def _train(
    job: Job,
    plan: Plan,
    folder: ResultFolder,
    *,
    console: Console,
    data_root: Path,
    resume: bool,
    privileged: bool | None,
) -> tuple[RunOutcome | None, str]:
    """How the run went (None: interrupted), and why it ended."""
    with LiveView(folder.run, console, environment=plan.environment) as view:
        listener = Listener(folder, view)
        runner: LocalRunner | None = None

        def hand_over(record: ProgressRecord) -> None:
            if runner is not None:
                runner.record(record)

        coordinator = LocalCoordinator(job, hand_over)
        runner = LocalRunner(
            job=job,
            plan=plan,
            coordinator=coordinator,
            results_dir=folder.path.resolve(),
            data_root=data_root,
            on_record=listener.take,
            resume=resume,
            elapsed_s=folder.elapsed_s,
            privileged=privileged,
        )
        try:
            outcome = runner.run()
        except KeyboardInterrupt:
            return None, "interrupted"
        finally:
            coordinator.close()
    reason = listener.stop_reasons[0] if listener.stop_reasons else "no worker trained to the end"
    return outcome, reason


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run in the same order, once: a second one does not disturb."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _finish(
    folder: ResultFolder,
    plan: Plan,
    outcome: RunOutcome | None,
    reason: str,
    *,
    output: str,
    now: datetime,
) -> int:
    exit_code = ExitCode.INTERRUPTED if outcome is None else outcome.exit_code
    if outcome is not None:
        folder.write_environment(environment_report(plan.environment, outcome.comparisons))
    failures = _failures(outcome)
    ending = Ending(
        stop_reason=reason,
        message="; ".join(failures),
        succeeded=exit_code is ExitCode.OK,
        started_at=now.isoformat(timespec="seconds"),
    )
    summary = folder.finish(ending)
    report = _report(folder, summary)
    for failure in failures:
        click.echo(f"dlion: {failure}", err=True)
    print_result(Console(), summary, folder=folder.path, report=report, output=output)
    return exit_code


def _failures(outcome: RunOutcome | None) -> list[str]:
    failed = {} if outcome is None else outcome.failed
    return [f"worker {rank} ended with {failure}" for rank, failure in sorted(failed.items())]


def _report(folder: ResultFolder, summary: Json) -> Path | None:
    """The page, where there is anything to show: a run that never trained has none."""
    if not summary["steps"]:
        return None
    from dlion_worker.results.report.page import write_report  # Matplotlib: only at the end

    return write_report([folder.path], folder.report_path)
