"""Test that three processes learn what one process learns from their joint batches.

Three real processes of unequal speed have batches by their speed and whole gradients in lock step.
They hold bit-identical weights after every step. The first gradient equals that of one process
within 1e-5, the weights after 20 steps within 5e-3 (relative norm), for `digits` and for `cipher`
without its dropout. In some iteration one worker's batch is 1.5 times another's or more.

A layer that waits for each sample slows a worker, twice as long on each next worker. So capacities
differ by that factor on any machine; they are measured and shared as usual.

The oracle uses models, data and update rule of the same library, but no exchange or policies. It
concatenates the batches of the three, without waits. Left out: other codecs, other policies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlion_api.spec import load_job
from dlion_worker.training import datasets, programs
from dlion_worker.training.model import FlatModel
from dlion_worker.training.optimizer import FlatOptimizer
from local_run import LONG_S, LocalRun, hashes, job_document

pytestmark = pytest.mark.patient

STEPS = 20

NAP_S = 0.005
"""Wait of the fastest worker for each sample."""
MIN_RATIO = 1.5

PROGRAM = """
import time

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from dlion_worker.training.programs.builtin import {name} as built_in

NAP_S = {nap_s}
speed = dict(worker=0)


@keras.saving.register_keras_serializable("tests")
class Nap(keras.layers.Layer):
    def call(self, x, training=False):
        if not (training and NAP_S):
            return x
        napped = tf.numpy_function(nap, [tf.shape(x)[0]], tf.float32, stateful=True)
        with tf.control_dependencies([napped]):
            return tf.identity(x)


def nap(samples):
    time.sleep(NAP_S * 2 ** speed["worker"] * int(samples))
    return np.float32(0)


def without_dropout(layer):
    if isinstance(layer, keras.layers.Dropout):
        return keras.layers.Identity()
    return layer.__class__.from_config(layer.get_config())


def build_model():
    model = built_in({shape}, 10)
    still = keras.models.clone_model(model, clone_function=without_dropout)
    return keras.Sequential([keras.layers.Input({shape}), Nap(), still])


def load_data(split, site, worker_index):
    speed["worker"] = worker_index
    if "{name}" == "digits":
        digits = load_digits()
        x, y = (digits.images / 16)[..., None], digits.target
        return x[worker_index::3], y[worker_index::3]
    chance = np.random.default_rng([5, worker_index])
    return chance.random((200, *{shape})), chance.integers(0, 10, 200)
"""
SHAPES = {"digits": (8, 8, 1), "cipher": (32, 32, 3)}
OPTIMIZERS = {
    "digits": {"name": "sgd", "learningRate": 0.05, "momentum": 0.9},
    "cipher": {"name": "sgd", "learningRate": 0.01, "momentum": 0.9},
}


def program(name: str, folder: Path, *, nap_s: float) -> dict[str, str]:
    """Return `trainer.program` of that model, with a wait for each sample."""
    path = folder / f"{name}-{nap_s}.py"
    path.write_text(PROGRAM.format(name=name, shape=SHAPES[name], nap_s=nap_s))
    return {"file": str(path)}


def one_process(document: dict[str, Any], batches: list[dict[int, int]]) -> list[np.ndarray]:
    """Return the first gradient and the weights after each step on the joint batches."""
    job = load_job(document)
    program = programs.load(job.spec.trainer.program, directory=Path())
    shares = [
        datasets.load(job, worker, program=program, data_root=Path()) for worker in job.workers()
    ]
    seed = job.spec.trainer.seed
    model = FlatModel(
        program,
        input_shape=shares[0].input_shape,
        class_count=shares[0].class_count,
        seed=seed,
        input_dtype=shares[0].input_dtype,
    )
    streams = [datasets.BatchStream(share, seed=seed, rank=r) for r, share in enumerate(shares)]
    optimizer = FlatOptimizer(job.spec.trainer.optimizer, model.layout.size)
    results: list[np.ndarray] = []
    for sizes in batches:
        parts = [streams[rank].next(size) for rank, size in sorted(sizes.items())]
        x_B, y_B = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        gradient_D = model.step(x_B, y_B).gradient_D
        results = results or [gradient_D.copy()]
        optimizer.apply(model.weights_D, gradient_D, job.spec.trainer.optimizer.learning_rate)
        results.append(model.get_weights())
    return results


def checkpoint(run: LocalRun, rank: int, name: str) -> np.ndarray:
    with np.load(run.folder / "state" / f"w{rank}" / "checkpoint.npz") as values:
        return values[name]


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["digits", pytest.param("cipher", marks=pytest.mark.slow)])
def test_three_processes_equal_one_with_their_joint_batches(tmp_path: Path, name: str) -> None:
    document = job_document(
        3,
        trainer={
            "program": program(name, tmp_path, nap_s=NAP_S),
            "optimizer": OPTIMIZERS[name],
            "stop": {"maxSteps": 1},
        },
        batching={"policy": "weighted", "globalBatchSize": {"initial": 50, "max": 50}},
    )
    with LocalRun(tmp_path, document) as run:
        assert run.finish(within_s=2 * LONG_S) == 0, run.terminal()
    learning_rate = OPTIMIZERS[name]["learningRate"]
    first_D = checkpoint(run, 0, "optimizer.momentum") / -learning_rate
    document["spec"]["trainer"]["stop"] = {"maxSteps": STEPS}
    with LocalRun(tmp_path, document, "--resume", str(run.folder)) as run:
        assert run.finish(within_s=2 * LONG_S) == 0, run.terminal()

    by_iteration = hashes(run.steps())
    assert sorted(by_iteration) == list(range(1, STEPS + 1))
    assert all(len(h) == 3 and len(set(h.values())) == 1 for h in by_iteration.values())
    batches: list[dict[int, int]] = [{} for _ in range(STEPS)]
    for step in run.steps():
        batches[step.iteration - 1][step.rank] = step.local_batch_size
    ratio = max(max(sizes.values()) / min(sizes.values()) for sizes in batches)
    assert ratio >= MIN_RATIO, batches
    document["spec"]["trainer"]["program"] = program(name, tmp_path, nap_s=0)
    gradient_D, *weights = one_process(document, batches)
    print(f"{name}: {distance(first_D, gradient_D):.1e}, batches {batches[-1]}, {ratio:.1f} to 1")
    assert distance(first_D, gradient_D) < 1e-5
    apart = distance(checkpoint(run, 0, "weights"), weights[-1])
    print(f"{name}: weights after {STEPS} steps {apart:.1e} apart")
    assert apart < 5e-3
