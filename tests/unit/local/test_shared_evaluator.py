"""Test when one process evaluates all replicas.

It does so if workers have less than a core and all hold out the same samples. Each worker evaluates
itself if a placeholder gives it its own held-out samples, or if its program loads them.

Left out: the process (tests/local).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlion_api.document import parse
from dlion_api.spec import Job, load_job
from dlion_environments.model import Environment
from dlion_environments.plan import unlimited_plan
from dlion_local.runner.shared_evaluator import SharedEvaluator

NPZ = {"format": "npz"}


def _job(dataset: dict[str, Any]) -> Job:
    trainer = {"program": {"file": "own.py"}, "dataset": dataset, "stop": {"maxSteps": 1}}
    sites = [{"name": "plant-a", "groups": [{"name": "g", "workers": 2}]}]
    return load_job(
        {
            "apiVersion": "dlion.dev/v1alpha1",
            "kind": "DLionJob",
            "metadata": {"name": "test"},
            "spec": {"sites": sites, "trainer": trainer},
        }
    )


def _is_shared(dataset: dict[str, Any], folder: Path, *, limited: bool = True) -> bool:
    job = _job(dataset)
    slow = parse(Environment, {"name": "slow", "workers": [{"count": 2, "cores": 1}]})
    plan = slow.plan(job.workers(), 2) if limited else unlimited_plan(job.workers())
    return SharedEvaluator(job, plan, folder, take=lambda _: None).folder is not None


SAME = [
    {"name": "digits"},
    {"path": "all.npz", **NPZ},
    {"path": "{site}/{index}.npz", "evaluationPath": "test.npz", **NPZ},
]
OWN = [
    {},
    {"path": "{site}/train.npz", **NPZ},
    {"path": "{site}-{rank}", "evaluationPath": "{site}/test.npz", **NPZ},
    {"path": "all.npz", "evaluationPath": "test-{group}.npz", **NPZ},
    {"path": "all.npz", "evaluationPath": "test-{index}.npz", **NPZ},
]


@pytest.mark.parametrize("dataset", SAME, ids=str)
def test_the_same_held_out_samples_are_evaluated_in_one_process(
    tmp_path: Path, dataset: dict[str, Any]
) -> None:
    assert _is_shared(dataset, tmp_path)
    assert not _is_shared(dataset, tmp_path, limited=False)


@pytest.mark.parametrize("dataset", OWN, ids=str)
def test_a_worker_with_its_own_held_out_samples_evaluates_itself(
    tmp_path: Path, dataset: dict[str, Any]
) -> None:
    assert not _is_shared(dataset, tmp_path)
