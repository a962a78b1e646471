"""The payload of a message: a small header, the values, then their positions.

Called by the policies (gradients, losses), the trainer (weights) and the simulator. Payloads of
peers are decoded here or rejected with `ContractError`. Memory and time are bounded by the model's
size, which the receiver knows, never by a header.

Legend: D entries of the flat vector, K kept.
"""

import math
import struct
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_core.codecs import kernels
from dlion_core.codecs.coded_values import CodedValues, check_values, length_of, prepare_values
from dlion_core.codecs.gap_codes import SKIP, GapSizes
from dlion_core.codecs.polyline import max_polyline_bytes
from dlion_core.codecs.positions import (
    BLOCK,
    CodedPositions,
    Positions,
    check_positions,
    positions_bytes,
    range_positions,
)
from dlion_core.codecs.selected import SelectedEntries
from dlion_core.codecs.values import AnyCoding, Coding, IndexCodec, ValueCodec, coding_of, peak_of
from dlion_core.phase_clock import Phase, counts_as

Payload = bytes | memoryview

_HEADER: Final = struct.Struct("<BBBBhHII")
"""Version, value codec, positions, 0, scale exponent (polyline: decimals), 0, D, K."""

HEADER_BYTES: Final = _HEADER.size
_VERSION: Final = 1
_CODEC_NUMBER: Final = {
    ValueCodec.FLOAT32: 1,
    ValueCodec.FLOAT16: 2,
    ValueCodec.BFLOAT16: 3,
    ValueCodec.INT8: 4,
    ValueCodec.INT4: 5,
    ValueCodec.POLYLINE: 6,
    ValueCodec.INT2: 7,
}
_NUMBER_CODEC: Final = {number: codec for codec, number in _CODEC_NUMBER.items()}
_LOSS: Final = struct.Struct("<d")


@dataclass(frozen=True)
class GradientPart:
    """A decoded gradient message: all entries (`where` is None) or some.

    `decode_gradient` checks the encoded form. The values stay encoded until they are added, so the
    message's bytes must not change. A plain float32 array is a whole gradient.
    """

    coded_K: NDArray[np.float32] | CodedValues
    where: CodedPositions | None = None

    @property
    def value_K(self) -> NDArray[np.float32]:  # noqa: N802 - an array of K
        """The values in order; converted on each access unless encoded as float32."""
        return self.coded_K.to_float32() if isinstance(self.coded_K, CodedValues) else self.coded_K

    @property
    def peak(self) -> float:
        """The largest magnitude, or with integers and float16 a bound of at most twice that."""
        if isinstance(self.coded_K, CodedValues):
            return self.coded_K.peak
        return peak_of(self.coded_K, "values of a gradient")

    @property
    def size(self) -> int:
        return self.coded_K.size if self.where is None else self.where.size

    @property
    def index_K(self) -> NDArray[np.intp] | None:  # noqa: N802 - an array of K
        """Ascending positions of the values; None: all entries."""
        if self.where is None:
            return None
        return self.where.index_K(self.coded_K.size)

    @counts_as(Phase.DECODE)
    def weighted(self, weight: np.float32) -> NDArray[np.float32]:
        """Return weight * part as a new float32 vector, the same as added to zeros."""
        if self.where is None:
            target_D = np.empty(self.size, np.float32)
            kernels.weigh_whole(self.value_K, weight, target_D)
        else:
            target_D = np.zeros(self.size, np.float32)
            self.add_to(target_D, weight)
        return target_D

    @counts_as(Phase.DECODE)
    def add_to(self, target_D: NDArray[np.float32], weight: np.float32) -> None:
        """target += weight * part, in float32."""
        if target_D.size != self.size:
            raise ValueError(f"gradient of {self.size} entries added to {target_D.size}")
        if self.where is None:
            kernels.add_whole(self.value_K, weight, target_D)
        else:
            self.where.add(self.value_K, weight, target_D)


def coded_bytes(kept: int, size: int, coding: AnyCoding) -> int:
    """Return the maximum payload bytes for `kept` of `size` entries, header included.

    >>> coded_bytes(10, 1000, ValueCodec.FLOAT16), coded_bytes(1000, 1000, ValueCodec.FLOAT16)
    (50, 2016)
    """
    coding = coding_of(coding)
    whole = coding.values.bytes_of(size)
    if kept >= size:
        return HEADER_BYTES + whole
    scheme = cheapest_positions(kept, size, coding.indices)
    sparse = coding.values.bytes_of(kept) + positions_bytes(scheme, kept, size)
    return HEADER_BYTES + (min(sparse, whole) if coding.values.has_zero else sparse)


