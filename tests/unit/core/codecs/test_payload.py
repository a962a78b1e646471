"""Tests of payloads by example: sizes, schemes and refusals.

Left out: round trips over many inputs (tests/property); many hostile payloads (tests/fuzz).
"""

from __future__ import annotations

import struct

import numpy as np
import pytest

from dlion_api.errors import ContractError
from dlion_core.codecs import (
    HEADER_BYTES,
    Coding,
    IndexCodec,
    SelectedEntries,
    ValueCodec,
    coded_bytes,
    decode_gradient,
    decode_loss,
    decode_weights,
    encode_loss,
    encode_selected,
    encode_weights,
    encode_whole,
)
from dlion_core.codecs.gap_codes import SKIP
from dlion_core.codecs.payload import max_kept_entries
from dlion_core.codecs.positions import Positions, check_positions
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
def test_the_smallest_scheme_is_chosen(kept: int, scheme: Positions) -> None:
    payload = sparse(kept)
    assert payload[2] == scheme
    assert len(payload) <= coded_bytes(kept, SIZE, ValueCodec.FLOAT16)


def header(**fields: int) -> bytes:
    """A payload with two of three float32 values by gaps, with some header fields changed."""
    values = {
        "version": 1, "codec": 1, "scheme": 3, "zero": 0, "exponent": 0, "zeros": 0, "size": 3,
        "kept": 2,
    } | fields  # fmt: skip
    return struct.pack("<BBBBhHII", *values.values()) + struct.pack("<ffHH", 1.0, 2.0, 0, 1)


def test_the_unchanged_payload_of_the_refusal_tests_is_valid() -> None:
    part = decode_gradient(header(), 3)
    assert part.index_K is not None
    assert (part.index_K.tolist(), part.value_K.tolist()) == ([0, 2], [1.0, 2.0])


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 2},
        {"codec": 9},
        {"scheme": 7},
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
        {"codec": 3},
        {"codec": 4},
        {"codec": 5},
        {"codec": 6},
        {"scheme": 4},
        {"scheme": 5},
        {"scheme": 6},
        {"codec": 3, "exponent": 1},
        {"codec": 4, "exponent": 1},
        {"codec": 6, "exponent": 10},
        {"codec": 6, "exponent": -1},
    ],
)
def test_a_wrong_header_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ContractError):
        decode_gradient(header(**fields), 3)


@pytest.mark.parametrize("kept", [10, 10_000, 20_000])
def test_a_truncated_or_longer_payload_is_refused(kept: int) -> None:
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
        ([2, 1], [9, 3, 0]),  # descending
        ([2, 1], [3, 3, 0]),  # a duplicate
        ([2, 1], [3, 255, 0]),  # in the next block
        ([2, 1], [3, 9, 45]),  # index 300 of 300
        ([1, 1], [3, 9, 0]),  # counts for two of three blocks
    ):
        with pytest.raises(ContractError):
            decode_gradient(blocks(counts, places), 300)


def test_a_bitmap_with_bits_beyond_the_model_is_refused() -> None:
    head = struct.pack("<BBBBhHII", 1, 1, 1, 0, 0, 0, 3, 1) + struct.pack("<f", 1.0)
    assert decode_gradient(head + b"\x04", 3).index_K is not None
    for bits in (b"\x08", b"\x0c", b"\x06", b"\x00"):
        with pytest.raises(ContractError):
            decode_gradient(head + bits, 3)


