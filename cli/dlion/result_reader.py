"""Reads the state of a run from its result folder, which may be damaged, foreign or in use."""

from __future__ import annotations

import math
import os
import shlex
import stat
from collections.abc import Mapping
from datetime import UTC, datetime
from errno import EACCES
from pathlib import Path
from typing import Any, Final

from dlion.job import BackendName, JobSnapshot, JobWorker
from dlion.run_processes import RunCommand, exit_code, read_command
from dlion_api.errors import DLionError
from dlion_api.exit_codes import ExitCode
from dlion_api.protocol.progress import (
    MAX_METRICS,
    EvaluationRecord,
    EventRecord,
    ProgressRecord,
)
from dlion_api.reasons import EventReason
from dlion_api.spec import Job, load_job
from dlion_api.status_names import Reason, State
from dlion_cli.comparison.child_processes import final_message
from dlion_cli.inputs.manifests import read_document
from dlion_cli.terminal.failures import INTERRUPTED
from dlion_cli.terminal.interruption import SIGNALS
from dlion_cli.views.worker_rows import WorkerDisplayState, WorkerRow
from dlion_operator.served_runs.progress import RunProgress
from dlion_results.report.stored_files import read_summary, stored_ending
from dlion_results.run_folder.events import EventFollower
from dlion_results.run_folder.layout import COMMAND_LOG, EVENTS, JOB, LOCK, SUMMARY
from dlion_results.run_folder.lock import is_lock, lock_holder
from dlion_results.run_folder.stored_values import MAX_NUMBER, number_of
from dlion_results.summary.accuracy_name import accuracy_name, common_name
from dlion_results.summary.curves import Curve, mean_over_replicas
from dlion_results.summary.judgement import EndReason

KILLED: Final = "Killed"
"""Reason of a run that has ended without a summary."""
DAMAGED: Final = "Damaged"
"""Reason of a run whose summary cannot be read."""
_CURVE_POINTS: Final = 256
_MAX_LOG_BYTES: Final = 64 * 1024
_SIMULATION: Final = "simulation.json"


def is_result_folder(path: Path) -> bool:
    """Whether the path is a folder, no link, that a run has made or was started for."""
    try:
        if path.is_symlink() or not path.is_dir():
            return False
    except OSError:  # a folder above it cannot be entered
        return False
    # A lock of another user may be unreadable: then the run is listed, and never deleted.
    has_lock = is_file(path / LOCK) and (is_lock(path / LOCK) or not _is_readable(path / LOCK))
    return (has_lock and is_file(path / JOB)) or read_command(path) is not None


def _is_readable(path: Path) -> bool:
    return os.access(path, os.R_OK, effective_ids=True)


