"""Compiled inner loops of selecting, encoding and adding.

Called by `payload`, `positions`, `values` and `policies.gradient.magnitudes`, which check every
argument. Nothing is checked here: a position out of bounds would overwrite other memory. Each loop
gives bit for bit the same results as the NumPy versions in tests/support/naive_codecs.py.

Work on many entries is in branch-free loops, which the compiler vectorises. They set a bit for each
relevant entry, and only those are then visited one by one. Magnitudes are compared as integers: the
bits of |x| increase with |x|, and those of non-finite values are above all others.

Legend: D entries of the flat vector, K kept, L variables, C candidates, B blocks of positions.
"""

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import intrinsic

from dlion_core.compiling import compiled, inlined, read_only

_FLOATS, _BITS, _BYTES, _HALVES, _WORDS, _PLACES = (
    read_only(dtype)
    for dtype in (
        types.float32, types.uint32, types.uint8, types.uint16, types.uint64, types.int64,
    )
)  # fmt: skip

_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_INFINITY: Final = np.uint32(0x7F800000)
_CHUNK: Final = 4096  # entries at a time; whole bytes of a bitmap
_BLOCK: Final = 255
_SKIP: Final = 0xFFFF
_GATHER_BITS: Final = np.uint64(0x0102040810204080)
_ONE: Final = np.uint64(1)
_LANES: Final = 4  # alternating histograms avoid stalls on repeated buckets


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


# ---- selecting -----------------------------------------------------------------------------------


@inlined
def _peak(bits: Any) -> Any:
    highest = np.uint32(0)
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & _MAGNITUDE)
        highest = max(highest, magnitude)
    return highest


@compiled(types.uint32(_BITS))
def peak_bits(bits_D: Any) -> int:
    """Return the bits of the largest magnitude; at least those of infinity if one is not finite."""
    highest: int = _peak(bits_D)
    return highest


@compiled(types.int64(_BITS, _PLACES, types.uint32[::1], types.int32[:, ::1]))
def measure(bits_D: Any, end_L: Any, peak_bits_L: Any, histogram: Any) -> int:
    """Compute each variable's largest magnitude (bits) and a histogram of the ratios.

    The histogram counts the top 16 bits of |x| / largest. Its rows start as zeros and must be
    summed. Returns the index of the variable with a non-finite entry, else -1.
    """
    bucket = np.empty(_CHUNK, np.uint16)
    begin = 0
    for variable in range(end_L.size):
        end = end_L[variable]
        peak_bits = _peak(bits_D[begin:end])
        peak_bits_L[variable] = peak_bits
        if peak_bits >= _INFINITY:
            return variable
        peak = _float(peak_bits) if peak_bits else np.float32(1)
        for start in range(begin, end, _CHUNK):
            piece = bits_D[start : min(start + _CHUNK, end)]
            for i in range(piece.size):
                bucket[i] = _bits(_float(piece[i] & _MAGNITUDE) / peak) >> np.uint32(16)
            for i in range(piece.size):
                histogram[i % _LANES, bucket[i]] += 1
        begin = end
    return -1


@compiled(types.void(types.float32, _BITS, types.uint32[::1]))
def cuts(threshold: Any, peak_bits_L: Any, cut_L: Any) -> None:
    """Compute the bits of the lowest magnitude per variable whose ratio reaches the threshold.

    Ratios are rounded as in `measure`. If there is none, the result is one more than the largest
    magnitude.
    """
    for variable in range(peak_bits_L.size):
        low, high = np.int64(0), np.int64(peak_bits_L[variable]) + 1
        peak = _float(peak_bits_L[variable]) if peak_bits_L[variable] else np.float32(1)
        while low < high:
            middle = (low + high) >> 1
            if _float(middle) / peak >= threshold:
                high = middle
            else:
                low = middle + 1
        cut_L[variable] = np.uint32(high)


@compiled(types.int64(_BITS, _PLACES, _BITS))
def count(bits_D: Any, end_L: Any, cut_L: Any) -> int:
    begin, written = 0, 0
    for variable in range(end_L.size):
        cut = cut_L[variable]
        part = bits_D[begin : end_L[variable]]
        for i in range(part.size):
            written += np.uint32(part[i] & _MAGNITUDE) >= cut
        begin = end_L[variable]
    return written