@pytest.mark.parametrize("codec", [ValueCodec.FLOAT32, ValueCodec.FLOAT16])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_neither_sent_nor_accepted(
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


@pytest.mark.parametrize("codec", list(ValueCodec))
def test_no_codec_sends_a_value_that_is_not_finite(codec: ValueCodec) -> None:
    for wrong in (np.nan, np.inf, -np.inf):
        with pytest.raises(ValueError, match="NaN or infinite"):
            encode_whole(np.array([1, wrong], np.float32), codec)


def whole(codec: int, values: bytes, size: int, exponent: int = 0) -> bytes:
    return struct.pack("<BBBBhHII", 1, codec, 0, 0, exponent, 0, size, size) + values


@pytest.mark.parametrize(
    ("payload", "size", "words"),
    [
        (whole(3, b"\x80\x7f", 1), 1, "NaN or infinite bfloat16"),
        (whole(3, b"\xc0\xff", 1), 1, "NaN or infinite bfloat16"),
        (whole(4, b"\x80\x3f\x80", 1), 1, "-128 times the scale"),
        (whole(4, b"\x80\xbf\x01", 1), 1, "a block's scale of bits 0xbf80"),
        (whole(4, b"\x80\x7f\x01", 1), 1, "a block's scale"),
        (whole(4, b"\x7f\x7f\x7f", 1), 1, "a block's scale"),  # 127 times this is infinite
        (whole(5, b"\x80\x3f\x08", 1), 1, "-8 times the scale"),
        (whole(5, b"\x80\x3f\x11", 1), 1, "bits set after the last int4"),
        (whole(5, b"\x80\x3f\x81", 2), 2, "-8 times the scale"),
        (whole(7, b"\x80\x3f\x11", 2), 2, "bits set after the last int2"),
        (whole(7, b"\x80\x3f\x05\0", 4), 4, "its values alone take 3"),
        (whole(7, b"\x80\x7f\x01", 1), 1, "a block's scale"),
        (whole(6, b"\x01\0\0\0\0", 1), 1, "its 1 values take 5"),  # float32 is shorter
        (whole(6, b"\x01\0\0\0\0\0", 2), 2, "its values alone take 5"),
        (whole(6, b"\x03\0\0\0\0\0", 2), 2, "its 2 values take 7"),
        (whole(6, b"\xff\xff\xff\xff\0\0", 2), 2, "its 2 values take"),
        (whole(6, b"\x02\0", 2), 2, "its 2 values take"),
    ],
)
def test_values_that_no_encoder_writes_are_refused(payload: bytes, size: int, words: str) -> None:
    with pytest.raises(ContractError, match=words):
        decode_gradient(payload, size)


def some(scheme: int, positions: bytes, kept: int, size: int) -> bytes:
    head = struct.pack("<BBBBhHII", 1, 1, scheme, 0, 0, 0, size, kept)
    return head + np.ones(kept, np.float32).tobytes() + positions


@pytest.mark.parametrize(
    ("scheme", "positions", "index_K", "size"),
    [
        (4, b"\x02\x00", [2, 3], 300),
        (4, b"\x80\x02\x05", [256, 262], 300),
        (4, b"\xff\xff\x03\x00", [65535, 65536], 70_000),
        (5, b"\x00\x0c", [2, 3], 300),  # r 0: two zeros, a one; a one
        (5, b"\x02\x51", [0, 7], 300),  # r 2: 1 00, 01 01 (lowest bit first)
        (6, b"\x02\x01\0\0", [258, 259], 300),
    ],
)
def test_gap_codes_and_runs_by_example(
    scheme: int, positions: bytes, index_K: list[int], size: int
) -> None:
    part = decode_gradient(some(scheme, positions, 2, size), size)
    assert part.index_K is not None
    assert part.index_K.tolist() == index_K


@pytest.mark.parametrize(
    ("scheme", "positions"),
    [
        (4, b"\x02"),  # one position of two
        (4, b"\x02\x00\x00"),  # three positions of two
        (4, b"\x82\x00\x00"),  # an unnecessary byte
        (4, b"\xff\xff\xff\xff\xff\xff\xff"),
        (4, b"\x02\xa9\x02"),  # position 300 of 300
        (5, b""),
        (5, b"\x00"),
        (5, b"\x20\x0c"),  # r 32
        (5, b"\x00\x04"),  # one position of two
        (5, b"\x00\x1c"),  # one bit too many
        (5, b"\x00\x0c\x00"),  # one byte too many
        (5, b"\x00\x00\x00\x00"),
        (5, b"\x07\x80\x01"),  # seven times 128
        (5, b"\x00" * 60),  # longer than any code of two of 300
        (5, b"\x08\x01\x5c\x01"),  # 0, then position 300 of 300
        (6, b"\x02\x01\0"),
        (6, b"\x02\x01\0\0\0"),
        (6, b"\x2b\x01\0\0"),  # the second is position 300 of 300
        (6, b"\xff\xff\xff\xff"),
    ],
)
def test_gap_codes_and_runs_that_no_encoder_writes_are_refused(
    scheme: int, positions: bytes
) -> None:
    with pytest.raises(ContractError, match=r"positions|run of 2 entries"):
        decode_gradient(some(scheme, positions, 2, 300), 300)


@pytest.mark.parametrize("codec", list(ValueCodec))
def test_only_polyline_makes_weights_coarser_than_float16(codec: ValueCodec) -> None:
    weights_D = np.linspace(-1, 1, 1001, dtype=np.float32)
    coding = Coding(codec, decimals=2)
    back_D = decode_weights(encode_weights(weights_D, coding), 1001)
    most = 0.005001 if codec is ValueCodec.POLYLINE else 2.0**-11
    assert np.abs(back_D - weights_D).max() <= most


def test_a_run_replaces_positions_where_it_is_smallest() -> None:
    value_D = np.zeros(SIZE, np.float32)
    value_D[700:900] = 1
    selected = SelectedEntries(value_D, np.array([SIZE]), np.array([1], np.uint32), 200, 1.0)
    payload = encode_selected(selected, Coding(ValueCodec.INT8, IndexCodec.SMALLEST))
    assert len(payload) == HEADER_BYTES + 200 + 2 + 4
    index_K = decode_gradient(payload, SIZE).index_K
    assert index_K is not None
    assert index_K.tolist() == list(range(700, 900))


def test_a_weight_payload_has_all_weights() -> None:
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


@pytest.mark.parametrize("codec", [ValueCodec.FLOAT32, ValueCodec.FLOAT16, ValueCodec.BFLOAT16])
@pytest.mark.parametrize("size", [1, 254, 255, 256, 1000, 70_000])
def test_the_count_for_a_budget_is_the_largest_that_fits(codec: ValueCodec, size: int) -> None:
    """Check each scheme around the sizes at which another scheme becomes the smallest."""
    whole = coded_bytes(size, size, codec)
    for budget in sorted({HEADER_BYTES, *range(HEADER_BYTES, whole + 9, max(1, whole // 300))}):
        kept = max_kept_entries(budget, size, codec)
        if kept:
            assert coded_bytes(kept, size, codec) <= budget
        if kept < size - 1:
            assert coded_bytes(kept + 1, size, codec) > budget


@pytest.mark.parametrize(("last", "is_taken"), [(SIZE - 1, True), (SIZE, False)])
def test_the_last_position_is_below_the_size(last: int, is_taken: bool) -> None:
    gaps = np.array([SKIP, last - SKIP], np.uint16)  # a skip of 65,535 entries, then the rest
    if is_taken:
        checked = check_positions(Positions.GAP, gaps.view(np.uint8), 1, SIZE)
        assert checked.size == SIZE
    else:
        with pytest.raises(ContractError, match="last one 100000"):
            check_positions(Positions.GAP, gaps.view(np.uint8), 1, SIZE)


def test_a_polyline_longer_than_the_values_is_not_sent() -> None:
    value_D = np.random.default_rng(1).standard_normal(1000).astype(np.float32) * 1000
    coding = Coding(ValueCodec.POLYLINE, decimals=8)
    plain = encode_whole(value_D, ValueCodec.FLOAT32)
    assert len(encode_whole(value_D, coding)) == len(plain)
    part = decode_gradient(encode_whole(value_D, coding), value_D.size)
    np.testing.assert_array_equal(part.value_K, value_D)
