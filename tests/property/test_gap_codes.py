"""Varints and Golomb-Rice codes are decoded, and equal their plain forms.

Sizes are within the predicted bounds. They are near the theoretical minimum for randomly kept
entries.

Left out: messages that carry them (test_codecs.py), hostile bytes (test_payload.py, tests/fuzz).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import naive_codecs
from dlion_core.codecs.gap_codes import (
    SKIP,
    GapSizes,
    gaps_from_rice,
    gaps_from_varints,
    rice_bytes,
    varint_bytes,
)
from dlion_core.codecs.positions import Positions, positions_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLOOR_BITS = {0.001: 11.4, 0.01: 8.1, 0.1: 4.7}  # entropy bound of an entry, by density


@st.composite
def selections(draw: st.DrawFn) -> tuple[NDArray[np.intp], int]:
    """Strictly rising positions below a size, spread out, in a run, or at both ends."""
    size = draw(st.sampled_from([1, 2, 100, 1000, SKIP, SKIP + 1, 300_000, 2_000_000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    most = min(size, 5000)
    kept = draw(st.integers(1, most))
    match draw(st.sampled_from(["spread", "run", "clusters"])):
        case "run":
            return np.arange(kept) + draw(st.integers(0, size - kept)), size
        case "clusters":
            return np.unique((rng.random(kept) ** 8 * size).astype(np.intp)), size
        case _:
            return np.sort(rng.choice(size, kept, replace=False)), size


def gaps_of(index_K: NDArray[np.intp], size: int) -> NDArray[np.uint16]:
    return naive_codecs.encode_positions(Positions.GAP, index_K, size).view(np.uint16)


@given(selections())
def test_gap_codes_are_decoded_and_keep_within_their_sizes(
    case: tuple[NDArray[np.intp], int],
) -> None:
    index_K, size = case
    kept, gap = index_K.size, gaps_of(index_K, size)
    gaps = GapSizes(gap, kept, size)
    varints, rice = gaps.varints(), gaps.rice()
    np.testing.assert_array_equal(
        varints, naive_codecs.encode_positions(Positions.VARINT, index_K, size)
    )
    np.testing.assert_array_equal(
        rice, naive_codecs.encode_positions(Positions.RICE, index_K, size)
    )
    assert varints.size == gaps.varint_bytes <= varint_bytes(kept, size)
    assert rice.size == gaps.rice_bytes <= rice_bytes(kept, size)
    np.testing.assert_array_equal(gaps_from_varints(varints, kept, size), gap)
    np.testing.assert_array_equal(gaps_from_rice(rice, kept, size), gap)
    is_run = index_K[-1] - index_K[0] + 1 == kept
    assert gaps.begin == (int(index_K[0]) if is_run else None)


@given(st.integers(1, 10**6), st.data())
def test_the_size_bound_of_golomb_rice_rises_with_the_kept_count(
    size: int, data: st.DataObject
) -> None:
    """The binary search of `kept_that_fit` requires that."""
    kept = data.draw(st.integers(1, size))
    assert rice_bytes(kept, size) <= rice_bytes(min(kept + 1, size), size)


@pytest.mark.parametrize("density", FLOOR_BITS)
def test_golomb_rice_codes_are_near_the_floor(density: float) -> None:
    """The minimum is the entropy of a coin thrown for each entry, per kept entry."""
    floor = -math.log2(density) - (1 - density) / density * math.log2(1 - density)
    assert floor == pytest.approx(FLOOR_BITS[density], abs=0.05)
    size = 1_000_000
    kept = int(density * size)
    index_K = np.sort(np.random.default_rng(0).choice(size, kept, replace=False))
    gaps = GapSizes(gaps_of(index_K, size), kept, size)
    bits = 8 * gaps.rice_bytes / kept
    assert floor - 0.05 < bits < floor + 0.12
    surely = 8 * positions_bytes(Positions.RICE, kept, size) / kept
    assert bits <= surely < floor + 0.8
    assert 32 / bits > 2.7  # what int32 positions would waste
    others = (Positions.BITMAP, Positions.BLOCK, Positions.GAP)
    assert bits < min(8 * positions_bytes(other, kept, size) / kept for other in others)
