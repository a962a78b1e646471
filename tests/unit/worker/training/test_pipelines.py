"""Tests of programs that return a `tf.data.Dataset`.

A program may return a finite pipeline of pairs, batched or not, also of dicts. It gives the same
samples as arrays. Its shuffled order is that of the worker's seed. A pipeline that is endless, too
large, of other elements or fails is refused with a remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlion_api.errors import ProgramError
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_worker.training import datasets, programs
from dlion_worker.training.datasets.pipelines import read_pipeline
from dlion_worker.training.framework import tf

PROGRAM = programs.TrainingProgram("mine", lambda *_: None, sources=(Path(__file__),))
X = np.random.default_rng(1).normal(size=(600, 3)).astype(np.float32)
Y = np.arange(600) % 4
pairs = tf.data.Dataset.from_tensor_slices


def read(dataset: Any, **bounds: int) -> Any:
    return read_pipeline(dataset, PROGRAM, "load_data('train', 'a', 0)", **bounds)


@pytest.mark.parametrize(
    "shape",
    [
        lambda ds: ds,
        lambda ds: ds.batch(32),
        lambda ds: ds.batch(32).map(lambda x, y: (x, y)).cache().prefetch(2),
        lambda ds: ds.map(lambda x, y: (x, y)).batch(7).unbatch(),
        lambda ds: ds.repeat(2).take(600),
    ],
)
def test_a_pipeline_gives_its_samples_in_its_order(shape: Any) -> None:
    x, y = read(shape(pairs((X, Y))))
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)


@pytest.mark.parametrize("size", [None, 32])
def test_inputs_and_targets_may_be_dicts(size: int | None) -> None:
    given = pairs(({"a": X, "it's": Y}, {"b": X[:, 0]}))
    x, y = read(given if size is None else given.batch(size))
    np.testing.assert_array_equal(x["a"], X)
    np.testing.assert_array_equal(x["it's"], Y)
    np.testing.assert_array_equal(y["b"], X[:, 0])


def test_targets_of_several_values_are_read_without_batches() -> None:
    """Their first axis is not that of the samples."""
    x, y = read(pairs((X, np.stack([Y, Y], axis=1))))
    assert (x.shape, y.shape) == ((600, 3), (600, 2))


def endless() -> Iterator[tuple[Any, int]]:
    while True:
        yield np.zeros(3, np.float32), 0


SIGNATURE = (tf.TensorSpec([3], tf.float32), tf.TensorSpec([], tf.int32))


@pytest.mark.parametrize(
    ("dataset", "bounds", "message"),
    [
        (lambda: pairs((X, Y)).repeat(), {}, r"does not end\. .*Remove \.repeat\(\)"),
        (
            lambda: pairs((X, Y)).batch(8).repeat(10**9),
            {},
            r"is too large \(given: 75,000,000,000 elements",
        ),
        (lambda: pairs((X, Y)), {"max_bytes": 7000}, r"of at least 12,000 bytes.*allowed: "),
        (
            lambda: pairs((X, Y)).filter(lambda x, y: True),
            {"max_bytes": 7000},
            r"or does not end \(read: 512 samples",
        ),
        (
            lambda: tf.data.Dataset.from_generator(endless, output_signature=SIGNATURE),
            {"max_samples": 1000},
            r"or does not end \(read: 1,024 samples",
        ),
        (lambda: pairs((X, Y)).filter(lambda x, y: False), {}, "has no samples"),
        (lambda: pairs(X), {}, r"has wrong elements \(given: TensorSpec.*allowed: \(x, y\)"),
        (lambda: pairs((X, (Y, Y))), {}, "has wrong elements"),
        (lambda: pairs((X, Y, Y)), {}, r"has three parts.*loss\(y_true, y_pred\)"),
        (lambda: pairs((Y.astype(str), Y)), {}, r"x is text.*TextVectorization"),
        (
            lambda: pairs(({"words": tf.ragged.constant([[1], [2, 3]])}, [0, 1])),
            {},
            r"x\['words'\] is not dense \(given: RaggedTensor\).*to_tensor",
        ),
        (lambda: pairs((tf.sparse.eye(4), [0] * 4)), {}, r"x is not dense \(given: SparseTensor\)"),
        (
            lambda: tf.data.Dataset.from_generator(endless, output_types=(tf.float32, tf.int32)),
            {},
            "the shape of x is unknown.*output_signature",
        ),
        (
            lambda: pairs((X, Y)).batch(30, drop_remainder=True),
            {},
            r"a batch or one sample \(given: x and y have 30 rows.*without drop_remainder",
        ),
        (
            lambda: pairs(([1, 2, 3], [0, 0, 0])).map(lambda n, y: (tf.range(n), y)),
            {},
            r"reading the tf.data pipeline .* failed.*Bring all samples to one shape",
        ),
        (
            lambda: pairs((X, Y)).map(lambda x, y: (tf.py_function(broken, [x], tf.float32), y)),
            {},
            "the shape of x is unknown",
        ),
        (
            lambda: pairs((X, Y)).map(
                lambda x, y: (tf.ensure_shape(tf.py_function(broken, [x], tf.float32), [3]), y)
            ),
            {},
            "no such file today",
        ),
    ],
)
def test_an_unreadable_pipeline_is_refused_with_a_remedy(
    dataset: Any, bounds: dict[str, int], message: str
) -> None:
    with pytest.raises(ProgramError, match=message):
        read(dataset(), **bounds)


def broken(_: Any) -> Any:
    raise OSError("no such file today")


TEXT = """
import keras
import numpy as np
import tensorflow as tf

X = np.arange(120, dtype=np.float32).reshape(40, 3)

def build_model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

def load_data(split, site, worker_index):
    given = tf.data.Dataset.from_tensor_slices((X, np.arange(40) % 2))
    return given.shuffle(40).batch(16) if split == "train" else given.take(10)
"""


def test_a_program_gets_its_samples_from_pipelines(tmp_path: Path, make_job: Any) -> None:
    """A shuffled pipeline has the same order after a restart, and another for each worker."""
    (tmp_path / "mine.py").write_text(TEXT)
    job = make_job(trainer={"program": {"file": "mine.py"}, "dataset": {}})
    program = programs.load(job.spec.trainer.program, directory=tmp_path)

    def loaded(rank: int) -> Any:
        worker = WorkerIdentity(Rank(rank), SiteName("plant-a"), "small", rank)
        return datasets.load(job, worker, program=program, data_root=tmp_path)

    data = loaded(0)
    assert (data.samples, data.class_count, data.input_shape) == (40, 2, (3,))
    assert len(data.held_out_y) == 10
    (x, y), (again, _), (other, _) = (
        next(iter(each.parts.values())) for each in (data, loaded(0), loaded(1))
    )
    np.testing.assert_array_equal(y, x[:, 0].astype(int) // 3 % 2)
    np.testing.assert_array_equal(x, again)
    assert not np.array_equal(x, other)
    assert not np.array_equal(x, np.sort(x, axis=0))
