"""Test runs that end early or do not start.

A run that takes longer than `activeDeadlineSeconds` ends with its exit code and keeps its models.
If an environment fails or an auxiliary process cannot be kept running, the run ends. The reason is
on the terminal, in the events and in the summary. A suspended job does not run. After
`startDeadlineSeconds` a worker begins without one that is missing. If a worker fails for good under
`failurePolicy: Fail`, the others get a limited time to end.

Left out: other failures of workers (test_bad_input, test_kill_and_rejoin).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord, ProgressRecord
from dlion_api.spec import load_job
from dlion_cli.local_runs.local_coordinator import LocalCoordinator
from dlion_environments.plan import unlimited_plan
from dlion_local.runner import runner
from dlion_local.runner.outcome import RunOutcome
from local_run import LONG_S, LocalRun, blobs, command_line, job_document

pytestmark = pytest.mark.patient

DEADLINE_S = 20
"""A busy machine needs half of it to start a run."""

ONE_IS_LATE = """
_load = load_data


def load_data(split, site, worker_index):
    if worker_index == 1:
        time.sleep(60)
    return _load(split, site, worker_index)
"""


def pids(run: LocalRun, module: str) -> list[int]:
    found = []
    for pid in run.left_behind():
        with contextlib.suppress(OSError):
            if module in command_line(pid):
                found.append(pid)
    return found


@pytest.mark.timeout(200)
def test_a_run_over_its_deadline_fails_and_keeps_its_models(tmp_path: Path) -> None:
    trainer = {"program": blobs(tmp_path, nap_s=0.2), "stop": {"maxSteps": 1_000_000}}
    began_s = time.monotonic()
    with LocalRun(
        tmp_path, job_document(1, trainer=trainer, activeDeadlineSeconds=DEADLINE_S)
    ) as run:
        assert run.finish() == ExitCode.DEADLINE, run.terminal()
    assert time.monotonic() - began_s >= DEADLINE_S
    ending = run.summary()["ending"]
    assert not ending["succeeded"]
    reason = f"longer than activeDeadlineSeconds ({DEADLINE_S} s)"
    assert reason in ending["message"]
    assert reason in run.terminal()
    assert (run.folder / "models" / "plant-a" / "model.keras").exists()


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "part", [pytest.param("network.relay", marks=pytest.mark.slow), "compute.duty_cycle"]
)
def test_a_failed_environment_ends_the_run_with_a_summary(tmp_path: Path, part: str) -> None:
    """No process is left, though the quotas can no longer be removed."""
    environment = {"name": "slow", "workers": [{"count": 2, "cores": 1, "mbitPerS": 50}]}
    path = tmp_path / "environment.yaml"
    path.write_text(yaml.safe_dump(environment))
    job = job_document(2, trainer={"stop": {"maxSteps": 1_000_000}})
    where = ("--environment", str(path), "--unprivileged")
    with LocalRun(tmp_path, job, *where, report=True) as run:
        run.wait_for_step(3)
        (process,) = pids(run, f"dlion_local.emulation.{part}")
        os.kill(process, signal.SIGKILL)
        assert run.finish() == ExitCode.UNAVAILABLE, run.terminal()
    assert run.events("EnvironmentFailed")
    ending = run.summary()["ending"]
    assert not ending["succeeded"]
    assert "the environment has failed" in ending["message"]
    assert "the environment has failed" in run.terminal()
    assert (run.folder / "report.html").exists()


@pytest.mark.timeout(200)
def test_a_sidecar_that_cannot_be_kept_running_ends_the_run(tmp_path: Path) -> None:
    trainer = {"program": blobs(tmp_path), "stop": {"maxSteps": 1_000_000}}
    with LocalRun(tmp_path, job_document(1, trainer=trainer)) as run:
        run.wait_for_step(3)

        def killed_for_good() -> bool:
            for pid in pids(run, "dlion_worker.sidecar"):
                with contextlib.suppress(ProcessLookupError):  # the last look has killed it
                    os.kill(pid, signal.SIGKILL)
            return len(run.events("SidecarEnded")) == 6

        run.wait_until(killed_for_good, "the sidecar is given up")
        assert run.finish() == ExitCode.UNAVAILABLE, run.terminal()
    assert "the sidecar of worker 0 ended with signal 9 (SIGKILL)" in run.terminal()
    assert (run.folder / "models" / "plant-a" / "model.keras").exists()


@pytest.mark.timeout(60)
def test_a_suspended_job_does_not_run(tmp_path: Path) -> None:
    with LocalRun(tmp_path, job_document(2, suspend=True)) as run:
        assert run.finish() == ExitCode.SPEC
    assert "the job is suspended: there is nothing to run" in run.terminal()
    assert not run.folder.exists()


@pytest.mark.timeout(200)
def test_after_the_start_deadline_a_worker_begins_without_the_others(tmp_path: Path) -> None:
    trainer = {
        "program": blobs(tmp_path, more=ONE_IS_LATE),
        "stop": {"maxSteps": 1_000_000},
    }
    with LocalRun(tmp_path, job_document(2, trainer=trainer, startDeadlineSeconds=2)) as run:
        run.wait_until(lambda: run.steps(0), "worker 0 trains")
        assert not run.events("WorkerReady", 1)
        (ready,) = run.events("WorkerReady", 0)
        (started,) = run.events("TrainingStarted", 0)
        assert started.time_s - ready.time_s >= 1.5
        run.end(signal.SIGINT)


@pytest.mark.timeout(300)
def test_a_run_that_a_failed_worker_ends_waits_for_no_other_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 still loads its data when worker 0, which trains without it, is killed for good."""
    monkeypatch.setattr(runner, "FINISH_TIMEOUT_S", 1.0)
    trainer = {
        "program": blobs(tmp_path, more=ONE_IS_LATE.replace("60", "1_000_000")),
        "stop": {"maxSteps": 1_000_000},
    }
    job = load_job(job_document(2, trainer=trainer, startDeadlineSeconds=1, failurePolicy="Fail"))
    records: list[ProgressRecord] = []
    outcomes: list[RunOutcome] = []
    coordinator = LocalCoordinator(job, lambda record: run.record(record))
    run = runner.LocalRunner(
        job=job, plan=unlimited_plan(job.workers()), coordinator=coordinator,
        results_dir=tmp_path, data_root=tmp_path, on_record=records.append, privileged=False,
    )  # fmt: skip
    running = threading.Thread(target=lambda: outcomes.append(run.run()), daemon=True)
    with contextlib.closing(coordinator):
        running.start()
        wait_until(lambda: "TrainingStarted" in reasons(records))
        run._group.kill("worker-0")
        running.join(LONG_S)
    (outcome,) = outcomes
    assert outcome.exit_code is not ExitCode.OK
    assert list(outcome.failed) == [Rank(0)]
    (problem,) = outcome.problems
    assert problem.startswith("workers 1 had not finished 1 s after the run's end: worker 0 has")
    assert problem.endswith("failurePolicy is Fail")


def reasons(records: list[ProgressRecord]) -> list[str]:
    return [record.reason for record in list(records) if isinstance(record, EventRecord)]


def wait_until(holds: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
