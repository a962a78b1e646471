"""Records that wait for the coordinator, within a bound. Pure: no thread, no clock.

While the coordinator is away, what can be spared gives way oldest first: steps, links and
directives. Evaluations and events do not; that some records were dropped becomes an event itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dlion_api.progress import EvaluationRecord, EventRecord, ProgressRecord
from dlion_api.reasons import EventReason
from dlion_api.records import record_to_json
from dlion_api.refusals import MAX_RECORDS_PER_REPORT, MAX_REPORT_BYTES

MAX_SPARABLE_BYTES = 8 * 1024 * 1024
"""Of steps, links and directives: about half an hour of one worker with three peers."""
MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Of evaluations and events. Memory is bounded, come what may: beyond it the oldest give way."""

_ENVELOPE_BYTES = 16 * 1024
"""Room in a report for its token and the framing of its records."""


@dataclass(frozen=True)
class _Waiting:
    number: int
    record: ProgressRecord
    text: str


class _Bounded:
    """One line of records with its size in bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0

    def put(self, waiting: _Waiting) -> list[_Waiting]:
        """Appends, and yields what had to give way."""
        self._waiting.append(waiting)
        self._bytes += len(waiting.text)
        dropped = []
        while self._bytes > self._limit_bytes:
            dropped.append(self.take())
        return dropped

    def take(self) -> _Waiting:
        waiting = self._waiting.popleft()
        self._bytes -= len(waiting.text)
        return waiting

    def first(self) -> _Waiting | None:
        return self._waiting[0] if self._waiting else None


class RecordQueue:
    """Records in the order they came, over both lines."""

    def __init__(
        self,
        *,
        max_sparable_bytes: int = MAX_SPARABLE_BYTES,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._sparable = _Bounded(max_sparable_bytes)
        self._kept = _Bounded(max_kept_bytes)
        self._count = 0
        self._dropped_count = 0
        self._last_dropped: ProgressRecord | None = None

    def put(self, record: ProgressRecord) -> None:
        """Takes one record.

        Raises:
            ContractError: a value in it cannot be sent (`dlion_api.records`).
        """
        text = record_to_json(record)
        kept = isinstance(record, EvaluationRecord | EventRecord)
        line = self._kept if kept else self._sparable
        for dropped in line.put(_Waiting(self._count, record, text)):
            self._dropped_count += 1
            self._last_dropped = dropped.record
        self._count += 1

    def take_batch(self) -> list[str]:
        """The oldest records as JSON, as many as one report may carry; empty: nothing waits."""
        texts: list[str] = []
        room_bytes = MAX_REPORT_BYTES - _ENVELOPE_BYTES
        notice = self._notice()
        if notice:
            texts.append(notice)
        while len(texts) < MAX_RECORDS_PER_REPORT:
            line = self._line_with_the_oldest()
            first = line.first() if line else None
            if line is None or first is None or len(first.text) + 8 > room_bytes:
                break
            texts.append(line.take().text)
            room_bytes -= len(first.text) + 8  # a field's tag and length
        return texts

    def __bool__(self) -> bool:
        return self._line_with_the_oldest() is not None or self._last_dropped is not None

    def _line_with_the_oldest(self) -> _Bounded | None:
        lines = [line for line in (self._sparable, self._kept) if line.first()]
        return min(lines, key=_first_number, default=None)

    def _notice(self) -> str | None:
        last = self._last_dropped
        if last is None:
            return None
        iteration = last.iteration
        message = f"{self._dropped_count} records gave way while the coordinator was not reachable"
        self._last_dropped = None
        self._dropped_count = 0
        return record_to_json(
            EventRecord(
                last.time_s,
                last.rank,
                iteration,
                EventReason.RECORDS_DROPPED,
                message,
                warning=True,
            )
        )


def _first_number(line: _Bounded) -> int:
    first = line.first()
    return first.number if first else -1
