"""Facts: at the end of a run each site has a model that Keras loads, said to be the averaged one or
the best replica, with the accuracies of averaged, best and mean, and the sites behind it. A worker
that is lost for good at the very end holds nobody up, also where it was to save for its site. An
epoch is a pass over what all workers have together, however unequal that is.

Left out: sites that cannot reach each other at the end.
"""

from __future__ import annotations

import json
from pathlib import Path

import keras
import numpy as np
import pytest

from local_run import LocalRun, blobs, job_document

pytestmark = pytest.mark.patient

SITES = {"plant-a": 2, "plant-b": 1}
LITTLE_AT_THE_FIRST = """
whole = load_data


def load_data(split, site, worker_index):
    x, y = whole(split, site, worker_index)
    return (x[:24], y[:24]) if split == "train" and worker_index == 0 else (x, y)
"""


@pytest.mark.timeout(200)
def test_every_site_has_a_model_that_says_what_it_is(tmp_path: Path) -> None:
    job = job_document(SITES, trainer={"stop": {"maxSteps": 60}})
    with LocalRun(tmp_path, job) as run:
        assert run.finish() == 0, run.terminal()
    for site in SITES:
        folder = run.folder / "models" / site
        about = json.loads((folder / "model.json").read_text())
        assert about["ranks"] == [0, 1, 2]
        assert about["sites"] == ["plant-a", "plant-b"]
        best = max(about["averaged_accuracy"], about["best_replica_accuracy"])
        assert about["accuracy"] == best
        assert 0.5 < about["mean_replica_accuracy"] <= about["best_replica_accuracy"]
        model = keras.models.load_model(folder / "model.keras")
        assert np.asarray(model(np.zeros((2, 8, 8, 1), np.float32))).shape == (2, 10)
    assert run.summary()["included_sites"] == ["plant-a", "plant-b"]


@pytest.mark.timeout(200)
def test_who_has_little_data_does_not_end_the_run_of_those_who_have_more(tmp_path: Path) -> None:
    program = blobs(tmp_path, more=LITTLE_AT_THE_FIRST)
    job = job_document(2, trainer={"program": program, "stop": {"maxEpochs": 3}})
    with LocalRun(tmp_path, job) as run:
        assert run.finish() == 0, run.terminal()
    steps_of_three_epochs = -(-3 * (24 + 240) // 32)
    for rank in (0, 1):
        assert run.steps(rank)[-1].iteration == steps_of_three_epochs


@pytest.mark.timeout(200)
def test_a_lead_lost_at_the_end_is_replaced(tmp_path: Path) -> None:
    trainer = {"program": blobs(tmp_path, evaluation_nap_s=2.0), "stop": {"maxSteps": 20}}
    with LocalRun(tmp_path, job_document(SITES, trainer=trainer, maxRestarts=0)) as run:
        run.wait_until(lambda: run.events("TrainingStopped"), "the end begins")
        run.kill_trainer(0)
        run.finish(60)
    assert {event.rank for event in run.events("WorkerFailed")} == {0}
    for site in SITES:
        about = json.loads((run.folder / "models" / site / "model.json").read_text())
        assert 0 not in about["ranks"]
