"""Payloads are decoded as they were encoded, within the stated bound.

Damaged payloads are never accepted as valid positions or as values that are not numbers. They raise
only ContractError. Every compiled loop gives the bits of its plain NumPy form
(tests/support/naive_codecs.py).

Left out: frames (exchange), the choice of entries to send (test_selection.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import naive_codecs
from dlion_api.errors import ContractError
from dlion_core.codecs import (
    Coding,
    IndexCodec,
    SelectedEntries,
    ValueCodec,
    coded_bytes,
    decode_gradient,
    encode_range,
    encode_selected,
    encode_whole,
    max_kept_entries,
    max_range_length,
    range_bytes,
)
from dlion_core.codecs.positions import Positions
from dlion_core.codecs.values import (
    EXPONENT_LIMIT,
    check_float16,
    from_float16,
    scale_exponent,
    to_float16,
)
from naive_codecs import added, encode_positions, encode_sparse, payload_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

finite_floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
codecs = st.builds(
    Coding,
    values=st.sampled_from(list(ValueCodec)),
    indices=st.sampled_from(list(IndexCodec)),
    decimals=st.integers(0, 9),
    seed=st.integers(0, 2**64 - 1),
)


@st.composite
def vectors(draw: st.DrawFn, most: int = 40) -> NDArray[np.float32]:
    shape = draw(st.integers(1, most))
    return draw(arrays.arrays(np.float32, shape, elements=finite_floats))


@st.composite
def selections(draw: st.DrawFn) -> tuple[NDArray[np.intp], int]:
    """Strictly rising positions below a size; sizes cross every scheme's limits."""
    size = draw(st.sampled_from([1, 7, 8, 255, 256, 1000, 65_535, 65_536, 200_000]))
    seed = draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    kept = draw(st.one_of(st.integers(1, min(size, 20)), st.integers(1, size)))
    index_K = np.sort(rng.choice(size, kept, replace=False))
    if draw(st.booleans()):  # as far apart, or as close, as possible
        index_K = np.arange(kept) + draw(st.sampled_from([0, size - kept]))
    return index_K, size


def bound(value_K: NDArray[np.float32]) -> NDArray[np.float64]:
    """The largest error of `to_float16`."""
    magnitude_K = np.abs(value_K.astype(np.float64))
    least = max(2.0**-38 * magnitude_K.max(), 2.0**-137)
    return np.maximum(2.0**-11 * magnitude_K, least)


def round_trip(value_K: NDArray[np.float32], exponent: int) -> NDArray[np.float32]:
    half_K = np.empty(value_K.size, np.uint16)
    to_float16(value_K, exponent, half_K)
    check_float16(half_K, exponent)
    return from_float16(half_K, exponent)


@given(vectors(), st.integers(-EXPONENT_LIMIT, EXPONENT_LIMIT))
def test_narrowing_and_widening_give_numpys_bits(
    value_K: NDArray[np.float32], exponent: int
) -> None:
    own = scale_exponent(float(np.abs(value_K).max()))
    assert own == naive_codecs.exponent_of(value_K)
    half_K = np.empty(value_K.size, np.uint16)
    to_float16(value_K, own, half_K)
    np.testing.assert_array_equal(half_K, naive_codecs.halves(value_K, own))
    widened_K = from_float16(half_K, exponent)
    naive_K = naive_codecs.floats(half_K, exponent)
    np.testing.assert_array_equal(widened_K.view(np.uint32), naive_K.view(np.uint32))


