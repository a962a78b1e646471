"""Test when one process evaluates all replicas.

It does so if workers have less than a core and all hold out the same samples. Each worker evaluates
itself if a placeholder gives it its own held-out samples, or if its program loads them. The records
of a restarted process are whole, although the one before was killed within a line.

Left out: the process (tests/local).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlion_api.document import parse
from dlion_api.names import Rank
from dlion_api.protocol.progress import EvaluationRecord, ProgressRecord
from dlion_api.protocol.records import record_to_json
from dlion_api.spec import Job, load_job
from dlion_environments.model import Environment
from dlion_environments.plan import unlimited_plan
from dlion_local.runner.shared_evaluator import SharedEvaluator
from dlion_worker.evaluator import RECORDS_FILE

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


def test_a_restarted_evaluator_loses_no_record_after_a_partial_line(tmp_path: Path) -> None:
    """The one before was killed within its third record."""
    job = _job({"name": "digits"})
    slow = parse(Environment, {"name": "slow", "workers": [{"count": 2, "cores": 1}]})
    taken: list[ProgressRecord] = []
    evaluator = SharedEvaluator(job, slow.plan(job.workers(), 2), tmp_path, taken.append)
    folder = tmp_path / "snapshots"
    records = [
        EvaluationRecord(float(number), Rank(0), number, 100, 0.5, 1.0, 100)
        for number in range(1, 5)
    ]
    lines = [record_to_json(record) + "\n" for record in records]

    def restarted(*_: Any) -> None:
        with (folder / RECORDS_FILE).open("a") as file:
            file.writelines(lines[2:])

    folder.mkdir()
    (folder / RECORDS_FILE).write_text(lines[0])
    evaluator.poll()
    with (folder / RECORDS_FILE).open("a") as file:
        file.write(lines[1] + lines[2][:20])
    group: Any = SimpleNamespace(fork=restarted)
    evaluator.start(group, "config.json")
    evaluator.poll()
    assert taken == records
