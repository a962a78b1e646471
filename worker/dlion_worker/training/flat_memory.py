"""Flat float32 arrays whose memory NumPy and TensorFlow share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dlion_core.policies.interface import Flat
from dlion_worker.training.framework import tf

_ALIGNMENT_BYTES = 64  # TensorFlow copies memory with a smaller alignment


def aligned_zeros(size: int) -> Flat:
    """Zeros [size] in memory that TensorFlow uses without a copy."""
    raw = np.zeros(4 * size + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[start : start + 4 * size].view(np.float32)


def all_finite(values_D: Flat) -> bool:
    """Whether no entry is NaN or infinite; usually one pass without a temporary."""
    # A sum of squares is finite if all entries are, unless it overflows; then check each entry.
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.dot(values_D, values_D))
    return math.isfinite(square) or bool(np.isfinite(values_D).all())


def tensor_view(weights_D: Flat) -> Any:
    """A tensor on the array's memory: it always has the array's current values."""
    return tf.experimental.dlpack.from_dlpack(weights_D.__dlpack__())
