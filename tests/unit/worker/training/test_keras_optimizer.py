"""Tests of a program's Keras optimizer.

It updates the flat weights as Keras updates a model's, layer by layer, with its schedule and the
manifest's scaling. Excluded variables do not decay. Keras itself is the oracle. Its state goes into
checkpoints and to peers. An optimizer that uses norms of layers is refused, and so is an object
that is not an optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dlion_api.errors import ContractError, ProgramError
from dlion_api.spec import Optimizer
from dlion_worker.training.framework import keras, tf
from dlion_worker.training.keras_optimizer import KerasOptimizer
from dlion_worker.training.optimizer import FlatOptimizer
from dlion_worker.training.programs import TrainingProgram

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZE = 37
SPEC = Optimizer(name="program", learning_rate=0.05)
optimizers = keras.optimizers
WEIGHTS = np.random.default_rng(1).normal(size=SIZE).astype(np.float32)
GRADIENTS = np.random.default_rng(2).normal(size=(12, SIZE)).astype(np.float32)


def schedule() -> Any:
    return optimizers.schedules.CosineDecay(0.1, decay_steps=8, alpha=0.1)


class Failing(optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: Any) -> Any:
        raise ValueError("no rate")

    def get_config(self) -> dict[str, Any]:
        return {}


def with_excluded(optimizer: Any, **excluded: Any) -> Any:
    optimizer.exclude_from_weight_decay(**excluded)
    return optimizer


MADE = {
    "sgd": lambda: optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: optimizers.Adam(0.01),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "lion": lambda: optimizers.Lion(0.01),
    "nadam": lambda: optimizers.Nadam(0.01),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "schedule": lambda: optimizers.SGD(schedule()),
    "function": lambda: optimizers.SGD(lambda: 0.1),
    "schedule of adamw": lambda: optimizers.AdamW(schedule()),
}


def of(make: Any, spec: Optimizer = SPEC, variables: Sequence[Any] = ()) -> KerasOptimizer:
    def never(*_: object) -> object:
        raise AssertionError

    return KerasOptimizer(TrainingProgram("mine", never, optimizer=make), spec, SIZE, variables)


def updated(optimizer: Any, weights_D: Any, gradients: Any, rate: float = 0.05) -> Any:
    for gradient_D in gradients:
        optimizer.apply(weights_D, gradient_D, rate)
    return weights_D


@pytest.mark.parametrize("name", MADE)
def test_updates_are_those_of_keras_on_a_models_layers(name: str) -> None:
    layers = [tf.Variable(WEIGHTS[:12].reshape(3, 4)), tf.Variable(WEIGHTS[12:])]
    oracle = MADE[name]()
    for gradient_D in GRADIENTS:
        oracle.apply([tf.reshape(gradient_D[:12], (3, 4)), tf.constant(gradient_D[12:])], layers)
    expected = np.concatenate([each.numpy().ravel() for each in layers])
    found = updated(of(MADE[name]), WEIGHTS.copy(), GRADIENTS)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    assert np.abs(found - WEIGHTS).max() > 0.05


def layers() -> list[Any]:
    """The variables of two layers, with the flat weights' values: a kernel, a kernel and a bias."""
    body = keras.layers.Dense(4, use_bias=False, name="body")
    model = keras.Sequential([keras.Input((3,)), body, keras.layers.Dense(5, name="head")])
    variables: list[Any] = model.trainable_variables
    for variable, part in zip(variables, in_layers(WEIGHTS), strict=True):
        variable.assign(part)
    return variables


def in_layers(flat_D: Any) -> list[Any]:
    return [flat_D[:12].reshape(3, 4), flat_D[12:32].reshape(4, 5), flat_D[32:]]


@pytest.mark.parametrize("kind", ["AdamW", "Lion", "SGD"])
@pytest.mark.parametrize("by", [["bias"], ["head"], ["body/kernel"], ["^bias"], None])
def test_variables_excluded_from_weight_decay_do_not_decay(kind: str, by: list[str] | None) -> None:
    def make(variables: list[Any]) -> Any:
        optimizer = getattr(optimizers, kind)(0.05, weight_decay=0.5)
        excluded = {"var_names": by} if by else {"var_list": variables[1:]}
        return with_excluded(optimizer, **excluded)

    oracle = make(expected := layers())
    for gradient_D in GRADIENTS:
        oracle.apply([tf.constant(each) for each in in_layers(gradient_D)], expected)
    found = updated(of(lambda: make(own), variables=(own := layers())), WEIGHTS.copy(), GRADIENTS)
    flat = np.concatenate([each.numpy().ravel() for each in expected])
    np.testing.assert_allclose(found, flat, rtol=2e-5, atol=2e-6)


