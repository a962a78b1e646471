"""Trains the job of `dlion run` with the local runner, a coordinator and a result folder.

Determines the exit code and the summary's ending, also after an interruption.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console

from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord, ProgressRecord
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_cli.local_runs.local_coordinator import LocalCoordinator
from dlion_cli.views.live_view import LiveView
from dlion_environments.plan import Plan
from dlion_local.runner.deferred_signals import DeferredSignals
from dlion_local.runner.outcome import RunOutcome, WorkerFailure
from dlion_local.runner.runner import LocalRunner
from dlion_results.run_folder.environment import (
    EnvironmentFigure,
    EnvironmentReport,
    LocalCommand,
)
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.run_folder.models import SiteModel, read_models
from dlion_results.summary.judgement import EndReason, judge_run
from dlion_results.summary.summary import Ending


@dataclass
class LocalRecordSink:
    """Writes records to the result folder and the live view, and keeps what the result needs."""

    folder: ResultFolder
    view: LiveView
    stop_reasons: list[str] = field(default_factory=list)
    saved_by: set[Rank] = field(default_factory=set)
    """Workers that saved their site's final model in this run."""
    iteration: int = 0
    """The highest of any worker that trains: sensors make steps of their own."""
    has_trained: bool = False

    def take(self, record: ProgressRecord) -> None:
        """Process one record, in order of arrival."""
        self.folder.append(record)
        self.view.update(record)
        if self.folder.job.spec.exchange.trains(record.rank):
            self.iteration = max(self.iteration, record.iteration)
        if isinstance(record, EventRecord):
            self.has_trained |= record.reason == EventReason.TRAINING_STARTED
            if record.reason == EventReason.TRAINING_STOPPED:
                self.stop_reasons.append(record.message)
            elif record.reason == EventReason.MODEL_SAVED:
                self.saved_by.add(record.rank)


@dataclass(frozen=True)
class RunResult:
    """How the training ended, for the shell and for the summary."""

    exit_code: ExitCode
    ending: Ending
    problems: tuple[str, ...] = ()
    """Messages for the terminal, most important first."""
    traceback: str = ""
    """Traceback of a program that raised; empty if none did."""


def _run_result(
    exit_code: ExitCode,
    stop_reason: str,
    reason: EndReason,
    problems: Iterable[str] = (),
    missing: tuple[int, ...] = (),
) -> RunResult:
    messages = tuple(filter(None, problems))
    succeeded = reason in (EndReason.COMPLETED, EndReason.STOPPED)
    ending = Ending(stop_reason, "; ".join(messages), succeeded, reason=reason, missing=missing)
    return RunResult(exit_code, ending, messages)


@dataclass(kw_only=True)
class LocalTraining:
    """One training of a job on this machine; runs once."""

    job: Job
    plan: Plan
    environment: dict[str, Any]
    """The document of the requested environment; empty without one."""
    folder: ResultFolder
    console: Console
    data_root: Path
    program_root: Path
    resume: bool
    privileged: bool | None
    certificate_life: timedelta
    _sink: LocalRecordSink | None = field(default=None, init=False)
    _runner: LocalRunner | None = field(default=None, init=False)

    def run(self) -> RunResult:
        """Train to the end. Raises: KeyboardInterrupt, after an orderly shutdown."""
        self._write_environment()
        self.folder.store_program_root(self.program_root)
        view = LiveView(
            self.folder.job,
            self.console,
            environment=self.plan.environment,
            elapsed_s=self.folder.elapsed_s,
        )
        with DeferredSignals() as signals, view:
            self._sink = sink = LocalRecordSink(self.folder, view)
            coordinator = LocalCoordinator(
                self.job, self._forward_record, certificate_life=self.certificate_life
            )
            self._runner = runner = self._runner_with(coordinator, sink)
            try:
                with signals.deliver():
                    outcome = runner.run()
            finally:
                coordinator.close()
        tracebacks = (why.traceback for _, why in sorted(outcome.failed.items()) if why.traceback)
        return replace(self._result(outcome, sink), traceback=next(tracebacks, ""))

    def interrupted(self) -> RunResult:
        """The result after an interruption of `run`, which may have come after its end."""
        sink, runner = self._sink, self._runner
        if sink is None or runner is None:
            return _interrupted_result()
        if runner.is_over:
            ended = self._result(runner.outcome(), sink)
            return replace(ended, exit_code=ExitCode.INTERRUPTED)
        if self.job.spec.trainer.stop.continuous and sink.has_trained and not runner.has_failed:
            # A signal is the regular end of continuous training.
            return _run_result(ExitCode.INTERRUPTED, "stopped by a signal", EndReason.STOPPED)
        return _interrupted_result()

    def _result(self, outcome: RunOutcome, sink: LocalRecordSink) -> RunResult:
        """The result after all workers ended or were abandoned."""
        failed = sorted(outcome.failed.items())
        failures = failure_messages(failed)
        if outcome.exit_code is not ExitCode.OK:
            reasons = [*outcome.problems, *sink.stop_reasons, "no worker trained to the end"]
            reason = EndReason.of(outcome.exit_code)
            problems = (*outcome.problems, *failures)
            return _run_result(outcome.exit_code, reasons[0], reason, problems)
        judgement = judge_run(
            sink.stop_reasons,
            expected={worker.rank for worker in self.job.workers()} - self.folder.quarantined,
            models=self._saved_models(sink.saved_by),
            iteration=sink.iteration,
            why={rank: f"ended with {why.code.name} ({int(why.code)})" for rank, why in failed},
        )
        return _run_result(
            judgement.exit_code,
            judgement.stop_reason,
            EndReason.of(judgement.exit_code),
            (judgement.message, *outcome.problems, *failures),
            judgement.missing,
        )

    def _saved_models(self, saved_by: Collection[Rank]) -> list[SiteModel]:
        """This run's models; a resumed folder also has those of earlier runs."""
        sites = {self.job.worker(rank).site for rank in saved_by}
        return [model for model in read_models(self.folder.path) if model.site in sites]

    def _runner_with(self, coordinator: LocalCoordinator, sink: LocalRecordSink) -> LocalRunner:
        return LocalRunner(
            job=self.job,
            plan=self.plan,
            coordinator=coordinator,
            results_dir=self.folder.path.resolve(),
            data_root=self.data_root,
            program_root=self.program_root,
            on_record=sink.take,
            resume=self.resume,
            elapsed_s=self.folder.elapsed_s,
            privileged=self.privileged,
            check_folder=self.folder.check_exists,
            on_environment=self._write_environment,
        )

    def _write_environment(
        self, figures: tuple[EnvironmentFigure, ...] = (), notes: tuple[str, ...] = ()
    ) -> None:
        """Write the requested environment together with the measured values."""
        given = notes if self.environment else ()
        self.folder.write_environment(
            EnvironmentReport(
                self.plan.environment, figures, given, self.environment, LocalCommand.RUN
            )
        )

    def _forward_record(self, record: ProgressRecord) -> None:
        if self._runner is not None:
            self._runner.record(record)


def failure_messages(failed: Sequence[tuple[Rank, WorkerFailure]]) -> list[str]:
    """One message for all workers that failed in the same way."""
    ranks: dict[str, list[Rank]] = {}
    for rank, why in failed:
        ranks.setdefault(str(why), []).append(rank)
    return [
        f"worker{'s' * (len(those) > 1)} {', '.join(map(str, those))} ended with {why}"
        for why, those in ranks.items()
    ]


def _interrupted_result() -> RunResult:
    return _run_result(ExitCode.INTERRUPTED, "interrupted", EndReason.INTERRUPTED)
