"""Positions of kept entries as bytes: a bitmap, bytes within blocks, or 16-bit gaps.

Called by `payload`. Each scheme's size follows from the number kept and D alone (`GAP` may be a
few bytes smaller), so that a policy knows what a selection costs before it makes it. Decoding
accepts exactly what encoding writes: strictly rising positions below D.

Legend: D entries of the flat vector, K kept.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError

Index = NDArray[np.intp]
"""Positions in the flat vector, strictly rising, shape [K]."""

BLOCK = 255
"""Entries in a block, so that both a place in it and its count fit one byte."""

SKIP = 0xFFFF
"""As a gap: 65,535 entries on, and none kept there."""


class Positions(IntEnum):
    """How positions are coded; the numbers are the wire's."""

    ALL = 0  # every entry, in order: nothing is written
    BITMAP = 1  # one bit for each of D
    BLOCK = 2  # a count for each block of 255, then a byte for each kept entry
    GAP = 3  # 16 bits for each kept entry: how many were left out before it


def positions_bytes(scheme: Positions, kept: int, size: int) -> int:
    """Bytes that `kept` positions of `size` take; for `GAP` at most.

    >>> [positions_bytes(scheme, 10, 1000) for scheme in Positions]
    [0, 125, 14, 20]
    """
    match scheme:
        case Positions.ALL:
            return 0
        case Positions.BITMAP:
            return (size + 7) // 8
        case Positions.BLOCK:
            return -(-size // BLOCK) + kept
        case Positions.GAP:
            return 2 * (kept + size // SKIP)


def encode_positions(scheme: Positions, index_K: Index, size: int) -> NDArray[np.uint8]:
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


def _encode_gaps(index_K: Index) -> NDArray[np.uint16]:
    left_out_K = np.diff(index_K, prepend=-1) - 1
    skips_K, rest_K = np.divmod(left_out_K, SKIP)
    if not skips_K.any():
        return rest_K.astype(np.uint16)
    place_K = np.arange(index_K.size) + np.cumsum(skips_K)
    coded = np.full(int(place_K[-1]) + 1, SKIP, np.uint16)
    coded[place_K] = rest_K
    return coded


def decode_positions(scheme: Positions, coded: NDArray[np.uint8], kept: int, size: int) -> Index:
    """Positions from bytes, by a scheme other than `ALL`.

    Raises:
        ContractError: wrong length, wrong number, not strictly rising, or not below `size`.
    """
    if scheme is Positions.BITMAP:
        return _decode_bitmap(coded, kept, size)
    if scheme is Positions.BLOCK:
        return _decode_blocks(coded, kept, size)
    return _decode_gaps(coded, kept, size)


def _decode_bitmap(coded: NDArray[np.uint8], kept: int, size: int) -> Index:
    _require_length(coded, positions_bytes(Positions.BITMAP, kept, size))
    bit_D = np.unpackbits(coded, bitorder="little")
    if bit_D[size:].any():
        raise ContractError(f"bitmap: bits set beyond the {size} entries of the model")
    index_K = np.flatnonzero(bit_D.view(np.bool_))
    _require_count(index_K.size, kept)
    return index_K


def _decode_blocks(coded: NDArray[np.uint8], kept: int, size: int) -> Index:
    _require_length(coded, positions_bytes(Positions.BLOCK, kept, size))
    count, place_K = np.split(coded, [-(-size // BLOCK)])
    _require_count(int(count.sum(dtype=np.int64)), kept)
    if int(place_K.max()) >= BLOCK:
        raise ContractError(f"block positions: place {BLOCK} in a block of {BLOCK}")
    index_K = np.repeat(np.arange(count.size, dtype=np.intp) * BLOCK, count)
    index_K += place_K
    if int(index_K[-1]) >= size or not (index_K[1:] > index_K[:-1]).all():
        raise ContractError(f"block positions: not strictly rising below {size}")
    return index_K


def _decode_gaps(coded: NDArray[np.uint8], kept: int, size: int) -> Index:
    most = positions_bytes(Positions.GAP, kept, size)
    if coded.size % 2 or not 2 * kept <= coded.size <= most:
        msg = f"gap positions: {coded.size} bytes; allowed: an even number, {2 * kept} to {most}"
        raise ContractError(msg)
    gap = np.frombuffer(coded.tobytes(), np.uint16)
    is_kept = gap != SKIP
    _require_count(int(np.count_nonzero(is_kept)), kept)
    if not is_kept[-1]:
        raise ContractError("gap positions: they end with a skip; allowed: a kept entry")
    end = np.cumsum(gap, dtype=np.intp) + np.cumsum(is_kept, dtype=np.intp) - 1
    index_K: Index = end[is_kept]
    if int(index_K[-1]) >= size:
        msg = f"gap positions: last one {int(index_K[-1])}; allowed: below {size}"
        raise ContractError(msg)
    return index_K


def _require_length(coded: NDArray[np.uint8], expected: int) -> None:
    if coded.size != expected:
        raise ContractError(f"positions: {coded.size} bytes; allowed: exactly {expected}")


def _require_count(found: int, kept: int) -> None:
    if found != kept:
        raise ContractError(f"positions: {found} entries; the header says {kept}")
