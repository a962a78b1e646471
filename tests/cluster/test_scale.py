"""Test the scale benchmark at a thirtieth of its size (`benchmarks/scale.py`).

It uses its own API server with nodes that KWOK simulates. Thirty jobs with 150 workers' pods are
created, train, idle, are changed, and continue with an operator that was killed and restarted. An
idle operator makes almost no request and no write. No pass has an internal error, and no worker is
refused. Kubeflow Trainer runs the same parts with TrainJobs. Left out: the bounds, which hold for a
thousand jobs on a quiet machine (`make scale`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks" / "scaling"))

import kubeflow  # noqa: E402
from one_run import Size, measure  # noqa: E402

pytestmark = [
    pytest.mark.cluster, pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1200)
]  # fmt: skip

SIZE = Size(jobs=30, workers=5, rest_s=20.0, probes=6)
LISTS_AND_LEASES = 40
"""Maximum in twenty seconds: two rounds of lists of eight kinds, and a Lease each five seconds."""


@pytest.mark.usefixtures("testbed_possible")
def test_thirty_jobs_train_idle_and_survive_their_operator() -> None:
    code = {"PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in ("api", "operator"))}
    figures = measure(SIZE, code=code, definition=ROOT / "crds" / "dlionjob.yaml")
    assert len(figures.made_at_s) == SIZE.jobs
    assert len(figures.burst_lags_s) == SIZE.jobs
    assert len(figures.probe_lags_s) == SIZE.probes
    assert max(figures.probe_lags_s) < 60
    assert {each.split()[0] for each in figures.rest_requests} <= {"list", "watch", "patch", "get"}
    writes = {k: n for k, n in figures.rest_requests.items() if k.startswith("patch")}
    assert writes.keys() <= {"patch leases"}
    assert sum(figures.rest_requests.values()) <= LISTS_AND_LEASES
    # A restarted process has nothing cached: it lists.
    assert not any(kind.startswith("get jobs") for kind in figures.restart_requests)
    assert not any(kind.startswith("create jobs") for kind in figures.restart_requests)
    assert figures.defects == 0


@pytest.mark.usefixtures("testbed_possible")
def test_train_jobs_have_the_same_figures() -> None:
    size = Size(jobs=5, workers=2, rest_s=8.0, probes=3, suspends=True)
    figures = kubeflow.measure(size)
    assert figures.create_requests["patch jobsets"] == size.jobs
    assert len(figures.burst_lags_s) == size.jobs
    assert len(figures.probe_lags_s) == size.probes
    assert max(figures.probe_lags_s) < 60
    assert figures.restart_s > 0
    assert figures.defects == 0
