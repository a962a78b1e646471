"""A bounded queue of records for the coordinator. Pure: no thread, no clock.

When full, it drops the oldest steps, links and directives; an event reports how many. Others are
kept.
"""

from collections import deque
from dataclasses import dataclass

from dlion_api.protocol.progress import (
    EvaluationRecord,
    EventRecord,
    ProcessRecord,
    ProgressRecord,
)
from dlion_api.protocol.records import record_to_json
from dlion_api.protocol.refusals import MAX_RECORDS_PER_REPORT, MAX_REPORT_BYTES
from dlion_api.reasons import EventReason

MAX_DROPPABLE_BYTES = 8 * 1024 * 1024
"""Maximum bytes of steps, links and directives: about half an hour of one worker with three
peers."""
MAX_RETAINED_BYTES = 64 * 1024 * 1024
"""Maximum bytes of other records; beyond it the oldest are dropped, so that memory stays
bounded."""

_ENVELOPE_BYTES = 16 * 1024
"""Space in a report for its token and the framing of its records."""


@dataclass(frozen=True)
class _QueuedRecord:
    number: int
    record: ProgressRecord
    text: str


class _BoundedQueue:
    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.waiting: deque[_QueuedRecord] = deque()
        self._bytes = 0

    def put(self, queued: _QueuedRecord) -> list[_QueuedRecord]:
        """Append; return the records dropped for it."""
        self.waiting.append(queued)
        self._bytes += len(queued.text)
        dropped = []
        while self._bytes > self._limit_bytes:
            dropped.append(self.take())
        return dropped

    def take(self) -> _QueuedRecord:
        queued = self.waiting.popleft()
        self._bytes -= len(queued.text)
        return queued


class RecordQueue:
    """Records in order of arrival, over both queues."""

    def __init__(
        self,
        *,
        max_droppable_bytes: int = MAX_DROPPABLE_BYTES,
        max_retained_bytes: int = MAX_RETAINED_BYTES,
    ) -> None:
        self._droppable = _BoundedQueue(max_droppable_bytes)
        self._retained = _BoundedQueue(max_retained_bytes)
        self._count = 0
        self._dropped_count = 0
        self._last_dropped: ProgressRecord | None = None

    def put(self, record: ProgressRecord) -> None:
        """Add one record.

        Raises: ContractError (it contains a value that cannot be sent
        (`dlion_api.protocol.records`)).
        """
        text = record_to_json(record)
        is_retained = isinstance(record, EvaluationRecord | ProcessRecord | EventRecord)
        queue = self._retained if is_retained else self._droppable
        for dropped in queue.put(_QueuedRecord(self._count, record, text)):
            self._dropped_count += 1
            self._last_dropped = dropped.record
        self._count += 1

    def take_batch(self) -> list[str]:
        """The oldest records as JSON, as many as one report may carry; empty if none are queued."""
        texts = self._take_drop_report()
        free_bytes = MAX_REPORT_BYTES - _ENVELOPE_BYTES
        while (queue := self._queue_with_oldest()) and len(texts) < MAX_RECORDS_PER_REPORT:
            free_bytes -= len(queue.waiting[0].text) + 8  # a field's tag and length
            if free_bytes < 0:
                break
            texts.append(queue.take().text)
        return texts

    def __bool__(self) -> bool:
        return self._queue_with_oldest() is not None or self._last_dropped is not None

    def _queue_with_oldest(self) -> _BoundedQueue | None:
        queues = [queue for queue in (self._droppable, self._retained) if queue.waiting]
        return min(queues, key=lambda queue: queue.waiting[0].number, default=None)

    def _take_drop_report(self) -> list[str]:
        """The event about dropped records as JSON; empty if none was dropped since the last one."""
        last, self._last_dropped = self._last_dropped, None
        if last is None:
            return []
        text = f"{self._dropped_count} records dropped while the coordinator was unreachable"
        self._dropped_count = 0
        event = EventRecord(
            last.time_s, last.rank, last.iteration, EventReason.RECORDS_DROPPED, text, warning=True
        )
        return [record_to_json(event)]
