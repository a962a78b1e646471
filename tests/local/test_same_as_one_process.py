"""Facts: three real processes with unequal batches and whole gradients in lock step hold bit-
identical weights after every step, and learn what one process learns from their joint batches:
the first gradient within 1e-5, the weights after 20 steps within 5e-3 (relative norm), for
`digits` and for `cipher` without its dropout.

The oracle takes models, data and update rule of the same library but none of exchange or policies:
it lays the batches of the three together. Left out: other codecs, other policies.
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
from local_run import LocalRun, hashes, job_document

STEPS = 20

CIPHER_WITHOUT_DROPOUT = """
import keras

from dlion_worker.training.programs.builtin import cipher


def without_dropout(layer):
    if isinstance(layer, keras.layers.Dropout):
        return keras.layers.Identity()
    return layer.__class__.from_config(layer.get_config())


def build_model():
    return keras.models.clone_model(cipher((32, 32, 3), 10), clone_function=without_dropout)
"""


def trainer(program: str, folder: Path) -> dict[str, Any]:
    if program == "digits":
        return {"program": {"builtin": "digits"}}
    (folder / "program.py").write_text(CIPHER_WITHOUT_DROPOUT)
    chance = np.random.default_rng(5)
    x, y = chance.integers(0, 256, (600, 32, 32, 3)).astype(np.uint8), chance.integers(0, 10, 600)
    np.savez(folder / "noise.npz", x=x, y=y)
    return {
        "program": {"file": str(folder / "program.py")},
        "dataset": {"path": str(folder / "noise.npz"), "format": "npz"},
        "optimizer": {"name": "sgd", "learningRate": 0.01, "momentum": 0.9},
    }


def one_process(document: dict[str, Any], batches: list[dict[int, int]]) -> list[np.ndarray]:
    """First gradient and weights after each step, on the joint batches of all workers."""
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
    seen: list[np.ndarray] = []
    for sizes in batches:
        parts = [streams[rank].next(size) for rank, size in sorted(sizes.items())]
        x_B, y_B = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        gradient_D = model.step(x_B, y_B).gradient_D
        seen = seen or [gradient_D.copy()]
        optimizer.apply(model.weights_D, gradient_D, job.spec.trainer.optimizer.learning_rate)
        seen.append(model.get_weights())
    return seen


def checkpoint(run: LocalRun, rank: int, name: str) -> np.ndarray:
    with np.load(run.folder / "state" / f"w{rank}" / "checkpoint.npz") as values:
        return values[name]


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("program", ["digits", "cipher"])
def test_three_processes_learn_what_one_learns_from_the_joint_batch(
    tmp_path: Path, program: str
) -> None:
    document = job_document(
        3,
        trainer={**trainer(program, tmp_path), "stop": {"maxSteps": 1}},
        batching={"policy": "weighted", "globalBatchSize": {"initial": 50, "max": 50}},
    )
    with LocalRun(tmp_path, document) as run:
        assert run.finish() == 0, run.terminal()
    learning_rate = document["spec"]["trainer"]["optimizer"]["learningRate"]
    first_D = checkpoint(run, 0, "optimizer.momentum") / -learning_rate
    document["spec"]["trainer"]["stop"] = {"maxSteps": STEPS}
    with LocalRun(tmp_path, document, "--resume", str(run.folder)) as run:
        assert run.finish() == 0, run.terminal()

    by_iteration = hashes(run.steps())
    assert sorted(by_iteration) == list(range(1, STEPS + 1))
    assert all(len(h) == 3 and len(set(h.values())) == 1 for h in by_iteration.values())
    batches: list[dict[int, int]] = [{} for _ in range(STEPS)]
    for step in run.steps():
        batches[step.iteration - 1][step.rank] = step.local_batch_size
    assert any(len(set(sizes.values())) > 1 for sizes in batches), batches
    gradient_D, *weights = one_process(document, batches)
    print(f"{program}: {distance(first_D, gradient_D):.1e}, batches {batches[-1]}")
    assert distance(first_D, gradient_D) < 1e-5
    apart = distance(checkpoint(run, 0, "weights"), weights[-1])
    print(f"{program}: weights after {STEPS} steps {apart:.1e} apart")
    assert apart < 5e-3
