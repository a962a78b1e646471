"""Compiled sums of squares, the same bits on every machine, random projections, and look-ups.

Called by `policies.robust` and `policies.claims`. Products of two float32 values are exact in
float64, and the sums have a fixed order, which no instruction set changes. NumPy's matrix products
would use threads, which wait for each other on a busy machine.

Legend: D entries of the flat vector, K kept, T looked up, R rows of entries, S values of a
projection.
"""

from typing import Any, Final

import numpy as np
from numba import types

from dlion_core.compiling import compiled, inlined, read_only

_FLOATS: Final = read_only(types.float32)
_PLACES: Final = read_only(types.int64)
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


@compiled(types.float64(_FLOATS, types.float32, types.float32[::1]))
def add_and_measure(value_D: Any, weight: Any, target_D: Any) -> Any:
    """target += weight * x, in float32. Return |x|^2, the same bits as `squared_norm_of`."""
    sums = np.zeros(_LANES, np.float64)
    for start in range(0, value_D.size, _LANES):
        part, target = value_D[start : start + _LANES], target_D[start : start + _LANES]
        for lane in range(part.size):  # the entries are in the cache for the second loop
            one = np.float64(part[lane])
            sums[lane] += one * one
        for lane in range(part.size):
            target[lane] += np.float32(part[lane] * weight)
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


@compiled(types.float64(_PLACES, _FLOATS, _FLOATS, types.float32[::1]))
def add_sparse_projection(index_K: Any, value_K: Any, sign_R: Any, sketch_S: Any) -> Any:
    """As `add_projection`, bit for bit, of values at ascending positions and zeros elsewhere."""
    width = sketch_S.size
    square_S = np.zeros(width, np.float32)
    row, begin = 0, 0
    for k in range(index_K.size):
        while index_K[k] >= begin + width:
            row, begin = row + 1, begin + width
        at, value = index_K[k] - begin, value_K[k]
        sketch_S[at] += sign_R[row] * value
        square_S[at] += value * value
    return _sum(square_S.astype(np.float64))


@compiled(types.void(_PLACES, _FLOATS, _PLACES, types.float32[::1]))
def look_up(index_K: Any, value_K: Any, wanted_T: Any, value_T: Any) -> None:
    """Write the values at those of the wanted positions that are kept. Both ascend."""
    k = 0
    for at in range(wanted_T.size):
        while k < index_K.size and index_K[k] < wanted_T[at]:
            k += 1
        if k < index_K.size and index_K[k] == wanted_T[at]:
            value_T[at] = value_K[k]
