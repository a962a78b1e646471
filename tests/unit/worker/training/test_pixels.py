"""Tests of the scaling of pixels.

The model gets uint8 samples of a program's `load_data` unscaled, as with Keras' `fit()`, from
arrays and pipelines. So a saved model predicts from the program's own data. Images of a data set of
the manifest are scaled to 0..1. Models and encoders that would scale them again are refused.

Left out: several inputs; whole runs (tests/local/test_own_programs).
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dlion_api.errors import DataError, ProgramError
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.spec import Program as ProgramSpec
from dlion_worker.training import datasets, programs
from dlion_worker.training.building import few_samples
from dlion_worker.training.framework import keras
from dlion_worker.training.model import FlatModel
from dlion_worker.training.staged.encoding import encoded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dlion_worker.training.datasets.dataset import DataSet

WORKER = WorkerIdentity(Rank(0), SiteName("plant-a"), "small", 0)
INPUT, RESCALING = "keras.Input((8, 8, 1))", "layers.Rescaling(1 / 255)"
SCRIPT = """
    import keras
    import numpy as np
    import tensorflow as tf
    from keras import layers


    def build_model():
        return keras.Sequential([LAYERS, layers.Flatten(), layers.Dense(10)])


    def load_data(split, site, worker_index):
        generator = np.random.default_rng(len(split))
        y = generator.integers(0, 4, 400)
        x = generator.integers(0, 100, (400, 8, 8, 1), np.uint8)
        x[np.arange(400), y, y] = 255
        return RESULT
"""


def script(*layers: str, result: str = "x, y") -> str:
    """A program whose model begins with these layers."""
    return textwrap.dedent(SCRIPT).replace("LAYERS", ", ".join(layers)).replace("RESULT", result)


def loaded(
    folder: Path, make_job: Any, text: str, dataset: dict[str, Any]
) -> tuple[Callable[[], FlatModel], DataSet]:
    """Return the builder of the program's model, and the data of its first worker."""
    (folder / "mine.py").write_text(text)
    program = programs.load(ProgramSpec(file="mine.py"), directory=folder)
    job = make_job(trainer={"program": {"file": "mine.py"}, "dataset": dataset})
    data = datasets.load(job, WORKER, program=program, data_root=folder)
    return lambda: FlatModel.of_data(program, data, job.spec.trainer), data


@pytest.mark.parametrize(
    "text",
    [
        script(INPUT, RESCALING),
        script(RESCALING),
        script(INPUT, RESCALING, result="tf.data.Dataset.from_tensor_slices((x, y)).batch(50)"),
    ],
    ids=["arrays", "no input layer", "pipeline"],
)
def test_a_saved_model_predicts_from_the_pixels_that_load_data_returns(
    tmp_path: Path, make_job: Any, text: str
) -> None:
    build, data = loaded(tmp_path, make_job, text, {})
    model, (x, y) = build(), (data.held_out_x, data.held_out_y)
    assert x.dtype == np.uint8
    stream = datasets.BatchStream(data, seed=1, rank=0)
    for _ in range(100):
        model.weights_D -= np.float32(0.2) * model.step(*stream.next(64)).gradient_D
    model.save_keras(tmp_path / "model.keras")
    predicted = keras.models.load_model(tmp_path / "model.keras").predict(x, verbose=0).argmax(1)
    accuracy = float(np.mean(predicted == y))
    assert accuracy == pytest.approx(model.evaluate(x, y).accuracy)
    assert accuracy > 0.95


def test_the_first_loss_is_that_of_keras(tmp_path: Path, make_job: Any) -> None:
    """A model that does not scale gets 0..255."""
    build, data = loaded(tmp_path, make_job, script(INPUT), {})
    model, x, y = build(), data.held_out_x[:64], data.held_out_y[:64]
    model.save_keras(tmp_path / "model.keras")
    same = keras.models.load_model(tmp_path / "model.keras")
    same.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert model.step(x, y).loss == pytest.approx(same.evaluate(x, y, verbose=0), rel=1e-4)


def test_bytes_may_be_indices(tmp_path: Path, make_job: Any) -> None:
    """An embedding of few words gets no random pixels."""
    text = script(INPUT, "layers.Flatten()", "layers.Embedding(4, 3)", result="x % 4, y")
    build, data = loaded(tmp_path, make_job, text, {})
    model = build()
    assert model.step(data.held_out_x[:8], data.held_out_y[:8]).finite
    few = few_samples((50,), np.dtype(np.uint8), scales_pixels=False)
    assert np.unique(few).tolist() == [0, 1]


@pytest.mark.parametrize(
    "layers",
    [
        RESCALING,
        "layers.Rescaling(1 / 127.5, offset=-1)",
        "keras.Sequential([layers.Rescaling([1 / 255], name='inner')])",
    ],
)
def test_images_of_the_manifest_are_not_scaled_twice(
    tmp_path: Path, make_job: Any, layers: str
) -> None:
    build, data = loaded(tmp_path, make_job, script(INPUT, layers), {"name": "digits"})
    assert data.input_dtype == np.uint8
    name = "inner" if "inner" in layers else "rescaling"
    refusal = rf"program mine.py: .*scaled to 0\.\.1 already.*layer '{name}'\). Remove the layer"
    with pytest.raises(ProgramError, match=refusal):
        build()


@pytest.mark.parametrize(
    "layers",
    ["layers.Rescaling(2.0, offset=-1)", f"layers.Rescaling(255), {RESCALING}"],
)
def test_other_scales_stay_allowed(tmp_path: Path, make_job: Any, layers: str) -> None:
    build, data = loaded(tmp_path, make_job, script(INPUT, layers), {"name": "digits"})
    assert build().step(data.held_out_x[:8], data.held_out_y[:8]).finite


def test_an_encoder_gets_pixels_like_a_model(tmp_path: Path, make_job: Any) -> None:
    image = keras.Input((8, 8, 1))
    path = tmp_path / "encoder.keras"
    keras.Model(image, keras.layers.Rescaling(1 / 255, name="to_unit")(image)).save(path)
    _, data = loaded(tmp_path, make_job, script(INPUT), {})
    features = encoded(data, path).held_out_x
    np.testing.assert_allclose(features, data.held_out_x / 255, rtol=1e-6)
    _, scaled = loaded(tmp_path, make_job, script(INPUT), {"name": "digits"})
    with pytest.raises(DataError, match=r"layer 'to_unit'.*Save the encoder without"):
        encoded(scaled, path)
