"""Compiled inner loops of selecting for several links at once, and of writing known positions.

Called by `policies.gradient.magnitudes` and `selected`, which check every argument. As in
`kernels`, nothing is checked here, and ratios are rounded as in `kernels.measure`.

Legend: D entries of the flat vector, K kept, L variables, C candidates, B blocks of positions.
"""

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import intrinsic

from dlion_core.compiling import compiled, inlined, read_only

_FLOATS, _BITS, _PLACES = (read_only(dtype) for dtype in (types.float32, types.uint32, types.int64))

_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_INFINITY: Final = np.uint32(0x7F800000)
_CHUNK: Final = 4096  # entries at a time
_BLOCK: Final = 255
_SKIP: Final = 0xFFFF
_GATHER_BITS: Final = np.uint64(0x0102040810204080)
_ONE: Final = np.uint64(1)

SAMPLED: Final = 64
"""One in so many entries is in the sample."""

# ---- as in `kernels`: the cache of compiled code notices no change in another file ---------------


@intrinsic  # type: ignore[untyped-decorator]
def _trailing_zeros(_typing: Any, _word: Any) -> Any:
    """The index of the lowest set bit; the word is not 0."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], context.get_constant(types.boolean, 1))

    return types.uint64(types.uint64), generate


@inlined
def _float(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@inlined
def _bits(value: Any) -> Any:
    return np.float32(value).view(np.uint32)


@inlined
def _marks(count: int) -> Any:
    """A byte of 0 or 1 per entry of a chunk, and space for one bit each."""
    return np.zeros(count, np.uint8), np.empty(count // 64, np.uint64)


@inlined
def _pack(mark: Any, word: Any) -> None:
    """Pack bytes of 0 or 1 into bits: a multiplication gathers eight of them in one byte."""
    eight, byte = mark.view(np.uint64), word.view(np.uint8)
    for i in range(byte.size):
        byte[i] = np.uint8((eight[i] * _GATHER_BITS) >> np.uint64(56))


@inlined
def _peak(bits: Any) -> Any:
    highest = np.uint32(0)
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & _MAGNITUDE)
        highest = max(highest, magnitude)
    return highest


@compiled(types.int64(_BITS, _PLACES, types.uint32[::1], types.int32[::1]))
def sample(bits_D: Any, end_L: Any, peak_bits_L: Any, histogram: Any) -> int:
    """Compute each variable's largest magnitude (bits) and a histogram of a sample's ratios.

    As `kernels.measure`. The sample is a run of each chunk, at a place that differs from chunk to
    chunk: values may repeat with the rows of a matrix.
    """
    begin = 0
    for variable in range(end_L.size):
        end = end_L[variable]
        peak_bits = _peak(bits_D[begin:end])
        peak_bits_L[variable] = peak_bits
        if peak_bits >= _INFINITY:
            return variable
        peak = _float(peak_bits) if peak_bits else np.float32(1)
        for start in range(begin, end, _CHUNK):
            size = min(_CHUNK, end - start)
            length = (size + SAMPLED - 1) // SAMPLED
            at = start + min(((start // _CHUNK) * 37 % SAMPLED) * length, size - length)
            for bits in bits_D[at : at + length]:
                histogram[_bits(_float(bits & _MAGNITUDE) / peak) >> np.uint32(16)] += 1
        begin = end
    return -1


@compiled(
    types.int64(
        _FLOATS, _BITS, _PLACES, _BITS, _BITS, types.uint32[::1], types.float32[::1],
        types.float32[::1], types.int32[::1],
    )
)  # fmt: skip
def candidates(
    value_D: Any, bits_D: Any, end_L: Any, peak_bits_L: Any, low_L: Any, place_C: Any,
    value_C: Any, ratio_C: Any, histogram: Any,
) -> int:  # fmt: skip
    """Write positions, values and ratios of the entries that reach their variable's cut, and count
    their ratios by the top 16 bits. Returns their number, or -1 if there is no space for all."""
    inside, word = _marks(_CHUNK)
    begin, written, space = 0, 0, place_C.size
    for variable in range(end_L.size):
        end, low = end_L[variable], low_L[variable]
        peak = _float(peak_bits_L[variable]) if peak_bits_L[variable] else np.float32(1)
        for start in range(begin, end, _CHUNK):
            piece = bits_D[start : min(start + _CHUNK, end)]
            for i in range(piece.size):
                inside[i] = np.uint32(piece[i] & _MAGNITUDE) >= low
            inside[piece.size :] = 0
            _pack(inside, word)
            for place in range(word.size):
                rest = word[place]
                while rest:
                    if written == space:
                        return -1
                    at = np.uint64(start + 64 * place) + _trailing_zeros(rest)
                    ratio = _float(bits_D[at] & _MAGNITUDE) / peak
                    place_C[written], value_C[written] = np.uint32(at), value_D[at]
                    ratio_C[written] = ratio
                    histogram[_bits(ratio) >> np.uint32(16)] += 1
                    written += 1
                    rest &= rest - _ONE
        begin = end
    return written


@compiled(types.int64(_FLOATS, types.int64, types.float32[::1]))
def of_bucket(ratio_C: Any, bucket: int, found_C: Any) -> int:
    """Write the ratios with those top 16 bits; there is space for exactly these."""
    written = 0
    for ratio in ratio_C:
        if _bits(ratio) >> np.uint32(16) == bucket:
            found_C[written] = ratio
            written += 1
    return written


@compiled(
    types.int64(_BITS, _FLOATS, _FLOATS, types.float32, types.uint32[::1], types.float32[::1])
)
def pick(
    place_C: Any, value_C: Any, ratio_C: Any, threshold: Any, place_K: Any, value_K: Any
) -> int:
    """Write positions and values of the candidates that reach the ratio. There must be space for
    one more: a loop without a branch also writes what it does not keep."""
    written = 0
    for i in range(place_C.size):
        place_K[written], value_K[written] = place_C[i], value_C[i]
        written += ratio_C[i] >= threshold
    return written


# ---- positions -----------------------------------------------------------------------------------


@compiled(types.void(_BITS, types.uint8[::1]))
def write_bitmap(place_K: Any, bitmap: Any) -> None:
    bitmap[:] = 0
    for place in place_K:
        bitmap[place >> np.uint32(3)] |= np.uint8(1 << (place & np.uint32(7)))


@compiled(types.void(_BITS, types.uint8[::1], types.uint8[::1]))
def write_blocks(place_K: Any, count_B: Any, within_K: Any) -> None:
    count_B[:] = 0
    for i in range(place_K.size):
        block = place_K[i] // np.uint32(_BLOCK)
        within_K[i] = np.uint8(place_K[i] - block * np.uint32(_BLOCK))
        count_B[block] += 1


@compiled(types.int64(_BITS, types.uint16[::1]))
def write_gaps(place_K: Any, gap: Any) -> int:
    """Return the number of 16-bit gaps, skips included."""
    gaps, after = 0, np.int64(0)
    for place in place_K:
        left_out = np.int64(place) - after
        while left_out >= _SKIP:
            gap[gaps] = _SKIP
            gaps, left_out = gaps + 1, left_out - _SKIP
        gap[gaps] = left_out
        gaps, after = gaps + 1, np.int64(place) + 1
    return gaps
