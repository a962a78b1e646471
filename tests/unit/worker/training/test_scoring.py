"""Tests of losses and accuracies.

A model may end in logits or in probabilities, with the same gradient. One output may stand for two
classes. Float targets use the squared error, and the coefficient of determination as accuracy;
scikit-learn is the oracle. Several inputs and outputs are dicts. A program's own accuracy is the
mean over all samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dlion_api.errors import DataError, ProgramError
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.spec import Program as ProgramSpec
from dlion_worker.training import building, datasets, programs
from dlion_worker.training.framework import keras, tf
from dlion_worker.training.model import FlatModel
from own_programs import OWN_PROGRAMS, TWO_INPUTS, OwnProgram

if TYPE_CHECKING:
    from pathlib import Path

    from dlion_worker.training.datasets.dataset import DataSet

WORKER = WorkerIdentity(Rank(0), SiteName("plant-a"), "small", 0)
layers = keras.layers
X = np.random.default_rng(5).normal(size=(30, 4)).astype(np.float32)


def of(own: OwnProgram, folder: Path, make_job: Any) -> tuple[FlatModel, DataSet]:
    (folder / "mine.py").write_text(own.text)
    program = programs.load(ProgramSpec(file="mine.py"), directory=folder)
    job = make_job(trainer={"program": {"file": "mine.py"}, "dataset": {}})
    data = datasets.load(job, WORKER, program=program, data_root=folder)
    return FlatModel.of_data(program, data, job.spec.trainer), data


def model_of(*last: Any, classes: int, **parts: Any) -> FlatModel:
    """A model of one hidden layer and the layers that these functions make."""

    def build(*_: Any) -> Any:
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(8, "relu"), *(make() for make in last)]
        )

    own = {key: parts.pop(key) for key in ("loss", "accuracy") if key in parts}
    program = programs.TrainingProgram("mine", build, **own)
    return FlatModel(program, input_shape=(4,), class_count=classes, seed=1, **parts)


@pytest.mark.parametrize("own", OWN_PROGRAMS, ids=lambda own: own.name)
def test_a_program_of_each_shape_trains_and_reloads(
    own: OwnProgram, tmp_path: Path, make_job: Any
) -> None:
    """The saved model gives the same outputs; a batch has the structure of the data."""
    model, data = of(own, tmp_path, make_job)
    stream = datasets.BatchStream(data, seed=1, rank=0)
    for _ in range(400):
        result = model.step(*stream.next(32))
        assert result.finite
        model.weights_D -= np.float32(0.1) * result.gradient_D
    evaluation = model.evaluate(data.held_out_x, data.held_out_y)
    assert own.min_accuracy < evaluation.accuracy <= 1
    assert evaluation.loss < 0.4
    assert model.evaluate(data.held_out_x, data.held_out_y, batch_size=7).accuracy == pytest.approx(
        evaluation.accuracy
    )
    model.save_keras(tmp_path / "model.keras")
    again = of(own, tmp_path, make_job)[0]
    again.load_keras(tmp_path / "model.keras")
    assert again.evaluate(data.held_out_x, data.held_out_y) == evaluation


def dense(*arguments: Any) -> Any:
    return lambda: layers.Dense(*arguments)


class Ending(keras.Model):
    """A subclass, without `training`, whose last assigned layer is not the last that it calls."""

    def __init__(self, activation: str, count: int) -> None:
        super().__init__()
        self.out = layers.Dense(count)
        self.activation = activation
        self.gate = layers.Dense(8, "sigmoid")

    def call(self, x: Any) -> Any:
        return keras.activations.get(self.activation)(self.out(self.gate(x) * x))


def nested(activation: str, count: int) -> Any:
    return lambda: keras.Sequential([keras.Input((8,)), layers.Dense(count, activation)])


def function_of_keras(activation: str, count: int) -> Any:
    def make() -> Any:
        given = keras.Input((8,))
        logits = layers.Dense(count)(given)
        outputs = logits if activation == "linear" else getattr(keras.ops, activation)(logits)
        return keras.Model(given, outputs)

    return make


ENDS: dict[str, Any] = {
    "layer": lambda activation, count: [dense(count, activation)],
    "activation": lambda activation, count: [dense(count), lambda: layers.Activation(activation)],
    "nested": lambda activation, count: [nested(activation, count)],
    "function": lambda activation, count: [function_of_keras(activation, count)],
    "subclass": lambda activation, count: [lambda: Ending(activation, count)],
}


ROUNDED_ENDS = ("layer", "subclass")
"""Model ends that are also tested in bfloat16 by default: one of Keras and one of a program."""


@pytest.mark.parametrize(
    ("end", "policy"),
    [
        *((end, "float32") for end in ENDS),
        *(
            pytest.param(
                end, "mixed_bfloat16", marks=[pytest.mark.slow] if end not in ROUNDED_ENDS else []
            )
            for end in ENDS
        ),
    ],
)
@pytest.mark.parametrize(("activation", "count", "classes"), [("softmax", 3, 3), ("sigmoid", 1, 2)])
def test_probabilities_are_trained_like_their_logits(
    end: str, activation: str, count: int, classes: int, policy: str
) -> None:
    """This holds for any place of the softmax, and for values that round to 0 or 1, which plain
    cross-entropy clips.
    """
    y = np.arange(30) % classes
    keras.config.set_dtype_policy(policy)
    try:
        one = model_of(*ENDS[end](activation, count), classes=classes)
        other = model_of(*ENDS[end]("linear", count), classes=classes)
        one.weights_D *= 100
        other.set_weights(one.weights_D)
        found, expected = one.step(X, y), other.step(X, y)
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        np.testing.assert_allclose(found.gradient_D, expected.gradient_D, rtol=1e-4, atol=1e-4)
        assert found.loss > 20
        assert np.abs(found.gradient_D).max() > 0.1
        assert one.evaluate(X, y).class_accuracy == other.evaluate(X, y).class_accuracy
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(
    ("end", "classes"),
    [
        ([dense(3, "softmax"), lambda: layers.Reshape((3,))], 3),
        ([dense(1, "sigmoid"), lambda: layers.Reshape((1,))], 2),
        ([dense(1, "hard_sigmoid")], 2),
    ],
)
def test_probabilities_whose_logits_are_unknown_are_refused(end: list[Any], classes: int) -> None:
    """They would be mistaken for logits."""
    with pytest.raises(ProgramError, match="seem to be probabilities"):
        model_of(*end, classes=classes)
    model_of(*end, classes=classes, loss=lambda y, p: 0.0, accuracy=lambda y, p: 0.0)


def pooled(seed_inputs: str) -> Any:
    """Usual models of one logit with small and similar outputs for random samples."""
    if seed_inputs == "indices":
        return [
            keras.Input((12,), dtype="int32"), layers.Embedding(50, 8),
            layers.GlobalAveragePooling1D(), layers.Dense(16, "relu"), layers.Dense(1),
        ]  # fmt: skip
    return [
        keras.Input((32, 32, 1)), layers.Conv2D(8, 3, activation="relu"), layers.MaxPooling2D(),
        layers.Conv2D(8, 3, activation="relu"), layers.GlobalAveragePooling2D(), layers.Dense(1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("inputs", "shape", "dtype"), [("indices", (12,), "int32"), ("pixels", (32, 32, 1), "uint8")]
)
def test_small_logits_are_not_mistaken_for_probabilities(
    inputs: str, shape: tuple[int, ...], dtype: str
) -> None:
    program = programs.TrainingProgram("mine", lambda *_: keras.Sequential(pooled(inputs)))
    for seed in range(12):
        FlatModel(program, input_shape=shape, class_count=2, seed=seed, input_dtype=np.dtype(dtype))


def test_a_softmax_that_training_changes_is_refused() -> None:
    """Dropout after it has an effect in evaluation only."""
    model = model_of(dense(3, "softmax"), lambda: layers.Dropout(0.01), classes=3)
    with pytest.raises(ProgramError, match="changes its outputs in training"):
        model.step(X, np.arange(30) % 3)


def test_probabilities_of_each_position_are_refused_or_trained() -> None:
    x = np.random.default_rng(1).normal(size=(30, 5, 4)).astype(np.float32)
    y = np.argmax(x[..., :3], axis=-1)

    def build(*end: Any) -> FlatModel:
        program = programs.TrainingProgram(
            "mine", lambda *_: keras.Sequential([keras.Input((5, 4)), *(each() for each in end)])
        )
        return FlatModel(program, input_shape=(5, 4), class_count=3, seed=1, target_shape=(5,))

    with pytest.raises(ProgramError, match="seem to be probabilities"):
        build(lambda: layers.TimeDistributed(layers.Dense(3, "softmax")))
    model = build(dense(3, "softmax"))
    for _ in range(200):
        model.weights_D -= np.float32(0.5) * model.step(x, y).gradient_D
    assert model.evaluate(x, y).accuracy > 0.9


def test_floats_and_probabilities_are_refused_together() -> None:
    """Labels that are floats by mistake would be a regression."""
    with pytest.raises(ProgramError, match="ends in probabilities, and y are floats"):
        model_of(dense(1, "sigmoid"), classes=0, target_shape=())
    model_of(dense(1, "sigmoid"), classes=0, target_shape=(), loss=lambda y, p: 0.0)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 3)])
def test_targets_are_judged_by_the_coefficient_of_determination(shape: tuple[int, ...]) -> None:
    """It is that of all outputs together, and at least 0."""
    count = int(np.prod(shape, dtype=int))
    y = np.random.default_rng(6).normal(size=(30, *shape)).astype(np.float32)
    end = [lambda: layers.Dense(count)] + [lambda: layers.Reshape(shape)] * (len(shape) > 1)
    model = model_of(*end, classes=0, target_shape=shape)
    assert model.evaluate(X, y).accuracy == 0
    for _ in range(300):
        model.weights_D -= np.float32(0.2) * model.step(X, y).gradient_D
    found = model.evaluate(X, y, batch_size=8)
    predicted = model._keras
    model._variables.write(model.weights_D, model._state)
    error = (np.asarray(predicted(X)).reshape(30, -1) - y.reshape(30, -1)) ** 2
    spread = (y.reshape(30, -1) - y.reshape(30, -1).mean(axis=0)) ** 2
    assert found.loss == pytest.approx(error.mean(), rel=1e-4)
    assert found.accuracy == pytest.approx(1 - error.sum() / spread.sum(), rel=1e-4)
    assert found.accuracy > 0.2
    assert (found.class_accuracy, found.accuracy_name) == ((), "R²")


def test_targets_that_are_all_equal_have_no_accuracy() -> None:
    model = model_of(lambda: layers.Dense(1), classes=0)
    assert model.evaluate(X, np.ones(30, np.float32)).accuracy == 0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda y, p: keras.ops.equal(y, 0), 1 / 10),
        (lambda y, p: keras.ops.mean(keras.ops.cast(keras.ops.equal(y, 0), "float32")), 1 / 10),
        (lambda y, p: 1.0, 1.0),
    ],
)
def test_a_programs_own_accuracy_is_a_mean_over_samples(value: Any, expected: float) -> None:
    model = model_of(lambda: layers.Dense(3), classes=3, accuracy=value)
    y = np.minimum(np.arange(30)[::-1] // 3, 2)  # the last batch is shorter and all zeros
    found = model.evaluate(X, y, batch_size=8)
    assert found.accuracy == pytest.approx(expected)
    assert found.class_accuracy == ()


def test_no_other_accuracy_is_called_r_squared() -> None:
    y = np.zeros((30, 1), np.float32)
    own = model_of(dense(1), classes=0, target_shape=(1,), accuracy=lambda y, p: 0.5)
    classes = model_of(dense(3), classes=3, target_shape=())
    assert own.evaluate(X, y).accuracy_name == ""
    assert classes.evaluate(X, np.zeros(30, np.int32)).accuracy_name == ""


def test_a_batch_without_an_accuracy_does_not_count() -> None:
    """Recall, for example, has none if there are no positives."""

    def recall(y: Any, _: Any) -> Any:
        positive = keras.ops.cast(keras.ops.equal(y, 1), "float32")
        return keras.ops.sum(positive) / keras.ops.sum(positive)

    model = model_of(dense(3), classes=3, accuracy=recall)
    assert model.evaluate(X, np.arange(30) // 10, batch_size=8).accuracy == 1
    assert model.evaluate(X, np.zeros(30, int), batch_size=8).accuracy == 0


def test_an_accuracy_beyond_1_is_refused() -> None:
    model = model_of(lambda: layers.Dense(3), classes=3, accuracy=lambda y, p: 12.0)
    with pytest.raises(ProgramError, match=r"must be from 0 to 1 \(given: 12"):
        model.evaluate(X, np.arange(30) % 3)


def test_an_accuracy_that_raises_is_named() -> None:
    model = model_of(lambda: layers.Dense(3), classes=3, accuracy=lambda y, p: p.no_such_thing)
    with pytest.raises(ProgramError, match=r"accuracy\(y_true, y_pred\) failed"):
        model.evaluate(X, np.arange(30) % 3)


def test_outputs_that_do_not_match_the_targets_are_refused() -> None:
    with pytest.raises(ProgramError, match=r"given: \[3\] .*allowed: \[2\], .*return integers"):
        model_of(lambda: layers.Dense(3), classes=0, target_shape=(2,))
    with pytest.raises(ProgramError, match="several outputs or targets need loss"):
        model_of(lambda: layers.Dense(3), classes=0, target_shape=None)
    model_of(
        lambda: layers.Dense(3),
        classes=0,
        target_shape=None,
        loss=lambda y, p: 0.0,
        accuracy=lambda y, p: 0,
    )


def test_targets_must_have_the_shapes_of_the_outputs() -> None:
    """Equal sizes are not enough; axes of length 1 do not matter."""
    reshaped = [dense(6), lambda: layers.Reshape((3, 2))]
    with pytest.raises(ProgramError, match=r"given: \[3, 2\] .*allowed: \[2, 3\]"):
        model_of(*reshaped, classes=0, target_shape=(2, 3))
    model_of(*reshaped, classes=0, target_shape=(3, 1, 2))
    with pytest.raises(ProgramError, match=r"allowed: \[3, 2\].*with argmax"):
        model_of(dense(3), classes=2, target_shape=(3,))
    with pytest.raises(ProgramError, match="more outputs, or correct the labels: they count from"):
        model_of(dense(3), classes=4)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda y, p: tf.raw_ops.Unique(x=tf.reshape(p, [-1])).y, r"compiling its step \(train\)"),
        (lambda y, p: tf.py_function(lambda _: 1 / 0, [p], tf.float32) + p, "rejected a batch"),
    ],
)
def test_a_loss_that_fails_in_tensorflow_is_a_fault_of_the_program(loss: Any, message: str) -> None:
    model = model_of(dense(3), classes=3, loss=loss)
    with pytest.raises((ProgramError, DataError), match=message):
        model.step(X, np.arange(30) % 3)


def test_an_output_may_be_none() -> None:
    class Auxiliary(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = layers.Dense(3)

        def call(self, x: Any) -> Any:
            return {"logits": self.out(x), "aux": None}

    program = programs.TrainingProgram(
        "mine",
        lambda *_: Auxiliary(),
        loss=lambda y, p: keras.ops.sum(p["logits"] ** 2),
        accuracy=lambda y, p: 0.5,
    )
    model = FlatModel(program, input_shape=(4,), class_count=3, seed=1)
    assert model.step(X, np.arange(30) % 3).finite


def test_values_of_records_are_counted_like_those_of_arrays() -> None:
    """They limit how many samples are evaluated at once."""
    records = np.zeros(2, [("a", "f4", (64, 64, 8)), ("b", "f4", ())])
    assert building.value_count(records) == building.value_count(records["a"]) + 1 == 2**15 + 1


def test_selections_by_class_are_refused_without_classes(tmp_path: Path, make_job: Any) -> None:
    (tmp_path / "mine.py").write_text(TWO_INPUTS.text)
    program = programs.load(ProgramSpec(file="mine.py"), directory=tmp_path)
    for field, message in (
        ({"keepClasses": [0]}, "keepClasses needs one class number for each sample"),
        ({"dropNearDuplicates": True}, r"dropNearDuplicates.*given: image, place"),
    ):
        job = make_job(trainer={"program": {"file": "mine.py"}, "dataset": field})
        with pytest.raises(ProgramError, match=message):
            datasets.load(job, WORKER, program=program, data_root=tmp_path)
    job = make_job(trainer={"program": {"file": "mine.py"}, "dataset": {"keepFraction": 0.25}})
    data = datasets.load(job, WORKER, program=program, data_root=tmp_path)
    assert (data.samples, data.class_count) == (100, 0)
