"""Tests of the flat model.

The compiled step gives Keras' own loss and gradient over one flat vector. It is traced once for all
batch sizes, and uses weights changed in place. It is the same in every process and on every worker
of a seed. Frozen variables are not part of it. Moving statistics can be read and set. Saved files
can be loaded. Faults in data or program are named.

Left out: speed (benchmarks); accuracy after training (tests/local).
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import keras
import numpy as np
import pytest
import tensorflow as tf

from dlion_api.errors import ContractError, DataError, ProgramError
from dlion_worker.training.evaluation import weights_hash
from dlion_worker.training.model import FlatModel
from dlion_worker.training.programs import TrainingProgram, builtin

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHAPE = (8, 8, 1)


def _batch(size: int = 16, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (size, *SHAPE), dtype=np.uint8), generator.integers(
        0, 10, size
    ).astype(np.int32)


def _model(build: object = None, **options: object) -> FlatModel:
    program = builtin("digits") if build is None else TrainingProgram("mine", lambda *_: build())
    settings = {"input_shape": SHAPE, "class_count": 10, "seed": 3, **options}
    return FlatModel(program, **settings)


def _with_everything() -> keras.Model:
    """Batch normalisation and dropout: state that changes with each step."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(SHAPE),
            layers.Conv2D(4, 3, name="conv"),
            layers.BatchNormalization(name="norm"),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10, kernel_regularizer="l2", name="last"),
        ]
    )


@pytest.fixture(scope="module")
def traced() -> tuple[FlatModel, FlatModel]:
    """Shared, because tracing costs more than all steps of a test."""
    return _model(), _model(_with_everything)


@pytest.fixture
def digits(traced: tuple[FlatModel, FlatModel]) -> Iterator[FlatModel]:
    """The model in its initial state."""
    with _as_built(traced[0]) as model:
        yield model


@pytest.fixture
def everything(traced: tuple[FlatModel, FlatModel]) -> Iterator[FlatModel]:
    """The model with batch normalisation and dropout in its initial state."""
    with _as_built(traced[1]) as model:
        yield model


@contextmanager
def _as_built(model: FlatModel) -> Iterator[FlatModel]:
    """Restore weights, statistics and counters afterwards."""
    weights_D, state_S, counters = model.get_weights(), model.get_state(), model.get_counters()
    yield model
    model.set_weights(weights_D)
    model.set_state(state_S)
    model.set_counters(counters)


def test_loss_and_gradient_are_those_of_keras(digits: FlatModel) -> None:
    x_B, y_B = _batch()
    result = digits.step(x_B, y_B)
    with tf.GradientTape() as tape:
        logits = digits._keras(x_B.astype(np.float32) / 255, training=True)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y_B, logits)
    expected = tape.gradient(loss, [v.value for v in digits._keras.trainable_variables])
    flat_D = np.concatenate([g.numpy().ravel() for g in expected])
    assert result.loss == pytest.approx(float(loss), rel=1e-5)
    np.testing.assert_allclose(result.gradient_D, flat_D, atol=1e-6)
    assert result.gradient_D.dtype == np.float32
    assert result.finite


def test_the_layout_names_every_part_of_the_flat_vector() -> None:
    model = _model()
    assert model.layout.names[0] == "conv1/kernel"
    assert model.layout.size == len(model.weights_D) == model._keras.count_params()
    place = dict(zip(model.layout.names, model.layout.slices(), strict=True))["dense1/bias"]
    np.testing.assert_array_equal(model.weights_D[place], 0)


def test_one_trace_serves_all_batch_sizes() -> None:
    model = _model()
    x_B, y_B = _batch(70)
    for size in (1, 2, 3, 5, 17, 64, 70):
        model.step(x_B[:size], y_B[:size])
    assert len(model._compiled) == 1
    model.evaluate(x_B, y_B, batch_size=32)
    model.evaluate(x_B, y_B, batch_size=9)
    assert len(model._compiled) == 2


def test_weights_changed_in_place_count_at_the_next_step(digits: FlatModel) -> None:
    x_B, y_B = _batch()
    before = digits.step(x_B, y_B)
    saved_D = digits.get_weights()
    digits.weights_D -= np.float32(0.5) * before.gradient_D
    assert digits.step(x_B, y_B).loss < before.loss
    digits.set_weights(saved_D)
    again = digits.step(x_B, y_B)
    assert again.loss == before.loss
    np.testing.assert_array_equal(again.gradient_D, before.gradient_D)


