"""Facts: a run that got Ctrl-C in the middle and is resumed makes, from its last iteration on, the
very same steps as a run without a break: the same batches, and bit-identical weights after each. No
iteration is made twice. None is left out, but that a worker whose peer had made the last update
before the break takes that update over from it instead of making it. So it is also where what is
not sent of a gradient waits for the next one. The run's clock goes on. While it goes on, nobody
else can resume it. A worker whose checkpoint is damaged says which, sets it aside and takes a
peer's state.

Left out: modes without a barrier (what arrives when differs from run to run), residuals of single
links (replicas differ, and so do a worker's weights from those that it takes over).
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from dlion_api.exit_codes import ExitCode
from local_run import LocalRun, blobs, hashes, job_document

pytestmark = pytest.mark.patient

STEPS, BREAK = 60, 20


EXCHANGES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full", "codec": "float32"},
    "residual": {"policy": "dlion", "residual": "shared", "codec": "float16"},
}
"""Under `residual` links carry all entries: what waits is what the codec rounds off."""


def document(folder: Path, exchange: dict[str, Any]) -> dict[str, Any]:
    trainer = {"program": blobs(folder, nap_s=0.03), "stop": {"maxSteps": STEPS}}
    return job_document(3, trainer=trainer, exchange=exchange)


def assert_refused(folder: Path, results: Path, document: dict[str, Any]) -> None:
    """A second run in a folder in which one goes on: refused, before anything is touched."""
    second = folder / "second"
    second.mkdir()
    with LocalRun(second, document, "--resume", str(results)) as run:
        assert run.finish() == ExitCode.UNAVAILABLE, run.terminal()
    assert "still uses this folder" in run.terminal()


@pytest.mark.timeout(300)
def test_a_worker_with_a_damaged_checkpoint_takes_a_peers_state(tmp_path: Path) -> None:
    """Two of three are damaged; where all are, nothing is started and each is named."""
    job = document(tmp_path, EXCHANGES["full"])
    with LocalRun(tmp_path, job) as broken:
        broken.wait_for_step(BREAK)
        broken.end(signal.SIGINT)
    paths = [broken.folder / "state" / f"w{rank}" / "checkpoint.npz" for rank in range(3)]
    whole = paths[2].read_bytes()
    paths[0].write_bytes(whole[: len(whole) // 2])
    paths[1].write_bytes(b"")
    paths[2].write_bytes(b"x" * 99)
    with LocalRun(tmp_path, job, "--resume", str(broken.folder)) as refused:
        assert refused.finish() == ExitCode.DATA, refused.terminal()
    said = refused.terminal()
    assert all(str(path) in said for path in paths)
    assert "replica" not in said, "no table of the run before"

    paths[2].write_bytes(whole)
    with LocalRun(tmp_path, job, "--resume", str(broken.folder)) as resumed:
        assert resumed.finish() == 0, resumed.terminal()
    damaged = {event.rank: event.message for event in resumed.events("CheckpointDamaged")}
    assert sorted(damaged) == [0, 1]
    for rank in (0, 1):
        assert str(paths[rank]) in damaged[rank]
        assert paths[rank].with_name("checkpoint.npz.damaged").exists(), "set aside, not deleted"
    assert sorted(event.rank for event in resumed.events("WorkerRejoined")) == [0, 1]
    assert all(resumed.steps(rank)[-1].iteration == STEPS for rank in range(3))
    assert all(len(set(known.values())) == 1 for known in hashes(resumed.steps()).values())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES.keys())
def test_a_resumed_run_goes_on_as_if_there_had_been_no_break(
    tmp_path: Path, exchange: dict[str, Any]
) -> None:
    job = document(tmp_path, exchange)
    with LocalRun(tmp_path, job) as whole:
        assert whole.finish() == 0, whole.terminal()
    broken_folder = tmp_path / "broken"
    broken_folder.mkdir()
    with LocalRun(broken_folder, job) as broken:
        broken.wait_for_step(BREAK)
        broken.end(signal.SIGINT)
    before = broken.steps()
    assert before[-1].iteration < STEPS
    with LocalRun(broken_folder, job, "--resume", str(broken.folder)) as resumed:
        resumed.wait_until(lambda: resumed.events("Resumed"), "it goes on")
        assert_refused(tmp_path, broken.folder, job)
        assert resumed.finish() == 0, resumed.terminal()

    for rank in range(3):
        expected = {s.iteration: (s.samples, s.weights_hash) for s in whole.steps(rank)}
        made = [(s.iteration, (s.samples, s.weights_hash)) for s in resumed.steps(rank)]
        assert made == [(iteration, expected[iteration]) for iteration, _ in made]
        taken_over = expected.keys() - {iteration for iteration, _ in made}
        assert taken_over <= {max(step.iteration for step in before)}
        assert len(made) == len({iteration for iteration, _ in made})
    assert all(len(set(known.values())) == 1 for known in hashes(resumed.steps()).values())
    ended_s = max(step.time_s for step in before)
    assert all(step.time_s > ended_s for step in resumed.steps()[len(before) :])
