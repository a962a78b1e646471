"""Facts: Ctrl-C and SIGTERM to `dlion run` end it within 5 s, while TensorFlow is imported, while
the workers wait for each other, in mid-training and at the end: exit code 130, no process, no
temporary file, no key left, and a result folder with events and a summary that says so. A killed
`dlion run` takes everybody with it.

Left out: namespaces and relays (their own tests, and `test_network_imposed`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from attempts import first_that_holds
from local_run import LocalRun, blobs, job_document

WITHIN_S = 5.0

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
    run.wait_until(lambda: run.events("WorkerReady"), "somebody waits for the others")


def training(run: LocalRun) -> None:
    run.wait_for_step(10)


def finishing(run: LocalRun) -> None:
    run.wait_until(lambda: run.events("TrainingStopped"), "the end begins")


MOMENTS = [
    (importing, signal.SIGINT, "", {"maxSteps": 10_000}),
    (waiting, signal.SIGTERM, ONE_IS_LATE, {"maxSteps": 10_000}),
    (training, signal.SIGINT, "", {"maxSteps": 10_000}),
    (training, signal.SIGTERM, "", {"maxSteps": 10_000}),
    (finishing, signal.SIGINT, "", {"maxSteps": 10}),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("moment", "number", "more", "stop"),
    MOMENTS,
    ids=[f"{moment.__name__}-{number.name}" for moment, number, *_ in MOMENTS],
)
def test_a_signal_ends_everything_within_five_seconds(
    tmp_path: Path,
    moment: Callable[[LocalRun], None],
    number: signal.Signals,
    more: str,
    stop: dict[str, int],
) -> None:
    folders = iter(tmp_path / str(attempt) for attempt in range(2))

    def ended_after_s() -> float:
        folder = next(folders)
        folder.mkdir()
        program = blobs(folder, more=more, evaluation_nap_s=1.0 if moment is finishing else 0.0)
        document = job_document(2, trainer={"program": program, "stop": stop})
        with LocalRun(folder, document) as run:
            moment(run)
            took_s = run.end(number)
            run.assert_nothing_left()
        assert run.process.returncode == 130, run.terminal()
        assert run.summary()["ending"]["stop_reason"] == "interrupted"
        assert run.records() or moment is importing
        if moment is training:
            assert (run.folder / "report.html").exists()
            assert (run.folder / "state" / "w1" / "checkpoint.npz").exists()
        print(f"{moment.__name__}, {number.name}: {took_s:.1f} s")
        return took_s

    first_that_holds(ended_after_s, lambda took_s: took_s <= WITHIN_S, attempts=2)


def test_a_killed_command_takes_everybody_with_it(tmp_path: Path) -> None:
    program = blobs(tmp_path)
    with LocalRun(
        tmp_path, job_document(2, trainer={"program": program, "stop": {"maxSteps": 10_000}})
    ) as run:
        run.wait_for_step(5)
        took_s = run.end(signal.SIGKILL)
        assert not run.left_behind()
        assert took_s <= WITHIN_S
        assert run.steps(), "what was recorded can be read"
