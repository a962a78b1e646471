"""The arithmetic of payloads in plain NumPy, step by step.

The codecs' compiled loops are compared with it, and tests write payloads with chosen positions.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import numpy as np

from dlion_core.codecs import AnyCoding, Coding, IndexCodec, ValueCodec, coding_of, encode_whole
from dlion_core.codecs.payload import cheapest_positions
from dlion_core.codecs.positions import BLOCK, SKIP, Positions, positions_bytes
from dlion_core.codecs.values import EXPONENT_LIMIT

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ALL = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def encode_sparse(
    index_K: NDArray[np.intp], value_K: NDArray[np.float32], size: int, coding: AnyCoding
) -> bytes:
    """Encode some entries (at least one), as `encode_selected` does."""
    coding = coding_of(coding)
    room = coding.values.bytes_of(size) - coding.values.bytes_of(index_K.size)
    scheme, positions = best_positions(index_K, size, coding.indices)
    if coding.indices is IndexCodec.FAST:
        taken = positions_bytes(scheme, index_K.size, size)
    else:
        taken = positions.size
    must_stay_zero = coding.values is ValueCodec.INT2 and index_K.size < size
    if taken >= room and not must_stay_zero:
        whole_D = np.zeros(size, np.float32)
        whole_D[index_K] = value_K
        return bytes(encode_whole(whole_D, coding))
    return payload_of(scheme, positions, value_K, size, coding)


def payload_of(
    scheme: Positions,
    positions: NDArray[np.uint8],
    value_K: NDArray[np.float32],
    size: int,
    coding: AnyCoding,
) -> bytes:
    """A message of those values and positions as bytes, valid or not."""
    number, exponent, values = encode_values(value_K.astype(np.float32), coding_of(coding))
    header = struct.pack("<BBBBhHII", 1, number, scheme, 0, exponent, 0, size, value_K.size)
    return header + values + positions.tobytes()


def encode_values(value_K: NDArray[np.float32], coding: Coding) -> tuple[int, int, bytes]:
    """The codec's number on the wire, the header's exponent, and the values' bytes."""
    match coding.values:
        case ValueCodec.FLOAT16:
            exponent = exponent_of(value_K)
            return 2, exponent, halves(value_K, exponent).tobytes()
        case ValueCodec.BFLOAT16:
            return 3, 0, bfloats(value_K).tobytes()
        case ValueCodec.INT8:
            scale_B, code_K = quantized(value_K, 127, coding.seed)
            return 4, 0, scale_B.tobytes() + code_K.tobytes()
        case ValueCodec.INT4:
            scale_B, code_K = quantized(value_K, 7, coding.seed)
            four_K = np.append(code_K, np.zeros(code_K.size % 2, np.int8)).view(np.uint8) & 15
            pairs = four_K[0::2] | four_K[1::2] << 4
            return 5, 0, scale_B.tobytes() + pairs.tobytes()
        case ValueCodec.INT2:
            scale_B, code_K = quantized(value_K, 3, coding.seed)
            two_K = np.append((code_K + 3) // 2, np.zeros(-code_K.size % 4, np.int8)).view(np.uint8)
            fours = two_K[0::4] | two_K[1::4] << 2 | two_K[2::4] << 4 | two_K[3::4] << 6
            return 7, 0, scale_B.tobytes() + fours.tobytes()
        case ValueCodec.POLYLINE:
            line = polyline(value_K, coding.decimals)
            if 4 + len(line) < 4 * value_K.size:
                return 6, coding.decimals, struct.pack("<I", len(line)) + line
    return 1, 0, value_K.tobytes()


def bfloats(value_K: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The nearer of the two bfloat16 around each value; the even one of two equally near."""
    below = value_K.view(np.uint32) >> 16
    above = np.where((below & 0x7FFF) < 0x7F7F, below + 1, below)
    exact_K = value_K.astype(np.float64)
    far_below, far_above = (
        np.abs((one << 16).astype(np.uint32).view(np.float32).astype(np.float64) - exact_K)
        for one in (below, above)
    )
    is_below = (far_below < far_above) | ((far_below == far_above) & (below % 2 == 0))
    return np.where(is_below, below, above).astype(np.uint16)


def quantized(
    value_K: NDArray[np.float32], levels: int, seed: int
) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
    """Scales of blocks of 256, and each value's lower or upper multiple, at random."""
    reach = np.arange(0x7F80, dtype=np.uint32) << 16
    reach = reach.view(np.float32).astype(np.float64) * levels
    largest = int(np.searchsorted(reach, float(np.finfo(np.float32).max), "right")) - 1
    key = _digest(value_K, seed)
    counter = np.arange(value_K.size, dtype=np.uint64)
    word_K = _random(key, counter // np.uint64(2)) >> (np.uint64(32) * (counter % np.uint64(2)))
    chance_K = (word_K & np.uint64(0xFFFFFFFF)).astype(np.float64) / 2**32
    scales, codes = [], []
    for start in range(0, value_K.size, 256):
        part = value_K[start : start + 256].astype(np.float64)
        top = min(int(np.searchsorted(reach, np.abs(part).max(), "left")), largest)
        scales.append(top)
        scale = reach[top] / levels
        ratio = np.clip(part / scale, -levels, levels) if top else np.zeros_like(part)
        rng = chance_K[start : start + 256]
        if levels == 3:  # odd multiples
            codes.append(2 * np.floor((ratio + 3) / 2 + rng) - 3 if top else ratio + 1)
        else:
            codes.append(np.floor(ratio + rng) if top else ratio)
    return np.array(scales, np.uint16), np.concatenate(codes).astype(np.int8)


def _digest(value_K: NDArray[np.float32], seed: int) -> int:
    state = seed & _ALL
    for bits in value_K.view(np.uint32).tolist():
        state = ((state ^ bits) * _GOLDEN) & _ALL
        state ^= state >> 29
    return state


def _random(key: int, counter: NDArray[np.uint64]) -> NDArray[np.uint64]:
    word = np.uint64(key) + (counter + np.uint64(1)) * np.uint64(_GOLDEN)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def polyline(value_D: NDArray[np.float32], decimals: int) -> bytes:
    """Encode differences of rounded values: zig-zag, in groups of 5 bits and a continuation bit.

    A too large value gives more bytes than any valid message.
    """
    scaled_D = value_D.astype(np.float64) * 10**decimals
    if np.abs(scaled_D).max() > 2**52:
        return bytes(4 * value_D.size)
    zigzag_D = np.diff(np.rint(scaled_D).astype(np.int64), prepend=0)
    zigzag_D = np.where(zigzag_D < 0, -2 * zigzag_D - 1, 2 * zigzag_D)
    rest_G = zigzag_D[:, None] >> (5 * np.arange(11))
    is_sent_G = rest_G > 0
    is_sent_G[:, 0] = True
    more_G = np.append(is_sent_G[:, 1:], np.zeros((value_D.size, 1), np.bool_), axis=1)
    group = ((rest_G & 31) | 32 * more_G)[is_sent_G]
    return np.packbits((group[:, None] >> np.arange(6)) & 1, bitorder="little").tobytes()


def exponent_of(value_K: NDArray[np.float32]) -> int:
    """The exponent that brings the largest magnitude into [2^14, 2^15)."""
    peak = float(np.abs(value_K).max())
    return max(-EXPONENT_LIMIT, min(EXPONENT_LIMIT, math.frexp(peak)[1] - 15)) if peak else 0


def halves(value_K: NDArray[np.float32], exponent: int) -> NDArray[np.uint16]:
    """float16 bit patterns of value / 2^exponent, to the nearest, ties away from zero."""
    scaled = value_K * np.float32(math.ldexp(1.0, -exponent))
    if exponent == EXPONENT_LIMIT:
        scaled = np.clip(scaled, np.float32(-32752), np.float32(32752))
    bits = (scaled * np.float32(2.0**-112)).view(np.uint32) + np.uint32(0x1000)
    return (((bits >> 13) & 0x7FFF) | ((bits >> 16) & 0x8000)).astype(np.uint16)


def floats(half_K: NDArray[np.uint16], exponent: int) -> NDArray[np.float32]:
    """float32 values of float16 bit patterns times 2^exponent."""
    bits_K = ((half_K & 0x7FFF).astype(np.uint32) << 13) | (
        (half_K & 0x8000).astype(np.uint32) << 16
    )
    with np.errstate(over="ignore"):
        return bits_K.view(np.float32) * np.float32(2.0**112) * np.float32(2.0**exponent)


def added(
    target_D: NDArray[np.float32],
    index_K: NDArray[np.intp] | None,
    value_K: NDArray[np.float32],
    weight: np.float32,
) -> NDArray[np.float32]:
    """target + weight * value, in float32; each product is rounded before it is added."""
    sum_D = target_D.copy()
    if index_K is None:
        sum_D += value_K * weight
    else:
        np.add.at(sum_D, index_K, value_K * weight)
    return sum_D


def best_positions(
    index_K: NDArray[np.intp], size: int, indices: IndexCodec
) -> tuple[Positions, NDArray[np.uint8]]:
    """The chosen scheme, and its bytes."""
    if indices is IndexCodec.FAST:
        scheme = cheapest_positions(index_K.size, size)
        return scheme, encode_positions(scheme, index_K, size)
    is_run = index_K[-1] - index_K[0] + 1 == index_K.size
    coded = {
        scheme: encode_positions(scheme, index_K, size)
        for scheme in list(Positions)[1 : 7 if is_run else 6]
    }
    scheme = min(coded, key=lambda each: coded[each].size)
    return scheme, coded[scheme]


def encode_positions(scheme: Positions, index_K: NDArray[np.intp], size: int) -> NDArray[np.uint8]:
    """Bytes of the positions, by a scheme other than `ALL`."""
    left_out_K = np.diff(index_K, prepend=-1) - 1
    match scheme:
        case Positions.BITMAP:
            bit_D = np.zeros(size, np.bool_)
            bit_D[index_K] = True
            return np.packbits(bit_D, bitorder="little")
        case Positions.BLOCK:
            narrow_K = index_K.astype(np.uint32)
            block_K = narrow_K // np.uint32(BLOCK)
            count = np.bincount(block_K, minlength=-(-size // BLOCK)).astype(np.uint8)
            place_K = (narrow_K - block_K * np.uint32(BLOCK)).astype(np.uint8)
            return np.concatenate([count, place_K])
        case Positions.VARINT:
            return varints(left_out_K)
        case Positions.RICE:
            left_out = size - index_K.size
            guess = min(range(32), key=lambda r: index_K.size * (1 + r) + (left_out >> r))
            near = [r for r in (guess - 1, guess, guess + 1) if 0 <= r < 32]
            bits = {r: int((left_out_K >> r).sum()) + index_K.size * (1 + r) for r in near}
            return rice(left_out_K, min(near, key=lambda r: bits[r]))
        case Positions.RANGE:
            return np.array(index_K[:1], np.uint32).view(np.uint8)
    return _encode_gaps(index_K).view(np.uint8)


def varints(left_out_K: NDArray[np.intp]) -> NDArray[np.uint8]:
    """7 bits a byte; the top bit is set if more follow."""
    rest_B = left_out_K[:, None] >> (7 * np.arange(5))
    is_sent_B = rest_B > 0
    is_sent_B[:, 0] = True
    more_B = np.append(is_sent_B[:, 1:], np.zeros((left_out_K.size, 1), np.bool_), axis=1)
    return ((rest_B & 127) | 128 * more_B)[is_sent_B].astype(np.uint8)


def rice(left_out_K: NDArray[np.intp], r: int) -> NDArray[np.uint8]:
    """r, then for each gap that number of zeros, a one, and r bits."""
    high_K = left_out_K >> r
    end_K = np.cumsum(high_K + 1 + r)
    bits = np.zeros(int(end_K[-1]), np.uint8)
    bits[end_K - r - 1] = 1
    for place in range(r):
        bits[end_K - r + place] = (left_out_K >> place) & 1
    return np.append(np.uint8(r), np.packbits(bits, bitorder="little")).astype(np.uint8)


def _encode_gaps(index_K: NDArray[np.intp]) -> NDArray[np.uint16]:
    left_out_K = np.diff(index_K, prepend=-1) - 1
    skips_K, rest_K = np.divmod(left_out_K, SKIP)
    if not skips_K.any():
        return rest_K.astype(np.uint16)
    place_K = np.arange(index_K.size) + np.cumsum(skips_K)
    coded = np.full(int(place_K[-1]) + 1, SKIP, np.uint16)
    coded[place_K] = rest_K
    return coded
