"""Proves: of images that come four times with camera noise no more than 30 % are kept, and a model
that learns from these is within a point of one that learns from the images without duplicates (mean
of three seeds, equal numbers of steps).

Leaves out: photos and the rule itself (tests/unit/training/test_selection). Figures are printed.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from dlion_api.spec import Optimizer
from dlion_worker.training import programs
from dlion_worker.training.datasets import BatchStream, DataSet
from dlion_worker.training.datasets.named import digits
from dlion_worker.training.datasets.selection import NearDuplicates
from dlion_worker.training.model import FlatModel
from dlion_worker.training.optimizer import FlatOptimizer

pytestmark = pytest.mark.patient

THRESHOLD = 0.05  # the manifest's default
NOISE = 0.02
HELD_OUT, STEPS, BATCH = 600, 400, 32

Samples = tuple[np.ndarray, np.ndarray]


def repeated(x: np.ndarray, y: np.ndarray, times: int = 4) -> Samples:
    """Every image so many times, each with noise of its own."""
    chance = np.random.default_rng(1)
    copies = np.repeat(x, times, axis=0).astype(np.float32)
    copies += chance.normal(0, 255 * NOISE, copies.shape)
    order = chance.permutation(len(copies))
    return np.clip(copies, 0, 255).astype(np.uint8)[order], np.repeat(y, times)[order]


def accuracy(train: Samples, test: Samples, seed: int) -> float:
    """On held-out images, after a fixed number of steps."""
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
def test_near_duplicates_are_left_out_and_accuracy_stays() -> None:
    x, y = digits()
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order], y[order]
    test, plain = (x[:HELD_OUT], y[:HELD_OUT]), (x[HELD_OUT:], y[HELD_OUT:])
    many_x, many_y = repeated(*plain)
    kept = NearDuplicates(THRESHOLD).fresh(many_x, many_y, ["all"] * len(many_y))
    share = len(kept) / len(many_y)
    seeds = range(3)
    filtered = np.mean([accuracy((many_x[kept], many_y[kept]), test, seed) for seed in seeds])
    without = np.mean([accuracy(plain, test, seed) for seed in seeds])
    sys.stdout.write(
        f"near-duplicates: kept {len(kept)} of {len(many_y)} ({share:.1%}); accuracy "
        f"{filtered:.2%} against {without:.2%} without duplicates\n"
    )
    assert share <= 0.30
    assert filtered >= without - 0.01
