"""Tests of `augment(x, y)`.

It changes training batches only. Its random numbers depend on the worker and its position: the same
after a restart, others for the next batch and for another worker. They have the distribution of
TensorFlow's operation. Held-out samples do not change. A function that changes shapes or types, or
uses random numbers beyond the seed, is refused with a remedy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlion_api.errors import ProgramError
from dlion_worker.training import datasets, programs
from dlion_worker.training.datasets.dataset import DataSet
from dlion_worker.training.framework import keras, tf
from dlion_worker.training.programs.augmentation import Augmentation

X = np.random.default_rng(1).normal(size=(40, 6, 6, 1)).astype(np.float32)
Y = np.arange(40, dtype=np.int32) % 4


def program(augment: Any) -> programs.TrainingProgram:
    return programs.TrainingProgram(
        "mine", lambda *_: None, augment=augment, sources=(Path(__file__),)
    )


def changed(augment: Any, x: Any = X, y: Any = Y, seed: Any = (1, 0, 0, 0)) -> Any:
    return Augmentation(program(augment))(x, y, seed)


def usual(x: Any, y: Any) -> Any:
    """Augment as in the `.map()` of a tf.data pipeline."""
    x = tf.image.random_flip_left_right(x)
    x = tf.image.random_brightness(x, 0.2)
    if tf.random.uniform([]) > 0.5:
        x = -x
    return x + tf.random.normal(tf.shape(x), stddev=0.1), y


def stream(augment: Any, *, rank: int = 0) -> datasets.BatchStream:
    data = DataSet(
        parts={"all": (X, Y)},
        held_out_x=X,
        held_out_y=Y,
        class_count=4,
        training_set_samples=40,
        augment=Augmentation(program(augment)),
    )
    return datasets.BatchStream(data, seed=1, rank=rank)


def test_batches_are_the_same_after_a_restart() -> None:
    first = stream(usual)
    batches = [first.next(16) for _ in range(2)]
    state = first.state()
    expected = [first.next(16) for _ in range(3)]
    again = stream(usual)
    again.restore(state)
    for x_B, y_B in expected:
        found = again.next(16)
        np.testing.assert_array_equal(found[0], x_B)
        np.testing.assert_array_equal(found[1], y_B)
    repeated = stream(usual)
    np.testing.assert_array_equal(repeated.next(16)[0], batches[0][0])


def test_each_batch_and_each_worker_has_its_own_numbers() -> None:
    def noise(x: Any, y: Any) -> Any:
        return tf.random.uniform(tf.shape(x)), y

    own, other = stream(noise), stream(noise, rank=1)
    drawn = [own.next(8)[0], own.next(8)[0], other.next(8)[0]]
    assert len({each.tobytes() for each in drawn}) == 3


def test_operations_of_one_batch_have_numbers_of_their_own() -> None:
    x, _ = changed(lambda x, y: (tf.random.normal(tf.shape(x)) - tf.random.normal(tf.shape(x)), y))
    assert np.std(x) == pytest.approx(2**0.5, rel=0.1)


@pytest.mark.parametrize(
    ("draw", "mean", "least", "most"),
    [
        (lambda s: tf.random.uniform(s, 2, 4), 3, 2, 4),
        (lambda s: tf.random.normal(s, 5, 0.1), 5, 4, 6),
        (lambda s: tf.random.truncated_normal(s, 1, 0.5), 1, 0, 2),
        (lambda s: tf.cast(tf.random.uniform(s, 1, 4, tf.int32), tf.float32), 2, 1, 3),
        (
            lambda s: tf.reshape(
                tf.cast(
                    tf.random.categorical(tf.math.log([[0.5, 0.5]]), tf.reduce_prod(s)), tf.float32
                ),
                s,
            ),
            0.5, 0, 1,
        ),
    ],
)  # fmt: skip
def test_numbers_have_the_requested_distribution(
    draw: Any, mean: float, least: float, most: float
) -> None:
    x, _ = changed(lambda x, y: (draw(tf.shape(x)), y))
    assert least <= x.min() < x.max() <= most
    assert x.mean() == pytest.approx(mean, abs=(most - least) / 20)
    assert len(np.unique(x)) > 1


def test_single_samples_are_changed_one_by_one() -> None:
    """`random_brightness` of a batch has one value for all."""

    def one(x: Any) -> Any:
        return tf.image.random_brightness(tf.image.random_flip_left_right(x), 0.5)

    x, _ = changed(lambda x, y: (tf.vectorized_map(one, x), y), x=np.zeros_like(X))
    assert len(np.unique(x[:, 0, 0, 0])) == 40
    np.testing.assert_array_equal(x.min(axis=(1, 2, 3)), x.max(axis=(1, 2, 3)))


def test_pixels_dicts_and_constants_of_the_program_work() -> None:
    shift = tf.constant(3, tf.uint8)
    x = np.zeros(8, [("image", np.uint8, (4, 4, 1)), ("place", np.float32, (2,))])
    y = np.zeros(8, [("sign", np.int32), ("sum", np.float32)])

    def augment(x: Any, y: Any) -> Any:
        return {**x, "image": x["image"] + shift}, {**y, "sum": y["sum"] + 1}

    found_x, found_y = changed(augment, x, y)
    assert found_x.dtype == x.dtype
    assert (found_x["image"] == 3).all()
    assert (found_y["sum"] == 1).all()
    assert (found_y["sign"] == 0).all()


LAYER = keras.layers.RandomFlip()


def in_map_fn(x: Any, y: Any) -> Any:
    return tf.map_fn(lambda one: one + tf.random.uniform([]), x), y


def cropped(x: Any, y: Any) -> Any:
    """Use a random operation without Random in its name."""
    begin, _, _ = tf.image.sample_distorted_bounding_box(
        [6, 6, 1], tf.zeros([1, 0, 4]), 0.1, use_image_if_no_bounding_boxes=True
    )
    return x + tf.cast(begin[0], tf.float32), y


def fails(x: Any, y: Any) -> Any:
    return x.no_such_thing, y


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (
            lambda x, y: (x[:, 1:], y),
            r"returns another x \(given: float32 \[40, 5, 6, 1\]; allowed",
        ),
        (lambda x, y: (x[:3], y), r"returns another x \(given: float32 \[3, "),
        (lambda x, y: (tf.cast(x, tf.float64), y), r"given: float64.*Use tf\.cast"),
        (lambda x, y: (x, tf.one_hot(y, 4)), r"returns another y \(given: float32 \[40, 4\]"),
        (lambda x, y: x, r"must return \(x, y\), as load_data"),
        (lambda x, y: ({"a": x}, y), r"must return \(x, y\), as load_data"),
        (lambda x, y: None, r"must return \(x, y\)"),
        (lambda x, y: (LAYER(x, training=True), y), r"uses the variable .*into the model"),
        (in_map_fn, r"contains RandomUniform, .*tf\.vectorized_map"),
        (
            lambda x, y: (tf.random.shuffle(x), y),
            r"contains RandomShuffle, whose numbers would differ",
        ),
        (cropped, r"contains SampleDistortedBoundingBoxV2, whose numbers would differ"),
        (
            lambda x, y: (tf.ensure_shape(tf.py_function(abs, [x], tf.float32), x.shape), y),
            r"contains EagerPyFunc.*operations of TensorFlow",
        ),
        (fails, r"augment\(x, y\) failed at .*test_augmentation\.py:\d+: AttributeError"),
    ],
)
def test_an_augmentation_that_cannot_be_repeated_is_refused(augment: Any, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        changed(augment)


def test_a_program_augments_only_training_samples(tmp_path: Path, make_job: Any) -> None:
    """This includes samples that the manifest names."""
    (tmp_path / "mine.py").write_text(
        "import keras, tensorflow as tf\n"
        "def build_model():\n    return keras.Sequential([keras.Input((8, 8, 1))])\n"
        "def augment(x, y):\n    return tf.zeros_like(x), y\n"
    )
    named = {"program": {"file": "mine.py"}, "dataset": {"name": "digits"}}
    job = make_job(trainer=named)
    loaded = programs.load(job.spec.trainer.program, directory=tmp_path)
    data = datasets.load(job, job.workers()[0], program=loaded, data_root=tmp_path)
    x_B, _ = datasets.BatchStream(data, seed=1, rank=0).next(8)
    assert x_B.max() == 0
    assert data.held_out_x.max() > 0
