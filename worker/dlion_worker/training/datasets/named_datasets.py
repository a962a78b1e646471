"""Data sets by name: scikit-learn's digits, and those of keras.datasets."""

import fcntl
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dlion_api.errors import DataError
from dlion_worker.training.datasets.dataset import Samples, checked

_LOG = logging.getLogger(__name__)


def digits() -> Samples:
    """1,797 handwritten digits, 8x8x1, uint8 (16 grey levels scaled to 0..255)."""
    # Importing sklearn.datasets for its loader takes a second of CPU; finding the package does not.
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise DataError("digits: scikit-learn, which has them, is not installed")
    folder = Path(found.submodule_search_locations[0])
    table = np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    x = np.round(table[:, :-1].reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    return checked(x, table[:, -1].astype(np.int64), "digits")


def keras_images(name: str) -> tuple[Samples, Samples]:
    """Training and held-out samples of a Keras data set, from its cache or downloaded.

    The manifest lists the names (`dlion_api.spec.Dataset.name`). Raises: DataError; a retry helps
    after a network failure.
    """
    from dlion_worker.training.framework import keras

    module = getattr(keras.datasets, name)
    try:
        with cache_lock():
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


def lock_path() -> Path:
    """The lock file: in Keras' folder, or in /tmp if that is not writable.

    Not in TMPDIR, because each run has its own.
    """
    home = Path(os.environ.get("KERAS_HOME") or "~/.keras").expanduser()
    if os.access(home, os.W_OK):
        return home / "dlion.lock"
    return Path("/tmp") / f"dlion-keras-{os.geteuid()}.lock"  # noqa: S108 - links not followed


@contextmanager
def cache_lock() -> Iterator[None]:
    """Hold a lock on Keras' cache: no other process of this user uses it. Waits for it.

    Keras downloads and unpacks in place, and a run's processes start together.

    The lock ends with its process, even if killed. If locking is not possible (a read-only file
    system, or one without locks), the caller continues without it.
    """
    file = None
    try:
        file = os.open(lock_path(), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        _LOG.warning("Keras' cache is used without a lock: %s", error)
    try:
        yield
    finally:
        if file is not None:
            os.close(file)
