"""Values in 16 to 2 bits: bfloat16 to nearest; int8, int4 and int2 with stochastic rounding.

Called by `coded_values`. The integers use blocks of 256 values, each with its own scale (a
bfloat16, 0.06 bits per value). Gradients of different variables differ by orders of magnitude, and
a single scale would erase the small ones. A value becomes one of the two adjacent multiples of its
block's scale, with probabilities such that its mean is the value itself. int2 has odd multiples
only, -3 to 3: zero is a bad estimate of an entry that is worth sending. So zeros do not stay zeros.

Random numbers come from a counter-based generator (SplitMix64's finaliser over key + n). The key is
a digest of the caller's seed and the values, so there is no state to restore. The same message
always has the same bytes; another message or seed has others.

Source: Alistarh et al., QSGD, NeurIPS 2017 (blocks, unbiased rounding), with the block's largest
magnitude for the norm; Steele, Lea and Flood, Fast splittable pseudorandom number generators,
OOPSLA 2014. Scales, keys and int2's odd multiples are ours. Legend: K values, B blocks of them.
"""

from typing import Any, Final

import numpy as np
from numba import types
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_core.compiling import compiled, inlined, read_only

BLOCK: Final = 256
"""Values that share a scale."""

LEVELS_8: Final = 127
LEVELS_4: Final = 7
LEVELS_2: Final = 3
"""The number of odd multiples."""

_FLOATS, _BITS, _BYTES, _HALVES = (
    read_only(dtype) for dtype in (types.float32, types.uint32, types.uint8, types.uint16)
)
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_TO_UNIT: Final = 2.0**-32
_BFLOAT_INFINITY: Final = 0x7F80


def _largest_scale(levels: int) -> int:
    """Bits of the largest bfloat16 whose multiple is still a finite float32."""
    most = np.array([float(np.finfo(np.float32).max) / levels], np.float32)
    return int(most.view(np.uint32)[0]) >> 16


_LARGEST_SCALE: Final = {
    levels: _largest_scale(levels) for levels in (LEVELS_8, LEVELS_4, LEVELS_2)
}


