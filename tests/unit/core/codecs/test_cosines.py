"""Tests of the cosine transform.

The transform is SciPy's orthonormal DCT-II of each chunk, and so is its inverse. The last chunk may
be shorter. Chunks do not mix. Zero coefficients change nothing. The same vector gives the same
bits.

Left out: the selection of coefficients (tests/property/test_demo.py).
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.fft import dct

from dlion_core.codecs import CosineTransform
from dlion_core.codecs.cosines import cosine_matrix


@pytest.mark.parametrize("length", [1, 2, 3, 8, 64, 100])
def test_the_matrix_is_orthonormal(length: int) -> None:
    matrix = cosine_matrix(length).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(length), atol=1e-6)
    if length % 2:  # a zero in the middle of a wave has no sign
        assert not matrix[1::2, length // 2].any()


@pytest.mark.parametrize("length", [1, 5, 64])
def test_the_transform_and_its_inverse_match_scipy_for_each_chunk(length: int) -> None:
    whole, size = 4 * length, 4 * length + 3
    transform = CosineTransform([(slice(0, whole), length), (slice(whole, size), 3)])
    value_D = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    coefficient_D = transform.coefficients(value_D)
    expected_D = np.concatenate(
        [
            dct(value_D[:whole].reshape(4, length).astype(np.float64), norm="ortho").ravel(),
            dct(value_D[whole:].astype(np.float64), norm="ortho"),
        ]
    )
    np.testing.assert_allclose(coefficient_D, expected_D, atol=1e-5)
    np.testing.assert_allclose(transform.values(coefficient_D), value_D, atol=1e-5)
    np.testing.assert_array_equal(transform.coefficients(value_D), coefficient_D)


def test_a_coefficient_adds_a_wave_to_its_own_chunk_only() -> None:
    transform = CosineTransform([(slice(0, 12), 4)])
    coefficient_D = np.zeros(12, np.float32)
    coefficient_D[5] = 2
    value_D = transform.values(coefficient_D)
    np.testing.assert_array_equal(value_D[4:8], 2 * cosine_matrix(4)[1])
    assert not value_D[:4].any()
    assert not value_D[8:].any()
