"""The polyline code.

Values are decoded within half of the last decimal, and encoded like the plain form. Hostile bytes
are refused, or are a possible encoding.

Left out: messages that carry it (test_codecs.py), FedAT.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dlion_api.errors import ContractError
from dlion_core.codecs import NotFiniteError
from dlion_core.codecs.polyline import MAX_DECIMALS, decode_polyline, encode_polyline

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGEST = 2**52
decimals_ = st.integers(0, MAX_DECIMALS)


@st.composite
def values(draw: st.DrawFn) -> tuple[NDArray[np.float32], int]:
    """Values of every size that these decimals allow, and the decimals."""
    decimals = draw(decimals_)
    most = float(np.nextafter(np.float32(LARGEST / 10**decimals), np.float32(0)))
    of_any_size = st.floats(-most, most, width=32)
    like_weights = st.floats(-2, 2, width=32)
    elements = draw(st.sampled_from([of_any_size, like_weights]))
    return draw(arrays.arrays(np.float32, st.integers(1, 40), elements=elements)), decimals


def naive(value_D: NDArray[np.float32], decimals: int) -> bytes:
    """Bit after bit, over Python's whole numbers."""
    bits, before = [], 0
    for value in value_D.tolist():
        rounded = round(value * 10**decimals)  # float64, exact; ties to even
        difference, before = rounded - before, rounded
        zigzag = 2 * difference if difference >= 0 else -2 * difference - 1
        while True:
            zigzag, group = divmod(zigzag, 32)
            bits += [(group >> i) & 1 for i in range(5)] + [int(zigzag > 0)]
            if not zigzag:
                break
    return np.packbits(bits, bitorder="little").tobytes()


@given(values())
@example((np.array([LARGEST, -LARGEST, LARGEST], np.float32), 0))
def test_values_are_decoded_within_half_of_the_last_decimal(
    case: tuple[NDArray[np.float32], int],
) -> None:
    value_D, decimals = case
    payload = encode_polyline(value_D, decimals)
    assert payload == naive(value_D, decimals)
    back_D = decode_polyline(payload, value_D.size, decimals)
    assert back_D.dtype == np.float32
    error_D = np.abs(back_D.astype(np.float64) - value_D)
    unit_D = np.spacing(np.maximum(np.abs(value_D), np.abs(back_D))).astype(np.float64)
    assert (error_D <= 0.5 * 10.0**-decimals * (1 + 1e-15) + unit_D / 2).all()
    again_D = decode_polyline(encode_polyline(back_D, decimals), value_D.size, decimals)
    if decimals <= 3 and np.abs(value_D).max() <= 2:  # float32 distinguishes these decimals
        np.testing.assert_array_equal(again_D, back_D)


@given(st.integers(0, 2**32), st.integers(1, 5000), st.sampled_from([2, 3, 4]))
def test_weights_like_a_models_are_coded_like_the_plain_form(
    seed: int, size: int, decimals: int
) -> None:
    value_D = (np.random.default_rng(seed).standard_normal(size) * 0.05).astype(np.float32)
    assert encode_polyline(value_D, decimals) == naive(value_D, decimals)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 2**53, -(2.0**60)])
def test_values_that_cannot_be_coded_are_refused(wrong: float) -> None:
    with pytest.raises(NotFiniteError, match=r"values to send.*Lower the learning rate"):
        encode_polyline(np.array([1, wrong], np.float32), 0)


@pytest.mark.parametrize("decimals", [-1, MAX_DECIMALS + 1])
def test_decimals_out_of_bounds_are_refused(decimals: int) -> None:
    with pytest.raises(ValueError, match="allowed: 0 to 9"):
        encode_polyline(np.ones(1, np.float32), decimals)
    with pytest.raises(ValueError, match="allowed: 0 to 9"):
        decode_polyline(b"\x00", 1, decimals)


@pytest.mark.parametrize(
    ("payload", "size", "words"),
    [
        (b"", 1, "polyline of 0 bytes"),
        (bytes(20), 1, "polyline of 20 bytes"),
        (b"\xff" * 9, 1, "more than 11 groups"),
        (bytes([0b0010_0001, 0]), 1, "a redundant one"),  # 1, then a group of nothing
        (b"\x40", 1, "bits set after its last group"),
        (bytes([0, 0]), 1, "do not end with its bytes"),
        (bytes([0, 0x08]), 2, "do not end with its bytes"),  # one more group follows
        (naive(np.array([2.0**53], np.float32), 0)[:9], 1, "more than 11 groups|beyond"),
    ],
)
def test_bytes_that_are_not_a_possible_encoding_are_refused(
    payload: bytes, size: int, words: str
) -> None:
    with pytest.raises(ContractError, match=words):
        decode_polyline(payload, size, 0)


def test_sums_beyond_the_bound_are_refused() -> None:
    """Each difference alone would be accepted."""
    payload = naive(np.array([LARGEST, 1.5 * LARGEST], np.float32), 0)
    with pytest.raises(ContractError, match="a value beyond"):
        decode_polyline(payload, 2, 0)


@given(values(), st.data())
def test_damage_is_refused_or_is_another_valid_payload(
    case: tuple[NDArray[np.float32], int], data: st.DataObject
) -> None:
    value_D, decimals = case
    payload = bytearray(encode_polyline(value_D, decimals))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    size = data.draw(st.sampled_from([value_D.size, 1, 10**6]))
    try:
        back_D = decode_polyline(bytes(payload), size, decimals)
    except ContractError:
        return
    assert back_D.size == size
    assert np.isfinite(back_D).all()
    assert (np.abs(back_D.astype(np.float64)) * 10**decimals <= LARGEST * (1 + 2.0**-24)).all()
