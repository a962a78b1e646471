"""`dlion simulate`: a job in an environment in virtual time, into a result folder like a run's.

Joins the simulation, the judge of the target, the result folder and the terminal.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from dlion_api.document import to_document
from dlion_api.errors import DivergedError, Problem, SpecError
from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_api.progress import ProgressRecord
from dlion_api.spec import Job
from dlion_cli import options
from dlion_cli.ending import finish_broken, report_in_time
from dlion_cli.finite import FiniteRange
from dlion_cli.interruption import Interruption, interruptible
from dlion_cli.live_view import LiveView
from dlion_cli.manifests import apply_set, load_manifest, read_document, refuse_suspended
from dlion_cli.run import program_root_of, tell_unreached
from dlion_cli.table import print_result
from dlion_operator.target import TargetWatch
from dlion_worker.environments import Plan, load_environment
from dlion_worker.results.description import describe
from dlion_worker.results.environment import EnvironmentReport, environment_report
from dlion_worker.results.folder import ResultFolder
from dlion_worker.results.judgement import EndReason, judge
from dlion_worker.results.models import read_models
from dlion_worker.results.storage import write_whole
from dlion_worker.results.summary import Ending, Json
from dlion_worker.simulation.calibration import read_costs
from dlion_worker.training import threads

if TYPE_CHECKING:
    from dlion_worker.simulation.run import SimulationOutcome

SIMULATION = "simulation.json"


@dataclass(frozen=True)
class CalibrationFile:
    """Where the costs of a step came from, and exactly which file that was."""

    path: str
    sha256: str


@dataclass(frozen=True)
class Simulated:
    """What `simulation.json` says: where and how a run was simulated."""

    environment: str
    seed: int
    virtual_seconds: float
    wall_seconds: float
    trace_hash: str
    samples_per_s_per_core: float
    """The environment's, or the calibration's in its place."""
    fixed_core_s: float
    exchange_core_s: float
    calibration: CalibrationFile | None

    def document(self) -> dict[str, object]:
        """As JSON."""
        return {
            "environment": self.environment,
            "seed": self.seed,
            "virtualSeconds": self.virtual_seconds,
            "wallSeconds": self.wall_seconds,
            "traceHash": self.trace_hash,
            "samplesPerSPerCore": self.samples_per_s_per_core,
            "fixedCoreS": self.fixed_core_s,
            "exchangeCoreS": self.exchange_core_s,
            "calibration": None if self.calibration is None else asdict(self.calibration),
        }


@dataclass(frozen=True)
class Asked:
    """What is to be simulated, and what becomes of it."""

    job: Job
    plan: Plan
    environment: EnvironmentReport
    program_root: Path
    data_root: Path
    fixed_core_s: float
    thread_count: int | None
    out: Path | None
    with_report: bool
    output: str
    exchange_core_s: float = 0.0
    exchange_core_s_per_byte: Mapping[Rank, float] = field(default_factory=dict)
    calibration: CalibrationFile | None = None


@dataclass(frozen=True)
class Finished:
    """A simulated run that was not broken off."""

    folder: Path
    summary: Json
    report: Path | None
    simulated: Simulated


Show = Callable[[Asked, Finished], None]


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
    "--step-overhead", "fixed_core_s", type=FiniteRange(0, 1000), metavar="SECONDS",
    help="What a step costs beside its samples, in seconds of one of the environment's cores. "
    "Default: 0, or the calibration's.",
)  # fmt: skip
@click.option(
    "--calibration", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="What `dlion calibrate` measured: a step's costs, in place of the environment's "
    "samplesPerSPerCore.",
)  # fmt: skip
@options.threads
@options.no_report
@options.result_folder
@click.option(
    "--data-root", type=click.Path(path_type=Path, file_okay=False), default=Path(), metavar="DIR",
    help="Relative paths of data and startFrom are taken from here. Default: the working "
    "directory.",
)  # fmt: skip
@options.output
def simulate(
    file: Path,
    environment: str,
    assignments: tuple[str, ...],
    seed: int | None,
    fixed_core_s: float | None,
    calibration: Path | None,
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
    dlion calibrate job.yaml --out costs.json
    dlion simulate job.yaml -e hetero-sys-a --calibration costs.json
    """
    document, lines = read_document(file)
    if seed is not None:
        assignments = (*assignments, f"trainer.seed={seed}")
    job = load_manifest(
        apply_set(document, assignments), source=str(file), lines=None if assignments else lines
    )
    refuse_suspended(job, str(file))
    refuse_endless(job, str(file))
    loaded = load_environment(environment)
    plan = loaded.plan(
        job.workers(),
        machine_cores=None,
        duration_s=job.spec.trainer.stop.max_seconds,
        source=str(file),
    )
    loaded.check(job, source=str(file))
    tell_unreached(loaded, job.spec.trainer.stop.max_seconds)
    measured = None
    if calibration is not None:
        plan, fixed_core_s, measured = _calibrated(plan, calibration, fixed_core_s)
    asked = Asked(
        job=job,
        plan=plan,
        environment=environment_report(loaded.name, document=to_document(loaded)),
        program_root=program_root_of(job, file, None),
        data_root=data_root.resolve(),
        fixed_core_s=fixed_core_s or 0.0,
        thread_count=threads,
        out=out,
        with_report=not no_report,
        output=output,
        calibration=measured,
    )
    return simulate_into_folder(asked, show)