def blocks_of(count: int) -> int:
    return -(-count // BLOCK)


def to_bfloat16(value_K: NDArray[np.float32], half_K: NDArray[np.uint16]) -> None:
    """Write bfloat16 bit patterns, to nearest, ties to even, never infinity.

    `from_bfloat16` restores values within max(2^-8 |v|, 2^-134); beyond the largest bfloat16,
    3.39e38, within 2^-7 |v|.
    """
    _narrow(value_K.view(np.uint32), half_K)


def check_bfloat16(half_K: NDArray[np.uint16]) -> None:
    """Raise ContractError if a bit pattern is NaN or infinite."""
    if int((half_K & np.uint16(0x7FFF)).max()) >= _BFLOAT_INFINITY:
        raise ContractError("coded values: NaN or infinite bfloat16; allowed: finite numbers")


def from_bfloat16(half_K: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the exact float32 values of bfloat16 bit patterns."""
    bits_K = half_K.astype(np.uint32)
    bits_K <<= np.uint32(16)
    return bits_K.view(np.float32)


def quantize(
    value_K: NDArray[np.float32],
    levels: int,
    seed: int,
    scale_B: NDArray[np.uint16],
    code_K: NDArray[np.int8],
) -> None:
    """Write scales (bits of bfloat16) and integers within +-levels (127, 7 or 3).

    `dequantize` restores values within one scale (int2: two). A scale is at most (1 + 2^-7) max|v
    of the block| / levels + 2^-133. The mean error over seeds is zero, to 2^-32 of a scale. Values
    within 1 % of float32's maximum may be rounded towards zero.
    """
    bits_K = value_K.view(np.uint32)
    key = _digest(bits_K, np.uint64(seed & 0xFFFF_FFFF_FFFF_FFFF))
    _quantize(value_K, key, levels, _LARGEST_SCALE[levels], scale_B, code_K)


def check_scales(scale_B: NDArray[np.uint16], levels: int) -> None:
    """Raise ContractError if a scale is negative or NaN, or a multiple of it infinite."""
    if int(scale_B.max()) > _LARGEST_SCALE[levels]:
        msg = f"coded values: a block's scale of bits {int(scale_B.max()):#x}"
        raise ContractError(f"{msg}; allowed: 0 to {_LARGEST_SCALE[levels]:#x}")


def check_codes(code_K: NDArray[np.int8], levels: int) -> None:
    """Raise ContractError for -levels - 1, which the bits can also represent."""
    if int(code_K.min()) < -levels:
        msg = f"coded values: {int(code_K.min())} times the scale; allowed: +-{levels}"
        raise ContractError(msg)


def dequantize(scale_B: NDArray[np.uint16], code_K: NDArray[np.int8]) -> NDArray[np.float32]:
    """Return the exact float32 values of scales and integers."""
    value_K = np.empty(code_K.size, np.float32)
    _multiply(scale_B, code_K.view(np.uint8), value_K)
    return value_K


def pack(code_K: NDArray[np.int8], levels: int, byte: NDArray[np.uint8]) -> None:
    """Pack integers within +-7 two per byte, odd ones within +-3 four per byte: the first in the
    low bits, and the last byte padded with 0."""
    kernel = _pack_4 if levels == LEVELS_4 else _pack_2
    kernel(code_K.view(np.uint8), byte)


def unpack(byte: NDArray[np.uint8], levels: int, count: int) -> NDArray[np.int8]:
    """Unpack integers within +-127, 7 (or -8) or 3. Raises ContractError if the padding of the last
    byte is set."""
    if levels == LEVELS_8:
        return byte.view(np.int8)
    bits, kernel = (4, _unpack_4) if levels == LEVELS_4 else (2, _unpack_2)
    if (used := bits * count % 8) and int(byte[-1]) >> used:
        raise ContractError(f"coded values: bits set after the last int{bits}; allowed: none")
    code_K = np.empty(count, np.int8)
    kernel(byte, code_K)
    return code_K


# ---- kernels -------------------------------------------------------------------------------------


@compiled(types.void(_BITS, types.uint16[::1]))
def _narrow(bits_K: Any, half_K: Any) -> None:
    for i in range(bits_K.size):
        bits = np.uint32(bits_K[i])
        odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
        magnitude = np.uint32((bits & np.uint32(0x7FFFFFFF)) + np.uint32(0x7FFF) + odd)
        top = min(np.uint32(magnitude >> np.uint32(16)), np.uint32(_BFLOAT_INFINITY - 1))
        half_K[i] = np.uint16(top | np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000)))


@compiled(types.uint64(_BITS, types.uint64))
def _digest(bits_K: Any, seed: Any) -> Any:
    state = seed
    for i in range(bits_K.size):
        state = np.uint64(np.uint64(state ^ np.uint64(bits_K[i])) * _GOLDEN)
        state ^= state >> np.uint64(29)
    return state


@inlined
def _random(key: Any, counter: Any) -> Any:
    word = np.uint64(key + np.uint64(np.uint64(counter) + np.uint64(1)) * _GOLDEN)
    word = np.uint64((word ^ (word >> np.uint64(30))) * _MIX_1)
    word = np.uint64((word ^ (word >> np.uint64(27))) * _MIX_2)
    return word ^ (word >> np.uint64(31))


@inlined
def _float_of(top: Any) -> Any:
    return np.uint32(np.uint32(top) << np.uint32(16)).view(np.float32)


@inlined
def _scale_of(peak: Any, levels: int, largest: int) -> Any:
    """Bits of the smallest bfloat16 of which `levels` reach the peak; at most the largest."""
    least = np.float32(np.float64(peak) / levels)
    top = np.int64(least.view(np.uint32) >> np.uint32(16))
    while top < largest and np.float64(_float_of(top)) * levels < peak:
        top += 1
    return min(top, np.int64(largest))


@compiled(
    types.void(_FLOATS, types.uint64, types.int64, types.int64, types.uint16[::1], types.int8[::1])
)
def _quantize(value_K: Any, key: Any, levels: int, largest: int, scale_B: Any, code_K: Any) -> None:
    for block in range(scale_B.size):
        start = block * BLOCK
        part = value_K[start : min(start + BLOCK, value_K.size)]
        code = code_K[start : start + part.size]
        peak = np.float32(0)
        for i in range(part.size):
            peak = max(peak, abs(part[i]))
        if peak == 0:
            scale_B[block] = 0
            code[:] = 1 if levels == LEVELS_2 else 0
            continue
        scale_B[block] = _scale_of(peak, levels, largest)
        scale = np.float64(_float_of(scale_B[block]))
        word = np.uint64(0)
        for i in range(part.size):
            if i % 2 == 0:
                word = _random(key, (start + i) // 2)
            chance = np.float64(word & np.uint64(0xFFFFFFFF)) * _TO_UNIT
            word >>= np.uint64(32)
            ratio = min(max(np.float64(part[i]) / scale, -levels), levels)
            if levels == LEVELS_2:
                code[i] = np.int8(2 * np.floor((ratio + levels) / 2 + chance) - levels)
            else:
                code[i] = np.int8(np.floor(ratio + chance))


@compiled(types.void(_HALVES, _BYTES, types.float32[::1]))
def _multiply(scale_B: Any, code_K: Any, value_K: Any) -> None:
    for block in range(scale_B.size):
        start = block * BLOCK
        code, value = code_K[start : start + BLOCK], value_K[start : start + BLOCK]
        scale = _float_of(scale_B[block])
        for i in range(value.size):
            value[i] = np.float32(np.int8(code[i])) * scale


@compiled(types.void(_BYTES, types.uint8[::1]))
def _pack_4(code_K: Any, byte: Any) -> None:
    pairs = code_K.size // 2
    for i in range(pairs):
        low = code_K[2 * i] & np.uint8(15)
        byte[i] = np.uint8(low | np.uint8(code_K[2 * i + 1] << np.uint8(4)))
    if code_K.size % 2:
        byte[pairs] = code_K[2 * pairs] & np.uint8(15)


@compiled(types.void(_BYTES, types.int8[::1]))
def _unpack_4(byte: Any, code_K: Any) -> None:
    for i in range(code_K.size):
        four = np.int64(byte[i // 2] >> np.uint8(4 * (i % 2))) & 15
        code_K[i] = np.int8((four ^ 8) - 8)


@compiled(types.void(_BYTES, types.uint8[::1]))
def _pack_2(code_K: Any, byte: Any) -> None:
    byte[:] = 0
    for i in range(code_K.size):
        two = np.uint8(np.uint8(code_K[i] + np.uint8(3)) >> np.uint8(1))
        byte[i // 4] |= np.uint8(two << np.uint8(2 * (i % 4)))


@compiled(types.void(_BYTES, types.int8[::1]))
def _unpack_2(byte: Any, code_K: Any) -> None:
    for i in range(code_K.size):
        two = np.int64(byte[i // 4] >> np.uint8(2 * (i % 4))) & 3
        code_K[i] = np.int8(2 * two - 3)