@compiled(types.int64(_BITS, _PLACES, _BITS, _BITS, _BITS, types.float32[::1]))
def ratios_between(
    bits_D: Any, end_L: Any, peak_bits_L: Any, low_L: Any, high_L: Any, ratio_C: Any
) -> int:
    """Write the ratios of entries between the two cuts (upper one excluded); return their
    number."""
    inside, word = _marks(_CHUNK)
    begin, written = 0, 0
    for variable in range(end_L.size):
        end, low = end_L[variable], low_L[variable]
        width = np.uint32(high_L[variable] - low)
        peak = _float(peak_bits_L[variable])
        for start in range(begin, end if width else begin, _CHUNK):
            piece = bits_D[start : min(start + _CHUNK, end)]
            for i in range(piece.size):
                inside[i] = np.uint32(np.uint32(piece[i] & _MAGNITUDE) - low) < width
            inside[piece.size :] = 0
            _pack(inside, word)
            for place in range(word.size):
                rest = word[place]
                while rest:
                    at = np.uint64(64 * place) + _trailing_zeros(rest)
                    ratio_C[written] = _float(piece[at] & _MAGNITUDE) / peak
                    written += 1
                    rest &= rest - _ONE
        begin = end
    return written


# ---- encoding ------------------------------------------------------------------------------------


@inlined
def _mark(
    bits_D: Any, end_L: Any, cut_L: Any, variable: int, start: int, stop: int, kept: Any, word: Any
) -> Any:
    """Mark the entries from start to stop that reach their cut; return the variable of the last."""
    at = start
    while at < stop:
        while end_L[variable] <= at:
            variable += 1
        until = min(stop, end_L[variable])
        cut, part, marks = cut_L[variable], bits_D[at:until], kept[at - start : until - start]
        for i in range(part.size):
            marks[i] = np.uint32(part[i] & _MAGNITUDE) >= cut
        at = until
    kept[stop - start :] = 0
    _pack(kept, word)
    return variable


@compiled(types.int64(_FLOATS, _BITS, _PLACES, _BITS, types.float32[::1], types.uint8[::1]))
def gather_bitmap(
    value_D: Any, bits_D: Any, end_L: Any, cut_L: Any, value_K: Any, bitmap: Any
) -> int:
    """Write the values that reach their cut, and one bit for each of D. Returns the number of
    values, or -1 if there is no space for all."""
    kept, word = _marks(_CHUNK)
    variable, written, size = 0, 0, value_D.size
    for start in range(0, size, _CHUNK):
        stop = min(start + _CHUNK, size)
        variable = _mark(bits_D, end_L, cut_L, variable, start, stop, kept, word)
        byte = bitmap[start // 8 : (stop + 7) // 8]
        byte[:] = word.view(np.uint8)[: byte.size]
        part = value_D[start:stop]
        for place in range(word.size):
            rest = word[place]
            while rest:
                if written == value_K.size:
                    return -1
                value_K[written] = part[np.uint64(64 * place) + _trailing_zeros(rest)]
                written += 1
                rest &= rest - _ONE
    return written


@compiled(
    types.int64(
        _FLOATS, _BITS, _PLACES, _BITS, types.float32[::1], types.uint8[::1], types.uint8[::1]
    )
)
def gather_blocks(
    value_D: Any, bits_D: Any, end_L: Any, cut_L: Any, value_K: Any, count_B: Any, place_K: Any
) -> int:
    """As `gather_bitmap`, with a count per block of 255 and each kept entry's place in its
    block."""
    kept, word = _marks(_BLOCK + 1)
    variable, written, size = 0, 0, value_D.size
    for block in range(count_B.size):
        start = block * _BLOCK
        stop = min(start + _BLOCK, size)
        variable = _mark(bits_D, end_L, cut_L, variable, start, stop, kept, word)
        before = written
        part = value_D[start:stop]
        for place in range(word.size):
            rest = word[place]
            while rest:
                if written == value_K.size:
                    return -1
                at = np.uint64(64 * place) + _trailing_zeros(rest)
                place_K[written], value_K[written] = np.uint8(at), part[at]
                written += 1
                rest &= rest - _ONE
        count_B[block] = written - before
    return written


@compiled(
    types.UniTuple(types.int64, 2)(
        _FLOATS, _BITS, _PLACES, _BITS, types.float32[::1], types.uint16[::1]
    )
)
def gather_gaps(
    value_D: Any, bits_D: Any, end_L: Any, cut_L: Any, value_K: Any, gap: Any
) -> tuple[int, int]:
    """As `gather_bitmap`, with the number of entries left out before each kept one. Also returns
    the number of 16-bit gaps, skips included."""
    kept, word = _marks(_CHUNK)
    variable, written, gaps, after, size = 0, 0, 0, np.int64(0), value_D.size
    for start in range(0, size, _CHUNK):
        stop = min(start + _CHUNK, size)
        variable = _mark(bits_D, end_L, cut_L, variable, start, stop, kept, word)
        for place in range(word.size):
            rest = word[place]
            while rest:
                if written == value_K.size:
                    return -1, 0
                at = start + 64 * place + np.int64(_trailing_zeros(rest))
                left_out = at - after
                while left_out >= _SKIP:
                    gap[gaps] = _SKIP
                    gaps, left_out = gaps + 1, left_out - _SKIP
                gap[gaps], value_K[written] = left_out, value_D[at]
                gaps, written, after = gaps + 1, written + 1, at + 1
                rest &= rest - _ONE
    return written, gaps


@compiled(types.void(_FLOATS, types.float32, types.float32, types.float32, types.uint16[::1]))
def narrow(value_K: Any, scale: Any, limit: Any, bias: Any, half_K: Any) -> None:
    """Write float16 bit patterns of value * scale, clamped to +-limit (see `values.to_float16`)."""
    for i in range(value_K.size):
        scaled = np.float32(value_K[i] * scale)
        scaled = np.float32(min(max(scaled, -limit), limit) * bias)
        bits = np.uint32(_bits(scaled) + np.uint32(0x1000))
        sign = np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000)
        half_K[i] = np.uint16((np.uint32(bits >> np.uint32(13)) & np.uint32(0x7FFF)) | sign)


