"""Test that Ctrl-C and SIGTERM end `dlion run` within 5 s at any moment.

The moments are: during the import of TensorFlow, the wait for other workers, training, saving of
models, cleanup, and writing of the report. Training is of a tiny model and of `cipher`, also under
small quotas. The exit code is 130. No process, temporary file or key is left. The
result folder has events and a summary that reports the interruption. No worker counts as lost, and
the last line is the command that resumes the run. The hang-up of a terminal has the same effect. A
killed `dlion run` ends all its processes, and trainers save a checkpoint first.

No case is retried: the bound holds for every run. Left out: relays (their own tests, and
`test_network_imposed`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dlion_api.protocol.progress import LinkRecord
from dlion_local.emulation.compute.quotas import control_groups_unavailable
from dlion_local.emulation.network.namespaces import namespaces_unavailable
from local_run import MUCH_TO_EVALUATE, LocalRun, blobs, job_document, run_command

WITHIN_S = 5.0
ROOT_MISSING = namespaces_unavailable() or control_groups_unavailable()

SMALL_QUOTAS = {
    "name": "small-quotas",
    "workers": [{"cores": 3}, {"cores": 2}],
    "coreScale": 0.1,
    "insideSites": {"mbitPerS": 100},
}

ONE_IS_LATE = """
_load = load_data


def load_data(split, site, worker_index):
    if worker_index == 1:
        time.sleep(60)
    return _load(split, site, worker_index)
"""


def importing(run: LocalRun) -> None:
    run.wait_until(lambda: run.trainer_pids(0) and run.trainer_pids(1), "trainers are started")
    time.sleep(0.5)


def waiting(run: LocalRun) -> None:
    run.wait_until(lambda: run.events("WorkerReady"), "a worker waits for the others")


def training(run: LocalRun) -> None:
    run.wait_for_step(10)


def finishing(run: LocalRun) -> None:
    run.wait_until(lambda: run.events("TrainingStopped"), "the end begins")


def saving(run: LocalRun) -> None:
    run.wait_until(lambda: run.events("ModelSaved"), "the first site has its model")


def taking_away(run: LocalRun) -> None:
    saving(run)
    run.wait_until(lambda: "dlion_worker.supervisor" not in run.modules(), "all workers have ended")
    time.sleep(0.1)  # the kernel notifies their parent a little later


def closing(run: LocalRun) -> None:
    taking_away(run)
    run.wait_until(lambda: "dlion_worker.sidecar" not in run.modules(), "no process is left")


def cipher_on_noise(folder: Path, global_batch: int = 192) -> dict[str, Any]:
    """Train the built-in `cipher` on random images of CIFAR-10's size, for two workers."""
    rng = np.random.default_rng(5)
    x, y = rng.integers(0, 256, (600, 32, 32, 3)).astype(np.uint8), rng.integers(0, 10, 600)
    np.savez(folder / "noise.npz", x=x, y=y)
    return job_document(
        2,
        trainer={
            "program": {"builtin": "cipher"},
            "dataset": {"path": str(folder / "noise.npz"), "format": "npz"},
            "stop": {"maxSteps": 10_000},
        },
        batching={
            "policy": "even",
            "globalBatchSize": {"initial": global_batch, "max": global_batch},
        },
    )


def assert_interrupted_and_resumable(run: LocalRun) -> None:
    """Check that the run is reported as interrupted and can be resumed."""
    assert run.process.returncode == 130, run.terminal()
    assert run.summary()["ending"]["stop_reason"] == "interrupted"
    assert_readable_and_resumable(run)


def assert_links_are_reported_to_the_end(run: LocalRun) -> None:
    links = [record for record in run.records() if isinstance(record, LinkRecord)]
    last = {record.rank: record.iteration for record in links}
    assert last == {step.rank: step.iteration for step in run.steps()}


def assert_readable_and_resumable(run: LocalRun) -> None:
    """If the machine is too busy to write the report in time, its command is printed."""
    assert run.steps()
    assert (run.folder / "report.html").exists() or "`dlion report" in run.terminal()
    for rank in {step.rank for step in run.steps()}:
        with np.load(run.folder / "state" / f"w{rank}" / "checkpoint.npz") as saved:
            assert saved["iteration"] > 0


