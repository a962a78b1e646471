"""Test training without a coordinator.

After the coordinator is gone for good, training continues. A trainer that is killed then returns
under mutual TLS without a new certificate, and the averaged model includes its weights. Keys are
readable only by their user during the run, and removed after it.

Left out: a coordinator that returns (tests/local/test_coordination.py).
"""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dlion_api.exit_codes import ExitCode
from dlion_api.protocol.progress import EventRecord, ProgressRecord
from dlion_api.spec import load_job
from dlion_cli.local_runs.local_coordinator import LocalCoordinator
from dlion_environments.plan import unlimited_plan
from dlion_local.runner.outcome import RunOutcome
from dlion_local.runner.runner import LocalRunner
from local_run import LONG_S, UNTIL_THERE, blobs, job_document

pytestmark = pytest.mark.patient

WORKERS, STEPS = 2, 200
"""With their pauses the steps last 100 s, or until the killed trainer is back."""


def wait_until(holds: Callable[[], object], within_s: float = LONG_S) -> None:
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def started(folder: Path, rank: int) -> list[int]:
    lines = (folder / "logs" / f"worker-{rank}.log").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return [event["pid"] for event in events if event.get("supervisor") == "started"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", [pytest.param("bounded", marks=pytest.mark.slow), "synchronous"])
def test_a_killed_trainer_returns_without_the_coordinator(tmp_path: Path, mode: str) -> None:
    back = tmp_path / "back"
    program = blobs(tmp_path, nap_s=0.5, more=UNTIL_THERE.format(path=str(back)))
    trainer = {"program": program, "stop": {"maxSteps": STEPS}}
    synchronization, checkpoint = {"mode": mode}, {"everySeconds": 1}
    job = load_job(
        job_document(
            WORKERS, trainer=trainer, synchronization=synchronization, checkpoint=checkpoint
        )
    )
    records: list[ProgressRecord] = []
    outcomes: list[RunOutcome] = []
    coordinator = LocalCoordinator(job, lambda record: runner.record(record))
    runner = LocalRunner(
        job=job, plan=unlimited_plan(job.workers()), coordinator=coordinator,
        results_dir=tmp_path, data_root=tmp_path, on_record=records.append, privileged=False,
    )  # fmt: skip
    running = threading.Thread(target=lambda: outcomes.append(runner.run()))
    running.start()

    def training() -> bool:
        reasons = [r.reason for r in list(records) if isinstance(r, EventRecord)]
        return reasons.count("TrainingStarted") == WORKERS

    wait_until(training)
    keys = [tmp_path / "state" / f"w{rank}" / "credentials.json" for rank in range(WORKERS)]
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    coordinator.close()
    os.kill(started(tmp_path, 1)[0], signal.SIGKILL)
    wait_until(lambda: len(started(tmp_path, 1)) == 2)
    began_ns = time.time_ns()
    saved = tmp_path / "state" / "w1" / "checkpoint.npz"
    # Its reports go to the coordinator, which is gone: a checkpoint shows that it trains.
    wait_until(lambda: saved.exists() and saved.stat().st_mtime_ns > began_ns)
    back.touch()
    running.join(200)
    assert [outcome.exit_code for outcome in outcomes] == [ExitCode.OK]
    about = json.loads((tmp_path / "models" / "plant-a" / "model.json").read_text())
    assert about["ranks"] == [0, 1]
    assert not any(key.exists() for key in keys)
