"""Tests of the trainer's reaction to refused messages.

Each refusal is reported once and at once, and counted every time. A peer that keeps sending invalid
messages is quarantined, each incarnation separately.

The link is real; nothing is sent on it.

Left out: the checks (tests/local/test_links); the path of the records (test_reporting).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dlion_api.names import Rank
from dlion_api.protocol.measurements import RefusalCount, StreamRefusals
from dlion_api.protocol.refusals import CallerError, PeerRefusal
from dlion_api.wire.exchange_pb2 import Hello
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.links.events import LinkDown, Refused
from dlion_worker.once_per_key import MAX_PER_KEY
from dlion_worker.security.credentials import WorkerCredentials
from dlion_worker.trainer.background.peer_refusals import PeerRefusalReporter
from dlion_worker.transport.peer_links import (
    MAX_VIOLATIONS,
    PeerExchangeConfig,
    PeerLink,
    PeerLinks,
)
from linked_workers import JOB, identity

PEER = Rank(3)


class Worker:
    """The parts of a worker that refusals need, and their effects."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.counts = StreamRefusals(())
        self.measuring: Any = None
        reporter: Any = SimpleNamespace(event=self._event)
        sidecar: Any = SimpleNamespace(send=self._count, on_refused=self._listen)
        self.refusals = PeerRefusalReporter(reporter, sidecar, JobProgress(iteration=7))
        me = PeerExchangeConfig(JOB, identity(0), 1, WorkerCredentials.insecure())
        take = self.refusals.filtered(lambda _: None)
        self.link = PeerLink(identity(PEER), PeerLinks(me, take))

    def _event(self, _reason: str, message: str, *, iteration: int, warning: bool) -> None:
        assert warning
        self.events.append((message, iteration))

    def admits(self, incarnation: int) -> bool:
        """Return whether that incarnation of the peer may send."""
        stream: Any = SimpleNamespace(end=lambda _reason: None)
        try:
            self.link.accept_stream(Hello(incarnation=incarnation), stream)
        except CallerError as error:
            return error.kind is not PeerRefusal.QUARANTINED
        return True

    def _count(self, counts: StreamRefusals) -> None:
        self.counts = counts

    def _listen(self, call: Any) -> None:
        self.measuring = call


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_a_refusal_of_the_exchange_is_reported_once_and_always_counted(worker: Worker) -> None:
    passed: list[Any] = []
    take = worker.refusals.filtered(passed.append)
    down = LinkDown(PEER, 1, "gone")
    for event in (
        Refused(None, "not its own", kind=PeerRefusal.BAD_CERTIFICATE),
        down,
        Refused(None, "not its own", kind=PeerRefusal.BAD_CERTIFICATE),
        Refused(PEER, "no proof", outgoing=True, kind=PeerRefusal.UNPROVEN),
    ):
        take(event)
    assert passed == [down]
    assert worker.events == [("a caller: not its own", 7), ("worker 3 refuses us: no proof", 7)]
    assert set(worker.counts.counts) == {
        RefusalCount("BadCertificate", False, 2), RefusalCount("Unproven", True, 1),
    }  # fmt: skip


def test_a_refusal_of_the_sidecar_is_reported(worker: Worker) -> None:
    worker.measuring("a caller: x")
    worker.measuring("a caller: x")
    assert worker.events == [("measuring: a caller: x", 7)]
    assert worker.counts == StreamRefusals(())  # it counts its own refusals


def test_unknown_peers_fill_neither_memory_nor_the_quota_of_peers(worker: Worker) -> None:
    many = 2 * MAX_PER_KEY
    worker.refusals.report([Refused(None, str(n)) for n in range(many)])
    assert len(worker.events) == MAX_PER_KEY
    assert worker.counts.counts == (RefusalCount("Malformed", False, many),)
    worker.refusals.report([Refused(PEER, "not finite"), Refused(None, "x", outgoing=True)])
    worker.measuring("a caller: y")
    assert [words for words, _ in worker.events[MAX_PER_KEY:]] == [
        "worker 3: not finite", "a caller refuses us: x", "measuring: a caller: y",
    ]  # fmt: skip


def test_a_repeated_violation_quarantines_a_peer_and_its_next_incarnation(worker: Worker) -> None:
    for incarnation in (1, 2, 3):
        assert worker.admits(incarnation) == (incarnation == 1), "another number is not a restart"
        worker.link.set_member(incarnation, "")  # its coordinator has confirmed it
        assert worker.admits(incarnation)
        for _ in range(MAX_VIOLATIONS - 1):
            worker.link.record_violation("not finite")
        assert worker.admits(incarnation)
        for _ in range(3):  # those that have arrived already, too
            worker.link.record_violation("not finite")
        assert not worker.admits(incarnation)
    events = [words for words, _ in worker.events]
    assert events[0] == "worker 3: not finite"
    assert [words.partition(": ")[2].partition(":")[0] for words in events[1:]] == [
        f"incarnation {incarnation} is quarantined" for incarnation in (1, 2, 3)
    ]
    assert set(worker.counts.counts) == {
        RefusalCount("Malformed", False, 3 * (MAX_VIOLATIONS + 2)),
        RefusalCount("Quarantined", False, 3),
    }


def test_a_peer_with_many_invalid_messages_does_not_fill_the_events(worker: Worker) -> None:
    for n in range(2 * MAX_PER_KEY):
        worker.link.record_violation(f"iteration {n}")
    events = [words for words, _ in worker.events]
    assert 0 < len([words for words in events if "quarantined" not in words]) <= MAX_PER_KEY
