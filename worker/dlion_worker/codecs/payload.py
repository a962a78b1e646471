"""The payload of a message: one small header, the values, then where they belong.

Called by the policies (gradients, losses), the trainer (weights) and the simulator. Whatever a
peer sends is decoded here or refused with `ContractError`: memory and time are bounded by the
model's own size, which the receiver knows, never by what a header claims.

Legend: D entries of the flat vector, K kept.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_worker.codecs.positions import (
    BLOCK,
    SKIP,
    Index,
    Positions,
    decode_positions,
    encode_positions,
    positions_bytes,
)
from dlion_worker.codecs.values import (
    ValueCodec,
    checked_floats,
    floats,
    halves,
    require_finite,
    scale_exponent,
)

Payload = bytes | memoryview

_HEADER: Final = struct.Struct("<BBBBhHII")
"""Version, value codec, positions, 0, scale exponent, 0, D, K."""

HEADER_BYTES: Final = _HEADER.size
_VERSION: Final = 1
_CODEC_NUMBER: Final = {ValueCodec.FLOAT32: 1, ValueCodec.FLOAT16: 2}
_NUMBER_CODEC: Final = {number: codec for codec, number in _CODEC_NUMBER.items()}
_LOSS: Final = struct.Struct("<d")
_CHUNK: Final = 1 << 15  # entries added at a time: intermediate values stay in the cache


@dataclass(frozen=True)
class GradientPart:
    """What one message brings of a gradient: all of it (`index_K` is None), or some entries."""

    value_K: NDArray[np.float32]
    index_K: Index | None = None

    def add_to(self, target_D: NDArray[np.float32], weight: np.float32) -> None:
        """target += weight * part, in float32."""
        if self.index_K is None:
            for start in range(0, target_D.size, _CHUNK):
                chunk = slice(start, start + _CHUNK)
                target_D[chunk] += self.value_K[chunk] * weight
        else:
            np.add.at(target_D, self.index_K, self.value_K * weight)


def coded_bytes(kept: int, size: int, codec: ValueCodec) -> int:
    """Bytes of a payload that keeps `kept` of `size` entries, header included; never more.

    >>> coded_bytes(10, 1000, ValueCodec.FLOAT16), coded_bytes(1000, 1000, ValueCodec.FLOAT16)
    (50, 2016)
    """
    if kept >= size:
        return HEADER_BYTES + size * codec.bytes_each
    scheme = cheapest_positions(kept, size)
    sparse = kept * codec.bytes_each + positions_bytes(scheme, kept, size)
    return HEADER_BYTES + min(sparse, size * codec.bytes_each)


def cheapest_positions(kept: int, size: int) -> Positions:
    """The sparse scheme that takes the fewest bytes."""
    schemes = (Positions.BITMAP, Positions.BLOCK, Positions.GAP)
    return min(schemes, key=lambda scheme: positions_bytes(scheme, kept, size))


def kept_that_fit(budget_bytes: int, size: int, codec: ValueCodec) -> int:
    """The most entries of `size` whose payload takes at most `budget_bytes`; 0: none does.

    >>> kept_that_fit(50, 1000, ValueCodec.FLOAT16)
    10
    """
    room, each = budget_bytes - HEADER_BYTES, codec.bytes_each
    if room >= size * each:
        return size
    fits = max(
        (room - positions_bytes(Positions.BITMAP, 0, size)) // each,
        (room + size // -BLOCK) // (each + 1),
        (room - 2 * (size // SKIP)) // (each + 2),
    )
    return max(0, min(fits, size - 1))


def encode_whole(value_D: NDArray[np.float32], codec: ValueCodec) -> Payload:
    """Every entry, in order.

    Raises:
        ValueError: an entry is not finite.
    """
    return _assemble(value_D, Positions.ALL, np.empty(0, np.uint8), value_D.size, codec)


def encode_sparse(
    index_K: Index, value_K: NDArray[np.float32], size: int, codec: ValueCodec
) -> Payload:
    """Some entries (at least one), by whichever positions take the fewest bytes.

    At most `coded_bytes(K, size, codec)` long.

    Raises:
        ValueError: an entry is not finite.
    """
    kept = index_K.size
    if coded_bytes(kept, size, codec) == HEADER_BYTES + size * codec.bytes_each:
        whole_D = np.zeros(size, np.float32)
        whole_D[index_K] = value_K
        return encode_whole(whole_D, codec)
    scheme = cheapest_positions(kept, size)
    return _assemble(value_K, scheme, encode_positions(scheme, index_K, size), size, codec)


def _assemble(
    value_K: NDArray[np.float32],
    scheme: Positions,
    positions: NDArray[np.uint8],
    size: int,
    codec: ValueCodec,
) -> Payload:
    require_finite(value_K, "values to send")
    values_end = HEADER_BYTES + value_K.size * codec.bytes_each
    payload = bytearray(values_end + positions.size)
    coded = np.frombuffer(payload, np.uint8)
    exponent = 0
    if codec is ValueCodec.FLOAT16:
        exponent = scale_exponent(value_K)
        coded[HEADER_BYTES:values_end] = halves(value_K, exponent).view(np.uint8)
    else:
        coded[HEADER_BYTES:values_end].view(np.float32)[:] = value_K
    coded[values_end:] = positions
    number = _CODEC_NUMBER[codec]
    _HEADER.pack_into(payload, 0, _VERSION, number, scheme, 0, exponent, 0, size, value_K.size)
    return memoryview(payload).toreadonly()


def decode_gradient(payload: Payload, size: int) -> GradientPart:
    """What a gradient message brings, for a model of `size` entries.

    Raises:
        ContractError: anything that `encode_whole` or `encode_sparse` would not have written for
            this model. The message is to be refused; a retry gives the same.
    """
    if len(payload) < HEADER_BYTES:
        msg = f"payload of {len(payload)} bytes; allowed: at least the header's {HEADER_BYTES}"
        raise ContractError(msg)
    codec, scheme, exponent, kept = _read_header(payload, size)
    values_end = HEADER_BYTES + kept * codec.bytes_each
    if len(payload) < values_end or (scheme is Positions.ALL and len(payload) != values_end):
        msg = f"payload of {len(payload)} bytes; its {kept} values alone end at {values_end}"
        raise ContractError(msg)
    coded = np.frombuffer(payload, np.uint8)
    if scheme is Positions.ALL:
        index_K = None
    else:
        index_K = decode_positions(scheme, coded[values_end:], kept, size)
    values = coded[HEADER_BYTES:values_end]
    if codec is ValueCodec.FLOAT16:
        return GradientPart(floats(values.view(np.uint16), exponent), index_K)
    return GradientPart(checked_floats(values.view(np.float32)), index_K)


def _read_header(payload: Payload, size: int) -> tuple[ValueCodec, Positions, int, int]:
    version, codec, scheme, zero, exponent, zeros, sent_size, kept = _HEADER.unpack_from(payload)
    if version != _VERSION or zero or zeros:
        msg = f"payload version {version}, reserved {zero}, {zeros}; allowed: {_VERSION}, 0, 0"
        raise ContractError(msg)
    if codec not in _NUMBER_CODEC or scheme not in Positions._value2member_map_:
        raise ContractError(f"payload with value codec {codec}, positions {scheme}: unknown")
    if sent_size != size:
        raise ContractError(f"payload for a model of {sent_size} entries; allowed: {size}")
    if not 1 <= kept <= size or (scheme == Positions.ALL and kept != size):
        raise ContractError(f"payload of {kept} entries for positions {scheme} of {size}")
    if codec == _CODEC_NUMBER[ValueCodec.FLOAT32] and exponent:
        raise ContractError(f"payload of float32 with scale exponent {exponent}; allowed: 0")
    return _NUMBER_CODEC[codec], Positions(scheme), exponent, kept


def encode_weights(weights_D: NDArray[np.float32], codec: str) -> Payload:
    """Weights as the payload of a `WEIGHTS` message. `codec` as in the manifest.

    Raises:
        ValueError: a weight is not finite.
    """
    return encode_whole(weights_D, ValueCodec(codec))


def decode_weights(payload: Payload, size: int) -> NDArray[np.float32]:
    """Weights of a model of `size` entries.

    Raises:
        ContractError: wrong in any way, or not all of them.
    """
    part = decode_gradient(payload, size)
    if part.index_K is not None:
        raise ContractError("weights payload with some entries; allowed: all of them")
    return part.value_K


def encode_loss(loss: float) -> bytes:
    """A loss as the payload of a `LOSS` message."""
    return _LOSS.pack(loss)


def decode_loss(payload: Payload) -> float:
    """A finite loss.

    Raises:
        ContractError: wrong length, or not finite.
    """
    if len(payload) != _LOSS.size:
        msg = f"loss payload of {len(payload)} bytes; allowed: {_LOSS.size}"
        raise ContractError(msg)
    (loss,) = _LOSS.unpack(payload)
    if not math.isfinite(loss):
        raise ContractError(f"loss {loss}; allowed: finite numbers")
    return float(loss)
