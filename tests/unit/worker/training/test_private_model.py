"""Tests of private steps.

A private step is the mean of gradients that are clipped one by one, plus noise of the stated size.
A sample moves it by at most its bound, also a sample without a finite gradient. Noise follows the
seed in simulations only. Dropout differs between samples. A model that would keep traces of samples
without noise is refused.

Left out: learning (tests/simulated/test_privacy.py); the privacy of the noise
(tests/unit/results/test_privacy.py).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import pytest

from dlion_api.errors import ProgramError
from dlion_api.spec.privacy import Privacy
from dlion_api.spec.trainer import Program, Stop, Trainer
from dlion_worker.training.datasets import DataSet
from dlion_worker.training.framework import tf
from dlion_worker.training.model import FlatModel
from dlion_worker.training.private.model import PrivateModel, model_of, system_noise
from dlion_worker.training.programs import TrainingProgram

if TYPE_CHECKING:
    from collections.abc import Sequence

CLIP_NORM, MULTIPLIER, SIZE = 1.2, 2.0, 12
layers = keras.layers


def _batch(size: int = SIZE, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(size, 6)).astype(np.float32)
    return x, generator.integers(0, 3, size).astype(np.int32)


def _net(*between: Any) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "relu", kernel_regularizer="l2"),
            *between,
            layers.Dense(3),
        ]
    )


def _made(
    *between: Any,
    is_repeatable: bool = False,
    freeze: Sequence[str] = (),
    multiplier: float | None = MULTIPLIER,
    **parts: Any,
) -> FlatModel:
    program = TrainingProgram("mine", lambda *_: _net(*between), **parts)
    x, y = _batch()
    data = DataSet({"all": (x, y)}, x, y, class_count=3, training_set_samples=len(y))
    privacy = multiplier and Privacy(clip_norm=CLIP_NORM, noise_multiplier=multiplier)
    trainer = Trainer(
        program=Program(builtin="digits"),
        stop=Stop(max_steps=1),
        freeze=tuple(freeze),
        privacy=privacy or None,
    )
    return model_of(program, data, trainer, rank=1, is_repeatable=is_repeatable)


@pytest.fixture(scope="module")
def plain() -> FlatModel:
    return _made(multiplier=None)


@pytest.fixture(scope="module")
def model() -> PrivateModel:
    made = _made()
    assert isinstance(made, PrivateModel)
    return made


@pytest.fixture(scope="module")
def silent() -> FlatModel:
    """A model with negligible noise, which no manifest may request."""
    return _made(multiplier=1e-12)


def clipped_mean(plain: FlatModel, x_B: np.ndarray, y_B: np.ndarray) -> tuple[np.ndarray, int]:
    """Clip naively, one sample at a time; also count the gradients above the bound."""
    rows, clipped = [], 0
    for number in range(len(y_B)):
        one = slice(number, number + 1)
        row = plain.step(x_B[one], y_B[one]).gradient_D.astype(np.float64)
        norm = np.linalg.norm(row)
        clipped += norm > CLIP_NORM
        rows.append(row * min(1.0, CLIP_NORM / norm))
    return np.mean(rows, axis=0), clipped


def test_gradients_are_clipped_sample_by_sample(plain: FlatModel, silent: FlatModel) -> None:
    x_B, y_B = _batch()
    x_B *= np.linspace(0.05, 3.0, SIZE, dtype=np.float32)[:, None]
    wanted, clipped = clipped_mean(plain, x_B, y_B)
    assert 0 < clipped < SIZE  # some are clipped and some are not
    found = silent.step(x_B, y_B)
    np.testing.assert_allclose(found.gradient_D, wanted, atol=1e-6)
    assert found.finite
    assert math.isnan(found.loss)


@pytest.mark.parametrize("value", [1e4, 1e30, np.inf, np.nan])
def test_a_sample_moves_the_sum_by_its_bound_at_most(silent: FlatModel, value: float) -> None:
    x_B, y_B = _batch()
    without = silent.step(x_B[:-1], y_B[:-1])
    x_B[-1] = value
    with_it = silent.step(x_B, y_B)
    moved = SIZE * with_it.gradient_D.astype(np.float64) - (SIZE - 1) * without.gradient_D
    assert np.linalg.norm(moved) <= CLIP_NORM * (1 + 1e-4)
    assert with_it.finite


def test_noise_has_the_stated_size(model: PrivateModel, plain: FlatModel) -> None:
    x_B, y_B = _batch()
    mean_D, _ = clipped_mean(plain, x_B, y_B)
    draws = 200
    noise = np.stack([model.step(x_B, y_B).gradient_D - mean_D for _ in range(draws)])
    count, std = noise.size, MULTIPLIER * CLIP_NORM / SIZE
    # Within five standard errors: fewer than one run in a million fails.
    assert abs(noise.std() / std - 1) < 5 / math.sqrt(2 * count)
    assert abs(noise.mean()) < 5 * std / math.sqrt(count)
    correlation = np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1]
    assert abs(correlation) < 5 / math.sqrt(count)


def test_the_noise_of_the_system_is_normal() -> None:
    noise = system_noise(100_001)
    assert noise.shape == (100_001,)
    ordered, ranks = np.sort(noise), np.arange(1, noise.size + 1) / noise.size
    normal = np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2)))(ordered)
    assert np.abs(normal - ranks).max() < 2.5 / math.sqrt(noise.size)  # Kolmogorov: p = 7e-6
    assert not np.array_equal(noise, system_noise(100_001))


def test_noise_follows_the_seed_in_simulations_only(model: PrivateModel) -> None:
    x_B, y_B = _batch()

    def first(template: FlatModel, rank: int) -> np.ndarray:
        return template.sibling(seed=3, rank=rank).step(x_B, y_B).gradient_D

    assert not np.array_equal(first(model, 0), first(model, 0))
    repeatable = _made(is_repeatable=True)
    np.testing.assert_array_equal(first(repeatable, 0), first(repeatable, 0))
    assert not np.array_equal(first(repeatable, 0), first(repeatable, 1))
    twin = repeatable.sibling(seed=3, rank=0)
    assert not np.array_equal(twin.step(x_B, y_B).gradient_D, twin.step(x_B, y_B).gradient_D)


def test_dropout_differs_between_samples_and_steps() -> None:
    model = _made(layers.Dropout(0.5), multiplier=1e-12)
    x_B, y_B = (np.repeat(each[:1], 2, axis=0) for each in _batch())
    alone = [model.step(x_B[:1], y_B[:1]).gradient_D for _ in range(8)]
    assert len({each.tobytes() for each in alone}) > 1
    pairs = [model.step(x_B, y_B).gradient_D for _ in range(8)]
    assert {each.tobytes() for each in pairs} - {each.tobytes() for each in alone}


def test_weights_that_are_not_finite_end_the_run(model: PrivateModel) -> None:
    kept = model.get_weights()
    model.weights_D[0] = np.nan
    assert not model.step(*_batch()).finite
    model.set_weights(kept)


def test_statistics_of_batches_are_refused() -> None:
    with pytest.raises(ProgramError, match=r"moving_mean, .*moving_variance.*GroupNormalization"):
        _made(layers.BatchNormalization())
    with pytest.raises(ProgramError, match="moving_mean"):  # because they would still be averaged
        _made(layers.BatchNormalization(trainable=False))
    moving = ["*/norm/moving_*"]
    with pytest.raises(
        ProgramError, match=r"nothing would be learned \(given: norm\)\. .*trainable ="
    ):
        _made(layers.BatchNormalization(name="norm"), freeze=moving)
    nested = keras.Sequential([layers.BatchNormalization(name="norm")], name="part")
    with pytest.raises(ProgramError, match="nothing would be learned"):
        _made(nested, freeze=["*/moving_*"])


def test_batch_normalization_that_keeps_its_statistics_learns() -> None:
    kept = layers.BatchNormalization(name="norm", trainable=False)
    model = _made(kept, freeze=["*/norm/*"], multiplier=1e-12)
    gradient_D = model.step(*_batch()).gradient_D
    assert all(np.abs(gradient_D[part]).max() > 1e-3 for part in model.layout.slices())
    assert isinstance(_made(layers.LayerNormalization(), layers.Dropout(0.1)), PrivateModel)


class _Mean(layers.Layer):
    """Subtract the mean of all inputs so far, in a variable that Keras does not know."""

    def build(self, input_shape: Any) -> None:
        self.mean = tf.Variable(tf.zeros(input_shape[-1]), trainable=False, name="seen")
        super().build(input_shape)

    def call(self, x: Any) -> Any:
        self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(x, 0))
        return x - self.mean


class _Named(layers.Layer):
    """Keep a sample under the name of a random generator."""

    def build(self, input_shape: Any) -> None:
        self.kept = self.add_weight(
            shape=input_shape[-1:], trainable=False, name="seed_generator_state"
        )

    def call(self, x: Any) -> Any:
        self.kept.assign(x[0])
        return x


def test_variables_outside_of_keras_are_refused() -> None:
    total = tf.Variable(0.0, name="seen")

    def loss(y: Any, outputs: Any) -> Any:
        total.assign_add(tf.reduce_sum(outputs))
        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)

    for model in (_made(_Mean()), _made(loss=loss)):
        with pytest.raises(ProgramError, match=r"the variable .*seen.*add_weight"):
            model.step(*_batch())


def test_a_name_does_not_make_a_random_generator() -> None:
    with pytest.raises(ProgramError, match="seed_generator_state"):
        _made(_Named())


def test_augmentation_of_batches_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"augment\(x, y\), which may mix samples"):
        _made(augment=lambda x, y: (x[::-1], y[::-1]))
