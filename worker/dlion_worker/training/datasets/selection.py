"""Selects a worker's training samples: filtering, subsampling, near-duplicates."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_worker.training.datasets.dataset import Labels

_THUMBNAIL_SIDE = 16
_FEATURES = 256
_BLOCK = 512
_ROUNDING = 1e-6  # rounding error of a squared distance computed from float32 sums


def of_classes(labels: Labels, classes: Sequence[int]) -> NDArray[np.int64]:
    """Ascending indices of samples of these classes; all if none is named."""
    if not classes:
        return np.arange(len(labels))
    return np.flatnonzero(np.isin(labels, list(classes)))


def subsampled(
    labels: Labels, fraction: float, *, seed: Sequence[int], of_file: bool = False
) -> NDArray[np.int64]:
    """Ascending indices of a random share of each class, at least one sample of each.

    `of_file`: of one of many files. Counts are then rounded at random, so that their mean is the
    exact fraction; a small file may keep none.
    """
    if fraction >= 1:
        return np.arange(len(labels))
    rng = np.random.default_rng([*seed, 2])
    kept = [np.zeros(0, np.int64)]
    for label in np.unique(labels):
        index = rng.permutation(np.flatnonzero(labels == label))
        if of_file:
            count = int(float(fraction) * len(index) + rng.random())
        else:
            count = subsampled_count(len(index), fraction)
        kept.append(index[:count])
    return np.sort(np.concatenate(kept))


def subsampled_count(count: int, fraction: float) -> int:
    """How many of that many samples of one class remain."""
    return max(1, round(float(fraction) * int(count))) if count else 0


class NearDuplicates:
    """Remembers kept samples, and selects new ones that differ from all of them.

    Two samples of a class are near-duplicates if their thumbnails' root mean squared difference is
    at most `threshold` of the value range. Thumbnails (grey, about 16 by 16) average out camera
    noise. With 10 % noise, CIFAR-10 images differ from the originals by at most 4.6 %; 1 % of
    different images have a neighbour within 6.7 %.

    Source: this project. Compares every sample with all kept ones, in blocks, by matrix products.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._range: tuple[float, float] | None = None
        self._feature_KF = np.zeros((0, 0), np.float32)
        self._label_K = np.zeros(0, np.int32)
        self._key_K = np.zeros(0, object)

    def select_new(self, x: NDArray[Any], y: Labels, keys: Sequence[str]) -> NDArray[np.int64]:
        """Ascending indices of the samples to keep. `keys`: the part of each sample."""
        feature_NF = self._features(x)
        old_KF = self._feature_KF if len(self._label_K) else feature_NF[:0]
        kept = [np.zeros(0, np.int64)]
        for label in np.unique(y):
            index = np.flatnonzero(y == label)
            kept.append(self._select_class(feature_NF, index, old_KF[self._label_K == label]))
        index_K = np.sort(np.concatenate(kept))
        self._feature_KF = np.concatenate([old_KF, feature_NF[index_K]])
        self._label_K = np.concatenate([self._label_K, y[index_K]])
        self._key_K = np.concatenate([self._key_K, np.asarray(keys, object)[index_K]])
        return index_K

    def forget(self, keys: Collection[str]) -> None:
        """Drop removed parts; the same samples may return later."""
        stays = np.array([k not in keys for k in self._key_K], bool)
        self._feature_KF = self._feature_KF[stays]
        self._label_K, self._key_K = self._label_K[stays], self._key_K[stays]

    def _select_class(
        self, feature_NF: NDArray[np.float32], index: NDArray[np.int64], old_KF: NDArray[np.float32]
    ) -> NDArray[np.int64]:
        """Indices to keep among these samples of one class."""
        limit = (self._threshold**2 + _ROUNDING) * feature_NF.shape[1]
        kept_KF = np.concatenate([old_KF, np.empty((len(index), feature_NF.shape[1]), np.float32)])
        count = len(old_KF)
        kept: list[int] = []
        for start in range(0, len(index), _BLOCK):
            indices = index[start : start + _BLOCK]
            block_BF = feature_NF[indices]
            is_new = (_squared_distances(block_BF, kept_KF[:count]) > limit).all(axis=1)
            within_BB = _squared_distances(block_BF, block_BF) <= limit
            for row in range(len(indices)):
                if is_new[row]:
                    is_new[row + 1 :] &= ~within_BB[row, row + 1 :]
                    kept_KF[count] = block_BF[row]
                    count += 1
                    kept.append(int(indices[row]))
        return np.array(kept, np.int64)

    def _features(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """Thumbnails of images, means over runs of values of other data; about -0.5..0.5."""
        if x.ndim == 4:
            parts = [_thumbnails(x[i : i + _BLOCK]) for i in range(0, len(x), _BLOCK)]
            feature_NF = np.concatenate(parts)
        else:
            flat = x.reshape(len(x), -1)
            edges = np.arange(0, flat.shape[1], -(-flat.shape[1] // _FEATURES))
            sizes = np.diff([*edges, flat.shape[1]])
            sums = np.add.reduceat(flat, edges, axis=1, dtype=np.float32)
            feature_NF = (sums / sizes).astype(np.float32)
        if self._range is None:
            is_pixels = x.dtype == np.uint8
            self._range = (0.0, 255.0) if is_pixels else (float(x.min()), float(x.max()))
        low, high = self._range
        # Centred on zero, because rounding errors of distances grow with the values.
        scaled = (feature_NF - low) / max(high - low, 1e-12) - 0.5
        return scaled.astype(np.float32, copy=False)


def _squared_distances(a_BF: NDArray[np.float32], b_KF: NDArray[np.float32]) -> NDArray[np.float32]:
    square_BK: NDArray[np.float32] = -2 * (a_BF @ b_KF.T)
    square_BK += np.square(a_BF).sum(axis=1)[:, None]
    square_BK += np.square(b_KF).sum(axis=1)
    return square_BK


def _thumbnails(x_BHWC: NDArray[Any]) -> NDArray[np.float32]:
    grey = x_BHWC.mean(axis=-1, dtype=np.float32)
    count, height, width = grey.shape
    tall, wide = -(-height // _THUMBNAIL_SIDE), -(-width // _THUMBNAIL_SIDE)
    grey = np.pad(grey, ((0, 0), (0, -height % tall), (0, -width % wide)), mode="edge")
    blocks = grey.reshape(count, grey.shape[1] // tall, tall, grey.shape[2] // wide, wide)
    thumbnail_NF: NDArray[np.float32] = blocks.mean(axis=(2, 4)).reshape(count, -1)
    return thumbnail_NF
