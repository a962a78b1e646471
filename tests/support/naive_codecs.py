"""The payloads' arithmetic in plain NumPy, one step after the other: what the codecs' compiled
loops are held against, and how tests write payloads of positions of their choice.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import numpy as np

from dlion_worker.codecs import HEADER_BYTES, ValueCodec, coded_bytes, encode_whole
from dlion_worker.codecs.payload import cheapest_positions
from dlion_worker.codecs.positions import BLOCK, SKIP, Positions
from dlion_worker.codecs.values import EXPONENT_LIMIT

if TYPE_CHECKING:
    from numpy.typing import NDArray


def encode_sparse(
    index_K: NDArray[np.intp], value_K: NDArray[np.float32], size: int, codec: ValueCodec
) -> bytes:
    """Some entries (at least one), as `encode_selected` writes them."""
    kept = index_K.size
    if coded_bytes(kept, size, codec) == HEADER_BYTES + size * codec.bytes_each:
        whole_D = np.zeros(size, np.float32)
        whole_D[index_K] = value_K
        return bytes(encode_whole(whole_D, codec))
    scheme = cheapest_positions(kept, size)
    exponent, values, number = 0, value_K.astype(np.float32).tobytes(), 1
    if codec is ValueCodec.FLOAT16:
        exponent = exponent_of(value_K)
        values, number = halves(value_K, exponent).tobytes(), 2
    header = struct.pack("<BBBBhHII", 1, number, scheme, 0, exponent, 0, size, kept)
    return header + values + encode_positions(scheme, index_K, size).tobytes()


def exponent_of(value_K: NDArray[np.float32]) -> int:
    """Brings the largest magnitude into [2^14, 2^15)."""
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
    """target + weight * value, in float32, each product rounded before it is added."""
    sum_D = target_D.copy()
    if index_K is None:
        sum_D += value_K * weight
    else:
        np.add.at(sum_D, index_K, value_K * weight)
    return sum_D


def encode_positions(scheme: Positions, index_K: NDArray[np.intp], size: int) -> NDArray[np.uint8]:
    """Bytes of the positions, by a scheme other than `ALL`."""
    if scheme is Positions.BITMAP:
        bit_D = np.zeros(size, np.bool_)
        bit_D[index_K] = True
        return np.packbits(bit_D, bitorder="little")
    if scheme is Positions.BLOCK:
        narrow_K = index_K.astype(np.uint32)
        block_K = narrow_K // np.uint32(BLOCK)
        count = np.bincount(block_K, minlength=-(-size // BLOCK)).astype(np.uint8)
        place_K = (narrow_K - block_K * np.uint32(BLOCK)).astype(np.uint8)
        return np.concatenate([count, place_K])
    return _encode_gaps(index_K).view(np.uint8)


def _encode_gaps(index_K: NDArray[np.intp]) -> NDArray[np.uint16]:
    left_out_K = np.diff(index_K, prepend=-1) - 1
    skips_K, rest_K = np.divmod(left_out_K, SKIP)
    if not skips_K.any():
        return rest_K.astype(np.uint16)
    place_K = np.arange(index_K.size) + np.cumsum(skips_K)
    coded = np.full(int(place_K[-1]) + 1, SKIP, np.uint16)
    coded[place_K] = rest_K
    return coded
