"""Bounded, numbered buffer of one run's newest records, for followers. Pure.

A follower that is slower than the run finds a gap in the numbers; memory stays bounded.
"""

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from dlion_api.protocol.refusals import MAX_RECORDS_PER_REPORT, MAX_REPORT_BYTES

MAX_FEED_BYTES = 8 * 1024 * 1024
"""Per run: a few minutes of a few workers, while the keeper is unreachable."""
RECORD_OVERHEAD_BYTES = 64
"""Approximate memory of a string beyond its characters."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    reason: str
    succeeded: bool


@dataclass(frozen=True)
class RecordBatch:
    """Consecutive records."""

    first_sequence: int
    texts: tuple[str, ...]
    end: RunEnd | None
    """Set on the last batch of a run."""

    @property
    def next_sequence(self) -> int:
        """Sequence number of the record after this batch."""
        return self.first_sequence + len(self.texts)


class RecordFeed:
    """One run's records as JSON since this coordinator opened it, numbered from 1."""

    def __init__(self, epoch: str, *, limit_bytes: int = MAX_FEED_BYTES) -> None:
        """`epoch` identifies this coordinator process. Sequence numbers hold within one epoch."""
        self.epoch = epoch
        self.end: RunEnd | None = None
        self._limit_bytes = limit_bytes
        self._texts: deque[str] = deque()
        self._bytes = 0
        self._next = 1

    def put(self, texts: Iterable[str]) -> None:
        """Append records; drop the oldest beyond the limit."""
        for text in texts:
            self._texts.append(text)
            self._bytes += len(text) + RECORD_OVERHEAD_BYTES
            self._next += 1
        while self._bytes > self._limit_bytes:
            self._bytes -= len(self._texts.popleft()) + RECORD_OVERHEAD_BYTES

    def finish(self, end: RunEnd) -> None:
        """Mark the end of the run; the first call counts."""
        self.end = self.end or end

    def position(self, epoch: str, taken_sequence: int) -> int:
        """Return where a follower resumes that has received `taken_sequence` of `epoch`."""
        if epoch != self.epoch:
            return 1
        return min(taken_sequence + 1, self._next)

    def batch(self, sequence: int) -> RecordBatch | None:
        """Return records from `sequence` or the oldest buffered; None if nothing is new."""
        first = max(sequence, self._next - len(self._texts))
        texts = tuple(self._from(first))
        is_last = first + len(texts) == self._next
        end = self.end if is_last else None
        return RecordBatch(first, texts, end) if texts or end else None

    def _from(self, first: int) -> Iterable[str]:
        skipped = first - (self._next - len(self._texts))
        room_bytes = MAX_REPORT_BYTES
        for text in itertools.islice(self._texts, skipped, skipped + MAX_RECORDS_PER_REPORT):
            # A character takes at most four bytes on the wire.
            room_bytes -= 4 * len(text) + RECORD_OVERHEAD_BYTES
            if room_bytes < 0:
                return
            yield text
