"""Tests of events about awaited peers.

A linked peer that holds a step is named after a minute, then at growing intervals. It is not named
if this process was paused meanwhile (SIGSTOP).
"""

from __future__ import annotations

from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord
from dlion_api.reasons import EventReason
from dlion_core.lifecycle.reporting import Reporter
from dlion_worker.trainer.awaited_peers import REPORT_AFTER_S, AwaitedPeers


def test_a_peer_that_holds_a_step_is_named_at_growing_intervals() -> None:
    records: list[EventRecord] = []
    reporter = Reporter(
        rank=Rank(0), incarnation=1, start_monotonic_s=0.0, clock_s=float,
        send=records.extend,  # type: ignore[arg-type]  # only events are sent here
    )  # fmt: skip
    awaited = AwaitedPeers(reporter)
    for _ in range(int(REPORT_AFTER_S / 0.2) - 1):
        awaited.waited({Rank(2)}, 0.2, iteration=7)
    assert records == []
    awaited.step_begins()
    awaited.waited({Rank(2)}, 3600.0, iteration=7)
    assert records == []
    awaited.step_begins()
    for _ in range(int(10 * REPORT_AFTER_S)):
        awaited.waited({Rank(2), Rank(1)}, 1.0, iteration=8)
    assert [record.message for record in records] == [
        f"iteration 8 waits for workers 1, 2, linked, for {seconds} s"
        for seconds in (60, 120, 240, 480)
    ]
    assert {(record.reason, record.warning) for record in records} == {
        (EventReason.PEERS_AWAITED, True)
    }
