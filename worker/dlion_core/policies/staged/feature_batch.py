"""Coded features of consecutive samples of one sensor: the payload of `FEATURES`.

Each channel (the last axis of a sample) has a range of its own, whose 2^bits levels are equally far
apart. Payload, little endian: a header (number of the first sample, samples of the sensor, samples
of this batch, bits), then the lowest value and the distance of levels of each channel (float32),
the levels (bits each, the first lowest), and the labels (uint16).

Shape suffixes: B samples of the batch, F values of a sample, C channels.
"""

import struct
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_core.codecs.payload import Payload
from dlion_core.policies.interface import LocalFeatures

BATCH_SAMPLES: Final = 256
"""Samples of a batch; the last one of a sensor may have fewer. Ranges then take few bytes."""
MAX_FEATURES: Final = 4096
"""Values of a sample."""
MAX_TOTAL_VALUES: Final = 2**28
"""Values of all samples of all sensors: 1 GiB at the decoder."""
MAX_MAGNITUDE: Final = 1e6
"""Maximum of a value: larger ones would end training."""
_TOLERANCE: Final = 1e-5
"""Relative, of the largest magnitude: the distance of levels is rounded to float32."""
MAX_CLASSES: Final = 2**16
BITS: Final = (2, 4, 8)
_HEADER: Final = struct.Struct("<IIHB")
MAX_BATCH_BYTES: Final = (
    _HEADER.size + MAX_FEATURES * 8 + BATCH_SAMPLES * (MAX_FEATURES + np.dtype("<u2").itemsize)
)


def max_sensor_values(sensors: int) -> int:
    """Return the most values of all samples of one of so many sensors: an equal share for each, so
    that none takes the room of another."""
    return MAX_TOTAL_VALUES // max(1, sensors)


