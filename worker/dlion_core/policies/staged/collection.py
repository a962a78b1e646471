"""The features that the decoder has of one sensor, and the batches to request next.

Bounded: a sensor has a fixed number of samples, and only requested batches are accepted. Adding a
batch and stating all of them takes time for what is new only.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_core.codecs.payload import Payload
from dlion_core.policies.interface import LocalFeatures, Value
from dlion_core.policies.staged.feature_batch import BATCH_SAMPLES, read_header

MAX_REQUESTED: Final = 4
"""Batches requested at once, so that a link is busy during the way of a request."""

_GROWTH: Final = 1.5


class Collection:
    """Features of one sensor, as payloads for checkpoints."""

    def __init__(self, max_samples: int) -> None:
        """`max_samples`: that a sensor may have."""
        self._max_samples = max_samples
        self.total = 0
        """Samples of the sensor; 0: unknown."""
        self.collected = 0
        self._bytes = np.zeros(0, np.uint8)
        """All payloads as they arrived, and room for more."""
        self._ends: dict[int, tuple[int, int]] = {}
        """First sample of each batch -> end of its payload, and its number among all batches."""
        self._requested: set[int] = set()
        self._next = 0
        """No batch before this sample is missing, unless it is requested."""

    @property
    def is_complete(self) -> bool:
        return 0 < self.total == self.collected

    @property
    def wire_bytes(self) -> int:
        """Bytes of all payloads."""
        return next(reversed(self._ends.values()))[0] if self._ends else 0

    @property
    def batches(self) -> int:
        return len(self._ends)

    def forget_requests(self) -> None:
        """The link is new: earlier requests are not answered."""
        self._next = min(self._requested, default=self._next)
        self._requested.clear()

    def next_requests(self) -> list[int]:
        """Return the first samples of the batches to request now, and count them as requested."""
        last = self.total or 1  # the first answer has the number of samples
        new: list[int] = []
        while self._next < last and len(self._requested) < MAX_REQUESTED:
            if self._next not in self._ends and self._next not in self._requested:
                self._requested.add(self._next)
                new.append(self._next)
            self._next += BATCH_SAMPLES
        return new

    def check(self, batch: LocalFeatures) -> None:
        """Raises ContractError for a batch that was not requested, or of other data."""
        if batch.first not in self._requested:
            raise ContractError(f"features from sample {batch.first} on, which were not requested")
        self._check_total(batch.total)

    def _check_total(self, total: int) -> None:
        if self.total and total != self.total:
            raise ContractError(
                f"features of one of {total} samples; allowed: {self.total}, as before. A "
                "sensor's data must not change during a run"
            )
        if total > self._max_samples:
            raise ContractError(
                f"features of one of {total} samples; allowed: {self._max_samples}, this sensor's "
                "share of the decoder's memory"
            )

    def refuse(self, payload: Payload) -> None:
        """A batch is refused: request it again."""
        first = read_header(payload).first
        if first in self._requested:
            self._requested.discard(first)
            self._next = min(self._next, first)

    def add(self, batch: LocalFeatures, payload: Payload, number: int) -> None:
        """Keep a checked batch. `number` counts the batches of all sensors."""
        self._requested.discard(batch.first)
        self.total = batch.total
        start, end = self.wire_bytes, self.wire_bytes + len(payload)
        if end > len(self._bytes):
            room = np.zeros(int(_GROWTH * end), np.uint8)
            room[:start] = self._bytes[:start]
            self._bytes = room
        self._bytes[start:end] = np.frombuffer(payload, np.uint8)
        self._ends[batch.first] = (end, number)
        self.collected += len(batch.labels_B)

    def payloads(self) -> Iterator[tuple[int, bytes]]:
        """Return the number of each batch, and its payload."""
        start = 0
        for end, number in self._ends.values():
            yield number, self._bytes[start:end].tobytes()
            start = end

    def state(self) -> dict[str, Value]:
        """All payloads as one array, and the end and number of each, shape [batches, 2].

        Later batches change neither.
        """
        return {
            "payloads": self._bytes[: self.wire_bytes],
            "ends": np.array([*self._ends.values()], np.int64).reshape(-1, 2),
        }

    def restore(self, payloads: Value, ends: Value) -> None:
        """Restore what `state` returned. Raises ContractError if it does not fit."""
        self._bytes, start = np.asarray(payloads, np.uint8), 0
        for end, number in _pairs(ends).tolist():
            if not start < end <= len(self._bytes):
                raise ContractError(f"features end at {end}, of {len(self._bytes)} bytes")
            header = read_header(self._bytes[start:end].tobytes())
            self._check_total(header.total)
            if header.first in self._ends:
                raise ContractError(f"two batches of features from sample {header.first} on")
            self._ends[header.first] = (end, number)
            self.total, start = header.total, end
            self.collected += header.count


def _pairs(ends: Value) -> NDArray[np.int64]:
    pairs = np.asarray(ends, np.int64)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ContractError(f"ends of features of shape {pairs.shape}")
    return pairs
