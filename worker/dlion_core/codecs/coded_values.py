"""Encode values with any codec, check received ones, and decode them when they are added.

Called by `payload`, which writes `exponent` into its header. Layout: float32, float16, bfloat16:
the values; int8, int4, int2: the scales of the blocks, then the values; polyline: its length as
uint32, then its bytes.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_core.codecs import quantized
from dlion_core.codecs.polyline import MAX_DECIMALS, decode_polyline, encode_polyline
from dlion_core.codecs.quantized import LEVELS_2, LEVELS_4, LEVELS_8, blocks_of
from dlion_core.codecs.values import (
    Coding,
    ValueCodec,
    check_float16,
    check_float32,
    from_float16,
    peak_of,
    scale_exponent,
    to_float16,
)

_LENGTH_BYTES: Final = 4
_LEVELS: Final = {ValueCodec.INT8: LEVELS_8, ValueCodec.INT4: LEVELS_4, ValueCodec.INT2: LEVELS_2}


@dataclass(frozen=True)
class CodedValues:
    """Received and checked values, converted to float32 when they are added."""

    codec: ValueCodec
    exponent: int
    coded: NDArray[np.uint8]
    size: int
    """Number of values."""
    top: int | None = None
    """Bits of the largest magnitude with float16 and float32, if known from the check."""

    @property
    def peak(self) -> float:
        """The largest magnitude, or with integers and float16 a bound of at most twice that."""
        match self.codec:
            case ValueCodec.FLOAT16 if self.top is not None:
                return float(np.uint16(self.top).view(np.float16)) * 2.0**self.exponent
            case ValueCodec.FLOAT32 if self.top is not None:
                return float(np.uint32(self.top).view(np.float32))
            case ValueCodec.INT8 | ValueCodec.INT4 | ValueCodec.INT2:
                scale_B, _ = _scales_and_codes(self.coded, self.size)
                most = np.array([int(scale_B.max()) << 16], np.uint32).view(np.float32)
                return float(most[0]) * _LEVELS[self.codec]
        return peak_of(self.to_float32(), "received values")

    def to_float32(self) -> NDArray[np.float32]:
        """Return the values in order, all finite."""
        match self.codec:
            case ValueCodec.FLOAT32 | ValueCodec.POLYLINE:  # polyline is decoded when it is checked
                return self.coded.view(np.float32)
            case ValueCodec.FLOAT16:
                return from_float16(self.coded.view(np.uint16), self.exponent)
            case ValueCodec.BFLOAT16:
                return quantized.from_bfloat16(self.coded.view(np.uint16))
            case ValueCodec.INT8 | ValueCodec.INT4 | ValueCodec.INT2:
                return quantized.dequantize(*_quantized(self.codec, self.coded, self.size))


def as_float32(value_K: NDArray[np.float32]) -> CodedValues:
    return CodedValues(ValueCodec.FLOAT32, 0, value_K.view(np.uint8), value_K.size)


@dataclass(frozen=True)
class PreparedValues:
    """Finite values to write, with a known encoded length."""

    codec: ValueCodec
    exponent: int
    length: int
    _value_K: NDArray[np.float32]
    _seed: int
    _line: bytes = b""

    def write(self, coded: NDArray[np.uint8]) -> None:
        """Fill exactly `length` bytes."""
        match self.codec:
            case ValueCodec.FLOAT32:
                coded.view(np.float32)[:] = self._value_K
            case ValueCodec.FLOAT16:
                to_float16(self._value_K, self.exponent, coded.view(np.uint16))
            case ValueCodec.BFLOAT16:
                quantized.to_bfloat16(self._value_K, coded.view(np.uint16))
            case ValueCodec.INT8 | ValueCodec.INT4 | ValueCodec.INT2:
                self._write_quantized(coded)
            case ValueCodec.POLYLINE:
                coded[:_LENGTH_BYTES].view(np.uint32)[0] = len(self._line)
                coded[_LENGTH_BYTES:] = np.frombuffer(self._line, np.uint8)

    def _write_quantized(self, coded: NDArray[np.uint8]) -> None:
        levels, size = _LEVELS[self.codec], self._value_K.size
        scale_B, codes = _scales_and_codes(coded, size)
        is_packed = levels != LEVELS_8
        code_K = np.empty(size, np.int8) if is_packed else codes.view(np.int8)
        quantized.quantize(self._value_K, levels, self._seed, scale_B, code_K)
        if is_packed:
            quantized.pack(code_K, levels, codes)


def prepare_values(value_K: NDArray[np.float32], peak: float, coding: Coding) -> PreparedValues:
    """Prepare finite values (at least one; `peak` is the largest magnitude) for that coding. Use
    float32 if polyline would be no shorter, or if a value is too large for it."""
    codec, exponent, line = coding.values, 0, b""
    if codec is ValueCodec.FLOAT16:
        exponent = scale_exponent(peak)
    elif codec is ValueCodec.POLYLINE:
        line = _line_of(value_K, coding.decimals)
        if line:
            length = _LENGTH_BYTES + len(line)
            return PreparedValues(codec, coding.decimals, length, value_K, coding.seed, line)
        codec = ValueCodec.FLOAT32
    length = codec.bytes_of(value_K.size)
    return PreparedValues(codec, exponent, length, value_K, coding.seed)


def _line_of(value_K: NDArray[np.float32], decimals: int) -> bytes:
    try:
        line = encode_polyline(value_K, decimals)
    except ValueError:
        if not 0 <= decimals <= MAX_DECIMALS:
            raise
        return b""  # all are finite, so one is too large
    shorter = _LENGTH_BYTES + len(line) < ValueCodec.FLOAT32.bytes_of(value_K.size)
    return line if shorter else b""


def length_of(codec: ValueCodec, kept: int, rest: NDArray[np.uint8]) -> int:
    """How many bytes after the header are values. Raises ContractError if there are fewer."""
    if codec is ValueCodec.POLYLINE and rest.size >= _LENGTH_BYTES:
        length = _LENGTH_BYTES + int(rest[:_LENGTH_BYTES].view(np.uint32)[0])
    else:
        length = codec.bytes_of(kept)
    if length > min(rest.size, 4 * kept):
        msg = f"payload with {rest.size} bytes after its header; its {kept} values take {length}"
        raise ContractError(msg)
    return length


def check_values(
    codec: ValueCodec, exponent: int, coded: NDArray[np.uint8], kept: int
) -> CodedValues:
    """Check untrusted bytes of the length that `length_of` returned. Raises ContractError unless
    they are `kept` finite values in the codec's canonical encoding."""
    if codec not in (ValueCodec.FLOAT16, ValueCodec.POLYLINE) and exponent:
        raise ContractError(f"payload of {codec} with scale exponent {exponent}; allowed: 0")
    match codec:
        case ValueCodec.FLOAT32:
            top = check_float32(coded.view(np.float32))
            return CodedValues(codec, exponent, coded, kept, top)
        case ValueCodec.FLOAT16:
            top = check_float16(coded.view(np.uint16), exponent)
            return CodedValues(codec, exponent, coded, kept, top)
        case ValueCodec.BFLOAT16:
            quantized.check_bfloat16(coded.view(np.uint16))
        case ValueCodec.INT8 | ValueCodec.INT4 | ValueCodec.INT2:
            scale_B, code_K = _quantized(codec, coded, kept)
            quantized.check_scales(scale_B, _LEVELS[codec])
            quantized.check_codes(code_K, _LEVELS[codec])
        case ValueCodec.POLYLINE:
            if not 0 <= exponent <= MAX_DECIMALS:
                msg = f"polyline of {exponent} decimals; allowed: 0 to {MAX_DECIMALS}"
                raise ContractError(msg)
            return as_float32(decode_polyline(coded[_LENGTH_BYTES:].data, kept, exponent))
    return CodedValues(codec, exponent, coded, kept)


def _quantized(
    codec: ValueCodec, coded: NDArray[np.uint8], kept: int
) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
    scale_B, codes = _scales_and_codes(coded, kept)
    return scale_B, quantized.unpack(codes, _LEVELS[codec], kept)


def _scales_and_codes(
    coded: NDArray[np.uint8], count: int
) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    scales_end = 2 * blocks_of(count)
    return coded[:scales_end].view(np.uint16), coded[scales_end:]
