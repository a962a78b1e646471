"""Flat float32 arrays whose memory NumPy and TensorFlow share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dlion_worker.training.framework import tf

if TYPE_CHECKING:
    from dlion_worker.policies.interface import Flat

_ALIGNMENT_BYTES = 64  # TensorFlow copies memory that is aligned to less


def aligned_zeros(size: int) -> Flat:
    """Zeros [size] in memory that TensorFlow can use without a copy."""
    raw = np.zeros(4 * size + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[start : start + 4 * size].view(np.float32)


def all_finite(values_D: Flat) -> bool:
    """Whether no entry is NaN or infinite; one pass without a temporary in the usual case."""
    # A sum of squares is finite if all entries are, unless it overflows: then look at each.
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.dot(values_D, values_D))
    return math.isfinite(square) or bool(np.isfinite(values_D).all())


def tensor_over(weights_D: Flat) -> Any:
    """A tensor on the array's own memory: it always shows the array's present values."""
    return tf.experimental.dlpack.from_dlpack(weights_D.__dlpack__())
