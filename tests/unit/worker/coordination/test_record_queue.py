"""Tests of the queue of records.

Records leave in the order of their arrival. A batch stays within the limits of a report. When the
queue is full, the oldest steps and links are dropped, but no evaluations and events. The loss is
reported.

Left out: sending (tests/local/test_coordination.py).
"""

from __future__ import annotations

import json

import pytest

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.protocol.progress import (
    EvaluationRecord,
    EventRecord,
    LinkRecord,
    ProcessRecord,
    StepRecord,
)
from dlion_api.protocol.records import record_to_json
from dlion_api.protocol.refusals import MAX_RECORDS_PER_REPORT, MAX_REPORT_BYTES
from dlion_worker.coordination.record_queue import RecordQueue

RANK = Rank(0)


def step(iteration: int, loss: float = 0.5) -> StepRecord:
    return StepRecord(0.0, RANK, 1, iteration, loss, 8, 32, 0.1, 0.1, 0.1, 0.1, 0.0, 0.0, 800)


def link(iteration: int) -> LinkRecord:
    return LinkRecord(0.0, RANK, Rank(1), iteration, 0, 0, 0, 0, None, None, 0, connected=True)


def evaluation(iteration: int) -> EvaluationRecord:
    return EvaluationRecord(0.0, RANK, iteration, 0, 0.5, 0.5, 100)


def event(iteration: int) -> EventRecord:
    return EventRecord(0.0, RANK, iteration, "Tested", "x" * 4000)


def taken(queue: RecordQueue) -> list[tuple[str, int]]:
    texts: list[str] = []
    while queue:
        texts += queue.take_batch()
    return [(json.loads(text)["kind"], json.loads(text)["iteration"]) for text in texts]


def test_records_leave_in_the_order_of_arrival() -> None:
    queue = RecordQueue()
    for record in (step(1), event(1), link(1), step(2), evaluation(2), step(3)):
        queue.put(record)
    assert taken(queue) == [
        ("step", 1), ("event", 1), ("link", 1), ("step", 2), ("evaluation", 2), ("step", 3)
    ]  # fmt: skip
    assert not queue
    assert queue.take_batch() == []


def test_a_batch_stays_within_the_limits_of_a_report() -> None:
    queue = RecordQueue()
    for iteration in range(2 * MAX_RECORDS_PER_REPORT):
        queue.put(event(iteration))
    sizes = []
    while queue:
        batch = queue.take_batch()
        sizes.append(len(batch))
        assert sum(map(len, batch)) < MAX_REPORT_BYTES
    assert sum(sizes) == 2 * MAX_RECORDS_PER_REPORT
    assert max(sizes) <= MAX_RECORDS_PER_REPORT


def test_the_oldest_steps_are_dropped_but_no_evaluations_and_events() -> None:
    room_bytes = 5 * len(record_to_json(step(10)))
    queue = RecordQueue(max_droppable_bytes=room_bytes)
    queue.put(evaluation(10))
    queue.put(ProcessRecord(0.0, RANK, 1, 10))
    for iteration in range(10, 30):
        queue.put(step(iteration))
    queue.put(event(99))
    notice, *rest = taken(queue)
    assert notice == ("event", 24)
    kept = [("evaluation", 10), ("process", 10)]
    assert rest == [*kept, *(("step", n) for n in range(25, 30)), ("event", 99)]


def test_dropped_records_are_reported_once_with_their_count() -> None:
    queue = RecordQueue(max_droppable_bytes=len(record_to_json(step(10))))
    for iteration in range(10, 14):
        queue.put(step(iteration))
    notice = json.loads(queue.take_batch()[0])
    assert (notice["reason"], notice["warning"]) == ("RecordsDropped", True)
    assert notice["message"].startswith("3 records")
    queue.put(step(14))
    assert taken(queue) == [("step", 14)]


def test_memory_is_bounded_even_for_events() -> None:
    queue = RecordQueue(max_retained_bytes=3 * len(record_to_json(event(10))))
    for iteration in range(10, 20):
        queue.put(event(iteration))
    assert len(taken(queue)) == 1 + 3


def test_a_record_that_cannot_be_sent_is_the_callers_error() -> None:
    queue = RecordQueue()
    with pytest.raises(ContractError, match="iteration"):
        queue.put(step(-1))
    assert not queue
