"""Test published systems with real processes and links, one of each kind.

The kinds are: updates, queues of weights, pairs, servers, and error feedback on links that drop
nothing. The policies train, no message is refused, and the run ends by itself, also if an awaited
worker stops first. Left out: what each policy computes (tests/property), all policies
(docs/policies).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from local_run import LocalRun, blobs, job_document

pytestmark = pytest.mark.patient

STEPS = 180
LEARNED = 0.55
"""Accuracy of every replica, of three classes: a third is chance. docs/policies.md has the final
accuracy of each policy."""

KINDS: dict[str, dict[str, Any]] = {
    "gaia": {},
    "hop": {},
    "adaptive": {},
    "halos": {"localSteps": 2, "accumulate": 4, "mergeWeight": 0.5},
    "quorum-diloco": {"localSteps": 4},
    "adpsgd": {"overlap": False},
    "adacomp": {"server": 1},
    "ako": {"partitions": 3},
}
SLOW = {"adacomp", "adaptive", "ako", "gaia", "halos", "hop"}
"""`make slow` trains them: `hop` (also in test_clustered), `adaptive` (also in the quick start and
the tutorial), policies that differ from `dlion` only in what they send, and the second policy with
servers."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "policy",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in sorted(KINDS)],
)
def test_a_policy_trains_with_real_links_and_ends_by_itself(tmp_path: Path, policy: str) -> None:
    document = job_document(
        3,
        trainer={"program": blobs(tmp_path), "stop": {"maxSteps": STEPS}},
        exchange={"policy": policy, "parameters": KINDS[policy]},
        synchronization={"mode": "bounded", "maxStaleness": 3},
    )
    with LocalRun(tmp_path, document) as run:
        assert run.finish() == 0
        run.assert_nothing_left()
    assert not run.events("MessageRefused")
    assert not run.events("WorkerFailed")
    assert max(step.iteration for step in run.steps()) == STEPS
    summary = run.summary()
    assert summary["accuracy"]["min"] > LEARNED
    assert summary["sent_bytes"] > 0
