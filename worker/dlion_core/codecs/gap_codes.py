"""Gaps between kept entries as varints or Golomb-Rice codes: fewer bytes, more computation.

Called by `positions`. Both encode the gaps of `Positions.GAP` (number of entries left out before
each kept one; 65,535 is a skip), and are converted to those on arrival.

Varint: 7 bits per byte, lowest first; the top bit is set if more follow. Golomb-Rice with parameter
r: the upper bits of a gap as that many zeros and a one, then its r lower bits, lowest first. A
leading byte holds r. If each entry is kept with equal probability, gaps are geometric, and this
code is within a few hundredths of a bit of the optimum.

Decoding accepts only canonical codes that end with the bytes. Its time is bounded by their number,
which `positions` bounds by D.

Source: Golomb, Run-length encodings, 1966; Rice and Plaunt, 1971; varints as in Protocol Buffers.
"""

from typing import Any, Final

import numpy as np
from numba import types
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_core.compiling import compiled, inlined, read_only

SKIP: Final = 0xFFFF
"""Gap value: 65,535 entries ahead, without a kept entry there."""

MAX_RICE_PARAMETER: Final = 31
_GAPS, _BYTES = read_only(types.uint16), read_only(types.uint8)
_REFUSED: Final = "positions: codes of {} that encoding does not write; allowed: {} below {}"


def rice_parameter(kept: int, size: int) -> int:
    """Return the r with the shortest codes, from `kept` and `size` only.

    >>> [rice_parameter(kept, 100_000) for kept in (10, 1000, 30_000, 100_000)]
    [13, 6, 1, 0]
    """
    left_out = size - kept
    # The upper bits are worth one more low bit while they shrink by `kept` or more.
    r = 0
    while r < MAX_RICE_PARAMETER and left_out - (left_out >> 1) > kept:
        r, left_out = r + 1, left_out >> 1
    return r


def rice_bytes(kept: int, size: int) -> int:
    """Return the maximum bytes of the codes of `kept` positions of `size`, including r."""
    r = rice_parameter(kept, size)
    return 1 + (kept * (1 + r) + ((size - kept) >> r) + 7) // 8


def varint_bytes(kept: int, size: int) -> int:
    """Return the maximum bytes of varints of `kept` positions of `size`."""
    left_out = size - kept
    return kept + sum(min(kept, left_out >> bits) for bits in (7, 14, 21, 28))


class GapSizes:
    """Encoded sizes of the gaps to send."""

    def __init__(self, gap: NDArray[np.uint16], kept: int, size: int) -> None:
        self._gap = gap
        guess = rice_parameter(kept, size)
        near = [r for r in (guess - 1, guess, guess + 1) if 0 <= r <= MAX_RICE_PARAMETER]
        high_bits = np.zeros(len(near), np.int64)
        sizes = np.zeros(3, np.int64)
        _measure(gap, np.array(near, np.int64), high_bits, sizes)
        bits = [int(high) + kept * (1 + r) for r, high in zip(near, high_bits, strict=True)]
        self._rice_bits, self._r = min(zip(bits, near, strict=True))
        self.varint_bytes = int(sizes[0])
        self.begin: int | None = int(sizes[2]) if sizes[1] == 0 else None
        """Begin of the entries if they are one contiguous range."""

    @property
    def rice_bytes(self) -> int:
        """Bytes with the best of three parameters; never more than the function of that name."""
        return 1 + (self._rice_bits + 7) // 8

    def varints(self) -> NDArray[np.uint8]:
        coded = np.empty(self.varint_bytes, np.uint8)
        _write_varints(self._gap, coded)
        return coded

    def rice(self) -> NDArray[np.uint8]:
        coded = np.zeros(self.rice_bytes, np.uint8)
        coded[0] = self._r
        _write_rice(self._gap, self._r, coded[1:])
        return coded


