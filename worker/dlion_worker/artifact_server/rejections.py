"""Counts rejected callers by reason, for the coordinator.

The service's loop writes, the record stream's thread reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from dlion_api.protocol.refusals import MAX_TEXT_BYTES, PeerRefusal


class UploadRejections:
    """The rejections of one keeper since its start."""

    def __init__(self) -> None:
        self._counts: Counter[PeerRefusal] = Counter()
        self.last_message = ""
        """The message of the last one."""

    def record(self, kind: PeerRefusal, last_message: str) -> None:
        self.last_message = last_message.encode()[:MAX_TEXT_BYTES].decode(errors="ignore")
        self._counts[kind] += 1

    def counts(self) -> Mapping[str, int]:
        return {str(kind): count for kind, count in self._counts.copy().items()}
