"""Positions of kept entries as bytes: a bitmap, places within blocks, three encodings of gaps, or
one range.

Called by `payload`. The maximum size of a scheme follows from the number kept and D alone, so a
policy knows the cost of a selection in advance; gaps may be smaller. Decoding accepts exactly the
output of encoding: strictly increasing positions below D.

Legend: D entries of the flat vector, K kept, B blocks.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_core.codecs import gap_codes, kernels
from dlion_core.codecs.gap_codes import SKIP

BLOCK = 255
"""Entries per block, so that both a place and a count fit one byte."""

_BEGIN_BYTES = 4


class Positions(IntEnum):
    """Encoding of positions. The numbers are wire values."""

    ALL = 0  # every entry, in order: nothing is written
    BITMAP = 1  # one bit for each of D
    BLOCK = 2  # a count for each block of 255, then a byte for each kept entry
    GAP = 3  # 16 bits per kept entry: number of entries left out before it
    VARINT = 4  # the same, in 7 bits or more
    RICE = 5  # the same, by Golomb-Rice codes
    RANGE = 6  # one run: where it begins, in 32 bits


def positions_bytes(scheme: Positions, kept: int, size: int) -> int:
    """Return the bytes of `kept` positions of `size`; a maximum for `GAP`, `VARINT` and `RICE`.

    >>> [positions_bytes(scheme, 10, 1000) for scheme in Positions]
    [0, 125, 14, 20, 17, 12, 4]
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
        case Positions.VARINT:
            return gap_codes.varint_bytes(kept, size)
        case Positions.RICE:
            return gap_codes.rice_bytes(kept, size)
        case Positions.RANGE:
            return _BEGIN_BYTES


@dataclass(frozen=True)
class CodedPositions:
    """Received and checked positions, decoded when values are added.

    Varints and Golomb-Rice codes are already converted to 16-bit gaps.
    """

    scheme: Positions
    coded: NDArray[np.uint8]
    size: int

    def index_K(self, count: int) -> NDArray[np.intp]:  # noqa: N802 - an array of K
        """Return the `count` positions, ascending."""
        match self.scheme:
            case Positions.BITMAP:
                bits_D = np.unpackbits(self.coded, count=self.size, bitorder="little")
                return np.flatnonzero(bits_D.view(np.bool_))
            case Positions.BLOCK:
                count_B, place_K = _of_blocks(self.coded, self.size)
                return np.repeat(np.arange(count_B.size) * BLOCK, count_B) + place_K
            case Positions.RANGE:
                begin = _begin_of(self.coded)
                return np.arange(begin, begin + count)
        index_K = np.empty(count, np.intp)
        kernels.places_after(self.coded.view(np.uint16), index_K)
        return index_K

    def add(
        self, value_K: NDArray[np.float32], weight: np.float32, target_D: NDArray[np.float32]
    ) -> None:
        """target += weight * value at the positions, in float32; `target_D` has `size` entries."""
        if self.scheme is Positions.BITMAP:
            word = np.zeros(-(-self.coded.size // 8), np.uint64)
            word.view(np.uint8)[: self.coded.size] = self.coded
            kernels.add_bitmap(word, value_K, weight, target_D)
        elif self.scheme is Positions.BLOCK:
            count_B, place_K = _of_blocks(self.coded, self.size)
            kernels.add_blocks(count_B, place_K, value_K, weight, target_D)
        elif self.scheme is Positions.RANGE:
            begin = _begin_of(self.coded)
            kernels.add_whole(value_K, weight, target_D[begin : begin + value_K.size])
        else:
            kernels.add_gaps(self.coded.view(np.uint16), value_K, weight, target_D)


def check_positions(
    scheme: Positions, coded: NDArray[np.uint8], kept: int, size: int
) -> CodedPositions:
    """Check untrusted positions of a scheme other than `ALL`. Raises ContractError unless they are
    `kept`, strictly increasing, below `size`, and of the right length."""
    match scheme:
        case Positions.BITMAP:
            _check_bitmap(coded, kept, size)
        case Positions.BLOCK:
            _check_blocks(coded, kept, size)
        case Positions.GAP:
            _check_gaps(coded, kept, size)
        case Positions.RANGE:
            _check_range(coded, kept, size)
        case _:
            return CodedPositions(Positions.GAP, _as_gaps(scheme, coded, kept, size), size)
    return CodedPositions(scheme, coded, size)


def range_positions(begin: int) -> NDArray[np.uint8]:
    """Encode the begin of a range."""
    return np.array([begin], np.uint32).view(np.uint8)


def _begin_of(coded: NDArray[np.uint8]) -> int:
    return int(coded.view(np.uint32)[0])


def _check_range(coded: NDArray[np.uint8], kept: int, size: int) -> None:
    _require_length(coded, _BEGIN_BYTES)
    if (begin := _begin_of(coded)) + kept > size:
        raise ContractError(f"run of {kept} entries from {begin}; the model has {size}")


def _as_gaps(
    scheme: Positions, coded: NDArray[np.uint8], kept: int, size: int
) -> NDArray[np.uint8]:
    most = positions_bytes(scheme, kept, size)
    if coded.size > most:
        msg = f"positions: {coded.size} bytes; allowed for {kept} of {size}: at most {most}"
        raise ContractError(msg)
    of = gap_codes.gaps_from_rice if scheme is Positions.RICE else gap_codes.gaps_from_varints
    return of(coded, kept, size).view(np.uint8)


def _check_bitmap(coded: NDArray[np.uint8], kept: int, size: int) -> None:
    _require_length(coded, positions_bytes(Positions.BITMAP, kept, size))
    if size % 8 and int(coded[-1]) >> (size % 8):
        raise ContractError(f"bitmap: bits set beyond the {size} entries of the model")
    _require_count(int(np.bitwise_count(coded).sum(dtype=np.int64)), kept)


def _check_blocks(coded: NDArray[np.uint8], kept: int, size: int) -> None:
    _require_length(coded, positions_bytes(Positions.BLOCK, kept, size))
    count_B, place_K = _of_blocks(coded, size)
    _require_count(int(count_B.sum(dtype=np.int64)), kept)
    if not kernels.blocks_rise(count_B, place_K, size):
        msg = f"block positions: not strictly rising, each below {BLOCK}, all below {size}"
        raise ContractError(msg)


def _check_gaps(coded: NDArray[np.uint8], kept: int, size: int) -> None:
    most = positions_bytes(Positions.GAP, kept, size)
    if coded.size % 2 or not 2 * kept <= coded.size <= most:
        msg = f"gap positions: {coded.size} bytes; allowed: an even number, {2 * kept} to {most}"
        raise ContractError(msg)
    gap = coded.view(np.uint16)
    _require_count(int(np.count_nonzero(gap != SKIP)), kept)
    if gap[-1] == SKIP:
        raise ContractError("gap positions: last gap is a skip; allowed: a kept entry")
    if (last := int(gap.sum(dtype=np.int64)) + kept - 1) >= size:
        raise ContractError(f"gap positions: last one {last}; allowed: below {size}")


def _of_blocks(coded: NDArray[np.uint8], size: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Counts per block, and places."""
    block_count = -(-size // BLOCK)
    return coded[:block_count], coded[block_count:]


def _require_length(coded: NDArray[np.uint8], expected: int) -> None:
    if coded.size != expected:
        raise ContractError(f"positions: {coded.size} bytes; allowed: exactly {expected}")


def _require_count(actual: int, kept: int) -> None:
    if actual != kept:
        raise ContractError(f"positions: {actual} entries; the header has {kept}")
