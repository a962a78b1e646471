"""Value codecs, and how a worker encodes its payloads: the manifest's choices in one object.

`Coding` is built by `policies.factory` from `spec.exchange`; payloads are self-describing, so
decoding does not need it. float32 is unchanged, float16 has one power-of-two scale per message.
Defines float16's rounding and error bound, and the check for finite
values. Coarser codecs: `quantized`, `polyline`. NumPy's float16 casts are scalar on processors
without AVX-512 (10 ms per million with subnormals, 3 ms at best), so both directions work on bit
patterns (`kernels`).

Legend: K values.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_core.codecs import kernels
from dlion_core.codecs.quantized import blocks_of

if sys.byteorder != "little":
    msg = "dlion_core.codecs reads and writes arrays in place: it needs a little-endian machine"
    raise ImportError(msg)

EXPONENT_LIMIT = 113
"""float32's maximum is just below 2^128 = 2^15 * 2^113."""

_HALF_BIAS = 112  # float32's exponent bias less float16's: 127 - 15
_HALF_INFINITY = 0x7C00
_SINGLE_INFINITY = 0x7F80_0000
_LARGEST_BELOW_TOP = np.float32(32752)  # the largest float16 below 2^15


class ValueCodec(StrEnum):
    """Encoding of values; the manifest's `exchange.codec`."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT4 = "int4"
    POLYLINE = "polyline"
    INT2 = "int2"

    @property
    def bytes_each(self) -> int | None:
        """Bytes per value if constant (a maximum for polyline); None: variable."""
        if self in (ValueCodec.INT8, ValueCodec.INT4, ValueCodec.INT2):
            return None
        return 2 if self in (ValueCodec.FLOAT16, ValueCodec.BFLOAT16) else 4

    @property
    def has_zero(self) -> bool:
        """Whether zeros are decoded as zeros."""
        return self is not ValueCodec.INT2

    def bytes_of(self, count: int) -> int:
        """Return the bytes of that many values; for polyline a maximum, since it falls back to
        float32.

        >>> [codec.bytes_of(257) for codec in ValueCodec]
        [1028, 514, 514, 261, 133, 1028, 69]
        """
        match self:
            case ValueCodec.FLOAT32 | ValueCodec.POLYLINE:
                return 4 * count
            case ValueCodec.FLOAT16 | ValueCodec.BFLOAT16:
                return 2 * count
            case ValueCodec.INT8:
                return count + 2 * blocks_of(count)
            case ValueCodec.INT4:
                return (count + 1) // 2 + 2 * blocks_of(count)
            case ValueCodec.INT2:
                return (count + 3) // 4 + 2 * blocks_of(count)


class IndexCodec(StrEnum):
    """Encoding of positions of kept entries; the manifest's `exchange.indexCodec`."""

    FAST = "fast"
    """The smallest byte-aligned encoding whose size follows from the number kept."""
    SMALLEST = "smallest"
    """The smallest of all, including Golomb-Rice codes and varints."""


@dataclass(frozen=True)
class Coding:
    """How to encode payloads. `decimals` is for polyline. `seed` is for int8, int4 and int2; it
    differs between workers, so that their rounding errors are independent."""

    values: ValueCodec
    indices: IndexCodec = IndexCodec.FAST
    decimals: int = 4
    seed: int = 0

    @property
    def for_weights(self) -> Coding:
        """The same for weights: float16 if values would have fewer bits. Rounding of gradients
        averages out over steps; rounding of weights would discard small steps."""
        coarse = (ValueCodec.BFLOAT16, ValueCodec.INT8, ValueCodec.INT4, ValueCodec.INT2)
        return replace(self, values=ValueCodec.FLOAT16) if self.values in coarse else self


AnyCoding = Coding | ValueCodec
"""A value codec alone means defaults for all else."""


def coding_of(coding: AnyCoding) -> Coding:
    return coding if isinstance(coding, Coding) else Coding(coding)


class NotFiniteError(ValueError):
    """Numbers to send are NaN, infinite, or too large for their codec."""


def require_finite(value_K: NDArray[np.float32], what: str) -> None:
    """Raise NotFiniteError if a value to send is NaN or infinite. A retry gives the same."""
    if not np.isfinite(value_K).all():
        wrong = int(np.count_nonzero(~np.isfinite(value_K)))
        raise NotFiniteError(
            f"{what}: {wrong} of {value_K.size} entries are NaN or infinite; only finite numbers "
            "can be sent. Lower the learning rate, or look for bad samples in the data"
        )


def peak_of(value_K: NDArray[np.float32], what: str) -> float:
    """Return the largest magnitude of values to send. Raises NotFiniteError as `require_finite`."""
    peak = float(np.uint32(kernels.peak_bits(value_K.view(np.uint32))).view(np.float32))
    if not math.isfinite(peak):
        require_finite(value_K, what)
    return peak


def scale_exponent(peak: float) -> int:
    """Return the power of two that scales the largest magnitude to [2^14, 2^15), far from overflow.

    >>> scale_exponent(3.0)
    -13
    """
    if peak == 0.0:
        return 0
    return max(-EXPONENT_LIMIT, min(EXPONENT_LIMIT, math.frexp(peak)[1] - 15))


def to_float16(value_K: NDArray[np.float32], exponent: int, half_K: NDArray[np.uint16]) -> None:
    """Write float16 bit patterns of value / 2^exponent, to nearest, ties away from zero.

    A float16 times 2^-112 is a float32 whose exponent fits five bits, subnormals included. So
    rounding is an addition and narrowing is a shift.

    With `exponent` from `scale_exponent`, `from_float16` restores values within max(2^-11 |v|,
    2^-38 max|v|, 2^-137). Source: this project.
    """
    # Rounding up to 2^15 would overflow float32 on the way back.
    limit = _LARGEST_BELOW_TOP if exponent == EXPONENT_LIMIT else np.float32(np.inf)
    scale, bias = np.float32(math.ldexp(1.0, -exponent)), np.float32(math.ldexp(1.0, -_HALF_BIAS))
    kernels.narrow(value_K, scale, limit, bias, half_K)


def check_float16(half_K: NDArray[np.uint16], exponent: int) -> int:
    """Return the bits of the largest magnitude.

    Raise ContractError if `from_float16` would not give finite values, or the exponent is out of
    bounds.
    """
    if not -EXPONENT_LIMIT <= exponent <= EXPONENT_LIMIT:
        raise ContractError(f"coded values: scale exponent {exponent}; allowed: +-{EXPONENT_LIMIT}")
    top = int((half_K & np.uint16(0x7FFF)).max())
    if top >= _HALF_INFINITY:
        raise ContractError("coded values: NaN or infinite float16; allowed: finite numbers")
    if exponent + 16 > 128 - 1:
        check_float32(from_float16(half_K, exponent))
    return top


def from_float16(half_K: NDArray[np.uint16], exponent: int) -> NDArray[np.float32]:
    """Return the exact float32 values of float16 bit patterns times 2^exponent."""
    value_K = np.empty(half_K.size, np.float32)
    bias, scale = np.float32(math.ldexp(1.0, _HALF_BIAS)), np.float32(math.ldexp(1.0, exponent))
    kernels.widen(half_K, bias, scale, value_K)
    return value_K


def check_float32(value_K: NDArray[np.float32]) -> int:
    """Return the bits of the largest magnitude. Raise ContractError if a value is NaN or
    infinite."""
    top = int(kernels.peak_bits(value_K.view(np.uint32)))
    if top >= _SINGLE_INFINITY:
        raise ContractError("coded values: NaN or infinite float32; allowed: finite numbers")
    return top
