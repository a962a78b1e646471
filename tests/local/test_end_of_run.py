"""Test the models and results at the end of a run.

Each site has a model that Keras loads. Its description states whether it is the averaged one or the
best replica. It has the accuracies of averaged, best and mean, and the contributing sites. Replicas
that are equal are not sent. A worker that is lost at the very end does not block the others, also
if it was to save for its site. An epoch is a pass over the data of all workers, however unequal
their shares. If sites cannot reach each other at the end, each side ends with its own model, which
names its sites. The summary lists the sites in any model and the missing ones. Neither side
succeeds: the exit code is 80.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from dlion_api.exit_codes import ExitCode
from dlion_api.protocol.provenance import PROVENANCE_FILE, ProvenanceStatement, stated_digests
from dlion_worker.training.framework import keras
from local_run import IMPATIENT, MUCH_TO_EVALUATE, LocalRun, blobs, job_document

pytestmark = pytest.mark.patient

SITES = {"plant-a": 2, "plant-b": 1}
LITTLE_AT_THE_FIRST = """
whole = load_data


def load_data(split, site, worker_index):
    x, y = whole(split, site, worker_index)
    return (x[:24], y[:24]) if split == "train" and worker_index == 0 else (x, y)
"""


@pytest.mark.timeout(200)
def test_every_site_has_a_model_with_a_description(tmp_path: Path) -> None:
    job = job_document(dict.fromkeys(SITES, 1), trainer={"stop": {"maxSteps": 60}})
    with LocalRun(tmp_path, job) as run:
        assert run.finish() == 0, run.terminal()
    for site in SITES:
        folder = run.folder / "models" / site
        about = json.loads((folder / "model.json").read_text())
        assert about["ranks"] == [0, 1]
        assert about["sites"] == ["plant-a", "plant-b"]
        best = max(about["averaged_accuracy"], about["best_replica_accuracy"])
        assert about["accuracy"] == best
        assert 0.5 < about["mean_replica_accuracy"] <= about["best_replica_accuracy"]
        model = keras.models.load_model(folder / "model.keras")
        assert np.asarray(model(np.zeros((2, 8, 8, 1), np.float32))).shape == (2, 10)
        stated = ProvenanceStatement.from_json((folder / PROVENANCE_FILE).read_bytes())
        assert stated.sha256 == stated_digests(folder)
        updates = stated.provenance.workers
        assert [(each.rank, each.last_iteration) for each in updates] == [(0, 60), (1, 60)]
        assert min(each.samples for each in updates) > 0
    assert run.summary()["included_sites"] == ["plant-a", "plant-b"]
    assert 0 < run.summary()["bytes"]["state_bytes"] < 1000, "replicas are equal"


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_worker_with_little_data_does_not_end_the_run(tmp_path: Path) -> None:
    program = blobs(tmp_path, more=LITTLE_AT_THE_FIRST)
    job = job_document(2, trainer={"program": program, "stop": {"maxEpochs": 3}})
    with LocalRun(tmp_path, job) as run:
        assert run.finish() == 0, run.terminal()
    steps_of_three_epochs = -(-3 * (24 + 240) // 32)
    for rank in (0, 1):
        assert run.steps(rank)[-1].iteration == steps_of_three_epochs


@pytest.mark.timeout(200)
def test_a_lead_lost_at_the_end_is_replaced(tmp_path: Path) -> None:
    program = blobs(tmp_path, evaluation_nap_s=0.5, more=MUCH_TO_EVALUATE)
    trainer = {"program": program, "stop": {"maxSteps": 20}}
    with LocalRun(tmp_path, job_document(SITES, trainer=trainer, maxRestarts=0)) as run:
        run.wait_until(lambda: run.events("TrainingStopped", 0), "the end begins")
        run.kill_trainer(0)
        assert run.finish() == ExitCode.PARTIAL, run.terminal()
    assert {event.rank for event in run.events("WorkerFailed")} == {0}
    models = [
        json.loads((run.folder / "models" / site / "model.json").read_text()) for site in SITES
    ]
    assert 0 not in models[0]["ranks"]  # the other site's lead may already have its replica


@pytest.mark.timeout(400)
def test_both_sides_of_a_cut_end_and_name_the_sites_of_their_models(tmp_path: Path) -> None:
    """Use network namespaces as root, relays otherwise."""
    sides = {"plant-a": ("plant-a", "plant-b"), "plant-b": ("plant-a", "plant-b"),
             "plant-c": ("plant-c",)}  # fmt: skip
    environment = {
        "name": "cut",
        "workers": [{"count": 3, "cores": 1}],
        "coreScale": 0.5,
        "sites": [{"name": name, "workers": 1} for name in sides],
        "betweenSites": {"mbitPerS": 100},
        "changes": [{"at": {"seconds": 2}, "cutSites": ["plant-c"]}],
    }
    path = tmp_path / "cut.yaml"
    path.write_text(yaml.safe_dump(environment))
    job = job_document(
        dict.fromkeys(sides, 1),
        minSites=1,
        trainer={
            "program": blobs(tmp_path, nap_s=0.1, more=IMPATIENT),
            "stop": {"maxSeconds": 15},
        },
        exchange={"policy": "dlion", "codec": "float16"},
        synchronization={"mode": "bounded", "maxStaleness": 5},
    )
    with LocalRun(tmp_path, job, "--environment", str(path)) as run:
        assert run.finish(300) == ExitCode.PARTIAL, run.terminal()
    stopped = {event.rank: event.time_s for event in run.events("TrainingStopped")}
    for rank, site in enumerate(sides):
        about = json.loads((run.folder / "models" / site / "model.json").read_text())
        assert about["sites"] == list(sides[site]), site
        assert about["ranks"] == [r for r, name in enumerate(sides) if name in sides[site]]
        assert run.steps(rank)[-1].time_s > stopped[rank] - 5, "training reached the end"
    missed = {int(event.rank): event.message for event in run.events("ReplicaMissing")}
    assert missed == {0: "worker 2: no link", 1: "worker 2: no link", 2: "workers 0, 1: no link"}
    summary = run.summary()
    assert {model["site"]: tuple(model["sites"]) for model in summary["models"]} == sides
    assert summary["included_sites"] == list(sides), "in any of the models"
    ending = summary["ending"]
    assert (ending["succeeded"], ending["reason"], ending["missing"]) == (
        False, "Partial", [0, 1, 2]
    )  # fmt: skip
    assert "the saved models differ: that of plant-a holds workers 0, 1" in run.terminal()
