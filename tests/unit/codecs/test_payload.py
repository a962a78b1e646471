"""Sizes, schemes and refusals of payloads, by example; round trips over many inputs are in
tests/property, hostile bytes by the hundred thousand in tests/fuzz.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest

from dlion_api.errors import ContractError
from dlion_worker.codecs import (
    HEADER_BYTES,
    ValueCodec,
    coded_bytes,
    decode_gradient,
    decode_loss,
    decode_weights,
    encode_loss,
    encode_weights,
    encode_whole,
)
from dlion_worker.codecs.positions import Positions
from naive_codecs import encode_sparse

SIZE = 100_000


def sparse(kept: int, codec: ValueCodec = ValueCodec.FLOAT16) -> bytes:
    rng = np.random.default_rng(kept)
    index_K = np.sort(rng.choice(SIZE, kept, replace=False))
    return bytes(encode_sparse(index_K, np.ones(kept, np.float32), SIZE, codec))


@pytest.mark.parametrize(
    ("kept", "scheme"),
    [
        (10, Positions.GAP),
        (300, Positions.GAP),
        (1000, Positions.BLOCK),
        (10_000, Positions.BLOCK),
        (20_000, Positions.BITMAP),
        (80_000, Positions.BITMAP),
        (99_000, Positions.ALL),
    ],
)
def test_the_smallest_scheme_is_taken(kept: int, scheme: Positions) -> None:
    payload = sparse(kept)
    assert payload[2] == scheme
    assert len(payload) <= coded_bytes(kept, SIZE, ValueCodec.FLOAT16)


def header(**fields: int) -> bytes:
    """A payload of two float32 values of three, by gaps, with some header fields changed."""
    values = {
        "version": 1, "codec": 1, "scheme": 3, "zero": 0, "exponent": 0, "zeros": 0, "size": 3,
        "kept": 2,
    } | fields  # fmt: skip
    return struct.pack("<BBBBhHII", *values.values()) + struct.pack("<ffHH", 1.0, 2.0, 0, 1)


def test_the_payload_that_the_refusals_start_from_is_right() -> None:
    part = decode_gradient(header(), 3)
    assert part.index_K is not None
    assert (part.index_K.tolist(), part.value_K.tolist()) == ([0, 2], [1.0, 2.0])


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 2},
        {"codec": 9},
        {"scheme": 4},
        {"zero": 1},
        {"zeros": 1},
        {"exponent": 1},
        {"size": 4},
        {"size": 2**32 - 1},
        {"kept": 0},
        {"kept": 1},
        {"kept": 3},
        {"kept": 2**32 - 1},
        {"scheme": 0},
        {"scheme": 1},
        {"scheme": 2},
        {"codec": 2},
    ],
)
def test_a_wrong_header_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ContractError):
        decode_gradient(header(**fields), 3)


@pytest.mark.parametrize("kept", [10, 10_000, 20_000])
def test_a_cut_or_longer_payload_is_refused(kept: int) -> None:
    payload = sparse(kept)
    for wrong in (b"", payload[:5], payload[:HEADER_BYTES], payload[:-1], payload + b"\0"):
        with pytest.raises(ContractError):
            decode_gradient(wrong, SIZE)


def blocks(counts: list[int], places: list[int]) -> bytes:
    kept = len(places)
    head = struct.pack("<BBBBhHII", 1, 1, 2, 0, 0, 0, 300, kept)
    return head + np.ones(kept, np.float32).tobytes() + bytes(counts) + bytes(places)


def test_positions_out_of_order_or_range_are_refused() -> None:
    part = decode_gradient(blocks([2, 1], [3, 9, 0]), 300)
    assert part.index_K is not None
    assert part.index_K.tolist() == [3, 9, 255]
    for counts, places in (
        ([2, 1], [9, 3, 0]),  # falling
        ([2, 1], [3, 3, 0]),  # twice
        ([2, 1], [3, 255, 0]),  # of the next block
        ([2, 1], [3, 9, 45]),  # 300 of 300
        ([1, 1], [3, 9, 0]),  # counts of two for three
    ):
        with pytest.raises(ContractError):
            decode_gradient(blocks(counts, places), 300)


def test_a_bitmap_with_bits_beyond_the_model_is_refused() -> None:
    head = struct.pack("<BBBBhHII", 1, 1, 1, 0, 0, 0, 3, 1) + struct.pack("<f", 1.0)
    assert decode_gradient(head + b"\x04", 3).index_K is not None
    for bits in (b"\x08", b"\x0c", b"\x06", b"\x00"):
        with pytest.raises(ContractError):
            decode_gradient(head + bits, 3)


@pytest.mark.parametrize("codec", list(ValueCodec))
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_no_numbers_are_neither_sent_nor_taken(
    codec: ValueCodec, wrong: float
) -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        encode_whole(np.array([1, wrong], np.float32), codec)
    payload = bytearray(encode_whole(np.array([1, 2], np.float32), codec))
    dtype = np.float32 if codec is ValueCodec.FLOAT32 else np.float16
    payload[HEADER_BYTES:] = np.array([1, wrong], dtype).tobytes()
    with pytest.raises(ContractError, match="NaN or infinite"):
        decode_gradient(bytes(payload), 2)


def test_a_scale_that_overflows_is_refused() -> None:
    payload = bytearray(encode_whole(np.array([1, 2], np.float32), ValueCodec.FLOAT16))
    struct.pack_into("<h", payload, 4, 114)
    with pytest.raises(ContractError, match="exponent 114"):
        decode_gradient(bytes(payload), 2)
    struct.pack_into("<h", payload, 4, 113)
    payload[HEADER_BYTES:] = np.full(2, 65504, np.float16).tobytes()
    with pytest.raises(ContractError, match="infinite"):
        decode_gradient(bytes(payload), 2)


def test_weights_are_all_or_nothing() -> None:
    weights_D = np.arange(5, dtype=np.float32)
    np.testing.assert_array_equal(
        decode_weights(encode_weights(weights_D, "float32"), 5), weights_D
    )
    with pytest.raises(ContractError, match="some entries"):
        decode_weights(sparse(10), SIZE)


def test_a_loss_is_one_finite_number() -> None:
    assert decode_loss(encode_loss(0.25)) == 0.25
    for wrong in (b"", b"1234567", encode_loss(float("nan")), encode_loss(float("inf"))):
        with pytest.raises(ContractError):
            decode_loss(wrong)
