"""bfloat16, int8, int4 and int2 stay within their bounds.

Stochastic rounding is unbiased, the same for the same seed and values, and never overflows. Every
compiled loop gives the bits of its plain NumPy form (tests/support/naive_codecs.py).

Left out: messages that carry them (test_codecs.py), hostile bytes (test_payload.py, tests/fuzz).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import naive_codecs
from dlion_core.codecs.quantized import (
    BLOCK,
    LEVELS_2,
    LEVELS_4,
    blocks_of,
    check_bfloat16,
    check_codes,
    check_scales,
    dequantize,
    from_bfloat16,
    pack,
    quantize,
    to_bfloat16,
    unpack,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGEST = float(np.finfo(np.float32).max)
levels_ = st.sampled_from([3, 7, 127])
WIDTH = {3: 2, 7: 1, 127: 1}
"""The width of a step between two values, in scales."""
seeds = st.integers(0, 2**64 - 1)
finite_floats = st.floats(allow_nan=False, allow_infinity=False, width=32)


@st.composite
def vectors(draw: st.DrawFn) -> NDArray[np.float32]:
    """Any finite values, or several blocks on different scales, some of zeros."""
    if draw(st.booleans()):
        return draw(arrays.arrays(np.float32, st.integers(1, 40), elements=finite_floats))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.sampled_from([1, 255, 256, 257, 1000]))
    scale_B = 10.0 ** rng.integers(-40, 30, blocks_of(size)) * (rng.random(blocks_of(size)) < 0.8)
    return (rng.standard_normal(size) * np.repeat(scale_B, BLOCK)[:size]).astype(np.float32)


def coded(
    value_K: NDArray[np.float32], levels: int, seed: int
) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
    scale_B = np.empty(blocks_of(value_K.size), np.uint16)
    code_K = np.empty(value_K.size, np.int8)
    quantize(value_K, levels, seed, scale_B, code_K)
    return scale_B, code_K


@given(vectors(), levels_, seeds)
@example(np.array([LARGEST, -LARGEST], np.float32), 127, 3)
@example(np.array([LARGEST, -LARGEST], np.float32), 7, 3)
@example(np.array([LARGEST, -LARGEST], np.float32), 3, 3)
@example(np.array([2.0**-149, -(2.0**-149)], np.float32), 7, 3)
def test_quantized_values_stay_within_their_bound(
    value_K: NDArray[np.float32], levels: int, seed: int
) -> None:
    scale_B, code_K = coded(value_K, levels, seed)
    naive_scale_B, naive_code_K = naive_codecs.quantized(value_K, levels, seed)
    np.testing.assert_array_equal(scale_B, naive_scale_B)
    np.testing.assert_array_equal(code_K, naive_code_K)
    check_scales(scale_B, levels)
    check_codes(code_K, levels)
    back_K = dequantize(scale_B, code_K)
    assert np.isfinite(back_K).all()
    exact_K = value_K.astype(np.float64)
    peak_B = [np.abs(exact_K[k : k + BLOCK]).max() for k in range(0, value_K.size, BLOCK)]
    peak_K = np.repeat(peak_B, BLOCK)[: value_K.size]
    max_K = WIDTH[levels] * ((1 + 2.0**-7) * peak_K / levels + 2.0**-133)
    assert (np.abs(back_K - exact_K) <= max_K).all()
    assert levels == 3 or not back_K[value_K == 0].any()


@pytest.mark.parametrize("levels", [3, 7, 127])
def test_rounding_is_unbiased(levels: int) -> None:
    """Over seeds, for each value; errors of neighbours are independent."""
    count, size = 400, 512
    value_K = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    scale_B, _ = coded(value_K, levels, 0)
    scale_K = WIDTH[levels] * np.repeat(from_bfloat16(scale_B).astype(np.float64), BLOCK)
    error = np.empty((count, size))
    for seed in range(count):
        error[seed] = (dequantize(*coded(value_K, levels, seed)) - value_K) / scale_K
    # A rounding's standard deviation is half a scale at most; the mean may differ by 6 of its own.
    assert np.abs(error.mean(axis=0)).max() < 6 * 0.5 / count**0.5
    assert abs(error.mean()) < 6 * 0.5 / (count * size) ** 0.5
    assert error.std() > 0.3  # nearest would have 0.29, and a separate mean for each value
    for other in (np.roll(error, 1, axis=1), np.roll(error, 1, axis=0)):
        correlation = np.corrcoef(error.ravel(), other.ravel())[0, 1]
        assert abs(correlation) < 6 / (count * size) ** 0.5


@given(levels_, seeds, st.integers(0, 511))
def test_randomness_depends_on_the_seed_and_the_values(levels: int, seed: int, place: int) -> None:
    value_K = np.random.default_rng(2).standard_normal(512).astype(np.float32)
    _, code_K = coded(value_K, levels, seed)
    np.testing.assert_array_equal(coded(value_K, levels, seed)[1], code_K)
    assert (coded(value_K, levels, seed ^ 1)[1] != code_K).sum() > 30
    other_K = value_K.copy()
    other_K[place] = np.nextafter(other_K[place], np.float32(0))
    assert (coded(other_K, levels, seed)[1] != code_K).sum() > 30


@given(vectors())
@example(np.array([LARGEST, -LARGEST, 3.3895314e38], np.float32))
def test_bfloats_are_the_nearest(value_K: NDArray[np.float32]) -> None:
    half_K = np.empty(value_K.size, np.uint16)
    to_bfloat16(value_K, half_K)
    np.testing.assert_array_equal(half_K, naive_codecs.bfloats(value_K))
    check_bfloat16(half_K)
    exact_K = value_K.astype(np.float64)
    share_K = np.where(np.abs(exact_K) > 3.389e38, 2.0**-7, 2.0**-8)
    max_K = np.maximum(share_K * np.abs(exact_K), 2.0**-134)
    assert (np.abs(from_bfloat16(half_K) - exact_K) <= max_K).all()


@given(arrays.arrays(np.int8, st.integers(1, 40), elements=st.integers(-7, 7)))
def test_nibbles_are_decoded(code_K: NDArray[np.int8]) -> None:
    byte = np.empty((code_K.size + 1) // 2, np.uint8)
    pack(code_K, LEVELS_4, byte)
    np.testing.assert_array_equal(unpack(byte, LEVELS_4, code_K.size), code_K)


@given(arrays.arrays(np.int8, st.integers(1, 40), elements=st.sampled_from([-3, -1, 1, 3])))
def test_pairs_of_bits_are_decoded(code_K: NDArray[np.int8]) -> None:
    byte = np.empty((code_K.size + 3) // 4, np.uint8)
    pack(code_K, LEVELS_2, byte)
    np.testing.assert_array_equal(unpack(byte, LEVELS_2, code_K.size), code_K)
