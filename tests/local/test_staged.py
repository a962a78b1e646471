"""Test runs with real processes in which one worker trains on the features of the others.

Sensors end when the decoder has finished, and every site keeps the decoder's model, which takes
images. A killed decoder or sensor returns, and the features of all sensors arrive. A decoder that
is lost for good fails the run. Left out: simulations (tests/simulated/test_staged.py), the rules
(tests/unit/core/policies/test_staged.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.staged_encoder import save_encoder

from dlion_api.exit_codes import ExitCode
from dlion_worker.training.converting import load_keras_file
from dlion_worker.training.datasets.named_datasets import digits
from local_run import LocalRun, job_document

pytestmark = pytest.mark.patient

SITES = {"plant-a": 1, "plant-b": 2}
DECODER, SENSOR = 0, 2
STEPS = {DECODER: 1500, SENSOR: 6000}
"""By the killed worker. A sensor needs the time of 1800 steps to return on a busy machine, and the
decoder must still train then."""


def staged_job(folder: Path, sites: dict[str, int], **stop: int) -> dict[str, Any]:
    return job_document(
        sites,
        trainer={"encoder": str(save_encoder(folder / "encoder.keras")), "stop": stop},
        exchange={"topology": "staged", "policy": "staged"},
    )


@pytest.mark.timeout(150)
@pytest.mark.parametrize("killed", [DECODER, pytest.param(SENSOR, marks=pytest.mark.slow)])
def test_a_killed_worker_returns_and_sensors_end_with_the_decoder(
    tmp_path: Path, killed: int
) -> None:
    with LocalRun(tmp_path, staged_job(tmp_path, SITES, maxSteps=STEPS[killed])) as run:
        run.wait_for_step(1)
        run.kill_trainer(killed)
        assert run.finish() == 0, run.terminal()
    assert {event.rank for event in run.events("TrainingStopped")} == {0, 1, 2}
    assert len(run.events("FeaturesCollected")) >= 2
    assert not run.events("MessageRefused")
    assert max(step.iteration for step in run.steps(DECODER)) == STEPS[killed]
    x, y = digits()
    for site in SITES:
        about = json.loads((run.folder / "models" / site / "model.json").read_text())
        assert (about["model"], about["ranks"]) == ("replica 0", [0, 1, 2])
        model = load_keras_file(run.folder / "models" / site / "model.keras")
        found = model.predict(x / np.float32(255), verbose=0).argmax(1)
        assert np.mean(found == y) > 0.8


@pytest.mark.timeout(100)
def test_a_decoder_that_is_lost_for_good_fails_the_run(tmp_path: Path) -> None:
    document = staged_job(tmp_path, {"plant-a": 1, "plant-b": 1}, maxSteps=10**6)
    document["spec"]["maxRestarts"] = 0
    with LocalRun(tmp_path, document) as run:
        run.wait_for_step(1)
        run.kill_trainer(0)
        assert run.finish() == ExitCode.FAILED, run.terminal()
    (stopped,) = run.events("TrainingStopped")
    assert (stopped.rank, stopped.message) == (
        1,
        "worker 0 has failed, and no other worker trains (topology staged)",
    )
    messages = [event.message for event in run.events("ReplicaMissing")]
    assert "no model is kept: of workers 1 none trains" in messages
    assert not list(run.folder.rglob("model.keras"))
