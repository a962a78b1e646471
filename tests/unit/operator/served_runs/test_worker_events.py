"""What workers tell becomes Kubernetes events, and how many of them.

Proves: a reason is told at once, then with its count after pauses that double up to an hour and
begin anew after an hour's silence, however many workers tell it; none is lost on the way; records
that are no news make none; a link that falls to a quarter is told once, with both figures, and a
short dip, a slow decline or a rise is not. Left out: that an API server takes them (tests/cluster).
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


def test_what_happens_once_is_told_at_once_and_once() -> None:
    news = WorkerEvents(WORKERS)
    news.take(event("WorkerLost", rank=1, warning=True))
    (told,) = news.pop_due(100.0)
    assert (told.reason, told.type, told.count) == ("PeerLost", "Warning", 1)
    assert told.message == "plant-a/small-1: iteration 7"
    assert news.pop_due(101.0) == news.pop_due(1e6) == ()


def test_what_is_no_news_makes_no_event() -> None:
    news = WorkerEvents(WORKERS)
    for reason in ("TrainerImported", "KnowledgeTransferred", "of-a-later-version"):
        news.take(event(reason))
    assert news.pop_due(0.0) == ()


def test_what_goes_on_is_told_ever_more_rarely_with_its_count() -> None:
    news, told = WorkerEvents(WORKERS), {}
    for second in range(4 * 3600):
        news.take(event(rank=second % 2))
        for notice in news.pop_due(float(second)):
            told[second] = notice.count
    assert list(told) == [0, 60, 180, 420, 900, 1860, 3780, 7380, 10980]
    assert sum(told.values()) == 10981
    later = 10980.0 + 2 * MAX_PAUSE_S
    assert news.pop_due(later)  # what was left
    news.take(event())
    assert news.pop_due(later + 59) == ()
    assert news.pop_due(later + 60)  # the pauses have begun anew


def test_invented_kinds_of_an_operators_event_share_one_rate() -> None:
    news = WorkerEvents(WORKERS)
    for at in range(10 * MAX_KINDS):
        news.add(JobEvent("WorkerRevoked", f"site-{at}"), kind=f"site-{at}")
    told = news.pop_due(0.0)
    assert len(told) == MAX_KINDS + 1
    assert sum(each.count for each in told) == 10 * MAX_KINDS


def test_each_kind_of_refused_caller_is_told_by_itself() -> None:
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
def test_nothing_is_lost_and_nobody_is_flooded(happened: list[tuple[str, float]]) -> None:
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
    """What is told of a link that carries so much, second by second."""
    news = WorkerEvents(WORKERS)
    for second, mbit in enumerate(rates):
        news.take(link(float(second), mbit))
    return [notice.message for notice in news.pop_due(0.0)]


def test_a_link_that_collapses_is_told_once_with_both_figures() -> None:
    steady = [20.0] * 60
    assert dropped([None, *steady, *[5.0] * 60]) == [
        "plant-a/small-0 to plant-a/small-1: 5 Mbit/s, 20 before"
    ]


def test_a_dip_a_slow_decline_and_a_rise_are_no_drop() -> None:
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
