"""Tests of saved models and their other formats.

SavedModel and TensorFlow Lite give the same logits as the `.keras` file. An older file is replaced.
Saved weights start a model of the same layers, whatever the state of its optimizer. A model with
code is refused and not run, and so is a file that is not a model. The earlier file stays then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dlion_api.errors import DataError, ProgramError
from dlion_worker.training.converting import convert, load_keras_file, load_weights

if TYPE_CHECKING:
    from pathlib import Path

INPUT_B = np.linspace(-1.0, 1.0, 4 * 8, dtype=np.float32).reshape(4, 8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model's file, and the outputs of the model."""
    layers = [keras.Input((8,)), keras.layers.Dense(5, "relu"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    path = tmp_path_factory.mktemp("model") / "model.keras"
    model.save(path)
    return path, np.asarray(model(INPUT_B))


def test_a_loaded_model_gives_the_same_outputs(saved: tuple[Path, Any]) -> None:
    path, expected = saved
    np.testing.assert_allclose(load_keras_file(path)(INPUT_B), expected, rtol=1e-6)


def test_a_file_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    code = keras.layers.Lambda(lambda x: x + 1, output_shape=(8,))
    keras.Sequential([keras.Input((8,)), code]).save(path)
    for content in (None, b"nonsense", b""):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError, match=r"model\.keras: cannot be loaded.*import the program"):
            load_keras_file(path)
    with pytest.raises(DataError, match="cannot be loaded"):
        load_keras_file(tmp_path / "none.keras")


def test_weights_are_read_in_any_state_of_a_compiled_optimizer(tmp_path: Path) -> None:
    """A file of a trained model starts one that was only compiled, and vice versa."""
    path = tmp_path / "model.keras"

    def compiled() -> Any:
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
        model.compile(optimizer="adam", loss="mse")
        return model

    fresh, trained = compiled(), compiled()
    trained.optimizer.build(trained.trainable_variables)
    for given, other in ((trained, fresh), (fresh, trained)):
        given.set_weights([each + 1 for each in given.get_weights()])
        given.save(path)
        load_weights(other, path)
        for before, after in zip(given.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_array_equal(before, after)
    narrow = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    with pytest.raises(DataError, match="does not fit this model"):
        load_weights(narrow, path)


def test_a_saved_model_gives_the_same_outputs(saved: tuple[Path, Any]) -> None:
    path, expected = saved
    (path.parent / "saved_model").mkdir()
    (path.parent / "saved_model" / "old").touch()
    made = convert(path, "savedmodel")
    assert not (made / "old").exists()
    loaded = tf.saved_model.load(made)
    np.testing.assert_allclose(loaded.serve(tf.constant(INPUT_B)), expected, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated")
def test_a_lite_model_gives_the_same_outputs(saved: tuple[Path, Any]) -> None:
    path, expected = saved
    made = convert(path, "tflite")
    interpreter = tf.lite.Interpreter(model_content=made.read_bytes())
    interpreter.allocate_tensors()
    for row, wanted in zip(INPUT_B, expected, strict=True):
        interpreter.set_tensor(interpreter.get_input_details()[0]["index"], row[None])
        interpreter.invoke()
        answer = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
        np.testing.assert_allclose(answer[0], wanted, rtol=1e-4, atol=1e-5)
    assert sorted(p.name for p in path.parent.iterdir() if p.name.startswith(".")) == []


def test_code_in_a_model_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    code = keras.layers.Lambda(lambda x: x + 1, output_shape=(8,))
    keras.Sequential([keras.Input((8,)), code]).save(path)
    (tmp_path / "model.tflite").write_text("old")
    with pytest.raises(ProgramError, match="cannot be converted"):
        convert(path, "tflite")
    path.write_text("nonsense")
    with pytest.raises(ProgramError, match="cannot be converted"):
        convert(path, "savedmodel")
    assert {p.name for p in tmp_path.iterdir()} == {"model.keras", "model.tflite"}
    assert (tmp_path / "model.tflite").read_text() == "old"