def is_file(path: Path) -> bool:
    """Whether it is a regular file and no link: reading a pipe would wait without end."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


class ResultReader:
    """Reads one result folder repeatedly: each record once. Not thread-safe."""

    def __init__(self, path: Path, job: Job | None = None) -> None:
        """`job`: of a run that was just started, and has not written its manifest yet."""
        self.path = path
        self._job = job
        self._file: tuple[int, int] | None = None
        """Inode and time in ns of the manifest that was read: another run may take the folder."""
        self._begin_again()

    def job(self) -> Job | None:
        """The manifest of the run; None while there is none, or if it cannot be read."""
        try:
            status = (self.path / JOB).lstat()
        except OSError:
            return self._job
        file = status.st_ino, status.st_mtime_ns
        if stat.S_ISREG(status.st_mode) and file != self._file:
            try:
                document, _ = read_document(self.path / JOB)
                self._job = load_job(document)
            except DLionError:
                self._job = None
            self._file = file
            self._begin_again()
        return self._job

    def is_running(self) -> bool:
        """Whether a process works on the run."""
        command = read_command(self.path)
        if command is not None and command.is_alive(self.path):
            return True
        try:
            return lock_holder(self.path) is not None
        except OSError:
            return False

    def read(self, *, with_curve: bool) -> JobSnapshot:
        """The run as it is now. Without the curve it is cheaper for a run that has succeeded."""
        try:
            return self._read(with_curve=with_curve)
        except (OSError, DLionError) as error:
            return self._unreadable(error)

    def _unreadable(self, error: Exception) -> JobSnapshot:
        command = read_command(self.path)
        return JobSnapshot(
            name=self.path.name,
            backend="simulated" if command and command.backend == "simulated" else "local",
            state=str(State.FAILED),
            reason=DAMAGED,
            message=f"cannot be read: {error}. Check the rights of its files",
            result_folder=self.path,
            created=self._created(command, {}),
        )

    def _read(self, *, with_curve: bool) -> JobSnapshot:
        for path in (self.path / JOB, self.path / LOCK):
            if is_file(path) and not _is_readable(path):
                raise PermissionError(EACCES, os.strerror(EACCES), str(path))
        is_running = self.is_running()  # first: its summary stands before the run ends
        command = read_command(self.path)
        job = self.job()
        has_summary = not is_running and is_file(self.path / SUMMARY)
        summary = read_summary(self.path) if has_summary else {}
        ending = summary.get("ending")
        is_completed = isinstance(ending, Mapping) and ending.get("succeeded") is True
        if job is not None and (with_curve or not is_completed) and is_file(self.path / EVENTS):
            self._follower.read_new(self._take, self._begin)
        about: dict[str, Any] = {
            "name": self.path.name,
            "backend": self._backend(command),
            "result_folder": self.path,
            "created": self._created(command, summary),
            "curve": self._curve() if with_curve else (),
            "metrics": self._metric_means() if with_curve else {},
            "accuracy_name": common_name(
                row.accuracy_name for row in self._rows.values() if row.accuracy is not None
            ),
            **self._figures(),
        }
        if is_running:
            about |= self._running()
        elif isinstance(ending, Mapping):
            about |= _ended(summary, is_completed)
        else:
            about |= self._without_summary(has_summary, command)
        about["state"], about["reason"] = str(about["state"]), str(about["reason"])
        lost = frozenset(stored_ending(summary).missing)
        return JobSnapshot(**about, workers=self._workers(is_running, is_completed, lost))

    def _begin_again(self) -> None:
        self._follower = EventFollower(self.path / EVENTS)
        self._begin()

    def _begin(self) -> None:
        self._progress = None if self._job is None else RunProgress(self._job)
        workers = () if self._job is None else self._job.workers()
        self._rows = {worker.rank: WorkerRow(worker.rank, worker.name) for worker in workers}
        self._curves: dict[int, Curve] = {}
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._ready: set[int] = set()
        self._paused: set[int] = set()
        self._newest_s = 0.0

    def _take(self, record: ProgressRecord) -> None:
        if self._progress is not None:
            self._progress.take(record)
        if (row := self._rows.get(record.rank)) is not None:
            row.add(record)
        self._newest_s = max(self._newest_s, record.time_s)
        if isinstance(record, EvaluationRecord):
            self._metrics[record.rank] = record.metrics
        match record:
            case EvaluationRecord() if math.isfinite(record.accuracy):
                curve = self._curves.setdefault(record.rank, Curve(1, limit=_CURVE_POINTS))
                curve.append(record.time_s, record.accuracy)
            case EventRecord(reason=EventReason.WORKER_READY):
                self._ready.add(record.rank)
            case EventRecord(reason=EventReason.QUORUM_LOST):
                self._paused.add(record.rank)
            case EventRecord(reason=EventReason.QUORUM_BACK):
                self._paused.discard(record.rank)
            case _:
                pass

    def _figures(self) -> dict[str, float | None]:
        """Progress, ETA, loss and accuracy as an operator computes them from the same records."""
        status = None if self._progress is None else self._progress.trainer_status("")
        if status is None:
            return {}
        values = {metric.name: metric.value for metric in status.metrics}
        percent, left_s = status.progress_percentage, status.estimated_remaining_seconds
        return {
            "progress": None if percent is None else percent / 100,
            "eta_s": None if left_s is None else float(left_s),
            "loss": float(values["loss"]) if "loss" in values else None,
            "accuracy": float(values["accuracy"]) if "accuracy" in values else None,
        }

    def _metric_means(self) -> dict[str, float]:
        """Means over the replicas that have them, of each one's newest evaluation."""
        known: dict[str, list[float]] = {}
        for metrics in self._metrics.values():
            for name, value in metrics.items():
                if (name in known or len(known) < MAX_METRICS) and abs(value) < MAX_NUMBER:
                    known.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in known.items()}

    def _running(self) -> dict[str, Any]:
        lost = [row.name for row in self._rows.values() if self._state(row) == "lost"]
        if self._progress is None or not self._progress.training:
            if self._ready:
                return {"state": State.WAITING, "reason": Reason.WAITING_FOR_PEERS}
            return {"state": State.PENDING, "reason": Reason.WORKERS_STARTING}
        if self._paused:
            return {"state": State.WAITING, "reason": Reason.BELOW_QUORUM}
        if lost:
            message = f"lost: {', '.join(lost[:8])}"
            return {"state": State.DEGRADED, "reason": Reason.PEERS_LOST, "message": message}
        return {"state": State.TRAINING, "reason": Reason.TRAINING}

    def _without_summary(self, has_summary: bool, command: RunCommand | None) -> dict[str, Any]:
        """A run that has ended, and left no summary, or one that cannot be read."""
        failed = {"state": State.FAILED, "eta_s": None}
        report = f"`{shlex.join(['dlion', 'report', str(self.path)])}`"
        if has_summary:
            advice = f"{report} computes the figures from the records"
            return {**failed, "reason": DAMAGED, "message": f"{SUMMARY} is unreadable; {advice}"}
        code = exit_code(self.path)
        text = self._last_output()
        if code is not None and code > 0:
            known = ExitCode(code) if code in set(ExitCode) else ExitCode.FAILED
            return {**failed, "reason": EndReason.of(known), "message": text}
        if text == INTERRUPTED or (code is not None and -code in SIGNALS):
            return {**failed, "reason": EndReason.INTERRUPTED, "message": INTERRUPTED}
        if is_file(self.path / JOB):
            advice = f"{report} shows how far it came"
            text = f"the run was killed and left no summary; {advice}"
            return {**failed, "reason": KILLED, "message": text}
        reason = EndReason.FAILED if text and command is not None else KILLED
        return {**failed, "reason": reason, "message": text or "it was killed before it began"}

    def _last_output(self) -> str:
        """The final message of the command; empty if its output is not known."""
        path = self.path / COMMAND_LOG
        if not is_file(path):
            return ""
        try:
            with path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_LOG_BYTES))
                return final_message(file.read().decode("utf-8", "replace").strip())
        except OSError:
            return ""

    def _workers(
        self, is_running: bool, is_completed: bool, lost: frozenset[int]
    ) -> tuple[JobWorker, ...]:
        job = self._job
        if job is None:
            return ()
        workers = []
        for worker in job.workers():
            state = self._state(self._rows[worker.rank])
            if not is_running:
                is_lost = worker.rank in lost or not is_completed
                is_lost &= state is not WorkerDisplayState.FINISHED or worker.rank in lost
                state = WorkerDisplayState.LOST if is_lost else WorkerDisplayState.FINISHED
            workers.append(JobWorker(worker.rank, worker.site, worker.name, str(state)))
        return tuple(workers)

    def _state(self, row: WorkerRow) -> WorkerDisplayState:
        return row.state(self._newest_s)

    def _curve(self) -> tuple[tuple[float, float], ...]:
        points = mean_over_replicas([curve.points() for curve in self._curves.values()])
        stride = 1 + len(points) // _CURVE_POINTS
        return tuple((float(time_s), float(mean)) for time_s, mean in points[::stride])

    def _backend(self, command: RunCommand | None) -> BackendName:
        if command is not None:
            return "simulated" if command.backend == "simulated" else "local"
        is_simulated = (self.path / _SIMULATION).exists() or not (self.path / "state").exists()
        return "simulated" if is_simulated else "local"

    def _created(self, command: RunCommand | None, summary: Mapping[str, Any]) -> datetime | None:
        began = stored_ending(dict(summary)).started_at if summary else ""
        for text in (command.created if command is not None else "", began):
            try:
                time = datetime.fromisoformat(text)
            except ValueError:
                continue
            return time if time.tzinfo else time.replace(tzinfo=UTC)
        try:
            return datetime.fromtimestamp((self.path / JOB).stat().st_mtime, UTC)
        except OSError:
            return None


def _ended(summary: Mapping[str, Any], is_completed: bool) -> dict[str, Any]:
    """State and figures of a run with a summary, any of whose fields may be missing."""
    ending = stored_ending(dict(summary))
    reason = ending.reason or (EndReason.COMPLETED if is_completed else EndReason.FAILED)
    about: dict[str, Any] = {
        "state": State.SUCCEEDED if is_completed else State.FAILED,
        "reason": reason,
        "message": ending.message or ending.stop_reason,
        "eta_s": None,
    }
    if reason == EndReason.COMPLETED:
        about["progress"] = 1.0
    accuracy = summary.get("accuracy")
    if isinstance(accuracy, Mapping) and (mean := number_of(accuracy.get("mean"))) is not None:
        about["accuracy"], about["accuracy_name"] = mean, accuracy_name(summary)
    workers = summary.get("workers")
    losses = [
        loss
        for each in (workers if isinstance(workers, list) else ())
        if isinstance(each, Mapping) and (loss := number_of(each.get("last_loss"))) is not None
    ]
    if losses:
        about["loss"] = sum(losses) / len(losses)
    return about
