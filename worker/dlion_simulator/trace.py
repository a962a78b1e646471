"""Hash of a simulated run: equal if and only if two runs are equal.

Covers all records, in order, and the final weights.
"""

import hashlib
from collections.abc import Callable, Iterable

import numpy as np

from dlion_api.protocol.progress import ProgressRecord
from dlion_api.protocol.records import record_to_json
from dlion_core.policies.interface import Flat


class Trace:
    """Forwards records and hashes them."""

    def __init__(self, on_record: Callable[[ProgressRecord, str], None]) -> None:
        """`on_record` takes each record and its JSON."""
        self._on_record = on_record
        self._hash = hashlib.blake2b(digest_size=16)
        self.latest_s = 0.0
        """Virtual time of the latest record."""

    def take(self, records: Iterable[ProgressRecord]) -> None:
        """Hash and forward records, in order."""
        for record in records:
            text = record_to_json(record)
            self._hash.update(text.encode())
            self.latest_s = max(self.latest_s, record.time_s)
            self._on_record(record, text)

    def weights(self, weights_D: Flat) -> None:
        """Hash a replica's final weights."""
        self._hash.update(np.ascontiguousarray(weights_D).data)

    def hexdigest(self) -> str:
        """32 hex digits."""
        return self._hash.hexdigest()