def max_collected_bytes(shape: tuple[int, ...], sensors: int) -> int:
    """Return the most bytes of all payloads of all sensors, with samples of that shape."""
    samples = max_sensor_values(sensors) // prod(shape)
    headers = -(-samples // BATCH_SAMPLES) * (_HEADER.size + 8 * shape[-1])
    return sensors * (headers + samples * (prod(shape) + np.dtype("<u2").itemsize))


@dataclass(frozen=True)
class FeatureBatch:
    """Decoded features, and the bits that each took."""

    samples: LocalFeatures
    bits: int


def encode(samples: LocalFeatures, bits: int) -> bytes:
    """Return the payload. Raises ValueError for more samples or values than allowed."""
    features_B = samples.features_B
    count, channels = len(features_B), features_B.shape[-1]
    if count > BATCH_SAMPLES or features_B[0].size > MAX_FEATURES:
        raise ValueError(f"features of shape {features_B.shape}")
    values_BC = features_B.reshape(-1, channels)
    lowest_C = values_BC.min(axis=0)
    step_C = (values_BC.max(axis=0) - lowest_C) / np.float32(2**bits - 1)
    divisor_C = np.where(step_C > 0, step_C, np.float32(1))
    levels_BC = np.rint((values_BC - lowest_C) / divisor_C).clip(0, 2**bits - 1).astype(np.uint8)
    return b"".join(
        [
            _HEADER.pack(samples.first, samples.total, count, bits),
            np.stack([lowest_C, step_C]).astype("<f4").tobytes(),
            _packed(levels_BC.reshape(-1), bits).tobytes(),
            samples.labels_B.astype("<u2").tobytes(),
        ]
    )


@dataclass(frozen=True)
class BatchHeader:
    """Which samples a payload has. Not checked."""

    first: int
    """Number of its first sample."""
    total: int
    """Samples of the sensor."""
    count: int
    bits: int


def read_header(payload: Payload) -> BatchHeader:
    """Raises ContractError if the payload is too short for one."""
    if len(payload) < _HEADER.size:
        raise ContractError(f"features of {len(payload)} bytes; allowed: {_HEADER.size} or more")
    return BatchHeader(*_HEADER.unpack_from(payload))


def decode(payload: Payload, shape: tuple[int, ...], class_count: int) -> FeatureBatch:
    """Return the features of samples of that shape. Raises ContractError if it is invalid."""
    data = bytes(payload)
    header = read_header(data)
    count, bits = header.count, header.bits
    _check_header(header, values=prod(shape))
    channels, values = shape[-1], count * prod(shape)
    level_bytes = -(-values * bits // 8)
    expected = _HEADER.size + 8 * channels + level_bytes + 2 * count
    if len(data) != expected:
        raise ContractError(f"features of {len(data)} bytes; allowed: {expected} for {count}")
    ranges = np.frombuffer(data, "<f4", 2 * channels, _HEADER.size).reshape(2, channels)
    lowest_C, step_C = ranges.astype(np.float32)
    highest_C = lowest_C.astype(np.float64) + step_C.astype(np.float64) * (2**bits - 1)
    limit = MAX_MAGNITUDE * (1 + _TOLERANCE)
    if not ((lowest_C >= -MAX_MAGNITUDE) & (step_C >= 0) & (highest_C <= limit)).all():
        raise ContractError(
            f"features with a range that falls, or exceeds what is allowed: +-{MAX_MAGNITUDE:g}"
        )
    at = _HEADER.size + 8 * channels
    levels = _unpacked(np.frombuffer(data, np.uint8, level_bytes, at), bits)[:values]
    features_B = np.minimum(levels.reshape(-1, channels) * step_C + lowest_C, MAX_MAGNITUDE)
    labels_B = np.frombuffer(data, "<u2", count, at + level_bytes).astype(np.int32)
    if labels_B.max() >= class_count:
        raise ContractError(f"a label of {labels_B.max()}; allowed: 0 to {class_count - 1}")
    shaped_B = features_B.astype(np.float32).reshape(count, *shape)
    return FeatureBatch(LocalFeatures(header.first, header.total, shaped_B, labels_B), bits)


def _check_header(header: BatchHeader, *, values: int) -> None:
    first, total, count = header.first, header.total, header.count
    if header.bits not in BITS:
        raise ContractError(f"features of {header.bits} bits; allowed: {', '.join(map(str, BITS))}")
    if not 1 <= total <= MAX_TOTAL_VALUES // values:
        most = MAX_TOTAL_VALUES // values
        raise ContractError(f"features of one of {total} samples; allowed: 1 to {most}")
    if first % BATCH_SAMPLES or first >= total:
        raise ContractError(
            f"features from sample {first} of {total} on; allowed: multiples of {BATCH_SAMPLES}"
        )
    if count != min(BATCH_SAMPLES, total - first):
        raise ContractError(
            f"features of {count} samples; allowed: {min(BATCH_SAMPLES, total - first)}"
        )


def bits_for(values: int, bytes_per_s: float | None, within_s: float) -> int:
    """Return the most bits with which so many values arrive in time over a link of that rate.

    None: the rate is not known yet. If no number suffices, the least.

    >>> bits_for(80_000, 1000, 60), bits_for(80_000, 1000, 100), bits_for(80_000, None, 60)
    (4, 8, 8)
    """
    if bytes_per_s is None:
        return max(BITS)
    fitting = [bits for bits in BITS if values * bits / 8 <= bytes_per_s * within_s]
    return max(fitting, default=min(BITS))


def _packed(levels: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    per_byte = 8 // bits
    padded = np.pad(levels, (0, -len(levels) % per_byte)).reshape(-1, per_byte)
    packed = np.zeros(len(padded), np.uint8)
    for place in range(per_byte):
        packed |= padded[:, place] << np.uint8(place * bits)
    return packed


def _unpacked(packed: NDArray[np.uint8], bits: int) -> NDArray[np.float32]:
    places = np.arange(0, 8, bits, dtype=np.uint8)
    mask = np.uint8(2**bits - 1)
    return ((packed[:, None] >> places) & mask).reshape(-1).astype(np.float32)