@st.composite
def cut_vectors(draw: st.DrawFn) -> SelectedEntries:
    """A vector of several variables and a cut for each, from all of it to a single entry."""
    sizes = draw(
        st.lists(st.sampled_from([1, 7, 63, 255, 1024, 3000, 70_000]), min_size=1, max_size=5)
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    value_D = (rng.standard_normal(sum(sizes)) * 10.0 ** rng.integers(-30, 30)).astype(np.float32)
    value_D[rng.random(value_D.size) < 0.1] = -0.0
    end_L = np.cumsum(sizes)
    cut_L = np.empty(len(sizes), np.uint32)
    for variable, part in enumerate(np.split(np.abs(value_D), end_L[:-1])):
        share = draw(st.sampled_from([0.0, 0.03, 0.3, 0.6, 0.9, 0.97, 0.999, 1.0]))
        cut_L[variable] = np.quantile(part, share, method="nearest").view(np.uint32)
        cut_L[variable] += draw(st.booleans())
    magnitude_D = np.abs(value_D)
    kept_D = magnitude_D.view(np.uint32) >= np.repeat(cut_L, sizes)
    assume(kept_D.any())
    peak = float(magnitude_D[kept_D].max())
    return SelectedEntries(value_D, end_L, cut_L, int(np.count_nonzero(kept_D)), peak)


@given(cut_vectors(), codecs)
def test_a_selection_is_encoded_like_its_positions_and_values(
    selected: SelectedEntries, codec: Coding
) -> None:
    magnitude_D = np.abs(selected.value_D)
    cut_D = np.repeat(selected.cut_L, np.diff(selected.end_L, prepend=0))
    index_K = np.flatnonzero(magnitude_D.view(np.uint32) >= cut_D)
    value_K, size = selected.value_D[index_K], selected.value_D.size
    np.testing.assert_array_equal(selected.index_K(), index_K)
    payload = encode_selected(selected, codec)
    assert bytes(payload) == encode_sparse(index_K, value_K, size, codec)


@pytest.mark.parametrize("scheme", [Positions.BITMAP, Positions.BLOCK, Positions.GAP])
@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_vector_that_changed_after_the_selection_is_refused(
    scheme: Positions, wrong: int
) -> None:
    value_D = np.arange(1, 5001, dtype=np.float32)
    cut_L = np.array([np.float32(4000).view(np.uint32)])
    selected = SelectedEntries(value_D, np.array([5000]), cut_L, 1001 + wrong, 5000.0)
    with pytest.raises(ValueError, match="the vector has changed"):
        selected.gathered(scheme)


@given(selections(), codecs, st.integers(0, 2**32), st.booleans())
def test_adding_gives_numpys_bits(
    selection: tuple[NDArray[np.intp], int], codec: Coding, seed: int, whole: bool
) -> None:
    index_K, size = selection
    rng = np.random.default_rng(seed)
    value_D, target_D = rng.standard_normal((2, size)).astype(np.float32)
    target_D[rng.random(size) < 0.3] = -0.0
    weight = np.float32(rng.random())
    if whole:
        payload = bytes(encode_whole(value_D, codec))
    else:
        payload = encode_sparse(index_K, value_D[index_K], size, codec)
    for shift in (0, 1):  # message bytes may be unaligned
        part = decode_gradient(memoryview(bytes(shift) + payload)[shift:], size)
        sum_D = target_D.copy()
        part.add_to(sum_D, weight)
        naive_D = added(target_D, part.index_K, part.value_K, weight)
        np.testing.assert_array_equal(sum_D.view(np.uint32), naive_D.view(np.uint32))
        zeros_D = added(np.zeros(size, np.float32), part.index_K, part.value_K, weight)
        np.testing.assert_array_equal(
            part.weighted(weight).view(np.uint32), zeros_D.view(np.uint32)
        )


def test_a_part_is_added_only_to_a_vector_of_its_size() -> None:
    part = decode_gradient(encode_sparse(np.array([9]), np.ones(1), 10, ValueCodec.FLOAT32), 10)
    with pytest.raises(ValueError, match="gradient of 10 entries added to 9"):
        part.add_to(np.zeros(9, np.float32), np.float32(1))


@given(vectors())
def test_float16_stays_within_its_bound_and_never_overflows(value_K: NDArray[np.float32]) -> None:
    exponent = scale_exponent(float(np.abs(value_K).max()))
    back_K = round_trip(value_K, exponent)
    assert np.isfinite(back_K).all()
    assert (np.abs(back_K.astype(np.float64) - value_K) <= bound(value_K)).all()


@given(st.integers(0, 2**32), st.integers(-90, 100))
def test_float16_rounds_as_numpy_does_but_for_ties(seed: int, exponent: int) -> None:
    value_K = np.random.default_rng(seed).standard_normal(200).astype(np.float32)
    scaled_K = value_K * np.float32(2.0**exponent)
    ours_K = round_trip(scaled_K, exponent)
    theirs_K = value_K.astype(np.float16).astype(np.float32) * np.float32(2.0**exponent)
    ties_K = (value_K.view(np.uint32) & 0x1FFF) == 0x1000
    small_K = np.abs(value_K) < 2.0**-14
    same_K = ours_K == theirs_K
    assert (same_K | ties_K | small_K).all()


@given(vectors(), codecs)
def test_a_whole_gradient_is_decoded(value_D: NDArray[np.float32], codec: Coding) -> None:
    payload = encode_whole(value_D, codec)
    part = decode_gradient(payload, value_D.size)
    assert part.index_K is None
    most = coded_bytes(value_D.size, value_D.size, codec)
    assert len(payload) == most or (codec.values is ValueCodec.POLYLINE and len(payload) < most)
    if codec.values is ValueCodec.FLOAT32:
        np.testing.assert_array_equal(part.value_K.view(np.uint32), value_D.view(np.uint32))


MAX_ERROR = {  # of whole numbers to 1000, which fit a float16
    ValueCodec.FLOAT32: 0,
    ValueCodec.FLOAT16: 0,
    ValueCodec.BFLOAT16: 1000 / 2**8,
    ValueCodec.INT8: 1000 / 127 * 1.01,
    ValueCodec.INT4: 1000 / 7 * 1.01,
    ValueCodec.INT2: 1000 * 2 / 3 * 1.01,
    ValueCodec.POLYLINE: 0,
}


@given(selections(), codecs)
def test_kept_entries_are_decoded_at_their_positions(
    selection: tuple[NDArray[np.intp], int], codec: Coding
) -> None:
    index_K, size = selection
    value_K = np.arange(1, index_K.size + 1, dtype=np.float32) % 1000 + 1
    payload = encode_sparse(index_K, value_K, size, codec)
    assert len(payload) <= coded_bytes(index_K.size, size, codec)
    part = decode_gradient(payload, size)
    dense_D = np.zeros(size, np.float32)
    part.add_to(dense_D, np.float32(1))
    expected_D = np.zeros(size, np.float32)
    expected_D[index_K] = value_K
    np.testing.assert_allclose(dense_D, expected_D, rtol=0, atol=MAX_ERROR[codec.values])
    if codec.values in (ValueCodec.INT8, ValueCodec.INT4, ValueCodec.INT2):
        assert not dense_D[expected_D == 0].any()


@given(st.integers(1, 300_000), st.integers(0, 1_300_000), codecs)
def test_the_maximum_count_that_fits_is_exact(size: int, budget: int, codec: Coding) -> None:
    kept = max_kept_entries(budget, size, codec)
    assert 0 <= kept <= size
    if kept:
        assert coded_bytes(kept, size, codec) <= budget
    if kept < size:
        assert coded_bytes(kept + 1, size, codec) > budget


@given(codecs, st.integers(1, 2000), st.data())
def test_a_run_is_decoded_at_its_position(codec: Coding, size: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, size - 1))
    end = data.draw(st.integers(begin + 1, size))
    value_D = (np.arange(size) % 100).astype(np.float32) - 50
    payload = encode_range(value_D, begin, end, codec)
    most = range_bytes(end - begin, size, codec)
    assert len(payload) == most or (codec.values is ValueCodec.POLYLINE and len(payload) < most)
    is_whole = end - begin == size
    if not is_whole:
        where = encode_positions(Positions.RANGE, np.arange(begin, end), size)
        naive = payload_of(Positions.RANGE, where, value_D[begin:end], size, codec)
        assert bytes(payload) == naive
    back_D = decode_gradient(payload, size).weighted(np.float32(1))
    max_error = MAX_ERROR[codec.values] / 20
    np.testing.assert_allclose(back_D[begin:end], value_D[begin:end], rtol=0, atol=max_error)
    assert not back_D[:begin].any()
    assert not back_D[end:].any()


