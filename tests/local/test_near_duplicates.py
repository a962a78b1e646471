"""Test that near-duplicates are left out and the accuracy stays.

Of images that appear four times with camera noise, at most 30 % are kept. A model that learns from
these is within two points of one with all images, and of one with the images without duplicates
(equal numbers of steps; slow: within one point, mean of three seeds). In a real run each worker
filters its own samples and reports how many it left out. With `-o json` such a run prints only its
summary.

Left out: photos and the rule itself (tests/unit/worker/training/test_selection). The test prints
the figures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlion_api.spec import Optimizer
from dlion_worker.training import programs
from dlion_worker.training.datasets import BatchStream, DataSet
from dlion_worker.training.datasets.named_datasets import digits
from dlion_worker.training.datasets.selection import NearDuplicates
from dlion_worker.training.model import FlatModel
from dlion_worker.training.optimizer import FlatOptimizer
from local_run import LocalRun, job_document

pytestmark = pytest.mark.patient

THRESHOLD = 0.05  # the manifest's default
NOISE = 0.02
HELD_OUT, STEPS, BATCH = 600, 400, 32

Samples = tuple[np.ndarray, np.ndarray]


def repeated(x: np.ndarray, y: np.ndarray, times: int = 4) -> Samples:
    """Repeat every image, each time with its own noise."""
    rng = np.random.default_rng(1)
    copies = np.repeat(x, times, axis=0).astype(np.float32)
    copies += rng.normal(0, 255 * NOISE, copies.shape)
    order = rng.permutation(len(copies))
    return np.clip(copies, 0, 255).astype(np.uint8)[order], np.repeat(y, times)[order]


def accuracy(train: Samples, test: Samples, seed: int) -> float:
    """Return the accuracy on held-out images after a fixed number of steps."""
    data = DataSet({"all": train}, *test, class_count=10, training_set_samples=len(train[1]))
    model = FlatModel(
        programs.builtin("digits"),
        input_shape=data.input_shape,
        class_count=10,
        seed=seed,
        input_dtype=data.input_dtype,
    )
    spec = Optimizer(name="sgd", learning_rate=0.05, momentum=0.9)
    optimizer: Any = FlatOptimizer(spec, model.layout.size)
    stream = BatchStream(data, seed=seed, rank=0)
    for step in range(STEPS):
        rate = 0.05 if step < STEPS // 2 else 0.005
        optimizer.apply(model.weights_D, model.step(*stream.next(BATCH)).gradient_D, rate)
    return model.evaluate(*test).accuracy


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("seed_count", "tolerance"), [(1, 0.02), pytest.param(3, 0.01, marks=pytest.mark.slow)]
)
def test_near_duplicates_are_left_out_and_accuracy_stays(seed_count: int, tolerance: float) -> None:
    x, y = digits()
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order], y[order]
    test, plain = (x[:HELD_OUT], y[:HELD_OUT]), (x[HELD_OUT:], y[HELD_OUT:])
    many_x, many_y = repeated(*plain)
    kept = NearDuplicates(THRESHOLD).select_new(many_x, many_y, ["all"] * len(many_y))
    share = len(kept) / len(many_y)
    seeds = range(seed_count)
    filtered, unfiltered, without = (
        np.mean([accuracy(train, test, seed) for seed in seeds])
        for train in ((many_x[kept], many_y[kept]), (many_x, many_y), plain)
    )
    sys.stdout.write(
        f"near-duplicates: kept {len(kept)} of {len(many_y)} ({share:.1%}); accuracy "
        f"{filtered:.2%} against {unfiltered:.2%} with all, {without:.2%} without duplicates\n"
    )
    assert share <= 0.30
    assert filtered >= max(unfiltered, without) - tolerance


@pytest.mark.timeout(300)
def test_each_worker_leaves_out_its_own_near_duplicates(tmp_path: Path) -> None:
    """The first worker has every image four times, the second has the same images once."""
    x, y = digits()
    (few_x, few_y), held_out = (x[:100], y[:100]), (x[-100:], y[-100:])
    for name, pair in {"0": repeated(few_x, few_y), "1": (few_x, few_y), "test": held_out}.items():
        np.savez(tmp_path / f"{name}.npz", x=pair[0], y=pair[1])
    dataset = {
        "path": str(tmp_path / "{rank}.npz"),
        "format": "npz",
        "evaluationPath": str(tmp_path / "test.npz"),
        "dropNearDuplicates": True,
    }
    document = job_document(2, trainer={"dataset": dataset, "stop": {"maxSteps": 5}})
    stdout = tmp_path / "stdout"
    with LocalRun(tmp_path, document, "-o", "json", stdout=stdout, report=True) as run:
        assert run.finish() == 0, run.terminal()
    (event,) = run.events("NearDuplicatesLeftOut")
    assert event.rank == 0
    left_out, of = (int(word) for word in event.message.split() if word.isdigit())
    assert of == 400
    assert left_out == pytest.approx(300, abs=10)
    printed = json.loads(stdout.read_text())
    places = {"folder": str(run.folder), "report": str(run.folder / "report.html")}
    assert printed == {**run.summary(), **places}
    assert printed["ending"]["succeeded"]
