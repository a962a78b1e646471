"""`dlion simulate`: a job in an environment in virtual time, into a result folder like a run's.

Joins the simulation, the judge of the target, the result folder and the terminal.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import click
from rich.console import Console

from dlion_api.atomic_file import write_atomically
from dlion_api.document import to_document
from dlion_api.errors import DLionError, Problem, SpecError
from dlion_api.exit_codes import ExitCode
from dlion_api.progress import ProgressRecord
from dlion_api.spec import Job
from dlion_cli.ending import finish_broken, report_in_time
from dlion_cli.interruption import Interruption, interruptible
from dlion_cli.live_view import LiveView
from dlion_cli.manifests import apply_set, load_manifest, read_document, refuse_suspended
from dlion_cli.run import program_root_of
from dlion_cli.table import print_result
from dlion_operator.target import TargetWatch
from dlion_worker.environments import Plan, load_environment
from dlion_worker.results.description import describe
from dlion_worker.results.environment import environment_report
from dlion_worker.results.folder import ResultFolder
from dlion_worker.results.summary import Ending
from dlion_worker.training import threads

SIMULATION = "simulation.json"


@dataclass(frozen=True)
class Simulated:
    """What `simulation.json` says: where and how a run was simulated."""

    environment: str
    seed: int
    virtual_seconds: float
    wall_seconds: float
    trace_hash: str

    def document(self) -> dict[str, object]:
        """As JSON."""
        return {
            "environment": self.environment,
            "seed": self.seed,
            "virtualSeconds": self.virtual_seconds,
            "wallSeconds": self.wall_seconds,
            "traceHash": self.trace_hash,
        }


@click.command(short_help="Train a job in virtual time.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--environment", "-e", metavar="NAME|FILE", required=True,
    help="Cores and links of each worker: the name of a published environment or a file.",
)  # fmt: skip
@click.option(
    "--set", "assignments", multiple=True, metavar="PATH=VALUE",
    help="Change a field of the manifest, e.g. trainer.optimizer.learningRate=0.1. Repeatable.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="In place of trainer.seed.")
@click.option(
    "--step-overhead", "fixed_core_s", type=click.FloatRange(0, 1000), default=0.0,
    metavar="SECONDS", show_default=True,
    help="What a step costs beside its samples, in seconds of one of the environment's cores.",
)  # fmt: skip
@click.option(
    "--threads", type=click.IntRange(1, 1024), metavar="N",
    help="Gradients computed at a time; changes nothing but the waiting. Default: all cores.",
)  # fmt: skip
@click.option("--no-report", is_flag=True, help="Do without report.html.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR",
    help="Result folder (new or empty). Default: runs/<job>-<time>.",
)  # fmt: skip
@click.option(
    "--data-root", type=click.Path(path_type=Path, file_okay=False), default=Path(), metavar="DIR",
    help="Relative paths of data and startFrom are taken from here. Default: the working "
    "directory.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table",
    help="What is printed at the end.",
)  # fmt: skip
def simulate(
    file: Path,
    environment: str,
    assignments: tuple[str, ...],
    seed: int | None,
    fixed_core_s: float,
    threads: int | None,
    no_report: bool,
    out: Path | None,
    data_root: Path,
    output: str,
) -> int:
    """Train the job of manifest FILE in virtual time: real gradients, simulated time and links.

    A worker of c cores computes c times the environment's samplesPerSPerCore; its links share
    uplink and downlink fairly. The same seed gives the same run, bit for bit, however busy the
    machine is. Stop conditions in seconds are virtual ones.

    \b
    dlion simulate examples/digits.yaml --environment quickstart
    dlion simulate job.yaml -e hetero-sys-a --set exchange.policy=full --seed 2 -o json
    """
    document, lines = read_document(file)
    if seed is not None:
        assignments = (*assignments, f"trainer.seed={seed}")
    job = load_manifest(
        apply_set(document, assignments), source=str(file), lines=None if assignments else lines
    )
    refuse_suspended(job, str(file))
    _refuse_endless(job, str(file))
    loaded = load_environment(environment)
    plan = loaded.plan(
        job.workers(), machine_cores=None, duration_s=job.spec.trainer.stop.max_seconds
    )
    loaded.check(job, source=str(file))
    now = datetime.now().astimezone()
    console = Console(stderr=output == "json")
    with (
        interruptible() as interruption,
        ResultFolder.create(out, describe(job), now=now) as folder,
    ):
        folder.write_environment(environment_report(loaded.name, document=to_document(loaded)))
        try:
            simulated, stop_reason = _simulate(
                job, plan, folder,
                console=console,
                data_root=data_root.resolve(),
                program_root=program_root_of(job, file, None),
                fixed_core_s=fixed_core_s,
                thread_count=threads,
            )  # fmt: skip
        except KeyboardInterrupt:
            finish_broken(folder, DLionError("interrupted"), now=now, with_report=False)
            return ExitCode.INTERRUPTED
        except (DLionError, OSError) as error:
            finish_broken(folder, error, now=now, with_report=not no_report)
            raise
        _finish(
            folder, simulated, stop_reason, interruption,
            output=output, now=now, with_report=not no_report,
        )  # fmt: skip
        return ExitCode.OK


def _refuse_endless(job: Job, source: str) -> None:
    """Raises: SpecError for what a simulation cannot do, or would never end doing."""
    stop = job.spec.trainer.stop
    problems = []
    if stop.max_seconds is None and stop.max_steps is None and stop.max_epochs is None:
        problems.append(
            Problem(
                "spec.trainer.stop",
                "a simulation needs an end that is sure to come",
                allowed="maxSeconds, maxSteps or maxEpochs",
                advice="Give --set trainer.stop.maxSeconds=600, say: they are virtual seconds.",
            )
        )
    if job.spec.trainer.dataset.watch:
        problems.append(
            Problem(
                "spec.trainer.dataset.watch",
                "files do not change in virtual time",
                value="true",
                allowed="false",
                advice="Give --set trainer.dataset.watch=false",
            )
        )
    if problems:
        raise SpecError(problems, source=source)


def _simulate(
    job: Job,
    plan: Plan,
    folder: ResultFolder,
    *,
    console: Console,
    data_root: Path,
    program_root: Path,
    fixed_core_s: float,
    thread_count: int | None,
) -> tuple[Simulated, str]:
    for name, value in threads.environment(1.0).items():
        os.environ.setdefault(name, value)
    from dlion_worker.simulation.run import Simulation  # TensorFlow: only when all else is right

    target = TargetWatch(
        job.spec.trainer.stop.target_accuracy, [worker.rank for worker in job.workers()]
    )
    with LiveView(folder.run, console, environment=f"{plan.environment}, virtual time") as view:

        def take(record: ProgressRecord) -> None:
            folder.append(record)
            view.update(record)

        outcome = Simulation(
            job=job,
            plan=plan,
            results_dir=folder.path.resolve(),
            data_root=data_root,
            program_root=program_root,
            on_record=take,
            judge=target.take,
            fixed_core_s=fixed_core_s,
            thread_count=thread_count,
        ).run()
    simulated = Simulated(
        environment=plan.environment,
        seed=job.spec.trainer.seed,
        virtual_seconds=outcome.virtual_s,
        wall_seconds=round(outcome.wall_s, 3),
        trace_hash=outcome.trace_hash,
    )
    return simulated, outcome.stop_reason


def _finish(
    folder: ResultFolder,
    simulated: Simulated,
    stop_reason: str,
    interruption: Interruption,
    *,
    output: str,
    now: datetime,
    with_report: bool,
) -> None:
    ending = Ending(stop_reason=stop_reason, started_at=now.isoformat(timespec="seconds"))
    summary = folder.finish(ending)
    text = json.dumps(simulated.document(), indent=2) + "\n"
    write_atomically(folder.path / SIMULATION, text.encode(), mode=0o644)
    report = report_in_time(folder, summary, interruption) if with_report else None
    if output == "json":
        summary = {**summary, "simulation": simulated.document()}
    print_result(Console(), summary, folder=folder.path, report=report, output=output)
    if output != "json":
        click.echo(
            f"simulated {simulated.virtual_seconds:.1f} s in {simulated.wall_seconds:.1f} s; "
            f"trace {simulated.trace_hash}"
        )
