"""Test that bad programs, bad data and full disks end a run with a clear error.

A program raises when it builds, loads or computes its loss, or ends its process with exit code 0.
Data is missing or corrupt, a gradient is not finite, or the disk is full. The run ends within
seconds with the documented code. The terminal states what happened and what to do. The run leaves
nothing behind, and its events can be read. A run on a full disk continues from its last checkpoint
without a gap once there is room again. A peer that sends NaN is refused, reported and quarantined;
the other workers continue to train.

Left out: wrong manifests (tests/unit/cli), hostile frames (tests/fuzz).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlion_api.exit_codes import ExitCode
from dlion_api.protocol.progress import StepRecord
from local_run import LocalRun, blobs, hashes, job_document

pytestmark = pytest.mark.patient

RAISES_IN_BUILD = "\ndef build_model():\n    raise KeyError('no such layer')\n"
RAISES_IN_LOAD = "\ndef load_data(split, site, worker_index):\n    return 1 / 0\n"
RAISES_IN_LOSS = "\ndef loss(y_true, y_pred):\n    raise RuntimeError('no such loss')\n"
NAN_LATER = """
count = 0


def loss(y_true, y_pred):
    plain = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
    return plain * tf.numpy_function(after_a_while, [], tf.float32, stateful=True)


def after_a_while():
    global count
    count += 1
    return np.float32(np.nan if count > 20 else 1)
"""
NAN_AT_ONE_PEER = """
from dlion_core.policies.gradient import gradient_selectors

whole = gradient_selectors.encode_whole


def poisoned(gradient_D, codec):
    return bytes(whole(gradient_D, codec))[:-4] + np.float32(np.nan).tobytes()


_load = load_data


def load_data(split, site, worker_index):
    if worker_index == 2:
        gradient_selectors.encode_whole = poisoned
    return _load(split, site, worker_index)
"""
EXITS = """
import os


def nap(nap_s):
    global naps
    naps = globals().get("naps", 0) + 1
    if naps > 10:
        os._exit(0)
    return np.float32(0)
"""
EXITS_WHEN_SAVED = """

class Leaving(keras.layers.Dense):
    def get_config(self):
        raise SystemExit(0)


def build_model():
    return keras.Sequential([keras.layers.Input((8,)), Leaving(3)])
"""


def document(folder: Path, more: str, workers: int = 1, **spec: Any) -> dict[str, Any]:
    trainer = {"program": blobs(folder, more=more), "stop": {"maxSteps": 60}}
    return job_document(workers, trainer=trainer, **spec)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        pytest.param(RAISES_IN_BUILD, ExitCode.PROGRAM, "no such layer", marks=pytest.mark.slow),
        pytest.param(RAISES_IN_LOAD, ExitCode.PROGRAM, "division by zero", marks=pytest.mark.slow),
        (RAISES_IN_LOSS, ExitCode.PROGRAM, "no such loss"),
        (NAN_LATER, ExitCode.DIVERGED, "learningRate"),
    ],
    ids=["build_model", "load_data", "loss", "nan"],
)
def test_a_failing_program_is_reported(
    tmp_path: Path, more: str, code: ExitCode, words: str
) -> None:
    with LocalRun(tmp_path, document(tmp_path, more)) as run:
        assert run.finish() == code, run.terminal()
    assert words in run.terminal()
    if code == ExitCode.PROGRAM:
        log = (run.folder / "logs" / f"worker-{run.events('WorkerFailed')[0].rank}.log").read_text()
        assert "traceback of the program\nTraceback" in log
        assert "program.py" in log.partition("Traceback")[2]
        terminal = run.terminal()
        assert terminal.count("Traceback (most recent call last)") == 1, (
            "the terminal shows one traceback"
        )
        assert 'program.py", line ' in terminal.partition("Traceback")[2]
    failed = run.events("WorkerFailed")
    assert failed
    assert all(words in event.message for event in failed)
    assert not run.summary()["ending"]["succeeded"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("more", "words"),
    [
        (EXITS, "the program ended the trainer's process with exit code 0"),
        pytest.param(EXITS_WHEN_SAVED, "the program called sys.exit(0)", marks=pytest.mark.slow),
    ],
    ids=["os._exit", "sys.exit"],
)
def test_a_program_that_ends_its_process_fails_the_run(
    tmp_path: Path, more: str, words: str
) -> None:
    with LocalRun(tmp_path, document(tmp_path, more, workers=2)) as run:
        assert run.finish() == ExitCode.PROGRAM, run.terminal()
    terminal = " ".join(run.terminal().split())
    assert re.search(r"workers? [01](, 1)? ended with PROGRAM \(67\): ", terminal)
    assert words in terminal
    assert run.summary()["ending"]["reason"] == "ProgramFailed"
    assert all(event.message.count(words) for event in run.events("WorkerFailed"))


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "content",
    [*(pytest.param(it, marks=pytest.mark.slow) for it in (None, b"")), b"PK\x03\x04 and no more"],
)
def test_missing_or_corrupt_data_is_reported(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "samples.npz"
    if content is not None:
        path.write_bytes(content)
    dataset = {"path": str(path), "format": "npz"}
    with LocalRun(tmp_path, job_document(1, trainer={"dataset": dataset})) as run:
        assert run.finish() == ExitCode.DATA, run.terminal()
    assert "samples.npz" in run.terminal()
    assert "Traceback" not in run.terminal()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("mode", ["bounded", pytest.param("synchronous", marks=pytest.mark.slow)])
def test_a_peer_that_sends_nan_is_quarantined(tmp_path: Path, mode: str) -> None:
    trainer = {"program": blobs(tmp_path, more=NAN_AT_ONE_PEER), "stop": {"maxSteps": 60}}
    job = job_document(3, trainer=trainer, synchronization={"mode": mode})
    with LocalRun(tmp_path, job) as run:
        run.wait_until(
            lambda: {0, 1} <= {step.rank for step in run.steps() if step.iteration >= 55},
            "both have trained",
        )
        run.process.terminate()
        run.finish()
    refused = [e for rank in (0, 1) for e in run.events("MessageRefused", rank)]
    assert any("worker 2" in event.message and "finite" in event.message for event in refused)
    assert any("quarantined" in event.message for event in refused)
    for rank in (0, 1):
        last = run.steps(rank)[-1]
        assert last.iteration >= 55
        assert np.isfinite(last.loss)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Put the result folder of a `LocalRun` in `tmp_path` on a file system of 8 MB."""
    folder = tmp_path / "out"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_the_disk(path: Path) -> None:
    """Write a file that takes all remaining space."""
    with path.open("wb", buffering=0) as file:
        while shutil.disk_usage(path.parent).free:  # others may remove a file meanwhile
            with contextlib.suppress(OSError):
                file.write(bytes(65536))


