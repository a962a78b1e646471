"""Float values as bytes: float32 as it is, float16 with one power-of-two scale per message.

Called by `payload`. Owns rounding and its bound, and the check that what arrives is a number.
NumPy's own float16 casts run entry by entry on processors without AVX-512 (10 ms a million where
subnormals occur, 3 ms at best), so both directions are done here on the bit patterns (about 1 ms).

Legend: K values.
"""

from __future__ import annotations

import math
import sys
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from dlion_api.errors import ContractError

if TYPE_CHECKING:
    from numpy.typing import NDArray

if sys.byteorder != "little":
    msg = "dlion_worker.codecs reads and writes arrays in place: it needs a little-endian machine"
    raise ImportError(msg)

EXPONENT_LIMIT = 113
"""float32's largest finite value is just below 2^128 = 2^15 * 2^113."""

_HALF_BIAS = 112  # float32's exponent bias less float16's: 127 - 15
_HALF_INFINITY = 0x7C00
_CHUNK = 1 << 15  # entries coded at a time: intermediate values stay in the cache
_LARGEST_BELOW_TOP = np.float32(32752)  # the largest float16 below 2^15


class ValueCodec(StrEnum):
    """How values travel; the manifest's `exchange.codec`."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"

    @property
    def bytes_each(self) -> int:
        """Bytes of one value."""
        return 4 if self is ValueCodec.FLOAT32 else 2


def require_finite(value_K: NDArray[np.float32], what: str) -> None:
    """Passes finite values; called before anything is sent.

    Raises:
        ValueError: an entry is NaN or infinite. A retry gives the same.
    """
    if not np.isfinite(value_K).all():
        wrong = int(np.count_nonzero(~np.isfinite(value_K)))
        msg = (
            f"{what}: {wrong} of {value_K.size} entries are NaN or infinite; only finite numbers "
            "can be sent. Lower the learning rate, or look for bad samples in the data"
        )
        raise ValueError(msg)


def scale_exponent(value_K: NDArray[np.float32]) -> int:
    """Power of two that brings the largest magnitude into [2^14, 2^15), far from overflow.

    >>> scale_exponent(np.array([1.0, -3.0], np.float32))
    -13
    """
    peak = max(float(value_K.max()), -float(value_K.min()))
    if peak == 0.0:
        return 0
    return max(-EXPONENT_LIMIT, min(EXPONENT_LIMIT, math.frexp(peak)[1] - 15))


def halves(value_K: NDArray[np.float32], exponent: int) -> NDArray[np.uint16]:
    """float16 bit patterns of value / 2^exponent, to the nearest, ties away from zero.

    A float16 times 2^-112 is a float32 whose exponent needs five bits, subnormals included, so
    rounding is an addition and narrowing is a shift.

    With `exponent` from `scale_exponent`, what comes back from `floats` differs by at most
    max(2^-11 |v|, 2^-38 max|v|, 2^-137). Source: ours.
    """
    half_K = np.empty(value_K.size, np.uint16)
    for start in range(0, value_K.size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        scaled = value_K[chunk] * np.float32(math.ldexp(1.0, -exponent))
        if exponent == EXPONENT_LIMIT:  # rounding up to 2^15 would overflow float32 on the way back
            np.clip(scaled, -_LARGEST_BELOW_TOP, _LARGEST_BELOW_TOP, out=scaled)
        scaled *= np.float32(math.ldexp(1.0, -_HALF_BIAS))
        bits = scaled.view(np.uint32)
        bits += np.uint32(0x1000)
        sign = np.right_shift(bits, 16, dtype=np.uint32) & np.uint32(0x8000)
        bits >>= 13
        bits &= np.uint32(0x7FFF)
        np.bitwise_or(bits, sign, out=half_K[chunk], casting="unsafe")
    return half_K


def floats(half_K: NDArray[np.uint16], exponent: int) -> NDArray[np.float32]:
    """float32 values of float16 bit patterns times 2^exponent, exactly.

    Raises:
        ContractError: a pattern is NaN or infinite, or the exponent is out of bounds.
    """
    if not -EXPONENT_LIMIT <= exponent <= EXPONENT_LIMIT:
        msg = f"coded values: scale exponent {exponent}; allowed: +-{EXPONENT_LIMIT}"
        raise ContractError(msg)
    if int((half_K & np.uint16(0x7FFF)).max()) >= _HALF_INFINITY:
        raise ContractError("coded values: NaN or infinite float16; allowed: finite numbers")
    bits_K = half_K.view(np.int16).astype(np.int32)  # the sign spreads over bits 15 to 31
    bits_K <<= 13
    bits_K &= np.int32(-0x70000001)  # bits 28 to 30 are float32's exponent: not ours
    value_K = bits_K.view(np.float32)
    value_K *= np.float32(math.ldexp(1.0, _HALF_BIAS))
    with np.errstate(over="ignore"):
        value_K *= np.float32(math.ldexp(1.0, exponent))
    if exponent + 16 > 128 - 1:
        _refuse_infinite(value_K)
    return value_K


def checked_floats(value_K: NDArray[np.float32]) -> NDArray[np.float32]:
    """The same values, all finite.

    Raises:
        ContractError: one is NaN or infinite.
    """
    _refuse_infinite(value_K)
    return value_K


def _refuse_infinite(value_K: NDArray[np.float32]) -> None:
    if not np.isfinite(value_K).all():
        raise ContractError("coded values: NaN or infinite float32; allowed: finite numbers")
