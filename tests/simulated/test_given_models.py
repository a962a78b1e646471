"""Tests of models given to `dlion.train`.

A compiled Keras model and arrays learn in virtual time, by the compiled loss, accuracy and
optimizer. Training starts from the model's weights. The result folder leads to the trained model,
not to the given one.

Left out: refusals (tests/unit/cli/test_client_models.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlion
from dlion_worker.training.converting import load_weights
from dlion_worker.training.framework import keras

ENVIRONMENT = {"backend": "simulated", "environment": "quickstart"}
SITES = {"plant-a": 3, "plant-b": 1}


def blobs(count: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, count)
    return (rng.normal(0, 1, (count, 8)) + 2 * y[:, None]).astype(np.float32), y


def classifier(learning_rate: float) -> Any:
    keras.utils.set_random_seed(1)  # the run has the model's initial weights
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((8,)), layers.Dense(16, "relu"), layers.Dense(3, "softmax")]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def test_a_compiled_model_learns_from_arrays(tmp_path: Path) -> None:
    (x, y), (test_x, test_y) = blobs(800, 1), blobs(200, 2)
    job = dlion.train(
        classifier(0.01),
        (x, y, test_x, test_y),
        sites=SITES,
        stop={"maxSteps": 100},
        root=tmp_path,
        **ENVIRONMENT,
    )
    assert job.state == "Succeeded"
    trained = dlion.load_model(job)
    found = float(np.mean(trained.predict(test_x, verbose=0).argmax(1) == test_y))
    assert found > 0.85
    assert job.accuracy == pytest.approx(found, abs=0.05)
    again = classifier(0.01)
    load_weights(again, job.result_folder)  # like trainer.startFrom
    best = np.mean(again.predict(test_x, verbose=0).argmax(1) == test_y)
    assert best > 0.85, "this is the trained model"


def test_training_starts_from_the_weights_of_the_model(tmp_path: Path) -> None:
    model = classifier(1e-6)
    model.set_weights([each + 0.25 for each in model.get_weights()])  # no seed gives these
    job = dlion.Client("simulated", root=tmp_path).train(
        model,
        {"train": blobs(400, 3)},
        sites=SITES,
        set={"trainer.stop.maxSteps": 3},
        environment="quickstart",
    )
    ended = dlion.Client("simulated", root=tmp_path).wait_for_job_status(job.name)
    trained = dlion.load_model(ended).get_weights()
    for before, after in zip(model.get_weights(), trained, strict=True):
        np.testing.assert_allclose(after, before, atol=1e-4)
    assert any(np.any(a != b) for a, b in zip(model.get_weights(), trained, strict=True))
