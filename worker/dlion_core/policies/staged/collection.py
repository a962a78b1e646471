"""What the decoder has of one sensor: which batches, and which to request next.

Bounded: a sensor has a fixed number of samples, and only requested batches are accepted.
"""

from typing import Final

import numpy as np

from dlion_api.errors import ContractError
from dlion_core.policies.interface import LocalFeatures, Value
from dlion_core.policies.staged.feature_batch import BATCH_SAMPLES

MAX_REQUESTED: Final = 4
"""Batches requested at once, so that a link is busy during the way of a request."""


class Collection:
    """The features of one sensor, as payloads for checkpoints."""

    def __init__(self) -> None:
        self.total = 0
        """Samples of the sensor; 0: unknown."""
        self.collected = 0
        self._payloads: dict[int, bytes] = {}
        self._requested: set[int] = set()

    @property
    def is_complete(self) -> bool:
        return 0 < self.total == self.collected

    @property
    def wire_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(map(len, self._payloads.values()))

    def forget_requests(self) -> None:
        """The link is new: earlier requests are not answered."""
        self._requested.clear()

    def next_requests(self) -> list[int]:
        """Return the first samples of the batches to request now, and count them as requested."""
        last = self.total or 1  # the first answer tells the number of samples
        missing = (
            first
            for first in range(0, last, BATCH_SAMPLES)
            if first not in self._payloads and first not in self._requested
        )
        new = [first for first, _ in zip(missing, range(self._room), strict=False)]
        self._requested.update(new)
        return new

    @property
    def _room(self) -> int:
        return MAX_REQUESTED - len(self._requested)

    def check(self, batch: LocalFeatures) -> None:
        """Raises ContractError for a batch that was not requested, or of other data."""
        if batch.first not in self._requested:
            raise ContractError(f"features from sample {batch.first} on, which were not requested")
        if self.total and batch.total != self.total:
            raise ContractError(
                f"features of one of {batch.total} samples; allowed: {self.total}, as before. A "
                "sensor's data must not change during a run"
            )

    def add(self, batch: LocalFeatures, payload: bytes) -> None:
        """Keep a checked batch."""
        self._requested.discard(batch.first)
        self.total = batch.total
        self._payloads[batch.first] = payload
        self.collected += len(batch.labels_B)

    def state(self) -> dict[str, Value]:
        """All payloads as one array, and the end of each."""
        payloads = [self._payloads[first] for first in sorted(self._payloads)]
        return {
            "payloads": np.frombuffer(b"".join(payloads), np.uint8),
            "ends": np.cumsum([len(payload) for payload in payloads], dtype=np.int64),
        }


def payloads_of(joined: Value, ends: Value) -> list[bytes]:
    """Return the payloads of `Collection.state`."""
    data, places = np.asarray(joined, np.uint8).tobytes(), np.asarray(ends, np.int64).tolist()
    return [data[start:end] for start, end in zip([0, *places], places, strict=False)]