MOMENTS = [
    (importing, signal.SIGINT, "", {"maxSteps": 10_000}),
    (waiting, signal.SIGTERM, ONE_IS_LATE, {"maxSteps": 10_000}),
    (training, signal.SIGTERM, "", {"maxSteps": 10_000}),
    (finishing, signal.SIGINT, MUCH_TO_EVALUATE, {"maxSteps": 10}),
]
SLOW_MOMENTS = [(training, signal.SIGINT, "", {"maxSteps": 10_000})]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("moment", "number", "more", "stop"),
    [*MOMENTS, *(pytest.param(*moment, marks=pytest.mark.slow) for moment in SLOW_MOMENTS)],
    ids=[f"{moment.__name__}-{number.name}" for moment, number, *_ in MOMENTS + SLOW_MOMENTS],
)
def test_a_signal_ends_everything_within_five_seconds(
    tmp_path: Path,
    moment: Callable[[LocalRun], None],
    number: signal.Signals,
    more: str,
    stop: dict[str, int],
) -> None:
    program = blobs(tmp_path, more=more, evaluation_nap_s=0.3 if moment is finishing else 0.0)
    workers = 1 if moment is finishing else 2
    document = job_document(workers, trainer={"program": program, "stop": stop})
    with LocalRun(tmp_path, document, report=True, by_itself=moment is importing) as run:
        moment(run)
        took_s = run.end(number)
        run.assert_nothing_left()
    print(f"{moment.__name__}, {number.name}: {took_s:.1f} s")
    assert run.process.returncode == 130, run.terminal()
    assert run.summary()["ending"]["stop_reason"] == "interrupted"
    assert run.records() or moment is importing
    if moment is training:
        assert_readable_and_resumable(run)
        assert not run.events("WorkerLost"), "no worker is lost: the user ended the run"
        assert_links_are_reported_to_the_end(run)
        command = f"dlion run {tmp_path / 'job.yaml'} --resume {run.folder}"
        assert run.terminal().splitlines()[-1] == command
    assert took_s <= WITHIN_S


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=[pytest.mark.slow] * (not ROOT_MISSING)),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
    ],
    ids=lambda it: it.name,
)
def test_training_of_cipher_ends_within_five_seconds(
    tmp_path: Path, number: signal.Signals
) -> None:
    with LocalRun(tmp_path, cipher_on_noise(tmp_path), report=True) as run:
        run.wait_for_step(5)
        took_s = run.end(number)
        run.assert_nothing_left()
    step_s = np.median([step.wall_s for step in run.steps()])
    print(f"cipher, {number.name}: {took_s:.1f} s, a step took {step_s:.2f} s")
    assert_interrupted_and_resumable(run)
    assert took_s <= WITHIN_S


@pytest.mark.root
@pytest.mark.skipif(bool(ROOT_MISSING), reason=ROOT_MISSING)
@pytest.mark.timeout(400)
def test_cipher_under_small_quotas_ends_within_five_seconds(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL_QUOTAS))
    where = ("--environment", str(tmp_path / "small.yaml"))
    with LocalRun(tmp_path, cipher_on_noise(tmp_path, global_batch=32), *where, report=True) as run:
        run.wait_for_step(5, within_s=200)
        assert len(run.namespaces()) >= 2
        assert run.control_groups()
        took_s = run.end(signal.SIGINT)
        run.assert_nothing_left()
    step_s = np.median([step.wall_s for step in run.steps()])
    print(f"cipher under small quotas: {took_s:.1f} s, a step took {step_s:.2f} s")
    assert_interrupted_and_resumable(run)
    for rank in (0, 1):
        with np.load(run.folder / "state" / f"w{rank}" / "checkpoint.npz") as saved:
            assert saved["iteration"] == run.steps(rank)[-1].iteration, "none was lost"
    assert took_s <= WITHIN_S


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        (saving, signal.SIGINT),
        (taking_away, signal.SIGTERM),
        pytest.param(closing, signal.SIGINT, marks=pytest.mark.slow),
    ],
    ids=lambda it: it.__name__ if callable(it) else it.name,
)
def test_a_signal_after_the_training_loses_nothing(
    tmp_path: Path, moment: Callable[[LocalRun], None], number: signal.Signals
) -> None:
    document = job_document(1, trainer={"program": blobs(tmp_path), "stop": {"maxSteps": 10}})
    with LocalRun(tmp_path, document, report=True) as run:
        moment(run)
        took_s = run.end(number)
        run.assert_nothing_left()
    print(f"{moment.__name__}, {number.name}: {took_s:.1f} s")
    assert run.process.returncode == 130, run.terminal()
    ending = run.summary()["ending"]
    assert ending["succeeded"] or moment is saving
    assert (ending["stop_reason"] == "interrupted") is not ending["succeeded"]
    assert run.steps()
    assert [model["site"] for model in run.summary()["models"]] == ["plant-a"]
    assert took_s <= WITHIN_S