def test_earlier_gradients_do_not_change(digits: FlatModel) -> None:
    first = digits.step(*_batch(seed=1)).gradient_D
    copy = first.copy()
    digits.step(*_batch(seed=2))
    np.testing.assert_array_equal(first, copy)


def test_workers_of_one_seed_start_equal_and_have_different_dropout() -> None:
    workers = [_model(_with_everything, rank=rank) for rank in (0, 1)]
    np.testing.assert_array_equal(workers[0].weights_D, workers[1].weights_D)
    x_B, y_B = _batch()
    gradients = [w.step(x_B, y_B).gradient_D for w in workers]
    assert not np.array_equal(*gradients)
    twin = _model(_with_everything, rank=1)
    np.testing.assert_array_equal(twin.step(x_B, y_B).gradient_D, gradients[1])
    assert not np.array_equal(_model(seed=4).weights_D, _model(seed=3).weights_D)


def test_counters_restore_the_position_of_dropout(everything: FlatModel) -> None:
    x_B, y_B = _batch()
    everything.step(x_B, y_B)
    counters, state_S = everything.get_counters(), everything.get_state()
    expected = everything.step(x_B, y_B).gradient_D
    assert not np.array_equal(everything.step(x_B, y_B).gradient_D, expected)
    everything.set_counters(counters)
    everything.set_state(state_S)
    np.testing.assert_array_equal(everything.step(x_B, y_B).gradient_D, expected)


def test_moving_statistics_are_a_vector_that_can_be_averaged(everything: FlatModel) -> None:
    np.testing.assert_array_equal(everything.get_state(), [0, 0, 0, 0, 1, 1, 1, 1])
    everything.step(*_batch())
    state_S = everything.get_state()
    assert not np.allclose(state_S[:4], 0)
    everything.set_state((state_S + 1) / 2)
    np.testing.assert_allclose(everything.get_state(), (state_S + 1) / 2)
    with pytest.raises(ContractError, match="wrong length"):
        everything.set_state(state_S[:-1])


def test_penalties_of_layers_are_part_of_the_loss() -> None:
    def build(penalty: str | None = "l2") -> keras.Model:
        dense = keras.layers.Dense(10, kernel_regularizer=penalty)
        return keras.Sequential([keras.Input(SHAPE), keras.layers.Flatten(), dense])

    plain, penalised = _model(lambda: build(None)), _model(build)
    x_B, y_B = _batch()
    kernel = penalised.weights_D[:640]
    difference = penalised.step(x_B, y_B).loss - plain.step(x_B, y_B).loss
    assert difference == pytest.approx(0.01 * float(np.square(kernel).sum()), rel=1e-4)


def test_frozen_variables_neither_train_nor_appear() -> None:
    whole = _model(_with_everything)
    model = _model(_with_everything, freeze=["*conv/*", "*norm/*"])
    assert [n.rsplit("/", 2)[-2] for n in model.layout.names] == ["last", "last"]
    assert len(model.get_state()) == 0
    x_B, y_B = _batch()
    tail = whole.layout.size - model.layout.size
    np.testing.assert_array_equal(model.weights_D, whole.weights_D[tail:])
    np.testing.assert_allclose(
        model.step(x_B, y_B).gradient_D, whole.step(x_B, y_B).gradient_D[tail:], atol=1e-5
    )
    counters = model.get_counters()
    model.step(x_B, y_B)
    assert (model.get_counters() != counters).sum() == 1  # only the counter of dropout changes


def test_a_pattern_that_matches_nothing_names_the_variables() -> None:
    with pytest.raises(ProgramError, match=r"given: encoder\*; variables: conv1/kernel, conv1/bi"):
        _model(freeze=["encoder*"])
    with pytest.raises(ProgramError, match="no variable left to train"):
        _model(freeze=["*"])


def test_an_infinite_gradient_is_flagged(digits: FlatModel) -> None:
    digits.weights_D[-1] = np.nan  # of the logits: a ReLU may hide layers before them
    result = digits.step(*_batch())
    assert not result.finite


def test_a_large_but_finite_gradient_is_not_flagged() -> None:
    model = FlatModel(
        TrainingProgram(
            "steep", builtin("digits").build, loss=lambda _, logits: logits[:, 0] * 1e25
        ),
        input_shape=SHAPE,
        class_count=10,
        seed=1,
    )
    result = model.step(*_batch())
    assert np.abs(result.gradient_D).max() > 1e20
    assert result.finite


