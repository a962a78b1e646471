"""The training of `dlion run`: the local runner with a coordinator, a result folder and a terminal.

Owns what a run that ended, or was interrupted, comes to for the summary and for the shell.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console

from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_api.progress import EventRecord, ProgressRecord
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_cli.live_view import LiveView
from dlion_cli.local_coordinator import LocalCoordinator
from dlion_worker.environments import Plan
from dlion_worker.local.held_signals import HeldSignals
from dlion_worker.local.measuring import Comparison
from dlion_worker.local.outcome import RunOutcome
from dlion_worker.local.runner import LocalRunner
from dlion_worker.results.environment import EnvironmentReport, environment_report
from dlion_worker.results.folder import ResultFolder
from dlion_worker.results.judgement import EndReason, judge
from dlion_worker.results.models import SavedModel, read_models


@dataclass
class Listener:
    """Where records go: result folder and terminal; and what the run's end is told from them."""

    folder: ResultFolder
    view: LiveView
    stop_reasons: list[str] = field(default_factory=list)
    saved_by: set[Rank] = field(default_factory=set)
    """Workers that have saved their site's model at the end of this run."""
    iteration: int = 0
    has_trained: bool = False

    def take(self, record: ProgressRecord) -> None:
        """One record, in the order of arrival."""
        self.folder.append(record)
        self.view.update(record)
        self.iteration = max(self.iteration, record.iteration)
        if isinstance(record, EventRecord):
            self.has_trained |= record.reason == EventReason.TRAINING_STARTED
            if record.reason == EventReason.TRAINING_STOPPED:
                self.stop_reasons.append(record.message)
            elif record.reason == EventReason.MODEL_SAVED:
                self.saved_by.add(record.rank)


@dataclass(frozen=True)
class Ended:
    """How the training ended, for the summary and for the shell."""

    exit_code: ExitCode
    stop_reason: str
    succeeded: bool
    reason: EndReason
    problems: tuple[str, ...] = ()
    """What the terminal says of it, the most important first."""
    missing: tuple[int, ...] = ()


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


@dataclass(kw_only=True)
class LocalTraining:
    """One training of a job on this machine, to be run once."""

    job: Job
    asked: Asked
    folder: ResultFolder
    console: Console
    data_root: Path
    program_root: Path
    resume: bool
    privileged: bool | None
    certificate_life: timedelta
    _listener: Listener | None = field(default=None, init=False)
    _runner: LocalRunner | None = field(default=None, init=False)

    def run(self) -> Ended:
        """Trains to the end. Raises: KeyboardInterrupt, when all has ended in order."""
        self.folder.write_environment(self.asked.report())
        self.folder.keep_program_root(self.program_root)
        view = LiveView(self.folder.run, self.console, environment=self.asked.plan.environment)
        with HeldSignals() as signals, view:
            self._listener = listener = Listener(self.folder, view)
            coordinator = LocalCoordinator(
                self.job, self._hand_over, certificate_life=self.certificate_life
            )
            self._runner = runner = self._runner_with(coordinator, listener)
            try:
                with signals.let_through():
                    outcome = runner.run()
            finally:
                coordinator.close()
        return self._ended(outcome, listener)

    def interrupted(self) -> Ended:
        """How it ended where `run` was interrupted: in its own way where it was over already."""
        listener, runner = self._listener, self._runner
        if listener is None or runner is None:
            return _interrupted()
        if runner.is_over:
            ended = self._ended(runner.outcome(), listener)
            return replace(ended, exit_code=ExitCode.INTERRUPTED)
        if self.job.spec.trainer.stop.continuous and listener.has_trained and not runner.has_failed:
            # It has no other end: who stops it has got what they wanted.
            words = "stopped by a signal"
            return Ended(ExitCode.INTERRUPTED, words, succeeded=True, reason=EndReason.STOPPED)
        return _interrupted()

    def _ended(self, outcome: RunOutcome, listener: Listener) -> Ended:
        """How it ended where all workers came to their end, or were given up."""
        failed = sorted(outcome.failed.items())
        failures = [f"worker {rank} ended with {why}" for rank, why in failed]
        if outcome.exit_code is not ExitCode.OK:
            reasons = [*outcome.problems, *listener.stop_reasons, "no worker trained to the end"]
            return Ended(
                outcome.exit_code,
                reasons[0],
                succeeded=False,
                reason=EndReason.of(outcome.exit_code),
                problems=(*outcome.problems, *failures),
            )
        judgement = judge(
            listener.stop_reasons,
            expected=[worker.rank for worker in self.job.workers()],
            models=self._saved_models(listener.saved_by),
            iteration=listener.iteration,
            why={rank: f"ended with {why.code.name} ({int(why.code)})" for rank, why in failed},
        )
        return Ended(
            judgement.exit_code,
            judgement.stop_reason,
            succeeded=judgement.exit_code is ExitCode.OK,
            reason=EndReason.of(judgement.exit_code),
            problems=tuple(filter(None, (judgement.message, *outcome.problems, *failures))),
            missing=judgement.missing,
        )

    def _saved_models(self, saved_by: Collection[Rank]) -> list[SavedModel]:
        """Those of this run: a folder that is gone on with has an earlier run's, too."""
        sites = {self.job.worker(rank).site for rank in saved_by}
        return [model for model in read_models(self.folder.path) if model.site in sites]

    def _runner_with(self, coordinator: LocalCoordinator, listener: Listener) -> LocalRunner:
        return LocalRunner(
            job=self.job,
            plan=self.asked.plan,
            coordinator=coordinator,
            results_dir=self.folder.path.resolve(),
            data_root=self.data_root,
            program_root=self.program_root,
            on_record=listener.take,
            resume=self.resume,
            elapsed_s=self.folder.elapsed_s,
            privileged=self.privileged,
            check_folder=self.folder.check_there,
            on_environment=lambda *found: self.folder.write_environment(self.asked.report(*found)),
        )

    def _hand_over(self, record: ProgressRecord) -> None:
        if self._runner is not None:
            self._runner.record(record)


def _interrupted() -> Ended:
    reason = EndReason.INTERRUPTED
    return Ended(ExitCode.INTERRUPTED, "interrupted", succeeded=False, reason=reason)
