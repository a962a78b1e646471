"""Facts: a link that carries something is reported every second; one that carries nothing, and of
which nothing else has changed, every ten, once more when its bytes have stopped, and at the end.

Left out: what reads the records (tests/unit/results, tests/unit/operator).
"""

from __future__ import annotations

from dataclasses import replace

from dlion_api.names import Rank
from dlion_api.progress import LinkRecord, ProgressRecord
from dlion_worker.exchange import LinkState
from dlion_worker.trainer.reporting import Reporter

QUIET = LinkState(
    connected=True,
    incarnation=1,
    queued_bytes=0,
    unacknowledged_bytes=0,
    window_bytes=1,
    sent_total=0,
    acknowledged_total=0,
    received_total=0,
    dropped_messages=0,
    wire_sent_bytes=0,
    wire_received_bytes=0,
)
BUSY, IDLE = Rank(1), Rank(2)


class Told:
    """A reporter of two links, told of them twice a second."""

    def __init__(self) -> None:
        self.records: list[ProgressRecord] = []
        self.now_s = 0.0
        self.states = {BUSY: QUIET, IDLE: QUIET}
        self._reporter = Reporter(
            rank=Rank(0),
            incarnation=1,
            start_monotonic_s=0.0,
            send=self.records.extend,
            clock_s=lambda: self.now_s,
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


def test_idle_links_are_reported_every_ten_seconds() -> None:
    told = Told()
    told.pass_time(20, bytes_per_s=1000)
    assert [one.time_s for one in told.of(IDLE)] == [0.5, 10.5]
    busy = told.of(BUSY)
    assert [one.time_s for one in busy] == [0.5 + s for s in range(20)]
    told.end()
    assert [one.iteration for one in told.of(IDLE)] == [1, 21, 40]
    assert sum(one.sent_bytes for one in told.of(BUSY)) == 20_000


def test_a_change_is_reported_at_once() -> None:
    told = Told()
    told.pass_time(3, bytes_per_s=1000)
    told.pass_time(3)
    told.states[IDLE] = replace(QUIET, connected=False)
    told.pass_time(3)
    assert [(one.time_s, one.connected) for one in told.of(IDLE)] == [(0.5, True), (6.5, False)]
    # That nothing comes any more is told as well: recent rates are read off the last report.
    assert [one.sent_bytes for one in told.of(BUSY)] == [500, 1000, 1000, 500, 0]
