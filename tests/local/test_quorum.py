"""A real run of two sites with `minSites: 2` whose second site falls silent for a while.

Proves: the first site's workers hold still and say so, make not one step, and go on when the other
is back; told to end as it goes once more, they save and end.
Left out: weights afterwards (tests/property/test_quorum.py, test_simulated_quorum.py).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from local_run import LocalRun, blobs, job_document

SITE_A, SITE_B = (0, 1), 2


@pytest.mark.timeout(200)
def test_a_site_holds_still_while_the_other_is_silent(tmp_path: Path) -> None:
    document = job_document(
        {"plant-a": 2, "plant-b": 1},
        minSites=2,
        trainer={"program": blobs(tmp_path, nap_s=0.05), "stop": {"maxSeconds": 600}},
        exchange={"policy": "dlion", "codec": "float16"},
        synchronization={"mode": "bounded", "maxStaleness": 5},
    )
    with LocalRun(tmp_path, document) as run:
        run.wait_for_step(20)
        (silent,) = run.trainer_pids(SITE_B)
        os.kill(silent, signal.SIGSTOP)
        try:
            for rank in SITE_A:
                run.wait_until(lambda rank=rank: run.events("QuorumLost", rank), "it says so")
        finally:
            os.kill(silent, signal.SIGCONT)
        for rank in SITE_A:
            run.wait_until(lambda rank=rank: run.events("QuorumBack", rank), "it goes on")
        run.wait_for_step(max(event.iteration for event in run.events("QuorumBack")) + 20)
        for rank in SITE_A:
            lost, back = run.events("QuorumLost", rank)[0], run.events("QuorumBack", rank)[0]
            assert back.iteration == lost.iteration
            assert back.time_s > lost.time_s
            steps = [step for step in run.steps(rank) if lost.time_s <= step.time_s < back.time_s]
            # One that waited for a peer, which held still, is over with the wait.
            assert {step.iteration for step in steps} <= {lost.iteration}
        run.kill_trainer(SITE_B)
        run.process.terminate()
        assert run.finish() == 130
        for rank in SITE_A:
            assert (run.folder / "state" / f"w{rank}" / "checkpoint.npz").exists()
