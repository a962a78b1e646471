"""Tests of the trial of a program.

A program of each shape is tried on one batch, without effects left. The trial finds faults that a
run finds seconds later or at its end. Examples are another input shape, an undefined name, values
that are not finite, a layer that Keras cannot save, and an object that is not an optimizer. The
model is built once, after the data are loaded, as in a run. The sites of the example need each
other. Of a manifest's data only what is used is read; without them, samples are made up,
unless the model may need other shapes: then it names the error that they have caused.

Left out: the process around it (tests/unit/cli/test_program_files).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dlion_api.errors import DataError, ProgramError
from dlion_api.spec import load_job
from dlion_worker.training import datasets, programs
from dlion_worker.training.framework import keras
from dlion_worker.training.trial import try_program
from own_programs import OWN_PROGRAMS, PROBABILITIES, OwnProgram


def tried(
    folder: Path, make_job: Any, text: str, optimizer: str = "sgd", privacy: Any = None
) -> str:
    (folder / "mine.py").write_text(text)
    trainer = {"program": {"file": "mine.py"}, "dataset": {}, "optimizer": {"name": optimizer}}
    trainer["privacy"] = privacy
    job = make_job(trainer=trainer, spec={"knowledgeTransfer": {"policy": "none"}})
    return try_program(job, data_root=folder, program_root=folder).text


@pytest.mark.parametrize("own", OWN_PROGRAMS, ids=lambda own: own.name)
def test_a_program_of_each_shape_is_tried(own: OwnProgram, tmp_path: Path, make_job: Any) -> None:
    found = tried(tmp_path, make_job, own.text, own.optimizer)
    assert " has 400 samples with " in found
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.py", "__pycache__"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("keras.Input((4,))", "keras.Input((5,))"), r"sample of shape \[4\] failed"),
        (("layers.Dense(16,", "Own(16,"), "name 'Own' is not defined"),
        (
            ('layers.Dense(16, "relu")', "layers.Rescaling(1e30), layers.Rescaling(1e30)"),
            "NaN or infinity",
        ),
        (
            ("layers.Dense(16,", "type('Own', (layers.Dense,), {'get_config': None})(16,"),
            "Keras cannot save the model",
        ),
    ],
)
def test_a_fault_that_a_run_would_find_later_is_found(
    tmp_path: Path, make_job: Any, change: tuple[str, str], message: str
) -> None:
    assert change[0] in PROBABILITIES.text
    with pytest.raises(ProgramError, match=message):
        tried(tmp_path, make_job, PROBABILITIES.text.replace(*change))


@pytest.mark.parametrize(
    ("change", "optimizer", "message"),
    [
        (("return keras.Sequential", "print"), "sgd", r"must return a keras.Model"),
        (("import numpy", "callbacks = int\nimport numpy"), "sgd", "must return a list"),
        (
            ("import numpy", "optimizer = int\nimport numpy"),
            "program",
            "keras.optimizers.Optimizer",
        ),
    ],
)
def test_a_function_with_a_wrong_result_is_found(
    tmp_path: Path, make_job: Any, change: tuple[str, str], optimizer: str, message: str
) -> None:
    assert change[0] in PROBABILITIES.text
    with pytest.raises(ProgramError, match=message):
        tried(tmp_path, make_job, PROBABILITIES.text.replace(*change), optimizer)


PIXELS = """
import keras


def build_model():
    first = keras.Input((None, None, 3))
    last = keras.layers.GlobalAveragePooling2D()(first)
    return keras.Model(first, keras.layers.Dense(5)(last))
