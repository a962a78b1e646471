"""Data sets by name: scikit-learn's digits, and those of keras.datasets."""

from __future__ import annotations

import numpy as np

from dlion_api.errors import DataError
from dlion_worker.training.datasets import keras_cache
from dlion_worker.training.datasets.dataset import Samples, checked


def digits() -> Samples:
    """1,797 handwritten digits, 8x8x1, uint8 (16 grey levels scaled to 0..255)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = np.round(data.images * (255 / 16)).astype(np.uint8)[..., None]
    return checked(x, data.target, "digits")


def keras_images(name: str) -> tuple[Samples, Samples]:
    """Training and held-out samples of a Keras data set, from its cache or downloaded.

    The manifest lists the names (`dlion_api.spec.Dataset.name`). Raises: DataError; a retry helps
    after a network failure.
    """
    from dlion_worker.training.framework import keras

    module = getattr(keras.datasets, name)
    try:
        with keras_cache.cache_lock():
            (x, y), (test_x, test_y) = module.load_data()
    # Keras raises a bare Exception if the download fails.
    except Exception as error:
        raise DataError(
            f"keras:{name}: not in Keras' cache (~/.keras/datasets, or KERAS_HOME), and the "
            f"download failed: {error}. Put the file there, or name the data by path"
        ) from error
    return _images(x, y, name), _images(test_x, test_y, name)


def _images(x: object, y: object, name: str) -> Samples:
    values, labels = checked(x, y, f"keras:{name}")
    return (values[..., None] if values.ndim == 3 else values), labels
