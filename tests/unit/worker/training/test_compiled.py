"""Tests of `compile()`.

Its settings count if the program has no function of its own for them. The loss and its gradient are
those of Keras, also with a loss per output and weights. The metrics over held-out samples are those
of Keras' `evaluate`. The optimizer is used for `program`. A Keras accuracy is the accuracy. Other
metrics are extra figures; one that returns a dict has a figure per key. The program's own functions
have priority. Unusable settings are refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlion_api.errors import ProgramError
from dlion_api.spec import Optimizer
from dlion_worker.training import programs
from dlion_worker.training.framework import keras, tf
from dlion_worker.training.keras_optimizer import KerasOptimizer, make_optimizer
from dlion_worker.training.model import FlatModel
from dlion_worker.training.programs.compiled import unused_optimizer

layers = keras.layers
X = np.random.default_rng(5).normal(size=(40, 4)).astype(np.float32)
Y = np.argmax(X[:, :3], axis=1)


def network(*end: Any) -> Any:
    return keras.Sequential([keras.Input((4,)), layers.Dense(8, "relu"), *end])


def built(make: Any, *, classes: int = 3, **given: Any) -> FlatModel:
    """`make` builds and compiles the model."""
    own = {key: given.pop(key) for key in ("loss", "accuracy", "optimizer") if key in given}
    sources = (Path(__file__),)
    program = programs.TrainingProgram("mine", lambda *_: make(), sources=sources, **own)
    return FlatModel(program, input_shape=(4,), class_count=classes, seed=1, **given)


def compiled(*end: Any, **settings: Any) -> Any:
    def make() -> Any:
        model = network(*(each() for each in end))
        model.compile(**settings)
        return model

    return make


def softmax() -> Any:
    return layers.Dense(3, "softmax")


def logits() -> Any:
    return layers.Dense(3)


def keras_figures(model: FlatModel, x: Any, y: Any) -> dict[str, float]:
    """Evaluate the model with Keras at its present weights."""
    model._variables.write(model.weights_D, model._state)
    found: dict[str, float] = model._keras.evaluate(x, y, batch_size=7, verbose=0, return_dict=True)
    return found


@pytest.mark.parametrize(
    ("end", "loss"),
    [
        (softmax, "sparse_categorical_crossentropy"),
        (logits, keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
        (logits, lambda y, p: keras.ops.square(p[:, 0] - keras.ops.cast(y, "float32"))),
    ],
)
def test_loss_and_accuracy_are_those_of_keras(end: Any, loss: Any) -> None:
    model = built(compiled(end, loss=loss, metrics=["accuracy"]))
    expected = keras_figures(model, X, Y)
    found = model.evaluate(X, Y, batch_size=9)
    assert found.loss == pytest.approx(expected["loss"], rel=1e-4)
    assert found.accuracy == pytest.approx(expected["accuracy"])
    assert len(found.class_accuracy) == 3
    assert found.metrics == {}


def test_the_gradient_is_that_of_the_compiled_loss() -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = built(compiled(logits, loss=loss))
    result = model.step(X, Y)
    network_ = model._keras
    with tf.GradientTape() as tape:
        value = loss(Y, network_(X))
    expected = tape.gradient(value, [each.value for each in network_.trainable_variables])
    np.testing.assert_allclose(
        result.gradient_D, np.concatenate([np.ravel(each) for each in expected]), atol=1e-6
    )
    assert result.loss == pytest.approx(float(value), rel=1e-5)


def two_outputs(**settings: Any) -> Any:
    def make() -> Any:
        given = keras.Input((4,))
        hidden = layers.Dense(8, "relu")(given)
        outputs = {
            "sum": layers.Dense(1, name="sum")(hidden),
            "sign": layers.Dense(1, "sigmoid", name="sign")(hidden),
        }
        model = keras.Model(given, outputs)
        model.compile(**settings)
        return model

    return make


LOSSES = {"sum": "mse", "sign": "binary_crossentropy"}


def records() -> Any:
    y = np.zeros(40, [("sign", np.int32), ("sum", np.float32)])
    y["sum"], y["sign"] = X.sum(axis=1), X[:, 3] > 0
    return y


def test_each_output_has_its_loss_weight_and_metrics() -> None:
    y = records()
    make = two_outputs(
        loss=LOSSES,
        loss_weights={"sum": 0.25, "sign": 2.0},
        metrics={"sum": ["mae"], "sign": ["accuracy", keras.metrics.AUC(name="auc")]},
    )
    model = built(make, classes=0, target_shape=None, target_dtype=y.dtype)
    expected = keras_figures(model, X, {name: y[name] for name in y.dtype.names})
    found = model.evaluate(X, y, batch_size=9)
    assert found.loss == pytest.approx(expected["loss"], rel=1e-4)
    assert found.accuracy == pytest.approx(expected["sign_accuracy"])
    assert found.metrics == pytest.approx(
        {"sum_mae": expected["sum_mae"], "sign_auc": expected["sign_auc"]}, rel=1e-4
    )
    assert model.step(X, y).loss == pytest.approx(expected["loss"], rel=1e-4)


def test_several_outputs_need_an_accuracy_in_compile_too() -> None:
    y = records()
    with pytest.raises(ProgramError, match=r"or a loss and an accuracy in compile\(\)"):
        built(two_outputs(loss=LOSSES), classes=0, target_shape=None, target_dtype=y.dtype)


def test_metrics_without_an_accuracy_leave_the_default_one() -> None:
    """A figure may exceed 1, and may be smaller for a better model."""
    make = compiled(
        lambda: layers.Dense(1), loss="mse", metrics=["mae", keras.metrics.MeanSquaredError("sq")]
    )
    model = built(make, classes=0)
    y = (100 * X.sum(axis=1)).astype(np.float32)
    found = model.evaluate(X, y, batch_size=9)
    expected = keras_figures(model, X, y)
    assert found.accuracy == 0  # R², at least 0
    assert found.metrics == pytest.approx({"mae": expected["mae"], "sq": expected["sq"]}, rel=1e-4)
    assert found.metrics["mae"] > 1


def test_one_hot_rows_are_judged_as_in_keras() -> None:
    make = compiled(softmax, loss="categorical_crossentropy", metrics=["accuracy"])
    model = built(make, classes=0, target_shape=(3,))
    y = np.eye(3, dtype=np.float32)[Y]
    expected = keras_figures(model, X, y)
    found = model.evaluate(X, y)
    assert found.accuracy == pytest.approx(expected["accuracy"])
    assert found.loss == pytest.approx(expected["loss"], rel=1e-4)


def test_one_output_for_two_classes_has_the_threshold_of_keras() -> None:
    make = compiled(
        lambda: layers.Dense(1, "sigmoid"), loss="binary_crossentropy", metrics=["accuracy"]
    )
    model = built(make, classes=2)
    y = (Y == 1).astype(np.int32)
    expected = keras_figures(model, X, y)
    found = model.evaluate(X, y)
    assert found.accuracy == pytest.approx(expected["accuracy"])
    assert found.loss == pytest.approx(expected["loss"], rel=1e-4)


def test_a_metric_of_classes_is_named_if_an_output_has_none() -> None:
    """One number for each sample, without an axis."""
    end = (lambda: layers.Dense(1), lambda: layers.Reshape(()))
    metrics = [keras.metrics.SparseCategoricalAccuracy()]
    model = built(compiled(*end, loss="mse", metrics=metrics), classes=2)
    with pytest.raises(ProgramError, match=r"a metric of compile\(\) failed"):
        model.evaluate(np.ones((7, 4), np.float32), np.zeros(7, np.int32))


def test_functions_of_the_program_have_priority() -> None:
    make = compiled(softmax, optimizer="adam", loss="mse", metrics=["accuracy"])
    own = keras.optimizers.SGD(0.5)
    model = built(
        make,
        loss=lambda y, p: keras.ops.mean(p) * 0 + 3.0,
        accuracy=lambda y, p: 0.25,
        optimizer=lambda: own,
    )
    found = model.evaluate(X, Y)
    assert (found.loss, found.accuracy) == (3.0, 0.25)
    assert found.metrics.keys() == {"accuracy"}
    assert model.program.optimizer is not None
    assert model.program.optimizer() is own


def test_the_compiled_optimizer_is_used_for_program() -> None:
    """It updates weights like Keras' own."""
    model = built(compiled(logits, optimizer=keras.optimizers.Adam(0.02)))
    optimizer = make_optimizer(model, Optimizer(name="program"))
    assert isinstance(optimizer, KerasOptimizer)
    gradient_D = model.step(X, Y).gradient_D
    weights = keras.Variable(model.weights_D)
    keras.optimizers.Adam(0.02).apply([tf.constant(gradient_D)], [weights])
    assert optimizer.apply(model.weights_D, gradient_D, Optimizer().learning_rate) == pytest.approx(
        0.02
    )
    np.testing.assert_allclose(model.weights_D, weights.numpy(), atol=1e-6)


