"""Compiled sums of squares, the same bits on every machine, and random projections.

Called by `policies.robust` and `policies.claims`. Products of two float32 values are exact in
float64, and the sums have a fixed order, which no instruction set changes. NumPy's matrix products
would use threads, which wait for each other on a busy machine.

Legend: D entries of the flat vector, K kept, R rows of entries, S values of a projection.
"""

from typing import Any, Final

import numpy as np
from numba import types

from dlion_core.compiling import compiled, inlined, read_only

_FLOATS: Final = read_only(types.float32)
_LANES: Final = 256  # sums side by side: a loop over them is vectorised


@inlined
def _sum(sums: Any) -> Any:
    total = 0.0
    for lane in range(sums.size):
        total += sums[lane]
    return total


@compiled(types.float64(_FLOATS))
def squared_norm_of(value_K: Any) -> Any:
    """Return |x|^2."""
    sums = np.zeros(_LANES, np.float64)
    for start in range(0, value_K.size, _LANES):
        part = value_K[start : start + _LANES]
        for lane in range(part.size):
            one = np.float64(part[lane])
            sums[lane] += one * one
    return _sum(sums)


@compiled(types.float64(_FLOATS, _FLOATS))
def squared_distance(value_D: Any, other_D: Any) -> Any:
    """Return |x - y|^2 of two vectors of the same length."""
    sums = np.zeros(_LANES, np.float64)
    for start in range(0, value_D.size, _LANES):
        part, other = value_D[start : start + _LANES], other_D[start : start + _LANES]
        for lane in range(part.size):
            one = np.float64(part[lane]) - np.float64(other[lane])
            sums[lane] += one * one
    return _sum(sums)


@compiled(types.float64(_FLOATS, _FLOATS, types.float32[::1]))
def add_projection(value_D: Any, sign_R: Any, sketch_S: Any) -> Any:
    """Add the rows of S entries, each with its sign; return |x|^2 in float32's precision.

    There are as many signs as rows; the last row may be shorter.
    """
    width = sketch_S.size
    square_S = np.zeros(width, np.float32)
    for row in range(sign_R.size):
        sign, part = sign_R[row], value_D[row * width : min((row + 1) * width, value_D.size)]
        for at in range(part.size):
            sketch_S[at] += sign * part[at]
            square_S[at] += part[at] * part[at]
    return _sum(square_S.astype(np.float64))
