"""Test real runs on data folders that change during training.

A class that no worker has at the start arrives at one worker during the run. Every replica learns
it (80 % or more) without a restart. A half-written file is loaded once it is complete. A corrupt
file is skipped and reported. A rewritten file is read again, and a removed one is dropped. While a
file is being read, for any time, all workers train. Global batches grow with the data, and workers
agree on them. Models are published during training, and Ctrl-C leaves the last one. A later job
starts from it; another architecture is refused with a message.

Left out: each change of a folder (tests/unit/worker/training/test_watch), the time to an end after
Ctrl-C (test_interrupts), near-duplicates (test_near_duplicates), user programs (test_video).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import statistics
import struct
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from dlion_api.exit_codes import ExitCode
from dlion_api.protocol.progress import DirectiveRecord, EvaluationRecord
from local_run import LONG_S, LocalRun, job_document

pytestmark = [pytest.mark.patient, pytest.mark.timeout(600)]

LATE, LATE_RANK = 9, 2
KNOWN = 0.8
LEARNED = 0.7
"""Accuracy of a trained model. Published accuracies vary, more so on a busy machine; an untrained
model has 0.1."""
SITES = {"plant-a": 2, "plant-b": 1}
FOLDERS = ("plant-a/0", "plant-a/1", "plant-b/0")


UNHURRIED = """
import time

from dlion_worker.training.model import FlatModel
from dlion_worker.training.programs.builtin import digits

at_once = FlatModel.step


def step(self, x_B, y_B):
    time.sleep(0.03)
    return at_once(self, x_B, y_B)


FlatModel.step = step


def build_model():
    return digits((8, 8, 1), 10)
"""
"""The digits, with a pause in each step: files arrive by the clock."""


def growing_job(folder: Path, **trainer: Any) -> dict[str, Any]:
    """Return a job of three workers, each with its own folder. `folder`: for their program."""
    (folder / "unhurried.py").write_text(UNHURRIED)
    return job_document(
        SITES,
        trainer={
            "program": {"file": str(folder / "unhurried.py")},
            "dataset": {
                "path": "{site}/{index}",
                "format": "npz",
                "evaluationPath": "held-out.npz",
                "watch": True,
            },
            "evaluation": {"everySamples": 5000},
            # At 0.05 and momentum 0.9 the weights of workers a few steps apart diverged once.
            "optimizer": {"name": "sgd", "learningRate": 0.1, "momentum": 0.0},
            "stop": {"continuous": True},
            "hashWeights": False,
            **trainer,
        },
        batching={"globalBatchSize": {"initial": 96, "max": 240}},
        exchange={"policy": "dlion"},
        synchronization={"mode": "bounded"},
        knowledgeTransfer={"policy": "best2all", "everySteps": 50},
        checkpoint={"everySeconds": 2},
    )


class Data:
    """Digits as files: 0 to 8 divided among workers, 9 held back, a held-out set of all ten."""

    def __init__(self, root: Path) -> None:
        self.root = root
        digits = load_digits()
        x = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None]
        order = np.random.default_rng(1).permutation(len(x))
        self._x, self._y = x[order], digits.target[order]
        save(root / "held-out.npz", self._x[:500], self._y[:500])
        early = 500 + np.flatnonzero(self._y[500:] != LATE)
        self.late = 500 + np.flatnonzero(self._y[500:] == LATE)
        for number, folder in enumerate(FOLDERS):
            rows = early[number :: len(FOLDERS)]
            save(root / folder / "early.npz", self._x[rows[20:]], self._y[rows[20:]])
            save(root / folder / "spare.npz", self._x[rows[:20]], self._y[rows[:20]])

    def rewrite(self, name: str) -> None:
        """Write the same samples in another order, and move the file into place."""
        with np.load(self.root / name) as there:
            x, y = there["x"][::-1], there["y"][::-1]
        save(self.root / "anew.npz", x, y)
        (self.root / "anew.npz").rename(self.root / name)

    def late_file(self) -> bytes:
        """Write a complete file with all samples of the late class."""
        content = io.BytesIO()
        np.savez(content, x=self._x[self.late], y=self._y[self.late])
        return content.getvalue()


def save(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, x=x, y=y)


def last_accuracy(run: LocalRun, label: int) -> dict[int, float]:
    """Return the accuracy of each replica on one class at its last evaluation."""
    evaluations = [r for r in run.records() if isinstance(r, EvaluationRecord)]
    return {int(r.rank): r.class_accuracy[label] for r in evaluations}


def has_learned(run: LocalRun) -> bool:
    """Whether each replica knows the late class and the others: a diverged one predicts one."""
    evaluations = {r.rank: r for r in run.records() if isinstance(r, EvaluationRecord)}
    return all(
        last.class_accuracy[LATE] >= KNOWN and last.accuracy >= LEARNED
        for last in evaluations.values()
    )


def published_accuracy(run: LocalRun, site: str) -> float:
    """Return the accuracy in the description of a site's model."""
    about = json.loads((run.folder / "models" / site / "model.json").read_text())
    return float(about["accuracy"])