@pytest.mark.timeout(300)
def test_a_terminal_hang_up_ends_the_run(tmp_path: Path) -> None:
    """Only the later output to the terminal is lost."""
    document = job_document(1, trainer={"program": blobs(tmp_path), "stop": {"maxSteps": 10_000}})
    ours, its = os.openpty()
    with LocalRun(tmp_path, document, stdout=Path(os.ttyname(its)), report=True) as run:
        run.wait_for_step(10)
        os.close(ours)
        os.close(its)
        took_s = run.end(signal.SIGHUP)
        run.assert_nothing_left()
    print(f"hang-up: {took_s:.1f} s")
    assert run.process.returncode == 130
    assert run.summary()["ending"]["stop_reason"] == "interrupted"
    assert_readable_and_resumable(run)
    assert took_s <= WITHIN_S


@pytest.mark.timeout(300)
def test_a_closed_pipe_ends_the_run(tmp_path: Path) -> None:
    """As by `dlion run … | head -1`: it ends as on a hang-up, with its summary."""
    document = job_document(1, trainer={"program": blobs(tmp_path), "stop": {"maxSteps": 10_000}})
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with LocalRun(tmp_path, document, stdout=pipe, report=True) as run:
        run.wait_for_step(1)
        os.close(reader)
        assert run.finish() == 130
    assert run.summary()["ending"]["stop_reason"] == "interrupted"
    assert_readable_and_resumable(run)


@pytest.mark.timeout(300)
def test_writing_the_report_is_interrupted(tmp_path: Path) -> None:
    """The summary of the finished training is kept, and `dlion report` writes the page."""
    document = job_document(1, trainer={"program": blobs(tmp_path), "stop": {"maxSteps": 10}})
    with LocalRun(tmp_path, document, report=True) as run:
        run.wait_until(lambda: (run.folder / "summary.json").exists(), "the report is due")
        took_s = run.end(signal.SIGINT)
        run.assert_nothing_left()
    print(f"report: {took_s:.1f} s")
    assert run.process.returncode == 130, run.terminal()
    assert run.summary()["ending"]["succeeded"]
    # The page may have been complete before the signal.
    for page in run.folder.glob("*report*"):
        assert page.read_text(encoding="utf-8").rstrip().endswith("</html>"), (
            f"{page} is incomplete"
        )
    assert took_s <= WITHIN_S
    assert run_command(tmp_path, "report", str(run.folder)).returncode == 0
    assert (run.folder / "report.html").exists()


def test_a_killed_command_ends_all_its_processes(tmp_path: Path) -> None:
    program = blobs(tmp_path)
    with LocalRun(
        tmp_path, job_document(2, trainer={"program": program, "stop": {"maxSteps": 10_000}})
    ) as run:
        run.wait_for_step(5)
        run.wait_until(lambda: run.steps(0) and run.steps(1), "steps of both are recorded")
        took_s = run.end(signal.SIGKILL)
        assert not run.left_behind()
        assert took_s <= WITHIN_S
    for rank in (0, 1):  # none was saved before: checkpoint.everySeconds is 300
        with np.load(run.folder / "state" / f"w{rank}" / "checkpoint.npz") as saved:
            assert saved["iteration"] >= run.steps(rank)[-1].iteration, "no step was lost"
