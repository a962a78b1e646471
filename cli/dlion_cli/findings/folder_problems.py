"""What a result folder has about its run, what is wrong with it, and what to do.

Used by `dlion describe`. The folder may be damaged, foreign, hostile or in use.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dlion_api.errors import DataError
from dlion_api.names import KIND, Rank, WorkerIdentity
from dlion_api.protocol.progress import EventRecord
from dlion_api.reasons import EventReason
from dlion_api.remaining_time import Remaining
from dlion_cli.cluster.cluster_jobs import Document
from dlion_cli.findings.job_problem import MAX_NAMED, JobProblem, Severity
from dlion_cli.inputs.named_folder import has_run, require_folder, run_document
from dlion_cli.pod_streams.kept_records import event_document
from dlion_cli.terminal.formatting import format_duration, printable
from dlion_results.report.runs import LoadedRun, load_run
from dlion_results.report.stored_files import UNFINISHED, read_summary
from dlion_results.run_folder.description import find_worker
from dlion_results.run_folder.layout import EVENTS, JOB, LOGS
from dlion_results.run_folder.listing import StoredRun, StoredState, read_comparison, read_run
from dlion_results.summary.judgement import EndReason

MAX_WARNINGS: Final = 8
"""Reasons of warnings that are named."""
_MAX_MESSAGE: Final = 600
_ADVICE: Final[Mapping[str, str]] = {
    EndReason.ENDED_EARLY: "See in the logs which worker ended, and why, before the stop rule",
    EndReason.PARTIAL: (
        "See the logs of the missing workers. With a later trainer.stop (--set "
        "trainer.stop.maxSteps=N) all workers continue"
    ),
    EndReason.DEADLINE_EXCEEDED: "Raise spec.activeDeadlineSeconds, or use the model as it is",
    EndReason.PROGRAM_FAILED: (
        "The program raised an error or broke its protocol: see the traceback; `dlion validate` "
        "tries the program on one batch"
    ),
    EndReason.DATA_FAILED: "Correct trainer.dataset.path or --data-root, or the data",
    EndReason.DIVERGED: "Lower trainer.optimizer.learningRate, and start another run",
    EndReason.STORAGE_FAILED: "Free space on the disk, or correct its rights",
    EndReason.UNAVAILABLE: "See in the logs which process was not reached",
    EndReason.INTERRUPTED: "Continue it, with the options that it was started with",
}
_WARNING_ADVICE: Final[Mapping[str, str]] = {
    EventReason.WORKER_LOST: "It may return by itself; the log has why its process ended",
    EventReason.WORKER_QUARANTINED: "See its data and its machine; another run accepts it again",
    EventReason.TRAINER_ENDED: "It is restarted by itself; the log has why it ended",
    EventReason.CHECKPOINT_FAILED: "Free space on the disk: a restart would go back further",
    EventReason.PUBLISH_FAILED: "Free space on the disk: the last model stays until then",
    EventReason.RECORDS_DROPPED: "Figures lack these records; training is not concerned",
    EventReason.DATA_SKIPPED: "Correct or remove the file",
    EventReason.EVALUATION_FAILED: "The accuracy stays at its last value; the log has the error",
    EventReason.EXCHANGE_TOO_LONG: "Choose a policy with fewer bytes, or a longer run",
    EventReason.PROGRAM_PART_UNUSED: "Nothing, or remove that part of the program",
}


@dataclass(frozen=True)
class RunFacts:
    """A result folder as it was when it was read."""

    run: StoredRun
    loaded: LoadedRun | None
    """The manifest and the records; None if they cannot be read."""
    summary: Mapping[str, Any]
    """Figures, from the records where they can be read; empty: none are known."""
    notes: list[str] = field(default_factory=list)
    """Why something is missing."""

    @property
    def name(self) -> str:
        return printable(self.run.path.resolve().name)

    @property
    def problems(self) -> list[JobProblem]:
        """What is wrong, worst first."""
        order = [*Severity]
        return sorted(
            [*self._end(), *self._missing(), *self._warnings(), *self._held_up()],
            key=lambda problem: order.index(problem.severity),
        )

    @property
    def events(self) -> list[Document]:
        """The newest events, oldest first, in the form of the API server's."""
        if self.loaded is None:
            return []
        job = self.loaded.job
        about = {"kind": KIND, "name": job.metadata.name}
        return [event_document(each, about, job) for each in self.loaded.tally.events]

    @property
    def next_commands(self) -> list[str]:
        """Commands that make sense now."""
        folder, commands = shlex.quote(str(self.run.path)), []
        if self.run.state is StoredState.RUNNING and (self.run.path / LOGS).is_dir():
            commands.append(f"dlion logs {folder} -f")
        if self.run.is_resumable:
            commands.append(self._resume())
        if self.loaded is not None and self.summary.get("steps"):
            commands.append(f"dlion report {folder}")
        return [printable(command) for command in commands]

    @property
    def remaining(self) -> Remaining | None:
        """The remaining time of a run in progress; None: it has ended, or its records cannot be
        read."""
        return None if self.loaded is None else self.loaded.remaining

    def as_json(self) -> dict[str, Any]:
        """For `-o json`."""
        return {
            "run": run_document(self.run, self.run.path.resolve().name),
            "problems": [each.as_json() for each in self.problems],
            "progress": _progress(self.remaining),
            "culprit": self.summary.get("culprit"),
            "events": self.events,
            "notes": self.notes,
            "next": self.next_commands,
            "summary": self.summary or None,
        }

    def _resume(self) -> str:
        folder = str(self.run.path)
        return shlex.join(["dlion", "run", str(self.run.path / JOB), "--resume", folder])

    def _logs(self, worker: WorkerIdentity | None = None) -> str:
        if not (self.run.path / LOGS).is_dir():
            return ""
        command = ["dlion", "logs", str(self.run.path), "--tail", "40"]
        if worker is not None:
            command += ["--group", worker.group, "--worker", str(worker.index)]
        return printable(shlex.join(command))

    def _end(self) -> Iterator[JobProblem]:
        run, about = self.run, f"run/{self.name}"
        if run.state in (StoredState.DAMAGED, StoredState.UNREADABLE):
            yield JobProblem(
                Severity.ERROR, "Damaged", about, _text(run.detail),
                "`dlion report` shows what can still be read; else take the folder from a backup",
                printable(shlex.join(["dlion", "report", str(run.path)])),
            )  # fmt: skip
        elif run.state in (StoredState.FAILED, StoredState.INTERRUPTED):
            reason = run.reason or EndReason.INTERRUPTED
            advice = _ADVICE.get(reason, "See the logs")
            is_interrupted = run.state is StoredState.INTERRUPTED
            if is_interrupted and not run.is_resumable:
                advice = "It has no checkpoint to continue from: start another run"
            yield JobProblem(
                Severity.WARNING if is_interrupted else Severity.ERROR,
                printable(reason), about, _text(run.detail) or "it gave no reason", advice,
                printable(self._resume()) if run.is_resumable and is_interrupted
                else self._logs(),
            )  # fmt: skip

    def _missing(self) -> Iterator[JobProblem]:
        if self.loaded is None:
            return
        missing = self.summary["ending"]["missing"]
        for rank in missing[:MAX_NAMED]:
            worker = find_worker(self.loaded.job, Rank(rank))
            tally = self.loaded.tally.workers.get(Rank(rank))
            last = "it did no step"
            if tally is not None and tally.steps:
                after = format_duration(tally.last_step_s)
                last = f"its last step was {tally.last_iteration:,}, after {after}"
            yield JobProblem(
                Severity.ERROR, EventReason.REPLICA_MISSING, f"worker/{self._worker_name(rank)}",
                f"the saved model lacks its replica; {last}", "See why it ended in its log",
                self._logs(worker),
            )  # fmt: skip
        if len(missing) > MAX_NAMED:
            yield JobProblem(
                Severity.ERROR, EventReason.REPLICA_MISSING, f"run/{self.name}",
                f"the saved model lacks {len(missing) - MAX_NAMED} more replicas",
                "summary.json has their ranks (ending.missing)",
            )  # fmt: skip

    def _warnings(self) -> Iterator[JobProblem]:
        if self.loaded is None:
            return
        by_reason: dict[str, list[EventRecord]] = {}
        for event in self.loaded.tally.events:
            if event.warning:
                by_reason.setdefault(event.reason, []).append(event)
        newest = sorted(by_reason.items(), key=lambda item: -item[1][-1].time_s)
        for reason, events in newest[:MAX_WARNINGS]:
            last = events[-1]
            often = "" if len(events) == 1 else f"{len(events):,} times, the last "
            worker = find_worker(self.loaded.job, last.rank) if last.is_of_worker else None
            about = f"worker/{self._worker_name(last.rank)}" if worker else f"run/{self.name}"
            yield JobProblem(
                Severity.WARNING, _text(reason, 80), about,
                f"{often}after {format_duration(last.time_s)}: {_text(last.message)}",
                _WARNING_ADVICE.get(last.reason, "See the events around it, and the log"),
                self._logs(worker),
            )  # fmt: skip
        if self.loaded.bad_lines:
            yield JobProblem(
                Severity.WARNING, "UnreadableRecords", f"run/{self.name}",
                f"{len(self.loaded.bad_lines):,} lines of {EVENTS} are not records: "
                f"{_text(self.loaded.bad_lines[0], 200)}",
                "The figures go without them. Check the disk if nothing else wrote there",
            )  # fmt: skip

    def _held_up(self) -> Iterator[JobProblem]:
        culprit = self.summary.get("culprit")
        if self.loaded is not None and isinstance(culprit, dict):
            yield JobProblem(
                Severity.NOTE, str(culprit["kind"]), f"run/{self.name}",
                _text(culprit["sentence"]), culprit["advice"],
            )  # fmt: skip

    def _worker_name(self, rank: int) -> str:
        return "" if self.loaded is None else printable(self.loaded.worker_name(Rank(rank)))


