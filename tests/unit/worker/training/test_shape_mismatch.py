"""Facts: where labels, outputs and loss, or data and input, do not fit, the program's author reads
both shapes and a remedy first, and the text of Keras or TensorFlow after it; any other error of a
program has no such sentence.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlion_api.errors import DLionError, ProgramError
from dlion_worker.training.framework import keras, tf
from dlion_worker.training.model import FlatModel
from dlion_worker.training.programs.program import TrainingProgram, user_code
from dlion_worker.training.programs.shape_mismatch import loss_mismatch
from dlion_worker.training.scoring import graph_error_cause

LABELS = np.arange(12).astype(np.int32) % 6
ONE_HOT = np.eye(6, dtype=np.float32)[LABELS]
SPARSE, CATEGORICAL = "sparse_categorical_crossentropy", "categorical_crossentropy"
X = np.zeros((12, 4), np.float32)
DETECTED = "Graph execution error:\n\nDetected at node a defined at (most recent call last):\n"
FRAME = '  File "model.py", line 7, in call\n    return y[x]\n'
CAUSE = "indices[1,4] = 12 is not in [0, 10)"


def error_of(
    y: Any, outputs: int, loss: Any, *, own: bool = False, inputs: int = 4, **settings: Any
) -> str:
    """The error of a model that is built, trained and evaluated on one batch.

    `own`: `loss` is a function of the program, not of compile().
    """

    def build(*_: Any) -> Any:
        model = keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(outputs, "softmax")])
        if not own:
            model.compile(loss=loss, **{"metrics": ["accuracy"], **settings})
        return model

    program = TrainingProgram("mine", build, loss=loss if own else None)
    classes = 6 if y.dtype == np.int32 else 0

    def train() -> None:
        FlatModel(
            program, input_shape=(4,), class_count=classes, seed=1, target_shape=y.shape[1:]
        ).step(X, y)

    with pytest.raises(DLionError) as caught:
        train()
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "shapes", "remedy", "of_keras"),
    [
        (
            (ONE_HOT, 6, SPARSE),
            "y has shape [6] of float32, and the model returns [6]",
            "use CategoricalCrossentropy", "ValueError: Argument `output` must have rank",
        ),
        (
            (LABELS, 6, CATEGORICAL),
            "y has one int32, and the model returns [6]",
            "use SparseCategoricalCrossentropy", "must have the same rank",
        ),
        (
            (ONE_HOT, 4, CATEGORICAL),
            "y has shape [6] of float32, and the model returns [4]",
            "Give the last layer 6 outputs, or return 4 values in y", "must have the same shape",
        ),
        (
            (ONE_HOT[:, :3], 2, "mse"),
            "y has shape [3] of float32, and the model returns [2]",
            "Give the last layer 3 outputs", "Incompatible shapes",
        ),
        (
            (ONE_HOT[:, 0], 6, CATEGORICAL),
            "y has one float32, and the model returns [6]",
            "Let the model return [], or return y of shape [6]", "must have the same rank",
        ),
        (
            (LABELS, 4, SPARSE),
            "y has labels from 0 to 5 (6 classes), and the model returns [4]",
            "Give the last layer at least 6 outputs", "rejected a batch: Received a label value of",
        ),
        (
            (LABELS - 1, 6, SPARSE),
            "y has labels from -1 to 4 (6 classes), and the model returns [6]",
            "correct the labels: they count from 0", "rejected a batch: Received a label value of",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_a_remedy_before_the_text_of_keras(
    given: tuple[Any, int, Any], shapes: str, remedy: str, of_keras: str
) -> None:
    message = error_of(*given)
    assert message.startswith(f"program mine: {shapes}")
    assert 0 < message.index(remedy) < message.index(of_keras)


def test_a_token_outside_an_embedding_is_named() -> None:
    """The cause is the last line of TensorFlow's message, after many lines of its stack."""

    def build(*_: Any) -> Any:
        layers = [keras.layers.Embedding(10, 3), keras.layers.Flatten(), keras.layers.Dense(2)]
        return keras.Sequential([keras.Input((5,), dtype="int32"), *layers])

    model = FlatModel(TrainingProgram("mine", build), input_shape=(5,), class_count=2, seed=1)
    with pytest.raises(DLionError, match=r"batch with .*: indices\[1,4\] = 12 is not in \[0, 10\)"):
        model.step(np.array([[0] * 5, [0, 0, 0, 0, 12]], np.int32), LABELS[:2])


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (f"{DETECTED}<stack traces unavailable>\n{CAUSE}", CAUSE),
        (f"{DETECTED}{FRAME}\n{FRAME}\n{CAUSE}\n\t [[node a]]", f"{CAUSE}\n\t [[node a]]"),
        (f"{DETECTED}{FRAME}", f"{DETECTED}{FRAME}"),
        (CAUSE, CAUSE),
    ],
)  # fmt: skip
def test_a_cause_is_kept_with_and_without_a_stack(message: str, cause: str) -> None:
    assert graph_error_cause(message) == cause


def test_a_metric_that_does_not_fit_is_named_too() -> None:
    metric = keras.metrics.CategoricalCrossentropy()
    message = error_of(LABELS, 6, SPARSE, metrics=[metric])
    assert message.startswith("program mine: y has one int32, and the model returns [6]")
    assert "The error: a metric of compile() failed" in message


def test_a_loss_of_the_program_has_the_shapes_of_its_batch() -> None:
    message = error_of(ONE_HOT, 6, lambda y, p: keras.losses.get(SPARSE)(y, p), own=True)
    assert message.startswith("program mine: y has shape [6] of float32")
    assert "The error: loss(y_true, y_pred) failed" in message


def test_a_wrong_input_has_both_shapes() -> None:
    message = error_of(LABELS, 6, SPARSE, inputs=5)
    assert message.startswith(
        "program mine: x has the shape [4] for one sample, and the model takes [5]. Give "
        "keras.Input() the shape of the data"
    )
    assert "The error: calling the model on a sample" in message


@pytest.mark.parametrize("error", [KeyError("float32"), NameError("name 'rank' is not defined")])
def test_an_error_about_something_else_comes_without_shapes(error: Exception) -> None:
    def loss(y_true: Any, y_pred: Any) -> Any:
        raise error

    message = error_of(LABELS, 6, loss)
    assert message.startswith("program mine: the loss of compile() failed at ")
    assert "the model returns" not in message


def test_outputs_of_equal_shape_get_no_advice_about_classes() -> None:
    y = np.zeros((2, 1), np.float32)
    assert loss_mismatch(y, y) == (
        "y has shape [1] of float32, and the model returns [1], for one sample"
    )


def test_a_list_of_targets_is_named_with_the_shape_of_each() -> None:
    shapes = "y has [one int32, shape [6] of float32], and the model returns [[6], [6]]"
    assert loss_mismatch([LABELS, ONE_HOT], [ONE_HOT, ONE_HOT]).startswith(shapes)


def test_an_error_with_unknown_shapes_comes_without_them() -> None:
    unknown = SimpleNamespace(shape=tf.TensorShape(None))
    boundary = user_code(
        TrainingProgram("mine", lambda *_: None), "loss()", "Correct it",
        partial(loss_mismatch, ONE_HOT, unknown),
    )  # fmt: skip
    message = r"^program mine: loss\(\) failed at .* same rank"
    with pytest.raises(ProgramError, match=message), boundary:
        raise ValueError("y and p need the same rank")
