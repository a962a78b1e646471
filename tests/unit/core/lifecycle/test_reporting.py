"""Tests of the report of near-duplicates.

Samples that the manifest leaves out as near-duplicates are reported: for data by path, for a
watched folder and for data of a program. If none are left out, there is no event.

Left out: the choice of near-duplicates (tests/unit/worker/training/test_selection).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord, ProgressRecord
from dlion_api.spec import Job, load_job
from dlion_core.lifecycle.reporting import Reporter
from dlion_worker.training import datasets, programs

PROGRAM = """
import keras
import numpy as np


def build_model():
    return keras.Sequential([keras.layers.Input((8, 8, 1)), keras.layers.Flatten()])


def load_data(split, site, worker_index):
    file = np.load("FILE")
    return file["x"], file["y"]
"""


def _job(dataset: dict[str, Any]) -> Job:
    trainer = {"program": {"file": "own.py"}, "dataset": dataset, "stop": {"maxSteps": 1}}
    sites = [{"name": "plant-a", "groups": [{"name": "g", "workers": 1}]}]
    return load_job(
        {
            "apiVersion": "dlion.dev/v1alpha1",
            "kind": "DLionJob",
            "metadata": {"name": "test"},
            "spec": {"sites": sites, "trainer": trainer},
        }
    )


def _reported(folder: Path, dataset: dict[str, Any]) -> list[ProgressRecord]:
    """Return the records of a worker with forty images, each present four times."""
    x = np.random.default_rng(0).integers(0, 256, (10, 8, 8, 1), dtype=np.uint8)
    (folder / "data").mkdir()
    for place in (folder / "data" / "train.npz", folder / "test.npz"):
        np.savez(place, x=np.repeat(x, 4, axis=0), y=np.repeat(np.arange(10) % 3, 4))
    (folder / "own.py").write_text(PROGRAM.replace("FILE", str(folder / "test.npz")))
    records: list[ProgressRecord] = []
    job = _job(dataset)
    program = programs.load(job.spec.trainer.program, directory=folder)
    reporter = Reporter(
        rank=Rank(0), incarnation=1, start_monotonic_s=0, clock_s=lambda: 0.0, send=records.extend
    )
    data = datasets.load(job, job.workers()[0], program=program, data_root=folder)
    reporter.near_duplicates(data.near_duplicates_left_out, kept=data.samples)
    return records


BY_PATH = {"path": "data", "format": "npz", "evaluationPath": "test.npz"}


@pytest.mark.parametrize("dataset", [BY_PATH, {**BY_PATH, "watch": True}, {}], ids=str)
def test_left_out_samples_are_reported(tmp_path: Path, dataset: dict[str, Any]) -> None:
    (event,) = _reported(tmp_path, {**dataset, "dropNearDuplicates": True})
    assert isinstance(event, EventRecord)
    assert event.reason == "NearDuplicatesLeftOut"
    assert event.message == "30 of 40 samples left out: similar to others"
    assert not event.warning


@pytest.mark.parametrize(
    "dataset",
    [BY_PATH, {"dropNearDuplicates": True, "nearDuplicateThreshold": 0.0, "keepFraction": 0.05}],
    ids=str,
)
def test_without_left_out_samples_there_is_no_event(
    tmp_path: Path, dataset: dict[str, Any]
) -> None:
    assert _reported(tmp_path, dataset) == []
