"""Polyline: values rounded to a number of decimals, encoded as differences.

Called by `payload` and by policies that send weights this way. A difference is zig-zag encoded (0,
-1, 1, -2, ... as 0, 1, 2, 3, ...) and cut into groups of 5 bits, lowest first. A sixth bit is set
if another group follows. Four groups are packed in three bytes; the published text form uses a
printable character (8 bits) per group. Neighbours of similar size are short. The number of bytes is
known only after encoding.

Decoding accepts exactly the output of encoding, in one pass bounded by the payload's length.

Source: Google's encoded polyline algorithm, as FedAT codes its weights (Chai et al., SC 2021: round
to d decimals, difference, zig-zag, 5-bit groups); binary packing and the bounds are ours. Legend: D
values.
"""

from typing import Any, Final

import numpy as np
from numba import types
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_core.codecs.values import NotFiniteError, require_finite
from dlion_core.compiling import compiled, inlined, read_only

Payload = bytes | memoryview


MAX_DECIMALS: Final = 9
"""A float32 times 10^9 is exact in float64, and this exceeds float32's precision."""

_LARGEST_ROUNDED: Final = 2**52
_MAX_GROUPS: Final = 11  # a difference of two of those, zig-zag coded, has at most 55 bits
_BAD_LENGTH, _BAD_GROUPS, _TOO_LARGE, _BAD_PADDING = 1, 2, 3, 4
_REASONS: Final = {
    _BAD_LENGTH: "its groups do not end with its bytes",
    _BAD_GROUPS: f"a difference of more than {_MAX_GROUPS} groups, or with a redundant one",
    _TOO_LARGE: f"a value beyond {_LARGEST_ROUNDED} units of the last decimal",
    _BAD_PADDING: "bits set after its last group",
}


def encode_polyline(value_D: NDArray[np.float32], decimals: int) -> bytes:
    """Encode every value, rounded to that many decimals (0 to `MAX_DECIMALS`), ties to even.

    Decoded values differ by at most 10^-decimals / 2, plus half a unit in the last place of a
    float32. Raises NotFiniteError if a value is not finite or beyond 2^52 / 10^decimals, and
    ValueError for other decimals.

    >>> encode_polyline(np.array([0.5, 0.52, -0.52], np.float32), 2).hex()
    'e440bc06'
    """
    scale = _scale(decimals)
    groups = int(_count_groups(value_D, scale))
    if groups < 0:
        require_finite(value_D, "values to send")
        raise NotFiniteError(
            f"values to send: up to {float(np.abs(value_D).max()):.3g}, too large for {decimals}"
            f" decimals, which carry {_LARGEST_ROUNDED / scale:.3g}. Lower the learning rate, or"
            " send fewer decimals"
        )
    coded = np.zeros(_bytes_of(groups), np.uint8)
    _write_groups(value_D, scale, coded)
    return coded.tobytes()


def decode_polyline(payload: Payload, size: int, decimals: int) -> NDArray[np.float32]:
    """Decode `size` finite values. Raises ContractError if they are not so encoded, and ValueError
    if the decimals are out of bounds."""
    scale = _scale(decimals)
    if not _bytes_of(size) <= len(payload) <= max_polyline_bytes(size):
        raise ContractError(
            f"polyline of {len(payload)} bytes; allowed for {size} values: "
            f"{_bytes_of(size)} to {max_polyline_bytes(size)}"
        )
    value_D = np.empty(size, np.float32)
    wrong = int(_read_groups(np.frombuffer(payload, np.uint8), scale, value_D))
    if wrong:
        raise ContractError(f"polyline of {size} values: {_REASONS[wrong]}")
    return value_D


def max_polyline_bytes(size: int) -> int:
    """Return the maximum length for that many values.

    >>> max_polyline_bytes(1000)
    8250
    """
    return _bytes_of(size * _MAX_GROUPS)


def _scale(decimals: int) -> float:
    if not 0 <= decimals <= MAX_DECIMALS:
        raise ValueError(f"polyline of {decimals} decimals; allowed: 0 to {MAX_DECIMALS}")
    return float(10**decimals)


def _bytes_of(groups: int) -> int:
    return -(-6 * groups // 8)


@inlined
def _zigzag(difference: Any) -> Any:
    return np.uint64((difference << np.int64(1)) ^ (difference >> np.int64(63)))


@compiled(types.int64(read_only(types.float32), types.float64))
def _count_groups(value_D: Any, scale: float) -> int:
    """Number of groups of 5 bits; -1 if a value is not finite or too large."""
    before, groups = np.int64(0), 0
    for i in range(value_D.size):
        scaled = np.float64(value_D[i]) * scale
        if not abs(scaled) <= _LARGEST_ROUNDED:
            return -1
        rounded = np.int64(np.rint(scaled))
        rest = _zigzag(rounded - before)
        before = rounded
        groups += 1
        while rest >= np.uint64(32):
            rest >>= np.uint64(5)
            groups += 1
    return groups


@compiled(types.void(read_only(types.float32), types.float64, types.uint8[::1]))
def _write_groups(value_D: Any, scale: float, coded: Any) -> None:
    before, bits, waiting, at = np.int64(0), np.uint64(0), np.uint64(0), 0
    for i in range(value_D.size):
        rounded = np.int64(np.rint(np.float64(value_D[i]) * scale))
        rest = _zigzag(rounded - before)
        before = rounded
        more = True
        while more:
            group = rest & np.uint64(31)
            rest >>= np.uint64(5)
            more = rest != np.uint64(0)
            if more:
                group |= np.uint64(32)
            bits |= group << waiting
            waiting += np.uint64(6)
            while waiting >= np.uint64(8):
                coded[at] = np.uint8(bits & np.uint64(255))
                at += 1
                bits >>= np.uint64(8)
                waiting -= np.uint64(8)
    if waiting:
        coded[at] = np.uint8(bits & np.uint64(255))


@compiled(types.int64(read_only(types.uint8), types.float64, types.float32[::1]))
def _read_groups(coded: Any, scale: float, value_D: Any) -> int:
    """Fill the values; return 0, or the number of the error."""
    before, bits, waiting, at = np.int64(0), np.uint64(0), np.uint64(0), 0
    for i in range(value_D.size):
        zigzag, shift, more = np.uint64(0), np.uint64(0), True
        while more:
            if waiting < np.uint64(6):
                if at == coded.size:
                    return _BAD_LENGTH
                bits |= np.uint64(coded[at]) << waiting
                at += 1
                waiting += np.uint64(8)
            group = bits & np.uint64(31)
            more = (bits & np.uint64(32)) != np.uint64(0)
            bits >>= np.uint64(6)
            waiting -= np.uint64(6)
            zigzag |= group << shift
            shift += np.uint64(5)
            if more and shift == np.uint64(5 * _MAX_GROUPS):
                return _BAD_GROUPS
            if not more and group == np.uint64(0) and shift > np.uint64(5):
                return _BAD_GROUPS
        before += np.int64(zigzag >> np.uint64(1)) ^ -np.int64(zigzag & np.uint64(1))
        if abs(before) > _LARGEST_ROUNDED:
            return _TOO_LARGE
        value_D[i] = np.float32(np.float64(before) / scale)
    if at != coded.size:
        return _BAD_LENGTH
    return _BAD_PADDING if bits else 0
