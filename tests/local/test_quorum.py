"""Test real runs with `minSites: 2` in which one site is stopped for a while or is cut off.

A site that is alone pauses, reports that it pauses and that none of its links is connected, and
makes no step. It continues when another site is back. If others trained meanwhile it takes the
state of one of them, and they take no other state. Slow test: a paused site that is asked to end
saves and ends.

Left out: weights afterwards (test_quorum.py in tests/property and tests/simulated), a request to
end during recovery (tests/unit/worker/trainer/test_loop_quorum.py).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlion_api.protocol.progress import EventRecord, LinkRecord
from local_run import LocalRun, blobs, job_document

SITE_A, SITE_B = (0, 1), 2
CUT_S, HEALED_S = 4, 22
"""After the start: long enough that a busy machine reports the cut before its end."""
OTHERS, ALONE = (0, 1), 2


def document(folder: Path, sites: dict[str, int]) -> dict[str, Any]:
    return job_document(
        sites,
        minSites=2,
        trainer={"program": blobs(folder, nap_s=0.1), "stop": {"maxSeconds": 600}},
        exchange={"policy": "dlion", "codec": "float16"},
        synchronization={"mode": "bounded", "maxStaleness": 5},
    )


@contextmanager
def silent(run: LocalRun, rank: int) -> Iterator[None]:
    """Stop its trainer within the block."""
    pid = run.trainer_pids(rank)[-1]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def wait_for_events(run: LocalRun, reason: str, ranks: tuple[int, ...], times: int = 1) -> None:
    for rank in ranks:
        run.wait_until(
            lambda rank=rank: len(run.events(reason, rank)) >= times, f"{reason} of worker {rank}"
        )


def assert_made_no_step(run: LocalRun, lost: EventRecord, back: EventRecord) -> None:
    assert back.time_s > lost.time_s
    steps = [step for step in run.steps(lost.rank) if lost.time_s <= step.time_s < back.time_s]
    # A step that waited for a paused peer ends with the wait.
    assert {step.iteration for step in steps} <= {lost.iteration}


def reported_no_link(run: LocalRun, lost: EventRecord, back: EventRecord) -> bool:
    """Report whether it recorded meanwhile that none of its links is connected."""
    connected_by_time: dict[float, list[bool]] = {}
    for record in run.records():
        if isinstance(record, LinkRecord) and record.rank == lost.rank:
            connected_by_time.setdefault(record.time_s, []).append(record.connected)
    return any(
        lost.time_s <= time_s < back.time_s and not any(connected)
        for time_s, connected in connected_by_time.items()
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_site_pauses_while_the_other_is_silent(tmp_path: Path) -> None:
    with LocalRun(tmp_path, document(tmp_path, {"plant-a": 2, "plant-b": 1})) as run:
        run.wait_for_step(20)
        with silent(run, SITE_B):
            wait_for_events(run, "QuorumLost", SITE_A)
        wait_for_events(run, "QuorumBack", SITE_A)
        run.wait_for_step(max(event.iteration for event in run.events("QuorumBack")) + 20)
        for rank in SITE_A:
            assert_made_no_step(
                run, run.events("QuorumLost", rank)[0], run.events("QuorumBack", rank)[0]
            )
        with silent(run, SITE_B):
            wait_for_events(run, "QuorumLost", SITE_A, times=2)
            run.process.terminate()
            for rank in SITE_A:
                run.wait_until(lambda rank=rank: checkpoint(run, rank).exists(), "it saves")
        assert run.finish() == 130


def checkpoint(run: LocalRun, rank: int) -> Path:
    return run.folder / "state" / f"w{rank}" / "checkpoint.npz"


@pytest.mark.timeout(400)
def test_a_site_that_was_cut_off_takes_the_others_state(tmp_path: Path) -> None:
    environment = {
        "name": "cut",
        "workers": [{"count": 3, "cores": 1}],
        "coreScale": 0.5,
        "sites": [{"name": name, "workers": 1} for name in "abc"],
        "betweenSites": {"mbitPerS": 100},
        "changes": [
            {"at": {"seconds": CUT_S}, "cutSites": ["c"]},
            {"at": {"seconds": HEALED_S}, "cutSites": []},
        ],
    }
    path = tmp_path / "cut.yaml"
    path.write_text(yaml.safe_dump(environment))
    job = document(tmp_path, {"plant-a": 1, "plant-b": 1, "plant-c": 1})
    with LocalRun(tmp_path, job, "--environment", str(path), "--unprivileged") as run:
        wait_for_events(run, "QuorumLost", (ALONE,))
        wait_for_events(run, "WorkerRejoined", (ALONE,))
        wait_for_events(run, "QuorumBack", (ALONE,))
        (lost,), (back,) = run.events("QuorumLost"), run.events("QuorumBack")
        run.wait_for_step(back.iteration + 20)
        (rejoined,) = run.events("WorkerRejoined")
        assert run.end(signal.SIGINT) < 10
    assert_made_no_step(run, lost, back)
    assert reported_no_link(run, lost, back)
    assert rejoined.iteration > lost.iteration + 10
    assert not run.events("FoldedTogether")
    for rank in OTHERS:
        meanwhile = [s for s in run.steps(rank) if lost.time_s < s.time_s < back.time_s]
        assert len(meanwhile) > 10
