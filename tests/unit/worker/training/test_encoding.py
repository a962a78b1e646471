"""Tests of data and models behind a frozen encoder.

Samples become the encoder's outputs. A saved model accepts the original samples and agrees with the
trained one. Sensors read their samples in order. Unsuitable encoders are refused with a remedy.

Left out: features on the wire (tests/unit/core/policies/test_staged.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlion_api.errors import DataError, DLionError
from dlion_api.spec import load_job
from dlion_core.policies.staged import feature_batch
from dlion_core.policies.staged.feature_batch import BATCH_SAMPLES
from dlion_worker.training import datasets, programs
from dlion_worker.training.converting import load_keras_file
from dlion_worker.training.datasets.dataset import DataSet
from dlion_worker.training.framework import keras
from dlion_worker.training.model import FlatModel
from dlion_worker.training.staged.encoding import encoded
from dlion_worker.training.staged.sensor import SensorStream
from local_run import job_document

COUNT = 2 * BATCH_SAMPLES + 5


def data(count: int = COUNT) -> DataSet:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 256, (count, 4, 4, 1)).astype(np.uint8)
    y = rng.integers(0, 3, count).astype(np.int32)
    return DataSet({"all": (x, y)}, x[:7], y[:7], 3, count)


def encoder(path: Path, *, factor: float = 1.0, shape: tuple[int, ...] = (4, 4, 1)) -> Path:
    image = keras.Input(shape)
    scaled = keras.layers.Rescaling(factor)(image)
    keras.Model(image, keras.layers.Conv2D(2, 3, strides=2, padding="same")(scaled)).save(path)
    return path


def test_a_saved_model_accepts_the_original_samples(tmp_path: Path) -> None:
    original, path = data(), encoder(tmp_path / "encoder.keras")
    features = encoded(original, path)
    assert features.input_shape == (2, 2, 2)
    assert features.samples == COUNT
    trainer = load_job(job_document(1)).spec.trainer
    model = FlatModel.of_data(programs.builtin("digits"), features, trainer)
    outputs = model.evaluate(features.held_out_x, features.held_out_y)
    model.save_keras(tmp_path / "whole.keras")
    whole = load_keras_file(tmp_path / "whole.keras")
    logits = whole.predict(original.held_out_x / 255.0, verbose=0)
    accuracy = float(np.mean(logits.argmax(1) == original.held_out_y))
    assert accuracy == pytest.approx(outputs.accuracy)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: None, "no such file"),
        (lambda path: path.write_text("nonsense"), "cannot be loaded"),
        (lambda path: encoder(path, shape=(5, 5, 3)), "does not take samples of shape"),
        (lambda path: encoder(path, factor=1e9), "outputs beyond"),
    ],
)
def test_an_encoder_that_does_not_fit_is_refused(make: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "encoder.keras"
    make(path)
    with pytest.raises(DataError, match=words):
        encoded(data(8), path)


def test_more_samples_than_the_decoder_accepts_are_refused(tmp_path: Path) -> None:
    path = encoder(tmp_path / "encoder.keras")
    assert encoded(data(8), path, max_values=8 * 8).samples == 8
    with pytest.raises(DataError, match=r"9 samples of 8 values .* 8 of each .*keepFraction"):
        encoded(data(9), path, max_values=8 * 8)


def test_only_a_worker_that_sends_its_samples_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_batch, "MAX_TOTAL_VALUES", 2 * 64 * 100)
    path = encoder(tmp_path / "encoder.keras", shape=(8, 8, 1))
    exchange = {"policy": "staged", "topology": "staged"}
    job = load_job(job_document(3, exchange=exchange, trainer={"encoder": str(path)}))
    program = programs.builtin("digits")
    decoder, sensor = job.workers()[:2]
    assert datasets.load(job, decoder, program=program, data_root=tmp_path).samples > 100
    with pytest.raises(DataError, match="too many for the worker that trains"):
        datasets.load(job, sensor, program=program, data_root=tmp_path)


def test_an_empty_part_stays_empty(tmp_path: Path) -> None:
    original = data(8)
    parts = {**original.parts, "none": (original.held_out_x[:0], original.held_out_y[:0])}
    features = encoded(replace(original, parts=parts), encoder(tmp_path / "encoder.keras"))
    assert features.parts["none"][0].shape == (0, 2, 2, 2)


def test_data_without_classes_or_with_augmentation_are_refused(tmp_path: Path) -> None:
    path = encoder(tmp_path / "encoder.keras")
    for wrong in (
        replace(data(8), class_count=0),
        replace(data(8), augment=lambda x, y, _: (x, y)),
    ):
        with pytest.raises(DLionError, match="encoder"):
            encoded(wrong, path)


def test_a_sensor_reads_its_samples_in_order() -> None:
    stream, (x, _) = SensorStream(data(), seed=1, rank=1), data().parts["all"]
    batches = [(len(stream.next(3)[1]), stream.first) for _ in range(4)]
    assert batches == [(256, 0), (256, 256), (5, 512), (256, 0)]
    other = SensorStream(data(), seed=1, rank=1)
    other.restore(stream.state())
    assert (other.next(1)[0] == x[256:512]).all()