def read_run_facts(path: Path) -> RunFacts:
    """What the folder has. Raises: DataError if it is none, or has no run."""
    require_folder(path)
    ls = shlex.join(["dlion", "ls", str(path)])
    if read_comparison(path) is not None:
        raise DataError(
            f"{path}: is a comparison, whose runs have separate folders. `{ls}` lists them: name "
            "one"
        )
    if not has_run(path):
        raise DataError(f"{path}: has no run. `{ls}` lists the runs below it")
    run = read_run(path)  # first: a run that ends meanwhile is still running here
    notes = []
    try:
        is_running = run.state is StoredState.RUNNING
        loaded = load_run(path, run.path.name, is_running=is_running)
    except DataError as error:
        notes.append(f"without records: {printable(str(error))[:_MAX_MESSAGE]}")
        return RunFacts(run, None, read_summary(path), notes)
    summary = dict(loaded.summary)
    if summary["ending"]["stop_reason"] == UNFINISHED:
        outcome = "is running" if is_running else run.detail or UNFINISHED
        summary["ending"] = {
            **summary["ending"], "succeeded": is_running, "stop_reason": outcome,
            "reason": "Running" if is_running else EndReason.INTERRUPTED,
        }  # fmt: skip
    return RunFacts(run, loaded, summary, notes)


def _progress(remaining: Remaining | None) -> dict[str, Any] | None:
    """For `-o json`; each figure may be unknown."""
    if remaining is None:
        return None
    return {
        "fraction": remaining.fraction,
        "secondsLeft": remaining.seconds,
        "secondsToTarget": list(remaining.target_s) if remaining.target_s else None,
    }


def _text(value: str, most: int = _MAX_MESSAGE) -> str:
    return printable(" ".join(value.split()))[:most]