def message_of(run: LocalRun, reason: str, within_s: float = LONG_S) -> str:
    """Wait for an event and return its message."""
    run.wait_until(lambda: run.events(reason), reason, within_s)
    return run.events(reason)[0].message


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalRun, dict[str, Any]]]:
    """A run that Ctrl-C ends after the late class was learned, and the observations."""
    root = tmp_path_factory.mktemp("grown")
    data, observed = Data(root / "data"), {}
    with LocalRun(root, growing_job(root), "--data-root", str(data.root)) as run:
        run.wait_until(lambda: len(last_accuracy(run, LATE)) == 3, "first evaluations", 240)
        run.wait_for_step(60)
        observed["before"] = last_accuracy(run, LATE)
        folder = data.root / FOLDERS[LATE_RANK]
        (folder / "broken.npz").write_bytes(b"not an archive")
        (folder / "spare.npz").unlink()
        whole = data.late_file()
        (folder / "late.npz").write_bytes(whole[: len(whole) // 2])
        run.wait_until(
            lambda: any("late.npz" in e.message for e in run.events("DataPending")), "DataPending"
        )
        observed["added while half"] = run.events("DataAdded")
        (folder / "late.npz").write_bytes(whole)
        observed["added"] = message_of(run, "DataAdded")
        began_s = time.monotonic()
        run.wait_until(lambda: has_learned(run), "the late class")
        observed["learned_s"] = time.monotonic() - began_s
        data.rewrite(FOLDERS[0] + "/early.npz")
        observed["skipped"] = message_of(run, "DataSkipped")
        observed["removed"] = message_of(run, "DataRemoved")
        observed["changed"] = message_of(run, "DataChanged")
        published = len(run.events("ModelPublished"))
        run.wait_until(lambda: len(run.events("ModelPublished")) >= published + 2, "a new model")
        run.wait_until(
            lambda: all(published_accuracy(run, site) >= 0.9 for site in SITES), "good models"
        )

        def still_known() -> bool:
            # One evaluation of 41 samples varies; the accuracy recovers without a restart.
            observed["after"] = last_accuracy(run, LATE)
            return min(observed["after"].values()) >= KNOWN

        run.wait_until(still_known, "the late class, known to the end")
        run.end(signal.SIGINT)
        run.assert_nothing_left()
        sys.stdout.write(
            f"class {LATE}: before {observed['before']}, after {observed['after']}, known to "
            f"all {observed['learned_s']:.1f} s after its file was taken in\n"
        )
        yield run, observed


def test_all_workers_learn_a_class_that_arrives_at_one(
    grown: tuple[LocalRun, dict[str, Any]],
) -> None:
    run, observed = grown
    assert set(observed["before"].values()) == {0.0}
    assert len(observed["after"]) == 3
    assert min(observed["after"].values()) >= KNOWN
    assert [worker["incarnations"] for worker in run.summary()["workers"]] == [1, 1, 1]
    assert {event.rank for event in run.events("DataAdded")} == {LATE_RANK}


def test_a_half_written_file_is_awaited_and_a_corrupt_one_reported(
    grown: tuple[LocalRun, dict[str, Any]],
) -> None:
    _, observed = grown
    assert observed["added while half"] == []
    assert observed["added"].startswith("late.npz: ")
    assert "broken.npz" in observed["skipped"]
    assert "not a readable .npz file" in observed["skipped"]
    assert observed["removed"] == "spare.npz"


def test_a_changed_file_is_read_again(grown: tuple[LocalRun, dict[str, Any]]) -> None:
    run, observed = grown
    assert observed["changed"] == "early.npz: 366 samples for this worker"
    assert {event.rank for event in run.events("DataChanged")} == {0}


def test_batches_grow_with_the_data_and_workers_agree(
    grown: tuple[LocalRun, dict[str, Any]],
) -> None:
    run, _ = grown
    directives = [r for r in run.records() if isinstance(r, DirectiveRecord)]
    added_s = run.events("DataAdded")[0].time_s
    before = {r.rank: r.global_batch_size for r in directives if r.time_s < added_s}
    after = {r.rank: r.global_batch_size for r in directives}
    assert max(after.values()) - min(after.values()) <= 2
    assert min(after.values()) > max(before.values())


def test_the_batch_shifts_to_the_worker_with_late_data(
    grown: tuple[LocalRun, dict[str, Any]],
) -> None:
    """Half of the batch is divided by samples: its share grows from a third to two fifths.

    The other half is divided by capacity, which varies on a busy machine. The test subtracts it.
    """
    run, _ = grown
    added_s = run.events("DataAdded")[0].time_s
    by_samples = [
        (r.time_s, 2 * r.local_batch_size / r.global_batch_size - capacity_share(r))
        for r in run.records()
        if isinstance(r, DirectiveRecord) and r.rank == LATE_RANK and len(r.capacities) == 3
    ]
    before = statistics.median(share for time_s, share in by_samples if time_s < added_s)
    after = statistics.median(share for time_s, share in by_samples if time_s > added_s + 1)
    assert before == pytest.approx(1 / 3, abs=0.025)
    assert after == pytest.approx(505 / 1277, abs=0.025)


def capacity_share(directive: DirectiveRecord) -> float:
    """Return the capacity share that the worker was given."""
    return directive.capacities[directive.rank] / sum(directive.capacities.values())


def test_models_are_published_during_training(
    grown: tuple[LocalRun, dict[str, Any]],
) -> None:
    run, _ = grown
    assert run.process.returncode == ExitCode.INTERRUPTED
    assert {int(event.rank) for event in run.events("ModelPublished")} == {0, 2}, "site leads"
    for site in SITES:
        folder = run.folder / "models" / site
        there = sorted(path.name for path in folder.iterdir())
        assert there == ["model.json", "model.keras", "model.provenance.json"]
        assert zipfile.ZipFile(folder / "model.keras").testzip() is None
        about = json.loads((folder / "model.json").read_text())
        assert about["stop_reason"] == "still training"
        assert about["accuracy"] >= LEARNED
        assert about["ranks"] == [0, 1, 2]


def save_image(path: Path, pixels: np.ndarray) -> None:
    """Write a grey PNG of these values, 0 to 255."""
    height, width = pixels.shape
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"".join(b"\0" + bytes(row) for row in pixels))),
        (b"IEND", b""),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )
    )