def max_coded_bytes(size: int) -> int:
    """Return the longest payload of a model's entries with any codec and selection.

    All codecs fall back to float32 if that is shorter. The exception is the polyline of weights
    alone, which can be more than twice as long.

    >>> max_coded_bytes(1000)
    8282
    """
    return 2 * HEADER_BYTES + max(ValueCodec.FLOAT32.bytes_of(size), max_polyline_bytes(size))


def cheapest_positions(kept: int, size: int, indices: IndexCodec = IndexCodec.FAST) -> Positions:
    """Return the sparse scheme with the smallest guaranteed size, whichever entries are kept."""
    schemes = [Positions.BITMAP, Positions.BLOCK, Positions.GAP]
    if indices is IndexCodec.SMALLEST:
        schemes.append(Positions.RICE)
    return min(schemes, key=lambda scheme: positions_bytes(scheme, kept, size))


def max_kept_entries(budget_bytes: int, size: int, coding: AnyCoding) -> int:
    """Return the maximum number of entries whose payload fits `budget_bytes`; 0: none.

    >>> max_kept_entries(50, 1000, ValueCodec.FLOAT16)
    10
    """
    coding = coding_of(coding)
    if coding.indices is IndexCodec.FAST and (each := coding.values.bytes_each):
        return _max_kept_closed_form(budget_bytes - HEADER_BYTES, size, each)
    return _max_kept_by_search(budget_bytes, size, coding)


@lru_cache(maxsize=4096)  # Planning a round asks for the same budgets again.
def _max_kept_by_search(budget_bytes: int, size: int, coding: Coding) -> int:
    return _max_count_within(budget_bytes, size, lambda kept: coded_bytes(kept, size, coding))


