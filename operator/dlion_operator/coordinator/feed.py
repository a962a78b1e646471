"""The records of one run, kept for whoever follows: the newest, numbered, within a bound. Pure.

Owns the numbers and the bound. Filled as reports are taken; read by the streams of `following`.
A follower that is slower than the run finds a gap in the numbers, never a coordinator out of
memory.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlion_api.refusals import MAX_RECORDS_PER_REPORT, MAX_REPORT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_FEED_BYTES = 8 * 1024 * 1024
"""Of one run: some minutes of a few workers, while its keeper is away."""
RECORD_OVERHEAD_BYTES = 64
"""What a text costs in memory beside its characters, about."""


@dataclass(frozen=True)
class End:
    """How a run ended."""

    reason: str
    succeeded: bool


@dataclass(frozen=True)
class Batch:
    """Records that follow each other without a gap."""

    first_sequence: int
    texts: tuple[str, ...]
    end: End | None
    """Where these are the last ones there will be."""

    @property
    def next_sequence(self) -> int:
        """The record that comes after these."""
        return self.first_sequence + len(self.texts)


class RecordFeed:
    """One run's records since this coordinator took it up, as JSON, counted from 1."""

    def __init__(self, epoch: str, *, limit_bytes: int = MAX_FEED_BYTES) -> None:
        """`epoch` names this life of the coordinator; numbers of another one mean nothing here."""
        self.epoch = epoch
        self.end: End | None = None
        self._limit_bytes = limit_bytes
        self._texts: deque[str] = deque()
        self._bytes = 0
        self._next = 1

    @property
    def next_sequence(self) -> int:
        """The number that the next record gets."""
        return self._next

    def put(self, texts: Iterable[str]) -> None:
        """Takes records; the oldest give way."""
        for text in texts:
            self._texts.append(text)
            self._bytes += len(text) + RECORD_OVERHEAD_BYTES
            self._next += 1
        while self._bytes > self._limit_bytes:
            self._bytes -= len(self._texts.popleft()) + RECORD_OVERHEAD_BYTES

    def finish(self, end: End) -> None:
        """No record is worth sending after this; the first end counts."""
        self.end = self.end or end

    def position(self, epoch: str, taken_sequence: int) -> int:
        """The record with which to go on, for a follower that has taken that one in that epoch."""
        if epoch != self.epoch:
            return 1
        return min(taken_sequence + 1, self._next)

    def batch(self, sequence: int) -> Batch | None:
        """Records from there on, or from the oldest that is left; None: there is nothing new."""
        first = max(sequence, self._next - len(self._texts))
        texts = tuple(self._from(first))
        is_last = first + len(texts) == self._next
        end = self.end if is_last else None
        return Batch(first, texts, end) if texts or end else None

    def _from(self, first: int) -> Iterable[str]:
        skipped = first - (self._next - len(self._texts))
        room_bytes = MAX_REPORT_BYTES
        for text in itertools.islice(self._texts, skipped, skipped + MAX_RECORDS_PER_REPORT):
            # Four bytes are the most that a character takes on the wire.
            room_bytes -= 4 * len(text) + RECORD_OVERHEAD_BYTES
            if room_bytes < 0:
                return
            yield text