"""


def test_no_more_samples_are_read_than_used(tmp_path: Path, make_job: Any) -> None:
    """The last images are not readable."""
    (tmp_path / "mine.py").write_text(PIXELS)
    image = keras.utils.array_to_img(np.zeros((4, 4, 3)))
    for number in range(400):
        path = tmp_path / "data" / f"class-{number // 200}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    for number in range(380, 400):
        (tmp_path / "data" / "class-1" / f"{number}.png").write_bytes(b"unreadable")
    trainer = {"program": {"file": "mine.py"}}
    dataset = {"path": "data", "format": "images", "partition": "iid", "evaluationFraction": 0.3}
    job = make_job(trainer=trainer, **dataset)
    found = try_program(job, data_root=tmp_path, program_root=tmp_path)
    assert re.search(r"plant-a/small-0 has 9[34] samples with 2 classes", found.text), found.text
    program = programs.load(job.spec.trainer.program, directory=tmp_path)
    with pytest.raises(DataError, match=r"3[89]\d\.png"):
        datasets.load(job, job.workers()[0], program=program, data_root=tmp_path)


INTEGERS = """
import keras
from keras import layers


def build_model():
    first = keras.Input((6,), dtype="int32")
    return keras.Sequential([first, layers.Embedding(2, 4), layers.Flatten(), layers.Dense(1)])
"""


LARGE_PIXELS = (
    PIXELS.replace("(first)", "(halved(first))", 1)
    + """

def halved(x):
    for _ in range(5):
        x = keras.layers.MaxPooling2D()(keras.layers.Conv2D(4, 3)(x))
    return x
"""
)

STRINGS = """
import keras
import tensorflow as tf


class Lengths(keras.layers.Layer):
    def call(self, texts):
        return tf.cast(tf.strings.length(texts), tf.float32)

    def compute_output_spec(self, texts):
        return keras.KerasTensor(texts.shape, "float32")


def build_model():
    first = keras.Input((1,), dtype="string")
    return keras.Model(first, keras.layers.Dense(2)(Lengths()(first)))
"""

NOT_TRIED = "its program builds a model; shapes are not known without the data: not tried"

MISNAMED = """
import keras


class Scaled(keras.layers.Layer):
    def call(self, x):
        return x * factor

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "float32")


def build_model():
    first = keras.Input((None, None, 3))
    pooled = keras.layers.GlobalAveragePooling2D()(Scaled()(first))
    return keras.Model(first, keras.layers.Dense(5)(pooled))
"""

WITHOUT_INPUT = """
import keras


def build_model():
    return keras.Sequential([keras.layers.Dense(2)])
"""


@pytest.mark.parametrize(
    ("text", "form", "found"),
    [
        (PIXELS, "images", "made-up samples [32, 32, 3] with 5 classes; one batch trained: loss "),
        (INTEGERS, "npz", "made-up samples [6] with 2 classes; one batch trained: loss "),
        (PIXELS.replace("None, None", "8, 8"), "npz", "made-up samples [8, 8, 3] with 5 classes"),
        (WITHOUT_INPUT, "npz", NOT_TRIED),
        (LARGE_PIXELS, "images", f"{NOT_TRIED} (a call with made-up samples [32, 32, 3] fails: "),
        (MISNAMED, "images", "name 'factor' is not defined"),
        (STRINGS, "npz", NOT_TRIED),
    ],
    ids=["any size", "integers", "floats", "without input", "a minimum size", "a wrong name",
         "strings"],
)  # fmt: skip
def test_without_data_samples_are_made_up(
    tmp_path: Path, make_job: Any, text: str, form: str, found: str
) -> None:
    (tmp_path / "mine.py").write_text(text)
    job = make_job(trainer={"program": {"file": "mine.py"}}, path="absent", format=form)
    assert found in try_program(job, data_root=tmp_path, program_root=tmp_path, has_data=False).text


def test_a_fault_is_found_in_made_up_samples(tmp_path: Path, make_job: Any) -> None:
    text = f"{PIXELS}\n\ndef loss(y, outputs):\n    return y - outputs[:, :2]\n"
    (tmp_path / "mine.py").write_text(text)
    job = make_job(trainer={"program": {"file": "mine.py"}}, path="absent", format="images")
    with pytest.raises(ProgramError, match=r"loss\(y_true, y_pred\)"):
        try_program(job, data_root=tmp_path, program_root=tmp_path, has_data=False)


def test_a_model_is_built_once(tmp_path: Path, make_job: Any) -> None:
    text = PROBABILITIES.text.replace(
        "def build_model():",
        "BUILT = []\n\n\ndef build_model():\n    BUILT.append(1 / (not BUILT))",
    )
    assert "BUILT.append" in text
    assert "one batch trained" in tried(tmp_path, make_job, text)


@pytest.mark.parametrize(
    ("before", "setting", "reading"),
    [
        ("", "global WIDTH\n    WIDTH = 4", "WIDTH"),
        ("FORM = {}\n\n\n", "FORM['width'] = x.shape[1]", "FORM['width']"),
        ("FORM = {'width': 7}\n\n\n", "FORM.update(width=4)", "FORM['width']"),
        ("FORM = []\n\n\n", "FORM.append(4)", "FORM[-1]"),
    ],
    ids=["a global", "a dict", "a dict with a wrong default", "a list"],
)
def test_a_model_may_depend_on_state_set_by_load_data(
    tmp_path: Path, make_job: Any, before: str, setting: str, reading: str
) -> None:
    text = PROBABILITIES.text.replace("def build_model", f"{before}def build_model")
    text = text.replace("keras.Input((4,))", f"keras.Input(({reading},))")
    text = text.replace("return x, np", f"{setting}\n    return x, np")
    assert setting in text
    assert "one batch trained" in tried(tmp_path, make_job, text)


def test_callbacks_find_the_folder_that_they_made(tmp_path: Path, make_job: Any) -> None:
    text = (
        PROBABILITIES.text
        + """