def test_accuracy_is_counted_per_class(digits: FlatModel) -> None:
    x, y = _batch(50)
    evaluation = digits.evaluate(x, y, batch_size=16)
    predicted = digits._keras(x.astype(np.float32) / 255).numpy().argmax(axis=1)
    assert evaluation.samples == 50
    assert evaluation.accuracy == pytest.approx((predicted == y).mean())
    for label in range(10):
        assert evaluation.class_accuracy[label] == pytest.approx(
            (predicted[y == label] == label).mean()
        )


def test_later_steps_do_not_change_a_snapshot(digits: FlatModel) -> None:
    x, y = _batch()
    expected = digits.evaluate(x, y)
    snapshot = digits.snapshot()
    digits.weights_D[:] = 0
    assert digits.evaluate(x, y, snapshot=snapshot) == expected
    assert digits.evaluate(x, y).loss == pytest.approx(np.log(10))
    other = digits.snapshot_of(snapshot.weights_D, digits.get_state())
    assert digits.evaluate(x, y, snapshot=other) == expected


def test_two_independent_workers_may_save_a_model_at_once(tmp_path: Path) -> None:
    models = [_model(_with_everything, rank=rank) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda at: models[at % 2].save_keras(tmp_path / "model.keras"), range(20)))
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]
    _model(_with_everything).load_keras(tmp_path)


def test_a_saved_model_is_a_keras_model(everything: FlatModel, tmp_path: Path) -> None:
    x, y = _batch()
    everything.step(x, y)
    everything.weights_D += np.float32(0.01)
    everything.save_keras(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    predicted = loaded(x.astype(np.float32) / 255, training=False).numpy().argmax(axis=1)
    assert everything.evaluate(x, y).accuracy == pytest.approx((predicted == y).mean())
    assert [p.name for p in tmp_path.iterdir()] == ["model.keras"]

    other = _model(_with_everything, seed=9)
    other.load_keras(tmp_path)
    np.testing.assert_array_equal(other.weights_D, everything.weights_D)
    np.testing.assert_array_equal(other.get_state(), everything.get_state())
    with pytest.raises(DataError, match="does not fit this model"):
        _model().load_keras(tmp_path / "model.keras")
    with pytest.raises(DataError, match="no such file"):
        _model().load_keras(tmp_path / "none.keras")
    whole = (tmp_path / "model.keras").read_bytes()
    (tmp_path / "half.keras").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"half\.keras does not fit this model: .*not a zip"):
        other.load_keras(tmp_path / "half.keras")


def test_labels_without_a_class_are_refused(digits: FlatModel) -> None:
    x_B, y_B = _batch()
    with pytest.raises(DataError, match=r"labels from \d to 10 \(10 classes\)"):
        digits.step(x_B, np.where(np.arange(16) == 3, 10, y_B))


def test_samples_of_another_shape_are_refused(digits: FlatModel) -> None:
    with pytest.raises(DataError, match=r"given: x \[16, 8, 7, 1\]"):
        digits.step(np.zeros((16, 8, 7, 1), np.uint8), np.zeros(16, np.int32))


def test_integer_inputs_train_through_an_embedding() -> None:
    def build() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                keras.layers.Embedding(20, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )

    model = _model(build, input_shape=(5,), class_count=3, input_dtype=np.int32)
    x_B = np.arange(20, dtype=np.int32).reshape(4, 5)
    result = model.step(x_B, np.array([0, 1, 2, 0], np.int32))
    assert result.finite
    assert np.count_nonzero(result.gradient_D[:80]) > 70


_TRAIN = """
import numpy as np
from dlion_worker.training import threads
threads.configure(None)
from dlion_worker.training.evaluation import weights_hash
from dlion_worker.training.model import FlatModel
from dlion_worker.training.programs import builtin
model = FlatModel(builtin("digits"), input_shape=(8, 8, 1), class_count=10, seed=3)
"""

_STEPS = """
x = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 1), dtype=np.uint8)
y = (np.arange(16) % 10).astype(np.int32)
for _ in range(3):
    model.weights_D -= np.float32(0.1) * model.step(x, y).gradient_D
result = weights_hash(model.weights_D)
"""


def test_another_process_gets_the_same_bits() -> None:
    here = {"np": np, "weights_hash": weights_hash, "model": _model()}
    before = weights_hash(here["model"].weights_D)
    exec(_STEPS, here)
    there = subprocess.run(
        [sys.executable, "-c", _TRAIN + _STEPS + "print(result)"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=110,
    )
    assert there.stdout.strip() == here["result"] != before
