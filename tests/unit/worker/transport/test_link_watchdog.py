"""Tests of the regular check of one link, with time as an argument.

An idle stream sends a heartbeat, and a silent one ends. Time in which this process was suspended is
not a silence of the peer.

Left out: real streams (tests/local/test_links); learning the time-out (test_deadline).
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_core.links.deadline import HEARTBEAT_S, MIN_MISSED_HEARTBEATS, ArrivalDeadline
from dlion_worker.security.credentials import WorkerCredentials
from dlion_worker.transport.peer_exchange import check_link
from dlion_worker.transport.peer_links import PeerExchangeConfig, PeerLink, PeerLinks

SILENT_S = 100.0
"""Far beyond the longest time-out of a stream without arrivals."""


class Connector:
    """Keep a stream with its time-out and its end; open none."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.stream = SimpleNamespace(
            last_sent_s=0.0, deadline=ArrivalDeadline(0.0), end=self.ended.append
        )

    def check_trust(self, _proof: object, _now_s: float) -> None:
        """Check nothing: there are no certificates here."""


def link() -> PeerLink:
    identity = WorkerIdentity(Rank(0), SiteName("plant-a"), "small", 0)
    peer = WorkerIdentity(Rank(1), SiteName("plant-b"), "large", 0)
    job, proof = JobKey("default", "digits", "1"), WorkerCredentials.insecure()
    local = PeerExchangeConfig(job, identity, 1, proof)
    return PeerLink(peer, PeerLinks(local, lambda _event: None))


def checked(connector: Any, now_s: float, late_s: float = 0.0) -> PeerLink:
    """Return a link after its check at that time."""

    async def check() -> PeerLink:
        one = link()
        check_link(one, connector, now_s, late_s)
        return one

    return asyncio.run(check())


@pytest.mark.parametrize(("now_s", "is_sent"), [(HEARTBEAT_S, True), (HEARTBEAT_S / 2, False)])
def test_an_idle_stream_sends_a_heartbeat(now_s: float, is_sent: bool) -> None:
    found = checked(Connector(), now_s)
    assert found.wake.is_set() is is_sent
    assert (found.send_queue.next_frame(now_s) is not None) is is_sent


def test_a_silent_stream_ends() -> None:
    connector = Connector()
    checked(connector, MIN_MISSED_HEARTBEATS * HEARTBEAT_S)
    assert not connector.ended
    checked(connector, SILENT_S)
    assert ["no acknowledgement: silent for 100.0 s" in why for why in connector.ended] == [True]


def test_a_pause_of_this_process_is_not_a_silence_of_the_peer() -> None:
    connector = Connector()
    checked(connector, SILENT_S, late_s=SILENT_S - 1)
    assert not connector.ended
