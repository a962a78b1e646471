"""Runs with real processes in which one worker trains on the features of the others.

Proves: sensors end when the decoder has finished, and every site keeps the decoder's model, which
takes images; a decoder or a sensor that is killed comes back, and the features of all sensors
arrive. Left out: simulations (tests/simulated/test_staged.py), the rules
(tests/unit/core/policies/test_staged.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.support.staged_encoder import save_encoder

from dlion_worker.training.converting import load_keras_file
from dlion_worker.training.datasets.named_datasets import digits
from local_run import LocalRun, job_document

pytestmark = pytest.mark.patient

SITES = {"plant-a": 1, "plant-b": 2}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("killed", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_worker_comes_back_and_sensors_end_with_the_decoder(
    tmp_path: Path, killed: int
) -> None:
    document = job_document(
        SITES,
        trainer={
            "encoder": str(save_encoder(tmp_path / "encoder.keras")),
            "stop": {"maxSteps": 3000},
        },
        exchange={"topology": "staged", "policy": "staged"},
    )
    with LocalRun(tmp_path, document) as run:
        run.wait_for_step(1)
        run.kill_trainer(killed)
        assert run.finish() == 0, run.terminal()
    assert {event.rank for event in run.events("TrainingStopped")} == {0, 1, 2}
    assert len(run.events("FeaturesCollected")) >= 2
    assert not run.events("MessageRefused")
    assert max(step.iteration for step in run.steps(0)) == 3000
    x, y = digits()
    for site in SITES:
        about = json.loads((run.folder / "models" / site / "model.json").read_text())
        assert (about["model"], about["ranks"]) == ("replica 0", [0, 1, 2])
        model = load_keras_file(run.folder / "models" / site / "model.keras")
        found = model.predict(x / np.float32(255), verbose=0).argmax(1)
        assert np.mean(found == y) > 0.8
