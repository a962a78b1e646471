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
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_worker.codecs import kernels
from dlion_worker.codecs.positions import (
    BLOCK,
    SKIP,
    CodedPositions,
    Positions,
    check_positions,
    positions_bytes,
)
from dlion_worker.codecs.values import (
    ValueCodec,
    check_floats,
    check_halves,
    floats,
    halves,
    peak_of,
    scale_exponent,
)

if TYPE_CHECKING:
    from dlion_worker.codecs.selected import Selected

Payload = bytes | memoryview

_HEADER: Final = struct.Struct("<BBBBhHII")
"""Version, value codec, positions, 0, scale exponent, 0, D, K."""

HEADER_BYTES: Final = _HEADER.size
_VERSION: Final = 1
_CODEC_NUMBER: Final = {ValueCodec.FLOAT32: 1, ValueCodec.FLOAT16: 2}
_NUMBER_CODEC: Final = {number: codec for codec, number in _CODEC_NUMBER.items()}
_LOSS: Final = struct.Struct("<d")


@dataclass(frozen=True)
class GradientPart:
    """What one message brings of a gradient: all of it (`where` is None), or some entries.

    As coded, checked by `decode_gradient`: it takes the message's bytes, which are not to change,
    and nothing else until it is added. An array of float32 alone is a whole gradient.
    """

    coded_K: NDArray[np.float32] | NDArray[np.uint16]
    exponent: int = 0
    where: CodedPositions | None = None

    @property
    def value_K(self) -> NDArray[np.float32]:  # noqa: N802 - an array of K
        """Its values, in order; made anew each time where they are coded as float16."""
        if self.coded_K.dtype == np.float32:
            return self.coded_K.view(np.float32)
        return floats(self.coded_K.view(np.uint16), self.exponent)

    @property
    def size(self) -> int:
        """D."""
        return self.coded_K.size if self.where is None else self.where.size

    @property
    def index_K(self) -> NDArray[np.intp] | None:  # noqa: N802 - an array of K
        """Positions of the values, rising; None: of all entries."""
        if self.where is None:
            return None
        mark_D = np.zeros(self.size, np.float32)
        self.where.add(np.ones(self.coded_K.size, np.float32), np.float32(1), mark_D)
        return np.flatnonzero(mark_D)

    def weighted(self, weight: np.float32) -> NDArray[np.float32]:
        """weight * part as a new vector, in float32; the same as added to zeros."""
        if self.where is None:
            target_D = np.empty(self.size, np.float32)
            kernels.weigh_whole(self.value_K, weight, target_D)
        else:
            target_D = np.zeros(self.size, np.float32)
            self.add_to(target_D, weight)
        return target_D

    def add_to(self, target_D: NDArray[np.float32], weight: np.float32) -> None:
        """target += weight * part, in float32."""
        if target_D.size != self.size:
            raise ValueError(f"gradient of {self.size} entries added to {target_D.size}")
        if self.where is None:
            kernels.add_whole(self.value_K, weight, target_D)
        else:
            self.where.add(self.value_K, weight, target_D)


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
    peak = peak_of(value_D, "values to send")
    return _assemble(value_D, peak, Positions.ALL, np.empty(0, np.uint8), value_D.size, codec)


def encode_selected(selected: Selected, codec: ValueCodec) -> Payload:
    """Some entries (at least one), by whichever positions take the fewest bytes.

    At most `coded_bytes(K, D, codec)` long. They are finite, since the peak is.
    """
    kept, size = selected.kept, selected.value_D.size
    if coded_bytes(kept, size, codec) == HEADER_BYTES + size * codec.bytes_each:
        whole_D, index_K = np.zeros(size, np.float32), selected.index_K()
        whole_D[index_K] = selected.value_D[index_K]
        return encode_whole(whole_D, codec)
    scheme = cheapest_positions(kept, size)
    value_K, positions = selected.gathered(scheme)
    return _assemble(value_K, selected.peak, scheme, positions, size, codec)


def _assemble(
    value_K: NDArray[np.float32],
    peak: float,
    scheme: Positions,
    positions: NDArray[np.uint8],
    size: int,
    codec: ValueCodec,
) -> Payload:
    values_end = HEADER_BYTES + value_K.size * codec.bytes_each
    payload = bytearray(values_end + positions.size)
    coded = np.frombuffer(payload, np.uint8)
    exponent = 0
    if codec is ValueCodec.FLOAT16:
        exponent = scale_exponent(peak)
        halves(value_K, exponent, coded[HEADER_BYTES:values_end].view(np.uint16))
    else:
        coded[HEADER_BYTES:values_end].view(np.float32)[:] = value_K
    coded[values_end:] = positions
    number = _CODEC_NUMBER[codec]
    _HEADER.pack_into(payload, 0, _VERSION, number, scheme, 0, exponent, 0, size, value_K.size)
    return memoryview(payload).toreadonly()


def decode_gradient(payload: Payload, size: int) -> GradientPart:
    """What a gradient message brings, for a model of `size` entries.

    Raises:
        ContractError: anything that `encode_whole` or `encode_selected` would not have written for
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
    where = None
    if scheme is not Positions.ALL:
        where = check_positions(scheme, coded[values_end:], kept, size)
    values = coded[HEADER_BYTES:values_end]
    if codec is ValueCodec.FLOAT16:
        half_K = values.view(np.uint16)
        check_halves(half_K, exponent)
        return GradientPart(half_K, exponent, where)
    value_K = values.view(np.float32)
    check_floats(value_K)
    return GradientPart(value_K, 0, where)


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
    if part.where is not None:
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