@given(st.integers(1, 300_000), st.integers(0, 1_300_000), codecs)
def test_the_longest_run_that_fits_is_exact(size: int, budget: int, codec: Coding) -> None:
    length = max_range_length(budget, size, codec)
    assert 0 <= length <= size
    if length:
        assert range_bytes(length, size, codec) <= budget
    if length < size:
        assert range_bytes(length + 1, size, codec) > budget


@given(selections(), codecs, st.data())
def test_damage_is_refused_or_harmless(
    selection: tuple[NDArray[np.intp], int], codec: Coding, data: st.DataObject
) -> None:
    index_K, size = selection
    payload = bytearray(encode_sparse(index_K, np.ones(index_K.size, np.float32), size, codec))
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(0, len(payload) - 1))
        payload[where] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del payload[data.draw(st.integers(0, len(payload) - 1)) :]
    assert_valid(bytes(payload), size)


@given(st.binary(max_size=200), st.integers(1, 100))
def test_any_bytes_are_refused_or_valid(payload: bytes, size: int) -> None:
    assert_valid(payload, size)


def assert_valid(payload: bytes, size: int) -> None:
    try:
        part = decode_gradient(payload, size)
    except ContractError:
        return
    assert np.isfinite(part.value_K).all()
    if part.index_K is None:
        assert part.value_K.size == size
        return
    assert part.index_K.size == part.value_K.size >= 1
    assert part.index_K[0] >= 0
    assert part.index_K[-1] < size
    assert (np.diff(part.index_K) > 0).all()
