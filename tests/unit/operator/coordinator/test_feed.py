"""Test the feed of a run's records.

Records have consecutive numbers from 1. A follower continues at its last record in the same epoch,
and at the oldest one in another epoch. A slow follower finds a gap. Memory is bounded. A batch fits
into a message. The first end follows the last record.

Left out: streams and gRPC (tests/local/test_coordinator_runs.py).
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlion_api.protocol.refusals import MAX_RECORDS_PER_REPORT, MAX_REPORT_BYTES
from dlion_operator.coordinator.feed import RECORD_OVERHEAD_BYTES, RecordBatch, RecordFeed, RunEnd

ENTRY_BYTES = RECORD_OVERHEAD_BYTES + 2


def feed(count: int, *, kept: int = 1000) -> RecordFeed:
    """Return a feed with the records "01", "02", ... and room for `kept` of them."""
    made = RecordFeed("life", limit_bytes=kept * ENTRY_BYTES)
    made.put(f"{number:02d}" for number in range(1, count + 1))
    return made


def test_a_follower_continues_after_its_last_record() -> None:
    assert feed(3).batch(1) == RecordBatch(1, ("01", "02", "03"), None)
    assert feed(3).position("life", 2) == 3
    assert feed(3).batch(3) == RecordBatch(3, ("03",), None)
    assert feed(3).batch(4) is None


def test_another_epoch_or_a_future_number_is_ignored() -> None:
    assert feed(3).position("an earlier life", 2) == 1
    assert feed(3).position("", 0) == 1
    assert feed(3).position("life", 2**64 - 1) == 4


def test_a_slow_follower_finds_a_gap() -> None:
    assert feed(10, kept=3).batch(5) == RecordBatch(8, ("08", "09", "10"), None)


def test_nothing_is_kept_without_a_follower() -> None:
    assert feed(10, kept=0).batch(1) is None
    assert feed(10, kept=0)._next == 11


def test_the_first_end_comes_after_the_last_record() -> None:
    ended = feed(MAX_RECORDS_PER_REPORT + 1)
    ended.finish(RunEnd("maxSteps reached", succeeded=True))
    ended.finish(RunEnd("too late", succeeded=False))
    first = ended.batch(1)
    assert first is not None
    assert (len(first.texts), first.end) == (MAX_RECORDS_PER_REPORT, None)
    last = ended.batch(first.next_sequence)
    assert last is not None
    assert (len(last.texts), last.end) == (1, RunEnd("maxSteps reached", succeeded=True))
    assert ended.batch(last.next_sequence) == RecordBatch(last.next_sequence, (), last.end)


@given(
    st.lists(st.lists(st.text(max_size=40), max_size=20), max_size=30),
    st.integers(0, 3000),
    st.integers(1, 700),
)
def test_the_newest_records_are_kept_in_order_within_the_bound(
    puts: list[list[str]], limit_bytes: int, start: int
) -> None:
    made = RecordFeed("life", limit_bytes=limit_bytes)
    everything = [text for put in puts for text in put]
    for put in puts:
        made.put(put)
    sequence, taken = min(start, made._next), list[str]()
    while (batch := made.batch(sequence)) is not None:
        assert batch.first_sequence >= sequence
        assert len(batch.texts) <= MAX_RECORDS_PER_REPORT
        assert sum(len(text.encode()) for text in batch.texts) <= MAX_REPORT_BYTES
        at = batch.first_sequence - 1
        assert list(batch.texts) == everything[at : at + len(batch.texts)]
        taken += batch.texts
        sequence = batch.next_sequence
    assert made._next == len(everything) + 1
    assert sequence == made._next or not taken
    assert sum(len(text) + RECORD_OVERHEAD_BYTES for text in taken) <= limit_bytes