# ---- decoding ------------------------------------------------------------------------------------


@compiled(types.void(_HALVES, types.float32, types.float32, types.float32[::1]))
def widen(half_K: Any, bias: Any, scale: Any, value_K: Any) -> None:
    """Write float32 values of float16 bit patterns, times bias and scale (see
    `values.from_float16`)."""
    for i in range(half_K.size):
        half = np.uint32(half_K[i])
        low = np.uint32((half & np.uint32(0x7FFF)) << np.uint32(13))
        sign = np.uint32((half & np.uint32(0x8000)) << np.uint32(16))
        value_K[i] = np.float32(_float(low | sign) * bias) * scale


@compiled(types.void(_HALVES, types.int64[::1]))
def places_after(gap: Any, place_K: Any) -> None:
    """Write the position after each gap."""
    written, at = 0, np.int64(0)
    for one in gap:
        at += np.int64(one)
        if one != _SKIP:
            place_K[written] = at
            written, at = written + 1, at + 1


@compiled(types.boolean(_BYTES, _BYTES, types.int64))
def blocks_rise(count_B: Any, place_K: Any, size: int) -> bool:
    """Whether places increase within each block and stay below `size`. Their number is already
    checked."""
    at = 0
    for block in range(count_B.size):
        before: Any = -1
        for place in place_K[at : at + count_B[block]]:
            if np.int64(place) <= before:
                return False
            before = np.int64(place)
        if before >= _BLOCK or block * _BLOCK + before >= size:
            return False
        at += count_B[block]
    return True


# ---- adding --------------------------------------------------------------------------------------


@compiled(types.void(_FLOATS, types.float32, types.float32[::1]))
def add_whole(value_D: Any, weight: Any, target_D: Any) -> None:
    """target += weight * value."""
    for i in range(value_D.size):
        target_D[i] += np.float32(value_D[i] * weight)


@compiled(types.void(_FLOATS, types.float32, types.float32[::1]))
def weigh_whole(value_D: Any, weight: Any, target_D: Any) -> None:
    """target = 0 + weight * value; the target is not read."""
    for i in range(value_D.size):
        target_D[i] = np.float32(0) + np.float32(value_D[i] * weight)


@compiled(types.void(_WORDS, _FLOATS, types.float32, types.float32[::1]))
def add_bitmap(word: Any, value_K: Any, weight: Any, target_D: Any) -> None:
    """As `add_whole`, at the set bits of words of 64."""
    written = np.uint64(0)
    for i in range(word.size):
        rest, begin = word[i], np.uint64(64 * i)
        while rest:
            at = begin + _trailing_zeros(rest)
            target_D[at] += np.float32(value_K[written] * weight)
            written += _ONE
            rest &= rest - _ONE


@compiled(types.void(_BYTES, _BYTES, _FLOATS, types.float32, types.float32[::1]))
def add_blocks(count_B: Any, place_K: Any, value_K: Any, weight: Any, target_D: Any) -> None:
    """As `add_whole`, at the places of each block."""
    written = 0
    for block in range(count_B.size):
        for _ in range(count_B[block]):
            at = block * _BLOCK + np.int64(place_K[written])
            target_D[at] += np.float32(value_K[written] * weight)
            written += 1


@compiled(types.void(_HALVES, _FLOATS, types.float32, types.float32[::1]))
def add_gaps(gap: Any, value_K: Any, weight: Any, target_D: Any) -> None:
    """As `add_whole`, after each gap."""
    written, at = 0, np.int64(0)
    for one in gap:
        at += np.int64(one)
        if one != _SKIP:
            target_D[at] += np.float32(value_K[written] * weight)
            written, at = written + 1, at + 1
