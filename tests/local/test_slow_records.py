"""Tests of a run whose records come faster than they are written, as on a busy machine.

A signal ends the run all the same, and its processes before the records that are left are written.
The end of a worker is noticed all the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord, ProgressRecord, StepRecord
from dlion_api.reasons import EventReason
from dlion_api.spec import load_job
from dlion_cli.local_runs.local_coordinator import LocalCoordinator
from dlion_environments.plan import unlimited_plan
from dlion_local.runner.runner import LocalRunner
from local_run import blobs, job_document

pytestmark = pytest.mark.patient

WORKERS, STEPS = 2, 1_000_000


class SlowRecords:
    """A run that takes a record only when the workers have sent another one, or have ended."""

    def __init__(
        self,
        folder: Path,
        first_step: Callable[[SlowRecords], None],
        *,
        elapsed_s: float = 0.0,
        **spec: Any,
    ) -> None:
        """`first_step` is called once the first step's record is taken.

        `elapsed_s`: of earlier runs that this one resumes.
        """
        trainer = {"program": blobs(folder, nap_s=0.0), "stop": {"maxSteps": STEPS}}
        job = load_job(job_document(WORKERS, trainer=trainer, **spec))
        self.taken: list[ProgressRecord] = []
        self.taken_while_training = 0
        """Records that were taken after the interruption, before the trainers had ended."""
        self.is_interrupted = False
        self.folder, self._first_step, self._sent = folder, first_step, 0
        self._has_stepped = False
        self.coordinator = LocalCoordinator(job, self._send)
        self.runner = LocalRunner(
            job=job, plan=unlimited_plan(job.workers()),
            coordinator=self.coordinator,
            results_dir=folder, data_root=folder, on_record=self._take, privileged=False,
            elapsed_s=elapsed_s,
        )  # fmt: skip

    def _send(self, record: ProgressRecord) -> None:
        self._sent += 1
        self.runner.record(record)

    def _take(self, record: ProgressRecord) -> None:
        self.taken.append(record)
        if self.is_interrupted:
            self.taken_while_training += self._are_training()
            return
        if not isinstance(record, StepRecord):
            return
        sent = self._sent
        while self._sent == sent and self._are_training():
            time.sleep(0.01)
        if not self._has_stepped:
            self._has_stepped = True
            self._first_step(self)

    def trainers(self) -> list[int]:
        """The processes, by rank; those that have ended, too."""
        logs = [self.folder / "logs" / f"worker-{rank}.log" for rank in range(WORKERS)]
        lines = [line for log in logs for line in log.read_text().splitlines()]
        events = [json.loads(line) for line in lines if line.startswith("{")]
        return [each["pid"] for each in events if each.get("supervisor") == "started"]

    def _are_training(self) -> bool:
        return any(Path(f"/proc/{pid}").exists() for pid in self.trainers())


def interrupt(run: SlowRecords) -> None:
    run.is_interrupted = True
    raise KeyboardInterrupt


def kill_a_worker(run: SlowRecords) -> None:
    status = Path(f"/proc/{run.trainers()[1]}/stat").read_text()
    supervisor = int(status.rpartition(")")[2].split()[1])
    os.kill(supervisor, signal.SIGKILL)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("elapsed_s", [0.0, 3600.0])
def test_a_signal_ends_the_processes_before_the_records_are_written(
    tmp_path: Path, elapsed_s: float
) -> None:
    run = SlowRecords(tmp_path, interrupt, elapsed_s=elapsed_s)
    with contextlib.closing(run.coordinator), pytest.raises(KeyboardInterrupt):
        run.runner.run()
    after = [each.reason for each in run.taken if isinstance(each, EventRecord)]
    assert run.taken_while_training == 0
    assert len(list(tmp_path.glob("state/w*/checkpoint.npz"))) == WORKERS
    assert "WorkerLost" not in after, "this process has ended it"


def test_training_has_begun_before_its_record_is_written(tmp_path: Path) -> None:
    runner = SlowRecords(tmp_path, interrupt).runner
    assert "the others would wait" in runner._stop_cause()
    runner.record(EventRecord(1.0, Rank(0), 0, EventReason.TRAINING_STARTED, ""))
    assert not runner._stop_cause()


@pytest.mark.timeout(180)
def test_the_end_of_a_worker_is_noticed(tmp_path: Path) -> None:
    run = SlowRecords(tmp_path, kill_a_worker, failurePolicy="Fail")
    with contextlib.closing(run.coordinator):
        outcome = run.runner.run()
    assert outcome.exit_code is not ExitCode.OK
    assert [*outcome.failed] == [1]