def test_an_optimizer_that_the_manifest_does_not_use_is_logged() -> None:
    """The manifest always names one, so a refusal would refuse every compiled model."""
    model = built(compiled(logits, optimizer="adam"))
    note = unused_optimizer(model.program, Optimizer(name="sgd", learning_rate=0.05))
    assert note.startswith("the optimizer of compile() is not used, as trainer.optimizer.name is ")
    assert "sgd (learning rate 0.05)" in note
    assert unused_optimizer(model.program, Optimizer(name="program")) == ""
    plain = built(lambda: network(logits()))
    assert unused_optimizer(plain.program, Optimizer()) == ""


def test_the_error_for_a_program_without_an_optimizer_names_both_ways() -> None:
    model = built(lambda: network(logits()))
    with pytest.raises(ProgramError, match=r"no optimizer\(\) and does not compile\(\) its model"):
        make_optimizer(model, Optimizer(name="program"))


def test_a_compiled_optimizer_that_needs_layers_is_refused() -> None:
    model = built(compiled(logits, optimizer=keras.optimizers.Adam(clipnorm=1.0)))
    with pytest.raises(ProgramError, match=r"optimizer of compile\(\) may not use clipnorm"):
        make_optimizer(model, Optimizer(name="program"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": lambda y, p: p.nothing}, r"the loss of compile\(\) failed at .*test_compiled"),
        ({"metrics": [lambda y, p: 1 / 0]}, r"a metric of compile\(\) failed .*ZeroDivision"),
        (
            {"metrics": [keras.metrics.Precision(thresholds=[0.2, 0.5], name="some")]},
            r"metric some .* one number, .*given: an array of shape \(2,\)\)\. Give it average",
        ),
        ({"metrics": ["mae", "mse"] * 33}, "at most 64 names .* as number 65"),
        ({"metrics": [keras.metrics.MeanSquaredError("m" * 101)]}, "of at most 100 characters"),
        ({"loss": {"other": "mse"}}, r"the loss of compile\(\) failed"),
    ],
)
def test_a_failure_in_compile_is_named_at_the_start(settings: Any, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        built(compiled(lambda: layers.Dense(1), **settings), classes=0)


class OwnStep(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.out(x)

    def train_step(self, data: Any) -> Any:
        raise NotImplementedError


def test_training_code_of_the_model_is_not_ignored() -> None:
    with pytest.raises(ProgramError, match=r"OwnStep\.train_step\(\) is never called"):
        built(OwnStep)
    assert built(OwnStep, loss=lambda y, p: keras.ops.sum(p**2)).step(X, Y).finite


def test_a_custom_metric_need_not_be_a_sum() -> None:
    """Its state is kept from batch to batch as in Keras."""

    @keras.saving.register_keras_serializable("tests")
    class Largest(keras.metrics.Metric):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.largest = self.add_variable((), "zeros", name="largest")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(y_pred)))

        def result(self) -> Any:
            return self.largest

    model = built(compiled(logits, metrics=[Largest(name="largest")]))
    expected = float(np.max(model._keras(X)))
    assert model.evaluate(X, Y, batch_size=9).metrics["largest"] == pytest.approx(expected)


