"""Orthonormal discrete cosine transform (DCT-II) of chunks of a flat vector.

Called by the policy `demo`. Chunk x of n entries has the coefficients

    c_k = s_k sum_i x_i cos(pi (2 i + 1) k / (2 n)),   s_0 = sqrt(1 / n), else s_k = sqrt(2 / n)

and is the sum of c_k times row k of that matrix. Sums have a fixed order, which a matrix product of
NumPy has not on all processors: workers that transform equal coefficients get equal bits.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from dlion_core.compiling import compiled, read_only

_FLOATS = read_only(types.float32)


def cosine_matrix(length: int) -> NDArray[np.float32]:
    """Return the matrix of the transform, [coefficients, entries].

    >>> cosine_matrix(2).round(3)
    array([[ 0.707,  0.707],
           [ 0.707, -0.707]], dtype=float32)
    """
    rows = [
        [
            # Rounded, as a cosine of zero must not leave a value whose sign is taken.
            math.sqrt((2 if k else 1) / length)
            * round(math.cos(math.pi * (2 * i + 1) * k / (2 * length)), 15)
            for i in range(length)
        ]
        for k in range(length)
    ]
    return np.array(rows, np.float32)


class CosineTransform:
    """The transform of every chunk of a vector, both ways."""

    def __init__(self, chunks: Iterable[tuple[slice, int]]) -> None:
        """`chunks`: runs of chunks of one length, with that length; together the whole vector."""
        self._chunks = list(chunks)
        self._matrix = {length: cosine_matrix(length) for _, length in self._chunks}

    def coefficients(self, value_D: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the coefficients of each chunk, in the places of its entries."""
        coefficient_D = np.zeros_like(value_D)
        for where, length in self._chunks:
            columns = np.ascontiguousarray(self._matrix[length].T).ravel()
            _add_rows(value_D[where], columns, length, coefficient_D[where])
        return coefficient_D

    def values(self, coefficient_D: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the vector with these coefficients. Zeros among them take no time."""
        value_D = np.zeros_like(coefficient_D)
        for where, length in self._chunks:
            rows = self._matrix[length].ravel()
            _add_rows(coefficient_D[where], rows, length, value_D[where])
        return value_D


@compiled(types.void(_FLOATS, _FLOATS, types.int64, types.float32[::1]))
def _add_rows(factor: Any, row: Any, length: int, target: Any) -> None:
    """For each chunk, target += the sum of factor i times row i."""
    for start in range(0, factor.size, length):
        chunk = target[start : start + length]
        for i in range(length):
            by = factor[start + i]
            if by != 0:
                one = row[i * length : (i + 1) * length]
                for j in range(length):
                    chunk[j] += np.float32(by * one[j])