def gaps_from_varints(coded: NDArray[np.uint8], kept: int, size: int) -> NDArray[np.uint16]:
    """Decode `GapSizes.varints` of `kept` positions below `size`. Raises ContractError."""
    gap = np.empty(kept + size // SKIP, np.uint16)
    gap_count = int(_read_varints(coded, kept, size, gap))
    if gap_count < 0:
        raise ContractError(_REFUSED.format("varint", kept, size))
    return gap[:gap_count]


def gaps_from_rice(coded: NDArray[np.uint8], kept: int, size: int) -> NDArray[np.uint16]:
    """Decode `GapSizes.rice` of `kept` positions below `size`. Raises ContractError."""
    if coded.size < 2 or int(coded[0]) > MAX_RICE_PARAMETER:
        raise ContractError("positions: Golomb-Rice codes without a parameter of 0 to 31")
    gap = np.empty(kept + size // SKIP, np.uint16)
    gap_count = int(_read_rice(coded[1:], int(coded[0]), kept, size, gap))
    if gap_count < 0:
        raise ContractError(_REFUSED.format("Golomb-Rice", kept, size))
    return gap[:gap_count]


# ---- kernels -------------------------------------------------------------------------------------


@compiled(types.void(_GAPS, read_only(types.int64), types.int64[::1], types.int64[::1]))
def _measure(gap: Any, parameter: Any, high_bits: Any, sizes: Any) -> None:
    """Sum the gaps' upper bits for each r, their bytes as varints, and what the first one and the
    others leave out."""
    left_out, gap_count = np.int64(0), 0
    for one in gap:
        left_out += np.int64(one)
        if one == SKIP:
            continue
        for i in range(parameter.size):
            high_bits[i] += left_out >> parameter[i]
        rest = left_out >> 7
        sizes[0] += 1
        while rest:
            sizes[0] += 1
            rest >>= 7
        sizes[1 if gap_count else 2] += left_out
        left_out, gap_count = np.int64(0), gap_count + 1


@compiled(types.void(_GAPS, types.uint8[::1]))
def _write_varints(gap: Any, coded: Any) -> None:
    left_out, at = np.int64(0), 0
    for one in gap:
        left_out += np.int64(one)
        if one != SKIP:
            while left_out >= 128:
                coded[at] = np.uint8((left_out & 127) | 128)
                at += 1
                left_out >>= 7
            coded[at] = np.uint8(left_out)
            at += 1
            left_out = np.int64(0)


@compiled(types.void(_GAPS, types.int64, types.uint8[::1]))
def _write_rice(gap: Any, r: int, coded: Any) -> None:
    """Write into zeros."""
    left_out, bit = np.int64(0), np.int64(0)
    for one in gap:
        left_out += np.int64(one)
        if one != SKIP:
            bit += left_out >> r
            code = ((left_out & ((np.int64(1) << r) - 1)) << 1) | 1
            code <<= bit & 7  # at most 39 bits in all
            at = bit >> 3
            while code:
                coded[at] |= np.uint8(code & 255)
                at += 1
                code >>= 8
            bit += 1 + r
            left_out = np.int64(0)


@inlined
def _put(left_out: Any, gap: Any, at: Any) -> Any:
    """Write a gap with its skips; return the next position."""
    while left_out >= SKIP:
        gap[at] = SKIP
        at += 1
        left_out -= SKIP
    gap[at] = left_out
    return at + 1


@compiled(types.int64(_BYTES, types.int64, types.int64, types.uint16[::1]))
def _read_varints(coded: Any, kept: int, size: int, gap: Any) -> int:
    """Return the number of gaps written; -1 if the bytes are invalid."""
    at, gaps, after = 0, 0, np.int64(0)
    for _ in range(kept):
        left_out, shift = np.int64(0), np.int64(0)
        more: Any = True
        while more:
            if at == coded.size or shift > 28:
                return -1
            byte = np.int64(coded[at])
            at += 1
            if byte == 0 and shift:
                return -1  # a redundant byte
            left_out |= (byte & 127) << shift
            shift += 7
            more = byte >= 128
        if after + left_out >= size:
            return -1
        after += left_out + 1
        gaps = _put(left_out, gap, gaps)
    return gaps if at == coded.size else -1


@compiled(types.int64(_BYTES, types.int64, types.int64, types.int64, types.uint16[::1]))
def _read_rice(coded: Any, r: int, kept: int, size: int, gap: Any) -> int:
    """Return the number of gaps written; -1 if the bytes are invalid."""
    bits, waiting = np.uint64(0), np.int64(0)
    at, gaps, after = 0, 0, np.int64(0)
    one, most = np.uint64(1), size >> r
    low_bits = np.uint64((np.uint64(1) << np.uint64(r)) - np.uint64(1))
    for _ in range(kept):
        high = np.int64(0)
        while bits == np.uint64(0):
            high += waiting
            if at == coded.size or high > most:
                return -1
            bits, waiting = np.uint64(coded[at]), np.int64(8)
            at += 1
        while not bits & one:
            bits >>= one
            waiting -= 1
            high += 1
        bits >>= one
        waiting -= 1
        while waiting < r:
            if at == coded.size:
                return -1
            bits |= np.uint64(coded[at]) << np.uint64(waiting)
            at += 1
            waiting += 8
        left_out = (high << r) | np.int64(bits & low_bits)
        bits >>= np.uint64(r)
        waiting -= r
        if high > most or after + left_out >= size:
            return -1
        after += left_out + 1
        gaps = _put(left_out, gap, gaps)
    return gaps if at == coded.size and waiting < 8 and bits == np.uint64(0) else -1
