"""Tests of the flat SGD and Adam.

They equal those of Keras, step by step, for any hyperparameters. They change weights in place and
only read the gradient. Both forms of saving keep their state. The learning rate follows the batch
by the rule, within the cap.

Left out: the faster form (the module's docstring has the figure).
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import ContractError
from dlion_api.spec import Optimizer
from dlion_worker.training import optimizer as module
from dlion_worker.training.optimizer import FlatOptimizer, learning_rate_for
from example_counts import examples

SIZE = 37


def _gradients(seed: int, count: int = 4) -> np.ndarray:
    generator = np.random.default_rng(seed)
    scale = generator.choice([1e-4, 1.0, 30.0], (count, SIZE))
    return (generator.standard_normal((count, SIZE)) * scale).astype(np.float32)


def _run_keras(optimizer: keras.optimizers.Optimizer, gradients: np.ndarray) -> np.ndarray:
    variable = keras.Variable(np.linspace(-1, 1, SIZE, dtype=np.float32))
    for gradient in gradients:
        optimizer.apply([gradient], [variable])
    return np.asarray(variable.value)


def _run_ours(spec: Optimizer, gradients: np.ndarray, rate: float) -> np.ndarray:
    weights_D = np.linspace(-1, 1, SIZE, dtype=np.float32)
    optimizer = FlatOptimizer(spec, SIZE)
    for gradient in gradients:
        optimizer.apply(weights_D, gradient, rate)
    return weights_D


@settings(max_examples=examples(25), deadline=None)
@given(
    seed=st.integers(0, 1000),
    rate=st.floats(1e-4, 1),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    nesterov=st.booleans(),
)
def test_sgd_follows_keras(seed: int, rate: float, momentum: float, nesterov: bool) -> None:
    nesterov = nesterov and momentum > 0
    spec = Optimizer(name="sgd", momentum=momentum, nesterov=nesterov)
    reference = keras.optimizers.SGD(rate, momentum=momentum, nesterov=nesterov)
    gradients = _gradients(seed)
    np.testing.assert_allclose(
        _run_ours(spec, gradients, rate), _run_keras(reference, gradients), rtol=2e-5, atol=1e-5
    )


@settings(max_examples=examples(25), deadline=None)
@given(
    seed=st.integers(0, 1000),
    rate=st.floats(1e-4, 1),
    beta1=st.floats(0, 0.95),
    beta2=st.floats(0.5, 0.999),
)
def test_adam_follows_keras(seed: int, rate: float, beta1: float, beta2: float) -> None:
    spec = Optimizer(name="adam", beta1=beta1, beta2=beta2, epsilon=1e-7)
    reference = keras.optimizers.Adam(rate, beta_1=beta1, beta_2=beta2, epsilon=1e-7)
    gradients = _gradients(seed)
    np.testing.assert_allclose(
        _run_ours(spec, gradients, rate), _run_keras(reference, gradients), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_blocks_do_not_change_the_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = _gradients(1)
    whole = _run_ours(Optimizer(name=name), gradients, 0.1)
    monkeypatch.setattr(module, "_BLOCK", 5)
    np.testing.assert_array_equal(_run_ours(Optimizer(name=name), gradients, 0.1), whole)


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("flat", [True, False])
def test_a_restored_optimizer_continues_as_before(name: str, flat: bool) -> None:
    gradients, weights_D = _gradients(2, 6), np.zeros(SIZE, np.float32)
    first = FlatOptimizer(Optimizer(name=name), SIZE)
    for gradient in gradients[:3]:
        gradient.flags.writeable = False
        first.apply(weights_D, gradient, 0.1)
    second, copy_D = FlatOptimizer(Optimizer(name=name), SIZE), weights_D.copy()
    if flat:
        second.restore_flat(first.flat_state())
    else:
        second.restore(first.state())
    for gradient in gradients[3:]:
        first.apply(weights_D, gradient, 0.1)
        second.apply(copy_D, gradient, 0.1)
    np.testing.assert_array_equal(weights_D, copy_D)


def test_state_of_another_optimizer_is_refused() -> None:
    adam, sgd = (FlatOptimizer(Optimizer(name=n), SIZE) for n in ("adam", "sgd"))
    with pytest.raises(ContractError, match="saved by another optimizer"):
        adam.restore(sgd.state())
    with pytest.raises(ContractError, match="wrong length"):
        adam.restore_flat(sgd.flat_state())
    with pytest.raises(ContractError, match="wrong length"):
        sgd.apply(np.zeros(3, np.float32), np.zeros(3, np.float32), 0.1)


def test_steps_beyond_float32_survive_the_flat_form() -> None:
    first, second = (FlatOptimizer(Optimizer(name="adam"), SIZE) for _ in range(2))
    first._steps = 2**24 + 1
    second.restore_flat(first.flat_state())
    assert second.state()["steps"] == 2**24 + 1


@pytest.mark.parametrize(
    ("rule", "samples", "factor"),
    [
        ("none", 800, 1.0),
        ("linear", 400, 2.0),
        ("linear", 2000, 4.0),  # the cap
        ("linear", 100, 0.5),  # half of the workers are missing
        ("linear", 1, 0.25),
        ("sqrt", 800, 2.0),
    ],
)
def test_the_learning_rate_follows_the_batch(rule: str, samples: int, factor: float) -> None:
    spec = Optimizer(learning_rate=0.1, learning_rate_scaling=rule)
    rate = learning_rate_for(spec, samples, initial_batch_samples=200)
    assert rate == pytest.approx(0.1 * factor)


@pytest.mark.parametrize(
    ("spec", "rtol"),
    [
        (Optimizer(momentum=0.0), 0),
        (Optimizer(momentum=0.9), 1e-4),
        (Optimizer(momentum=0.9, nesterov=True), 1e-4),
    ],
)
def test_weights_converge_to_the_predicted_point(spec: Optimizer, rtol: float) -> None:
    optimizer = FlatOptimizer(spec, SIZE)
    weights_D = np.linspace(-1, 1, SIZE, dtype=np.float32)
    for seed in range(100):
        for gradient_D in _gradients(seed):
            optimizer.apply(weights_D, gradient_D + np.float32(1), 0.01)
    was_D, predicted_D = weights_D.copy(), optimizer.resting_D(weights_D)
    for _ in range(400):
        optimizer.apply(weights_D, np.zeros(SIZE, np.float32), 0.01)
    assert (rtol > 0) == bool(np.abs(weights_D - was_D).max() > 0.01)
    np.testing.assert_allclose(predicted_D - was_D, weights_D - was_D, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("beta2", [0.0, 0.81, 0.999])
def test_adams_weights_converge_to_the_point_of_its_mean_at_the_present_variance(
    beta2: float,
) -> None:
    spec = Optimizer(name="adam", beta1=0.9, beta2=beta2)
    optimizer = FlatOptimizer(spec, SIZE)
    weights_D = np.ones(SIZE, np.float32)
    for gradient_D in _gradients(1, 30):
        optimizer.apply(weights_D, gradient_D, 0.01)
    state = optimizer.state()
    rate = 0.01 * (1 - beta2**30) ** 0.5 / (1 - 0.9**30)
    step_D = rate * state["mean"] / (np.sqrt(state["variance"]) + spec.epsilon)
    expected_D = weights_D - step_D * sum(0.9**k for k in range(1, 400))
    np.testing.assert_allclose(optimizer.resting_D(weights_D), expected_D, rtol=1e-4)