def callbacks():
    import os

    os.mkdir("logs")
    return [keras.callbacks.CSVLogger("logs/epochs.csv")]
"""
    )
    assert "one batch trained" in tried(tmp_path, make_job, text)
    assert not (tmp_path / "logs").exists()


def test_wrong_values_are_named_without_a_traceback(tmp_path: Path, make_job: Any) -> None:
    """A traceback would have no line of the user's."""
    text = PROBABILITIES.text.replace("return x, np", "return x[:0], np")
    with pytest.raises(ProgramError, match=r"load_data\('train'.*: wrong shapes") as caught:
        tried(tmp_path, make_job, text)
    assert caught.value.__cause__ is None


def test_a_missing_optimizer_is_found(tmp_path: Path, make_job: Any) -> None:
    with pytest.raises(ProgramError, match=r"it has no optimizer\(\)"):
        tried(tmp_path, make_job, PROBABILITIES.text, "program")


def test_a_private_program_is_tried_without_its_loss(tmp_path: Path, make_job: Any) -> None:
    privacy = {"clipNorm": 1, "noiseMultiplier": 1}
    assert "one batch trained: loss" in tried(tmp_path, make_job, PROBABILITIES.text)
    found = tried(tmp_path, make_job, PROBABILITIES.text, privacy=privacy)
    assert found.endswith("one batch trained")


def test_statistics_of_batches_are_found_with_privacy(tmp_path: Path, make_job: Any) -> None:
    text = PROBABILITIES.text.replace(
        "layers.Dense(16,", "layers.BatchNormalization(), layers.Dense(16,"
    )
    tried(tmp_path, make_job, text)
    with pytest.raises(ProgramError, match="privacy does not go with variables"):
        tried(tmp_path, make_job, text, privacy={"clipNorm": 1, "noiseMultiplier": 1})


def test_sites_of_the_example_need_each_other() -> None:
    """Each site lacks half of the classes in the common test."""
    folder = Path(__file__).parents[4] / "examples" / "own-model"
    job = load_job(yaml.safe_load((folder / "job.yaml").read_text()))
    load_data = programs.load(job.spec.trainer.program, directory=folder).load_data
    assert load_data is not None
    _, tested = load_data("test", "plant-a", 0)
    classes = np.unique(tested)
    found_classes: set[int] = set()
    for worker in job.workers():
        _, y = load_data("train", str(worker.site), worker.index)
        own = {*np.unique(y).tolist()}
        assert 2 * len(own) == len(classes)
        assert np.isin(tested, [*own]).mean() < 0.55
        found_classes |= own
    assert found_classes == {*classes.tolist()}