def _calibrated(
    plan: Plan, path: Path, fixed_core_s: float | None
) -> tuple[Plan, float, CalibrationFile]:
    """The plan with measured costs; a fixed part that was given counts all the same."""
    measured_s, per_sample_s = read_costs(path)
    plan = replace(plan, samples_per_s_per_core=1.0 / per_sample_s)
    about = CalibrationFile(str(path), hashlib.sha256(path.read_bytes()).hexdigest())
    return plan, measured_s if fixed_core_s is None else fixed_core_s, about


def simulate_into_folder(asked: Asked, show: Show) -> int:
    """Simulates, keeps everything in a new result folder and shows it; the exit code.

    Raises: DLionError, OSError, or what else went wrong. The folder then says why it ended; it is
    not there where nothing was trained, so that the corrected command may be given as it is.
    """
    now = datetime.now().astimezone()
    console = Console(stderr=asked.output == "json")
    with (
        interruptible() as interruption,
        ResultFolder.create(asked.out, describe(asked.job), now=now) as folder,
    ):
        try:
            folder.write_environment(asked.environment)
            simulated, (code, ending) = _simulate(asked, folder, console=console)
        except KeyboardInterrupt:
            if folder.has_steps:
                finish_broken(folder, None, interruption, now=now, with_report=False)
            click.echo(f"dlion: interrupted {_kept(folder)}", err=True)
            return ExitCode.INTERRUPTED
        except Exception as error:
            # One that has diverged has trained, if only a part of a step.
            if folder.has_steps or isinstance(error, DivergedError):
                finish_broken(folder, error, interruption, now=now, with_report=asked.with_report)
            else:
                folder.discard()
            raise
        ending = replace(ending, started_at=now.isoformat(timespec="seconds"))
        summary, report = _finish(asked, folder, simulated, ending, interruption)
        if not ending.succeeded:
            click.echo(f"dlion: {ending.message}", err=True)
        show(asked, Finished(folder.path, summary, report, simulated))
        return code


def _kept(folder: ResultFolder) -> str:
    """How far an interrupted simulation came, and what there is of it."""
    if not folder.has_steps:
        folder.discard()
        return "before the first step: nothing is kept"
    return (
        f"after {folder.elapsed_s:.1f} virtual seconds. {folder.path} holds the records and the "
        f"summary until then; `dlion report {folder.path}` makes the page. A simulation "
        "cannot be resumed: simulate anew into another folder, or remove this one"
    )


def refuse_endless(job: Job, source: str) -> None:
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
    asked: Asked, folder: ResultFolder, *, console: Console
) -> tuple[Simulated, tuple[ExitCode, Ending]]:
    for name, value in threads.environment(1.0).items():
        os.environ.setdefault(name, value)
    from dlion_worker.simulation.run import Simulation  # TensorFlow: only when all else is right

    job, plan = asked.job, asked.plan
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
            data_root=asked.data_root,
            program_root=asked.program_root,
            on_record=take,
            judge=target.take,
            lost=target.left,
            fixed_core_s=asked.fixed_core_s,
            exchange_core_s=asked.exchange_core_s,
            exchange_core_s_per_byte=asked.exchange_core_s_per_byte,
            thread_count=asked.thread_count,
        ).run()
    simulated = Simulated(
        environment=plan.environment,
        seed=job.spec.trainer.seed,
        virtual_seconds=outcome.virtual_s,
        wall_seconds=round(outcome.wall_s, 3),
        trace_hash=outcome.trace_hash,
        samples_per_s_per_core=plan.samples_per_s_per_core,
        fixed_core_s=asked.fixed_core_s,
        exchange_core_s=asked.exchange_core_s,
        calibration=asked.calibration,
    )
    return simulated, judge_simulated(job, outcome, folder)


def judge_simulated(
    job: Job, outcome: SimulationOutcome, folder: ResultFolder
) -> tuple[ExitCode, Ending]:
    """How a simulated run ended, for the shell and for the summary: judged as a real one."""
    if outcome.problem:
        code = ExitCode.UNAVAILABLE
        return code, Ending(outcome.stop_reason, outcome.problem, False, reason=EndReason.of(code))
    judgement = judge(
        [outcome.stop_reason],
        expected=[worker.rank for worker in job.workers()],
        models=read_models(folder.path),
        iteration=folder.last_iteration,
    )
    return judgement.exit_code, Ending(
        judgement.stop_reason,
        judgement.message,
        judgement.exit_code is ExitCode.OK,
        reason=EndReason.of(judgement.exit_code),
        missing=judgement.missing,
    )


def _finish(
    asked: Asked,
    folder: ResultFolder,
    simulated: Simulated,
    ending: Ending,
    interruption: Interruption,
) -> tuple[Json, Path | None]:
    """Summary and page of a run that was not broken off."""
    summary = folder.finish(ending)
    text = json.dumps(simulated.document(), indent=2) + "\n"
    write_whole(folder.path / SIMULATION, text.encode())
    report = report_in_time(folder, summary, interruption) if asked.with_report else None
    return summary, report


def show(asked: Asked, finished: Finished) -> None:
    """Prints the end of a simulated run."""
    simulated, summary = finished.simulated, finished.summary
    if asked.output == "json":
        summary = {**summary, "simulation": simulated.document()}
    print_result(
        Console(), summary, folder=finished.folder, report=finished.report, output=asked.output
    )
    if asked.output != "json":
        click.echo(
            f"simulated {simulated.virtual_seconds:.1f} s in {simulated.wall_seconds:.1f} s; "
            f"trace {simulated.trace_hash}"
        )
