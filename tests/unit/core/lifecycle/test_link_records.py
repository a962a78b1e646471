"""Tests of link records.

Each link is reported once a second. On request, an unused link is reported less often as long as
nothing changes, and so are bytes to workers that are not neighbours: the rarer, the more they are.
States are reported at once, and all links at the end.

Left out: readers of the records (tests/unit/results, tests/unit/operator).
"""

from __future__ import annotations

from dataclasses import replace

from dlion_api.names import Rank
from dlion_api.protocol.progress import LinkRecord, ProgressRecord
from dlion_core.lifecycle.reporting import Reporter
from dlion_core.links.events import LinkCounters

QUIET = LinkCounters(
    connected=True,
    queued_bytes=0,
    unacknowledged_bytes=0,
    window_bytes=1,
    sent_total=0,
    acknowledged_total=0,
    dropped_messages=0,
)
BUSY, IDLE = Rank(1), Rank(2)


class LinkReports:
    """A reporter of two links that reads their states twice a second."""

    def __init__(self, unused_links_every_s: float = 0.0) -> None:
        self.records: list[ProgressRecord] = []
        self.now_s = 0.0
        self.states = {BUSY: QUIET, IDLE: QUIET}
        self._reporter = Reporter(
            rank=Rank(0),
            incarnation=1,
            start_monotonic_s=0.0,
            send=self.records.extend,
            clock_s=lambda: self.now_s,
            unused_links_every_s=unused_links_every_s,
        )

    def pass_time(self, seconds: int, *, bytes_per_s: int = 0) -> None:
        for _ in range(2 * seconds):
            self.now_s += 0.5
            busy = self.states[BUSY]
            sent = busy.sent_total + bytes_per_s // 2
            self.states[BUSY] = replace(busy, sent_total=sent, acknowledged_total=sent)
            self._reporter.links(lambda: self.states, None, int(2 * self.now_s))

    def end(self) -> None:
        self._reporter.links(lambda: self.states, None, int(2 * self.now_s), now=True)

    def of(self, peer: Rank) -> list[LinkRecord]:
        return [one for one in self.records if isinstance(one, LinkRecord) and one.peer == peer]


def test_every_link_is_reported_once_a_second() -> None:
    reports = LinkReports()
    reports.pass_time(10, bytes_per_s=1000)
    for peer in (BUSY, IDLE):
        assert [one.time_s for one in reports.of(peer)] == [0.5 + s for s in range(10)]


def test_unused_links_are_reported_at_the_requested_interval() -> None:
    reports = LinkReports(unused_links_every_s=10.0)
    reports.pass_time(20, bytes_per_s=1000)
    assert [one.time_s for one in reports.of(IDLE)] == [0.5, 10.5]
    reports.pass_time(3)
    assert [one.time_s for one in reports.of(BUSY)] == [0.5 + s for s in range(23)]
    reports.end()
    assert [one.iteration for one in reports.of(IDLE)] == [1, 21, 41, 46]
    assert sum(one.sent_bytes for one in reports.of(BUSY)) == 20_000


def test_a_change_of_an_unused_link_is_reported_at_once() -> None:
    reports = LinkReports(unused_links_every_s=10.0)
    reports.pass_time(3)
    reports.states[IDLE] = replace(QUIET, connected=False)
    reports.pass_time(3)
    reports.states[IDLE] = replace(QUIET, sent_total=7)
    reports.pass_time(2)
    found = [(one.time_s, one.connected, one.sent_bytes) for one in reports.of(IDLE)]
    assert found == [(0.5, True, 0), (3.5, False, 0), (6.5, True, 7), (7.5, True, 0)]


def test_all_bytes_of_an_unused_link_are_reported() -> None:
    """The changes are equal and consecutive, as with heartbeats and with bytes of its sidecar."""
    reports = LinkReports(unused_links_every_s=10.0)
    for second in range(1, 6):
        reports.states[IDLE] = replace(QUIET, header_total=40 * second)
        reports.pass_time(1)
    assert len(reports.of(IDLE)) == 1, "headers are not a change"
    for second in range(1, 4):
        reports.states[IDLE] = replace(reports.states[IDLE], probe_total=300 * second)
        reports.pass_time(1)
    reports.end()
    found = reports.of(IDLE)
    assert [one.probe_bytes for one in found] == [0, 300, 300, 300, 0]
    assert sum(one.header_bytes for one in found) == 200


def test_bytes_to_a_non_neighbour_are_reported_rarely_and_states_at_once() -> None:
    reports = LinkReports()
    away = replace(QUIET, connected=False, neighbour=False)
    reports.states[IDLE] = replace(away, state_total=500)
    reports.pass_time(3)
    reports.states[IDLE] = replace(away, state_total=900, probe_total=7)
    reports.pass_time(3)
    reports.states[IDLE] = replace(away, state_total=900, probe_total=77, header_total=3)
    reports.pass_time(40)
    found = [(each.time_s, each.state_bytes, each.probe_bytes) for each in reports.of(IDLE)]
    assert found == [(0.5, 500, 0), (3.5, 400, 7), (33.5, 0, 70)]
    assert not any(each.neighbour for each in reports.of(IDLE))
    reports.states[IDLE] = replace(away, state_total=900, probe_total=80, header_total=4)
    reports.end()
    assert sum(each.probe_bytes for each in reports.of(IDLE)) == 80
    assert sum(each.header_bytes for each in reports.of(IDLE)) == 4


def test_many_non_neighbours_together_have_one_record_a_second() -> None:
    """In a sparse topology of 200 workers, whose sidecars exchange capacities every five
    seconds."""
    reports, distant = LinkReports(), [Rank(rank) for rank in range(10, 205)]
    for second in range(0, 600, 5):
        for peer in distant:
            reports.states[peer] = replace(
                QUIET, connected=False, neighbour=False, probe_total=100 * second
            )
        reports.pass_time(5)
    known = [one for one in reports.records if isinstance(one, LinkRecord) and not one.neighbour]
    assert {one.peer for one in known} == set(distant)
    assert len(known) <= len(distant) + 600, "each once at the begin, and then one a second"
    reports.states[distant[3]] = replace(reports.states[distant[3]], state_total=500)
    reports.pass_time(1)
    assert reports.of(distant[3])[-1].state_bytes == 500
    reports.end()
    assert all(sum(one.probe_bytes for one in reports.of(peer)) == 59500 for peer in distant)


def test_a_link_that_is_no_longer_kept_is_reported_once() -> None:
    reports = LinkReports()
    reports.pass_time(2)
    reports.states[IDLE] = replace(QUIET, connected=False, neighbour=False)
    reports.pass_time(5)
    assert [each.neighbour for each in reports.of(IDLE)] == [True, True, False]