def test_excluded_variables_of_another_model_are_refused() -> None:
    def make() -> Any:
        return with_excluded(optimizers.AdamW(0.05), var_list=layers())

    with pytest.raises(ProgramError, match="no variable of exclude_from_weight_decay"):
        of(make, variables=layers())


@pytest.mark.parametrize("name", MADE)
def test_a_restored_optimizer_continues_without_a_difference(name: str) -> None:
    """The state comes from a checkpoint or from a peer."""
    first = of(MADE[name])
    weights_D = updated(first, WEIGHTS.copy(), GRADIENTS[:5])
    second, third = of(MADE[name]), of(MADE[name])
    second.restore(first.state())
    third.restore_flat(first.flat_state())
    expected = updated(first, weights_D.copy(), GRADIENTS[5:])
    np.testing.assert_array_equal(updated(second, weights_D.copy(), GRADIENTS[5:]), expected)
    np.testing.assert_array_equal(updated(third, weights_D.copy(), GRADIENTS[5:]), expected)
    np.testing.assert_array_equal(second.flat_state(), first.flat_state())


def test_the_manifests_scaling_multiplies_the_programs_rate() -> None:
    half = updated(of(lambda: optimizers.SGD(0.1)), WEIGHTS.copy(), GRADIENTS[:1], rate=0.025)
    whole = updated(of(lambda: optimizers.SGD(0.05)), WEIGHTS.copy(), GRADIENTS[:1])
    np.testing.assert_allclose(half, whole, rtol=1e-6)


@pytest.mark.parametrize("rate", [0.1, schedule()])
def test_a_program_may_return_the_same_optimizer_each_time(rate: Any) -> None:
    """The optimizer is copied, and does not change."""
    kept = optimizers.SGD(rate)
    updated(of(lambda: kept), WEIGHTS.copy(), GRADIENTS)
    assert float(kept.learning_rate) == pytest.approx(0.1)
    assert int(kept.iterations) == 0


def test_the_rate_of_an_update_is_returned() -> None:
    """With a schedule, it is the rate of that update."""
    optimizer = of(MADE["schedule"])
    rates = [optimizer.apply(WEIGHTS.copy(), GRADIENTS[0], 0.1) for _ in range(9)]
    assert rates == pytest.approx([2 * float(schedule()(step)) for step in range(9)])
    assert rates[-1] == pytest.approx(0.02)


def test_it_equals_the_sgd_of_the_manifest() -> None:
    own = updated(FlatOptimizer(Optimizer(momentum=0.9), SIZE), WEIGHTS.copy(), GRADIENTS, 0.1)
    found = updated(of(MADE["sgd"]), WEIGHTS.copy(), GRADIENTS)
    np.testing.assert_allclose(found, own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (None, r"has no optimizer\(\)"),
        (lambda: "adam", r"must be a keras.optimizers.Optimizer \(given: str\)"),
        (lambda: optimizers.SGD, r"given: the class SGD\)\. Return SGD\(\), an object"),
        (lambda: 1 / 0, r"optimizer\(\) failed at .*ZeroDivisionError"),
        (lambda: optimizers.Lamb(0.01), "uses norms or shapes of layers"),
        (lambda: optimizers.Muon(0.01), "uses norms or shapes of layers"),
        (lambda: optimizers.Adafactor(0.01), "uses norms or shapes of layers"),
        (lambda: optimizers.SGD(0.01, clipnorm=100.0), "may not use clipnorm"),
        (lambda: optimizers.SGD(0.01, global_clipnorm=1.0), "may not use global_clipnorm"),
        (lambda: optimizers.Adam(gradient_accumulation_steps=2), "may not use gradient_accum"),
        (lambda: optimizers.Adam(use_ema=True), "may not use use_ema"),
        (
            lambda: with_excluded(optimizers.AdamW(0.01), var_names=["bias"]),
            r"may not use exclude_from_weight_decay\(\), which a saved model does not keep",
        ),
        (
            lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1)),
            "may not scale the loss. Use the policy mixed_bfloat16",
        ),
        (lambda: optimizers.SGD(Failing()), r"learning rate of optimizer\(\) failed.*no rate"),
    ],
)
def test_an_optimizer_that_cannot_update_single_weights_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        of(make)


def test_another_optimizers_state_is_refused() -> None:
    adam, sgd = of(MADE["adam"]), of(MADE["sgd"])
    with pytest.raises(ContractError, match="It was saved by another optimizer"):
        adam.restore(sgd.state())
    with pytest.raises(ContractError, match="The peer runs another optimizer or model"):
        adam.restore_flat(sgd.flat_state())
    with pytest.raises(ContractError, match="wrong length"):
        adam.apply(WEIGHTS[1:].copy(), WEIGHTS, 0.05)