def test_a_slow_read_does_not_block_training(tmp_path: Path) -> None:
    """The test delays the read of a named pipe, as a disk that does not answer."""
    digits, root = load_digits(), tmp_path / "data"
    for label in range(3):
        for number, image in enumerate(digits.images[digits.target == label][:30]):
            folder = ("held-out", "plant-a/0", "plant-a/1")[number % 3]
            save_image(root / folder / str(label) / f"{number}.png", (image * 15).astype(np.uint8))
    trainer = {
        "dataset": {
            "path": "{site}/{index}",
            "format": "images",
            "evaluationPath": "held-out",
            "watch": True,
        },
        "stop": {"maxSteps": 1_000_000},
    }
    late, writers = root / "plant-a" / "1" / "0" / "late.png", list[int]()

    def is_read() -> bool:
        with contextlib.suppress(OSError):  # no reader yet
            writers.append(os.open(late, os.O_WRONLY | os.O_NONBLOCK))
        return bool(writers)

    with LocalRun(tmp_path, job_document(2, trainer=trainer), "--data-root", str(root)) as run:
        run.wait_for_step(10)
        os.mkfifo(late)
        run.wait_until(is_read, "the late file is read")
        run.wait_for_step(run.steps()[-1].iteration + 10)
        assert not run.events("DataAdded")
        whole = tmp_path / "late.png"
        save_image(whole, np.zeros((8, 8), np.uint8))
        with os.fdopen(writers[0], "wb") as pipe:
            pipe.write(whole.read_bytes())
            whole.replace(late)  # the next read is of a file
        # Before the next read, the watcher pauses twenty times as long as this one took.
        assert message_of(run, "DataAdded", 400).startswith("0/late.png: 1 ")
        run.end(signal.SIGINT)


def test_a_job_starts_from_an_earlier_jobs_model(
    grown: tuple[LocalRun, dict[str, Any]], tmp_path: Path
) -> None:
    model = grown[0].folder / "models" / "plant-b" / "model.keras"
    trainer = {
        "startFrom": str(model),
        "stop": {"maxSteps": 2},
        "optimizer": {"name": "sgd", "learningRate": 1e-6},
    }
    with LocalRun(tmp_path, job_document(1, trainer=trainer)) as run:
        assert run.finish() == ExitCode.OK
        assert run.summary()["accuracy"]["mean"] >= LEARNED


@pytest.mark.slow
def test_a_model_of_another_architecture_is_refused_with_a_message(
    grown: tuple[LocalRun, dict[str, Any]], tmp_path: Path
) -> None:
    model = grown[0].folder / "models" / "plant-b" / "model.keras"
    trainer = {"startFrom": str(model), "program": {"builtin": "cnn17"}}
    with LocalRun(tmp_path, job_document(1, trainer=trainer)) as run:
        assert run.finish() == ExitCode.DATA
        assert "does not fit this model" in run.terminal()
        assert "Name a model saved by the same program" in run.terminal()
