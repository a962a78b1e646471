"""Test the Kubernetes events that follow from records of workers.

- A reason is reported immediately, then with its count after pauses that double up to an hour. The
  pauses start again after an hour of silence. The number of workers does not matter, and no record
  is lost.
- Uninteresting records make no event.
- A link that falls to a quarter is reported once, with both figures. A short dip, a slow decline or
  a rise is not.

Left out: that an API server accepts the events (tests/cluster).
"""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.protocol.progress import EventRecord, LinkRecord
from dlion_operator.plan.decisions import JobEvent
from dlion_operator.served_runs.worker_events import MAX_KINDS, MAX_PAUSE_S, WorkerEvents

WORKERS = [WorkerIdentity(Rank(rank), SiteName("plant-a"), "small", rank) for rank in range(2)]
MBIT = 1e6 / 8


def event(reason: str = "CheckpointSaved", rank: int = 0, *, warning: bool = False) -> EventRecord:
    return EventRecord(1.0, Rank(rank), 7, reason, "iteration 7", warning)


def test_a_single_record_is_reported_immediately_and_once() -> None:
    news = WorkerEvents(WORKERS)
    news.take(event("WorkerLost", rank=1, warning=True))
    (reported,) = news.pop_due(100.0)
    assert (reported.reason, reported.type, reported.count) == ("PeerLost", "Warning", 1)
    assert reported.message == "plant-a/small-1: iteration 7"
    assert news.pop_due(101.0) == news.pop_due(1e6) == ()


def test_uninteresting_records_make_no_event() -> None:
    news = WorkerEvents(WORKERS)
    for reason in ("TrainerImported", "KnowledgeTransferred", "of-a-later-version"):
        news.take(event(reason))
    assert news.pop_due(0.0) == ()


def test_repeated_records_are_reported_at_growing_intervals_with_their_count() -> None:
    news, counts = WorkerEvents(WORKERS), {}
    for second in range(4 * 3600):
        news.take(event(rank=second % 2))
        for notice in news.pop_due(float(second)):
            counts[second] = notice.count
    assert list(counts) == [0, 60, 180, 420, 900, 1860, 3780, 7380, 10980]
    assert sum(counts.values()) == 10981
    later = 10980.0 + 2 * MAX_PAUSE_S
    assert news.pop_due(later)  # the remaining records
    news.take(event())
    assert news.pop_due(later + 59) == ()
    assert news.pop_due(later + 60)  # the pauses have started again


def test_invented_kinds_of_an_operators_event_share_one_rate() -> None:
    news = WorkerEvents(WORKERS)
    for at in range(10 * MAX_KINDS):
        news.add(JobEvent("WorkerRevoked", f"site-{at}"), kind=f"site-{at}")
    reported = news.pop_due(0.0)
    assert len(reported) == MAX_KINDS + 1
    assert sum(each.count for each in reported) == 10 * MAX_KINDS


def test_each_kind_of_refused_caller_is_reported_separately() -> None:
    news = WorkerEvents(WORKERS)
    assert news.refuse("coordinator: BadToken", "its words", warning=True)
    assert not news.refuse("coordinator: BadToken", "newer words", warning=True)
    assert news.refuse("federation: WrongSite", "others", warning=False)
    token, site = news.pop_due(0.0)
    assert {token.reason, site.reason} == {"CallerRefused"}
    assert (token.message, token.type, token.count) == (
        "coordinator: BadToken: newer words", "Warning", 2,
    )  # fmt: skip
    assert (site.message, site.type, site.count) == ("federation: WrongSite: others", "Normal", 1)
    assert news.refuse("coordinator: BadToken", "once more", warning=True)
    assert news.pop_due(59.0) == ()
    assert [notice.count for notice in news.pop_due(60.0)] == [1]


@given(st.lists(st.tuples(st.sampled_from(["CheckpointSaved", "WorkerLost"]), st.floats(0, 900))))
def test_no_record_is_lost_and_events_are_limited(happened: list[tuple[str, float]]) -> None:
    news, counted, posted = WorkerEvents(WORKERS), 0, 0
    now_s = 0.0
    for reason, passed_s in happened:
        now_s += passed_s
        news.take(event(reason))
        events = news.pop_due(now_s)
        counted += sum(notice.count for notice in events)
        posted += len(events)
    counted += sum(notice.count for notice in news.pop_due(now_s + 2 * MAX_PAUSE_S))
    assert counted == len(happened)
    assert posted <= 2 * (1 + now_s / 60)


def link(time_s: float, mbit: float | None, peer: int = 1) -> LinkRecord:
    rate = None if mbit is None else mbit * MBIT
    return LinkRecord(time_s, Rank(0), Rank(peer), 1, 0, 0, 0, 0, None, rate, 0, True)


def dropped(rates: Iterable[float | None]) -> list[str]:
    """Return the reports about a link with these rates, second by second."""
    news = WorkerEvents(WORKERS)
    for second, mbit in enumerate(rates):
        news.take(link(float(second), mbit))
    return [notice.message for notice in news.pop_due(0.0)]


def test_a_link_that_collapses_is_reported_once_with_both_figures() -> None:
    steady = [20.0] * 60
    assert dropped([None, *steady, *[5.0] * 60]) == [
        "plant-a/small-0 to plant-a/small-1: 5 Mbit/s, 20 before"
    ]


def test_a_dip_a_slow_decline_and_a_rise_are_not_a_drop() -> None:
    assert dropped([20.0] * 60 + [5.0] * 5 + [20.0] * 60) == []
    assert dropped(20.0 * 0.996**second for second in range(600)) == []
    assert dropped([5.0] * 60 + [20.0] * 60) == []


def test_links_of_workers_that_the_run_does_not_have_are_not_kept() -> None:
    news = WorkerEvents(WORKERS)
    for second in range(120):
        news.take(link(float(second), 20.0 if second < 60 else 5.0, peer=9))
    news.expect(WORKERS[:1])
    news.take(link(200.0, 1.0))
    assert news.pop_due(0.0) == ()
