"""Test that a resumed run makes the same steps as a run without a break.

The run gets Ctrl-C in the middle. After its resumption, batches are the same, and weights are
bit-identical after each step. No iteration is made twice or omitted. The exception is a worker
whose peer made the last update before the break, which takes that update over. The same holds if
unsent parts of gradients wait for the next one. The run's clock continues. During the run, a second
resumption is refused. A worker with a damaged checkpoint names it, moves it aside and takes a
peer's state.

Left out: modes without a barrier (the order of messages varies), residuals of single links
(replicas differ). Left out, too: weights after an update that was taken over while gradients wait
(those of that worker are lost).
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from dlion_api.exit_codes import ExitCode
from local_run import LocalRun, blobs, hashes, job_document

pytestmark = pytest.mark.patient

WORKERS, STEPS, BREAK = 2, 50, 10
"""Four seconds are left after the break: a busy machine acts on Ctrl-C, and on a second command,
later."""


EXCHANGES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full", "codec": "float32"},
    "residual": {"policy": "dlion", "residual": "shared", "codec": "float16"},
}
"""Under `residual` links carry all entries: only the rounding errors of the codec wait."""


def document(folder: Path, exchange: dict[str, Any]) -> dict[str, Any]:
    # On a busy machine links of shorter steps do not carry all entries.
    trainer = {"program": blobs(folder, nap_s=0.1), "stop": {"maxSteps": STEPS}}
    network = {"bandwidthFraction": 1}  # enough for all entries at any measured rate
    return job_document(WORKERS, trainer=trainer, exchange=exchange, network=network)


@pytest.fixture(
    scope="module",
    params=[pytest.param("full", marks=pytest.mark.slow), "residual"],
)
def broken(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LocalRun, dict[str, Any]]:
    """A run that got Ctrl-C in the middle, and its manifest. Tests resume copies of it."""
    root = tmp_path_factory.mktemp("broken")
    job = document(root, EXCHANGES[request.param])
    with LocalRun(root, job) as run:
        run.wait_for_step(BREAK)
        run.end(signal.SIGINT)
    return run, job


def assert_refused(folder: Path, results: Path, document: dict[str, Any]) -> None:
    """Check that a second run in the folder of a running one is refused before any change."""
    second = folder / "second"
    second.mkdir()
    with LocalRun(second, document, "--resume", str(results)) as run:
        assert run.finish() == ExitCode.UNAVAILABLE, run.terminal()
    assert "still uses this folder" in run.terminal()


@pytest.mark.timeout(300)
def test_a_worker_with_a_damaged_checkpoint_takes_a_peers_state(
    broken: tuple[LocalRun, dict[str, Any]], tmp_path: Path
) -> None:
    """If all checkpoints are damaged, nothing is started and each is named."""
    copy, job = tmp_path / "out", broken[1]
    shutil.copytree(broken[0].folder, copy)
    paths = [copy / "state" / f"w{rank}" / "checkpoint.npz" for rank in range(WORKERS)]
    whole = paths[1].read_bytes()
    paths[0].write_bytes(whole[: len(whole) // 2])
    paths[1].write_bytes(b"")
    with LocalRun(tmp_path, job, "--resume", str(copy)) as refused:
        assert refused.finish() == ExitCode.DATA, refused.terminal()
    terminal = refused.terminal()
    assert all(str(path) in terminal for path in paths)
    assert "replica" not in terminal, "no table of the earlier run"

    paths[1].write_bytes(whole)
    with LocalRun(tmp_path, job, "--resume", str(copy)) as resumed:
        assert resumed.finish() == 0, resumed.terminal()
    (damaged,) = resumed.events("CheckpointDamaged")
    assert damaged.rank == 0
    assert str(paths[0]) in damaged.message
    assert paths[0].with_name("checkpoint.npz.damaged").exists(), "set aside, not deleted"
    assert [event.rank for event in resumed.events("WorkerRejoined")] == [0]
    assert all(resumed.steps(rank)[-1].iteration == STEPS for rank in range(WORKERS))
    assert all(len(set(known.values())) == 1 for known in hashes(resumed.steps()).values())


@pytest.mark.timeout(300)
def test_a_resumed_run_equals_a_run_without_a_break(
    broken: tuple[LocalRun, dict[str, Any]], tmp_path: Path
) -> None:
    before, job = broken[0].steps(), broken[1]
    broken_at = max(step.iteration for step in before)
    assert broken_at < STEPS
    (tmp_path / "whole").mkdir()
    with LocalRun(tmp_path / "whole", job) as whole:
        assert whole.finish() == 0, whole.terminal()
    copy = tmp_path / "out"
    shutil.copytree(broken[0].folder, copy)
    with LocalRun(tmp_path, job, "--resume", str(copy)) as resumed:
        resumed.wait_until(lambda: resumed.events("Resumed"), "it continues")
        assert_refused(tmp_path, copy, job)
        assert resumed.finish() == 0, resumed.terminal()

    made = {rank: [step.iteration for step in resumed.steps(rank)] for rank in range(WORKERS)}
    left_out = {i for each in made.values() for i in range(1, STEPS + 1) if i not in each}
    assert left_out <= {broken_at}
    compared = broken_at if left_out and "residual" in job["spec"]["exchange"] else STEPS
    for rank in range(WORKERS):
        assert len(made[rank]) == len(set(made[rank]))
        expected = {s.iteration: (s.samples, s.weights_hash) for s in whole.steps(rank)}
        for step in resumed.steps(rank):
            samples, weights_hash = expected[step.iteration]
            assert step.samples == samples
            if step.iteration <= compared:
                assert step.weights_hash == weights_hash, step.iteration
    assert all(len(set(known.values())) == 1 for known in hashes(resumed.steps()).values())
    ended_s = max(step.time_s for step in before)
    assert all(step.time_s > ended_s for step in resumed.steps()[len(before) :])
