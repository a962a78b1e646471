"""Test a run over two sites whose certificates live for seconds.

Every connection is replaced: both links, the sidecars' measurements, those of workers and keepers
to their coordinators, and those between operators. Slow test: twice and more. No worker loses an
iteration, no link goes down, no warning is reported, and the replicas stay equal in lock step.

Processes, the operators' parts and mutual TLS are real, on loopback. `benchmarks/renewals.py` shows
the same with lives of two minutes, and the times of iterations. Left out: messages in flight when a
connection changes (test_renewed_links.py).
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from local_run import blobs
from renewed_run import renewed_run

LIFE = timedelta(seconds=16)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_connection_is_replaced_and_no_iteration_lost(tmp_path: Path, times: int) -> None:
    run = renewed_run(tmp_path, life=LIFE, times=times, program=blobs(tmp_path, nap_s=0.05))
    print(f"{run.seconds:.0f} s: {run.remade}")
    assert len(run.remade) == 12
    assert min(run.remade.values()) >= times
    assert run.warnings == ()
    assert run.dropped_messages == 0
    assert run.lines_down == 0
    for loss in run.losses.values():
        assert loss.iterations > 50
        assert loss.discarded == ()
    assert run.compared > 50
    assert run.parted == 0
