"""`dlion simulate`: train a job in virtual time, into a result folder like a run's."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from rich.console import Console

from dlion_api.document import to_document
from dlion_api.errors import DivergedError
from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_api.protocol.progress import ProgressRecord
from dlion_api.spec import Job
from dlion_cli.inputs.manifests import read_job
from dlion_cli.inputs.required_files import find_program_root
from dlion_cli.inputs.runnable import prepare_simulation
from dlion_cli.inputs.unreached import warn_unreached
from dlion_cli.terminal import options
from dlion_cli.terminal.completion import complete_environments
from dlion_cli.terminal.interruption import interruptible
from dlion_cli.terminal.table import print_result
from dlion_cli.views.live_view import LiveView
from dlion_cli.views.run_ending import RunConsole, finish_failed_run, write_report_in_time
from dlion_environments.plan import Plan
from dlion_operator.served_runs.target_accuracy import TargetAccuracyMonitor
from dlion_results.run_folder.environment import EnvironmentReport, LocalCommand
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.run_folder.layout import SIMULATION
from dlion_results.run_folder.models import read_models
from dlion_results.run_folder.storage import write_whole
from dlion_results.summary.judgement import EndReason, judge_run
from dlion_results.summary.summary import Ending, Json
from dlion_simulator.calibration.calibration import read_costs
from dlion_worker.training import threads

if TYPE_CHECKING:
    from dlion_simulator.run import SimulationOutcome


@dataclass(frozen=True)
class SimulationRequest:
    """What to simulate, and where to write the results."""

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
    calibration: Mapping[str, str] | None = None
    """Path and SHA-256 of the file with the measured costs of a step."""


@dataclass(frozen=True)
class FinishedSimulation:
    """A simulated run that was not interrupted."""

    folder: Path
    summary: Json
    report: Path | None
    simulated: Json
    """The content of `simulation.json`: where and how it was simulated."""


_FEW_ITERATIONS: Final = 20
"""Minimum iterations for meaningful accuracies."""

Show = Callable[[SimulationRequest, FinishedSimulation], None]


@click.command(short_help="Train a job in virtual time.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--environment", "-e", metavar="NAME|FILE", required=True,
    shell_complete=complete_environments,
    help="A published environment's name, or a file: cores and links of each worker.",
)  # fmt: skip
@options.assignments("the manifest, e.g. exchange.policy=full")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="Overrides trainer.seed.")
@options.step_overhead
@options.calibration
@options.threads
@options.no_report
@options.result_folder
@options.data_root
@options.output
def simulate(
    file: Path,
    environment: str,
    assignments: tuple[str, ...],
    seed: int | None,
    step_overhead_s: float | None,
    calibration: Path | None,
    threads: int | None,
    no_report: bool,
    out: Path | None,
    data_root: Path,
    output: str,
) -> int:
    """Train the job of manifest FILE in virtual time: real gradients, simulated time and links.

    The same seed gives the same run, bit for bit. Stop conditions in seconds count virtual seconds.

    \b
    dlion simulate job.yaml -e hetero-sys-a --set exchange.policy=full --seed 2 -o json
    """
    if seed is not None:
        assignments = (*assignments, f"trainer.seed={seed}")
    job = read_job(file, assignments)
    plan, loaded = prepare_simulation(job, environment, source=str(file))
    warn_unreached(loaded, job.spec.trainer.stop.max_seconds)
    measured = None
    if calibration is not None:
        plan, step_overhead_s, measured = _calibrated(plan, calibration, step_overhead_s)
    request = SimulationRequest(
        job=job,
        plan=plan,
        environment=EnvironmentReport(
            loaded.name, document=to_document(loaded), command=LocalCommand.SIMULATE
        ),
        program_root=find_program_root(job, file, None),
        data_root=data_root.resolve(),
        fixed_core_s=step_overhead_s or 0.0,
        thread_count=threads,
        out=out,
        with_report=not no_report,
        output=output,
        calibration=measured,
    )
    return simulate_into_folder(request, print_simulation)


def _calibrated(
    plan: Plan, path: Path, step_overhead_s: float | None
) -> tuple[Plan, float, Mapping[str, str]]:
    """The plan with measured costs; an explicit fixed cost takes precedence."""
    measured_s, per_sample_s = read_costs(path)
    plan = replace(plan, samples_per_s_per_core=1.0 / per_sample_s)
    about = {"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    return plan, measured_s if step_overhead_s is None else step_overhead_s, about


def simulate_into_folder(request: SimulationRequest, print_simulation: Show) -> int:
    """Simulate into a new result folder, print the result, and return the exit code.

    If nothing was trained, the folder is removed, so that the user can repeat the corrected
    command. Raises: DLionError, OSError or any other error, after recording it in the folder.
    """
    now = datetime.now().astimezone()
    console = RunConsole(stderr=request.output == "json")
    with (
        interruptible() as interruption,
        ResultFolder.create(request.out, request.job, now=now) as folder,
    ):
        try:
            folder.write_environment(request.environment)
            folder.store_program_root(request.program_root)
            simulated, (code, ending) = _simulate(request, folder, console)
        except KeyboardInterrupt:
            if folder.has_steps:
                finish_failed_run(
                    folder, None, interruption, now=now, with_report=False, virtual_time=True
                )
            click.echo(f"dlion: interrupted {_interruption_message(folder)}", err=True)
            return ExitCode.INTERRUPTED
        except Exception as error:
            # A diverged run has trained, if only part of a step.
            if folder.has_steps or isinstance(error, DivergedError):
                finish_failed_run(
                    folder, error, interruption, now=now, with_report=request.with_report,
                    virtual_time=True,
                )  # fmt: skip
            else:
                folder.discard()
            raise
        started_at = now.isoformat(timespec="seconds")
        ending = replace(ending, started_at=started_at, virtual_time=True)
        summary = folder.finish(ending)
        text = json.dumps(simulated, indent=2) + "\n"
        write_whole(folder.path / SIMULATION, text.encode())
        report = (
            write_report_in_time(folder, summary, interruption) if request.with_report else None
        )
        if not ending.succeeded:
            click.echo(f"dlion: {ending.message}", err=True)
        print_simulation(request, FinishedSimulation(folder.path, summary, report, simulated))
        return code


def _interruption_message(folder: ResultFolder) -> str:
    """How far an interrupted simulation came, and what it left."""
    if not folder.has_steps:
        folder.discard()
        return "before the first step: nothing is kept"
    return (
        f"after {folder.elapsed_s:.1f} virtual seconds. {folder.path} holds the records and the "
        f"summary until then; `dlion report {shlex.quote(str(folder.path))}` creates the report. A "
        "simulation cannot be resumed: simulate again into another folder, or remove this one"
    )


def _simulate(
    request: SimulationRequest, folder: ResultFolder, console: Console
) -> tuple[Json, tuple[ExitCode, Ending]]:
    for name, value in threads.environment(1.0).items():
        os.environ.setdefault(name, value)
    from dlion_simulator.run import Simulation

    job, plan = request.job, request.plan
    target = TargetAccuracyMonitor.of(job, job.workers())
    environment = f"{plan.environment}, virtual time"
    with LiveView(folder.job, console, environment=environment, is_virtual=True) as view:

        def take(record: ProgressRecord, text: str) -> None:
            folder.append(record, text)
            view.update(record)

        outcome = Simulation(
            job=job,
            plan=plan,
            results_dir=folder.path.resolve(),
            data_root=request.data_root,
            program_root=request.program_root,
            on_record=take,
            judge=target.take,
            lost=target.remove,
            fixed_core_s=request.fixed_core_s,
            exchange_core_s=request.exchange_core_s,
            exchange_core_s_per_byte=request.exchange_core_s_per_byte,
            thread_count=request.thread_count,
        ).run()
    simulated = {
        "environment": plan.environment,
        "seed": job.spec.trainer.seed,
        "virtualSeconds": outcome.virtual_s,
        "wallSeconds": round(outcome.wall_s, 3),
        "traceHash": outcome.trace_hash,
        "samplesPerSPerCore": plan.samples_per_s_per_core,
        "fixedCoreS": request.fixed_core_s,
        "exchangeCoreS": request.exchange_core_s,
        "calibration": request.calibration,
    }
    return simulated, _judge(job, outcome, folder)


def _judge(job: Job, outcome: SimulationOutcome, folder: ResultFolder) -> tuple[ExitCode, Ending]:
    """The exit code and ending of a simulated run, by the rules for real runs."""
    if outcome.problem:
        code = ExitCode.UNAVAILABLE
        return code, Ending(outcome.stop_reason, outcome.problem, False, reason=EndReason.of(code))
    judgement = judge_run(
        [outcome.stop_reason],
        expected={worker.rank for worker in job.workers()} - folder.quarantined,
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


def print_simulation(request: SimulationRequest, finished: FinishedSimulation) -> None:
    """Print the result of a simulated run."""
    simulated, summary = finished.simulated, finished.summary
    if request.output == "json":
        summary = {**summary, "simulation": simulated}
    print_result(
        Console(), summary, folder=finished.folder, report=finished.report, output=request.output
    )
    if request.output != "json":
        click.echo(
            f"simulated {simulated['virtualSeconds']:.1f} s in {simulated['wallSeconds']:.1f} s; "
            f"trace {simulated['traceHash']}"
        )
    iterations = summary["ending"]["iteration"]
    is_slow = request.calibration is None and iterations < _FEW_ITERATIONS
    if is_slow and str(summary["ending"]["stop_reason"]).startswith("maxSeconds"):
        click.echo(
            f"dlion: only {iterations} iterations: a core computes "
            f"{simulated['samplesPerSPerCore']:g} samples/s here (the environment's "
            "samplesPerSPerCore). `dlion calibrate FILE` measures the job's own speed",
            err=True,
        )
