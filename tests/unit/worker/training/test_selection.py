"""Tests of the selection of samples.

Filtering and subsampling keep the requested samples, the same for a seed. Of images that come four
times with camera noise, at most 30 % are kept, while different images stay. Samples of other
classes and forgotten parts do not count.

Left out: the effect on accuracy (a benchmark).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dlion_worker.training.datasets import selection
from dlion_worker.training.datasets.named_datasets import digits
from dlion_worker.training.datasets.tfrecord import TFRecordSource
from example_counts import examples

CIFAR = Path(__file__).parents[4].parent / "shared" / "data" / "cifar10" / "test.tfrecord"
THRESHOLD = 0.05


def _noisy(x: np.ndarray, times: int, deviation: float) -> np.ndarray:
    generator = np.random.default_rng(1)
    copies = np.repeat(x, times, axis=0).astype(np.float32)
    copies += generator.normal(0, 255 * deviation, copies.shape)
    return np.clip(copies, 0, 255).astype(np.uint8)


def _kept(x: np.ndarray, y: np.ndarray, threshold: float = THRESHOLD) -> np.ndarray:
    return selection.NearDuplicates(threshold).select_new(x, y, ["all"] * len(y))


def _naive(squared: np.ndarray, y: np.ndarray, threshold: float) -> list[int]:
    """Select one by one."""
    kept: list[int] = []
    for i in range(len(y)):
        if not any(squared[i, j] <= threshold**2 for j in kept if y[j] == y[i]):
            kept.append(i)
    return kept


@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 100), threshold=st.floats(0.01, 0.3))
def test_kept_samples_are_those_of_the_naive_rule(seed: int, threshold: float) -> None:
    generator = np.random.default_rng(seed)
    base = generator.integers(0, 256, (12, 9, 7, 3), dtype=np.uint8)
    x = _noisy(base[generator.integers(0, 12, 40)], 1, 0.05)
    y = generator.integers(0, 2, 40).astype(np.int32)
    # Thumbnails of images of at most 16 by 16 pixels are their grey values.
    grey = x.mean(axis=-1).reshape(len(x), -1) / 255
    squared = np.mean((grey[:, None] - grey) ** 2, axis=-1)
    # Sums of float32 do not decide where a distance is that of the threshold.
    assume(np.abs(squared - threshold**2).min() > 2e-6)
    np.testing.assert_array_equal(_kept(x, y, threshold), _naive(squared, y, threshold))


def test_noisy_copies_of_digits_are_left_out() -> None:
    x, y = (a[:400] for a in digits())
    alone = len(_kept(x, y))
    kept = _kept(_noisy(x, 4, 0.02), np.repeat(y, 4))
    assert alone >= 0.97 * 400
    assert len(kept) <= 0.3 * 1600
    assert len(np.unique(kept // 4)) >= 0.97 * 400


@pytest.mark.skipif(not CIFAR.exists(), reason="needs the shared data set cifar10")
@pytest.mark.parametrize("deviation", [0.02, 0.05, 0.08])
def test_noisy_copies_of_photos_are_left_out(deviation: float) -> None:
    source = TFRecordSource(CIFAR)
    x, y = source.read(np.arange(500)), source.labels[:500]
    assert len(_kept(x, y)) >= 0.99 * 500
    kept = _kept(_noisy(x, 4, deviation), np.repeat(y, 4))
    assert len(kept) <= 0.3 * 2000
    assert len(np.unique(kept // 4)) >= 0.98 * 500


def test_other_classes_and_forgotten_parts_do_not_count() -> None:
    x = np.full((3, 8, 8, 1), 100, np.uint8)
    filtering = selection.NearDuplicates(THRESHOLD)
    assert filtering.select_new(x, np.array([0, 1, 0], np.int32), ["a", "a", "a"]).tolist() == [
        0,
        1,
    ]
    assert filtering.select_new(x[:1], np.array([0], np.int32), ["b"]).tolist() == []
    filtering.forget({"a"})
    assert filtering.select_new(x[:1], np.array([0], np.int32), ["b"]).tolist() == [0]


def test_near_duplicates_of_other_data_are_found_too() -> None:
    x = np.random.default_rng(0).normal(size=(20, 4, 1, 30, 30)).astype(np.float32)
    y = np.zeros(40, np.int32)
    assert _kept(np.concatenate([x, x + 0.001]), y, 0.005).tolist() == list(range(20))


def test_classes_are_filtered() -> None:
    labels = np.array([3, 1, 2, 3, 0], np.int32)
    assert selection.of_classes(labels, (3, 0)).tolist() == [0, 3, 4]
    assert selection.of_classes(labels, ()).tolist() == [0, 1, 2, 3, 4]


@settings(max_examples=examples(40), deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=200),
    fraction=st.floats(0.01, 1),
    seed=st.integers(0, 9),
)
def test_subsampling_keeps_the_share_of_every_class(
    labels: list[int], fraction: float, seed: int
) -> None:
    y = np.array(labels, np.int32)
    kept = selection.subsampled(y, fraction, seed=[seed])
    np.testing.assert_array_equal(kept, selection.subsampled(y, fraction, seed=[seed]))
    for label in set(labels):
        count = labels.count(label)
        assert (y[kept] == label).sum() == max(1, min(count, round(fraction * count)))