def saved_iterations(run: LocalRun) -> list[int]:
    """Return the iteration of each worker's checkpoint."""
    iterations = []
    for path in sorted(run.folder.glob("state/w*/checkpoint.npz")):
        with np.load(path) as saved:
            iterations.append(int(saved["iteration"]))
    return iterations


@pytest.mark.root
@pytest.mark.timeout(300)
def test_a_run_continues_from_its_last_checkpoint_after_a_full_disk(
    tmp_path: Path, small_disk: Path
) -> None:
    """Another file fills the disk during training and is removed later."""
    job = document(tmp_path, "", workers=2, checkpoint={"everySeconds": 3})
    job["spec"]["trainer"]["stop"] = {"maxSteps": 100_000}
    foreign = small_disk / "somebody-elses.bin"
    with LocalRun(tmp_path, job) as run:
        run.wait_until(
            lambda: run.events("CheckpointSaved", 0) and run.events("CheckpointSaved", 1),
            "both have saved a checkpoint",
        )
        fill_the_disk(foreign)
        assert run.finish() == ExitCode.STORAGE, run.terminal()
    terminal = " ".join(run.terminal().split())
    assert "No space left on device. Free some space" in terminal
    assert "once this is solved, continue: dlion run " in terminal
    assert f"--resume {run.folder}" in terminal
    before = run.records()
    reported = [run.events("CheckpointSaved", rank)[-1].iteration for rank in (0, 1)]
    assert saved_iterations(run) == reported, "the last checkpoints remain"

    foreign.unlink()
    end = max(step.iteration for step in run.steps()) + 20
    job["spec"]["trainer"]["stop"] = {"maxSteps": end}
    with LocalRun(tmp_path, job, "--resume", str(run.folder)) as resumed:
        assert resumed.finish() == 0, resumed.terminal()
    after = resumed.records()
    assert after[: len(before)] == before
    made = [record for record in after[len(before) :] if isinstance(record, StepRecord)]
    for rank in (0, 1):
        iterations = [step.iteration for step in made if step.rank == rank]
        assert iterations == list(range(max(reported) + 1, end + 1))
        # Steps that ended while the disk filled may have no record for want of space.
        every = {step.iteration for step in resumed.steps(rank)}
        missing = set(range(1, end + 1)) - every
        assert missing <= set(range(min(reported), max(reported) + 1))
    assert all(len(set(known.values())) == 1 for known in hashes(made).values())
    assert resumed.summary()["ending"]["succeeded"]


@pytest.mark.timeout(200)
def test_a_result_folder_that_is_removed_ends_the_run(tmp_path: Path) -> None:
    job = document(tmp_path, "")
    job["spec"]["trainer"]["stop"] = {"maxSteps": 100_000}
    with LocalRun(tmp_path, job) as run:
        run.wait_for_step(5)
        gone = run.folder.rename(tmp_path / "gone")  # at once: no process adds a file meanwhile
        shutil.rmtree(gone)
        assert run.finish() == ExitCode.STORAGE, run.terminal()
    terminal = " ".join(run.terminal().split())
    assert "the result folder is gone: it was removed or moved during the run" in terminal
    assert str(run.folder) in terminal
    assert not run.folder.exists(), "the folder is not created again"


@pytest.mark.timeout(200)
def test_a_model_that_cannot_be_saved_is_reported(tmp_path: Path) -> None:
    """Limit the trainer's files to 200 kB: the checkpoint fits, the model does not."""
    wide = (
        "\nimport resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "\ndef build_model():\n    return keras.Sequential([keras.layers.Input((8,)), "
        "keras.layers.Dense(9000), keras.layers.Dense(3)])\n"
    )
    job = document(tmp_path, wide)
    with LocalRun(tmp_path, job) as run:
        assert run.finish() == ExitCode.STORAGE, run.terminal()
    assert "Free some space" in run.terminal()
    assert run.events("CheckpointFailed")
    assert run.steps(0)[-1].iteration == 60