class Answering(keras.metrics.Metric):
    """The mean of the outputs, in the form that `answer` gives it."""

    def __init__(self, answer: Any, **given: Any) -> None:
        super().__init__(**given)
        self.answer = answer
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.sum(y_pred))
        self.count.assign_add(keras.ops.cast(keras.ops.size(y_pred), "float32"))

    def result(self) -> Any:
        return self.answer(self.total / keras.ops.maximum(self.count, 1.0))


def test_a_metric_that_returns_a_dict_has_a_figure_for_each_key() -> None:
    metric = Answering(
        lambda mean: {"mean": mean, "more": {"twice": 2 * mean, "row": mean[None]}}, name="own"
    )
    extra = keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="entropy")
    model = built(compiled(logits, metrics=["accuracy", metric, extra]))
    expected = float(np.mean(model._keras(X)))
    found = model.evaluate(X, Y, batch_size=9).metrics
    assert [*found] == ["own/mean", "own/more/twice", "own/more/row", "entropy"]
    figures = [found[f"own/{name}"] for name in ("mean", "more/twice", "more/row")]
    assert figures == pytest.approx([expected, 2 * expected, expected], rel=1e-4)


@pytest.mark.parametrize(
    ("answer", "given"),
    [
        (lambda mean: keras.ops.stack([mean] * 3), r"metric own .*an array of shape \(3,\)"),
        (lambda mean: {"rows": [mean, mean]}, r"metric own/rows .*an array of shape \(2,\)"),
        (lambda mean: "good", "metric own .*a str"),
        (lambda mean: None, "metric own .*a NoneType"),
        (lambda mean: [], r"metric own .*an array of shape \(0,\)"),
        (lambda mean: {"a": mean, 1: {"b": mean}, "1/b": mean}, "each given once .*'own/1/b'"),
        (lambda mean: dict.fromkeys(range(65), mean), "at most 64 names"),
    ],
    ids=["array", "array in a dict", "text", "nothing", "empty", "names twice", "many"],
)
def test_a_metric_that_is_not_a_number_is_named_with_its_result(answer: Any, given: str) -> None:
    with pytest.raises(ProgramError, match=given):
        built(compiled(logits, metrics=[Answering(answer, name="own")]))