def _max_kept_closed_form(room_bytes: int, size: int, bytes_each: int) -> int:
    """Closed form, since it is called for each link at every step."""
    if room_bytes >= size * bytes_each:
        return size
    fits = max(
        (room_bytes - positions_bytes(Positions.BITMAP, 0, size)) // bytes_each,
        (room_bytes + size // -BLOCK) // (bytes_each + 1),
        (room_bytes - 2 * (size // SKIP)) // (bytes_each + 2),
    )
    return max(0, min(fits, size - 1))


def range_bytes(length: int, size: int, coding: AnyCoding) -> int:
    """Return the maximum payload bytes for a range of `length` of `size` entries, header
    included."""
    begin = 0 if length >= size else positions_bytes(Positions.RANGE, length, size)
    return HEADER_BYTES + coding_of(coding).values.bytes_of(min(length, size)) + begin


def max_range_length(budget_bytes: int, size: int, coding: AnyCoding) -> int:
    """Return the longest range of `size` whose payload fits `budget_bytes`; 0: none."""
    return _max_count_within(budget_bytes, size, lambda length: range_bytes(length, size, coding))


def _max_count_within(budget_bytes: int, size: int, bytes_of: Callable[[int], int]) -> int:
    """Sizes increase with the number of entries, except for all of them, which need no
    positions."""
    if bytes_of(size) <= budget_bytes:
        return size
    return bisect_right(range(1, size), budget_bytes, key=bytes_of)


@counts_as(Phase.ENCODE)
def encode_whole(value_D: NDArray[np.float32], coding: AnyCoding) -> Payload:
    """Encode every entry, in order. Raises ValueError if one is not finite."""
    peak = peak_of(value_D, "values to send")
    size, nowhere = value_D.size, np.empty(0, np.uint8)
    return _assemble(value_D, peak, Positions.ALL, nowhere, size, coding_of(coding))


@counts_as(Phase.ENCODE)
def encode_range(value_D: NDArray[np.float32], begin: int, end: int, coding: AnyCoding) -> Payload:
    """Encode the entries from `begin` to `end` (at least one), zeros included. At most
    `range_bytes(end - begin, D, coding)` long. Raises ValueError if one is not finite."""
    if begin == 0 and end == value_D.size:
        return encode_whole(value_D, coding)
    value_K = value_D[begin:end]
    peak, where = peak_of(value_K, "values to send"), range_positions(begin)
    return _assemble(value_K, peak, Positions.RANGE, where, value_D.size, coding_of(coding))


@counts_as(Phase.ENCODE)
def encode_selected(selected: SelectedEntries, coding: AnyCoding) -> Payload:
    """Encode some entries (at least one) with the shortest position scheme. At most `coded_bytes(K,
    D, coding)` long. The entries are finite if the peak is."""
    kept, size, coding = selected.kept, selected.value_D.size, coding_of(coding)
    room = coding.values.bytes_of(size) - coding.values.bytes_of(kept)
    if not coding.values.has_zero and kept < size:  # the others must stay zero
        room = max_coded_bytes(size)
    if coding.indices is IndexCodec.FAST:
        scheme = cheapest_positions(kept, size)
        encoded = selected.gathered(scheme) if positions_bytes(scheme, kept, size) < room else None
    else:
        scheme, encoded = _smallest(selected, room)
    if encoded is None:
        whole_D, index_K = np.zeros(size, np.float32), selected.index_K()
        whole_D[index_K] = selected.value_D[index_K]
        return encode_whole(whole_D, coding)
    return _assemble(encoded[0], selected.peak, scheme, encoded[1], size, coding)


def _smallest(
    selected: SelectedEntries, room: int
) -> tuple[Positions, tuple[NDArray[np.float32], NDArray[np.uint8]] | None]:
    """Values and positions in the shortest scheme for these entries; None if not below `room`."""
    kept, size = selected.kept, selected.value_D.size
    value_K, gap_bytes = selected.gathered(Positions.GAP)
    gaps = GapSizes(gap_bytes.view(np.uint16), kept, size)
    ways: dict[Positions, tuple[int, Callable[[], NDArray[np.uint8]]]] = {
        scheme: (positions_bytes(scheme, kept, size), lambda s=scheme: selected.gathered(s)[1])
        for scheme in (Positions.BITMAP, Positions.BLOCK)
    } | {
        Positions.GAP: (gap_bytes.size, lambda: gap_bytes),
        Positions.VARINT: (gaps.varint_bytes, gaps.varints),
        Positions.RICE: (gaps.rice_bytes, gaps.rice),
    }
    if gaps.begin is not None:
        length = positions_bytes(Positions.RANGE, kept, size)
        ways[Positions.RANGE] = (length, partial(range_positions, gaps.begin))
    scheme, (length, encode) = min(ways.items(), key=lambda way: way[1][0])
    return scheme, (value_K, encode()) if length < room else None


def _assemble(
    value_K: NDArray[np.float32],
    peak: float,
    scheme: Positions,
    positions: NDArray[np.uint8],
    size: int,
    coding: Coding,
) -> Payload:
    values = prepare_values(value_K, peak, coding)
    values_end = HEADER_BYTES + values.length
    payload = bytearray(values_end + positions.size)
    coded = np.frombuffer(payload, np.uint8)
    values.write(coded[HEADER_BYTES:values_end])
    coded[values_end:] = positions
    number = _CODEC_NUMBER[values.codec]
    kept, exponent = value_K.size, values.exponent
    _HEADER.pack_into(payload, 0, _VERSION, number, scheme, 0, exponent, 0, size, kept)
    return memoryview(payload).toreadonly()


@counts_as(Phase.DECODE)
def decode_gradient(payload: Payload, size: int) -> GradientPart:
    """Decode a gradient message for a model of `size` entries. Raises ContractError if it is no
    output of `encode_whole` or `encode_selected` for this model. A retry gives the same."""
    if len(payload) < HEADER_BYTES:
        msg = f"payload of {len(payload)} bytes; allowed: at least the header's {HEADER_BYTES}"
        raise ContractError(msg)
    codec, scheme, exponent, kept = _read_header(payload, size)
    coded = np.frombuffer(payload, np.uint8)[HEADER_BYTES:]
    values_end = length_of(codec, kept, coded)
    where = None
    if scheme is not Positions.ALL:
        where = check_positions(scheme, coded[values_end:], kept, size)
    elif coded.size != values_end:
        msg = f"payload of {coded.size} bytes after its header; its values alone take {values_end}"
        raise ContractError(msg)
    values = check_values(codec, exponent, coded[:values_end], kept)
    return GradientPart(values, where)


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
    return _NUMBER_CODEC[codec], Positions(scheme), exponent, kept


@counts_as(Phase.ENCODE)
def encode_weights(weights_D: NDArray[np.float32], coding: AnyCoding | str) -> Payload:
    """Encode weights for a `WEIGHTS` message, never coarser than float16, except by polyline.

    `coding` may be a name of the manifest, with defaults for all else. Raises ValueError if a
    weight is not finite.
    """
    if isinstance(coding, str):
        coding = ValueCodec(coding)
    return encode_whole(weights_D, coding_of(coding).for_weights)


@counts_as(Phase.DECODE)
def decode_weights(payload: Payload, size: int) -> NDArray[np.float32]:
    """Decode all weights of a model of `size` entries. Raises ContractError."""
    part = decode_gradient(payload, size)
    if part.where is not None:
        raise ContractError("weights payload with some entries; allowed: all of them")
    return part.value_K


def encode_loss(loss: float) -> bytes:
    return _LOSS.pack(loss)


def decode_loss(payload: Payload) -> float:
    """Decode a loss. Raises ContractError if it is not finite, or has another length."""
    if len(payload) != _LOSS.size:
        raise ContractError(f"loss payload of {len(payload)} bytes; allowed: {_LOSS.size}")
    (loss,) = _LOSS.unpack(payload)
    if not math.isfinite(loss):
        raise ContractError(f"loss {loss}; allowed: finite numbers")
    return float(loss)
