"""What a trainer does about refusals: told once each and at once, counted every time, and a peer
whose messages go on to make no sense is shut out.

Left out: who refuses (tests/local/test_links), the way of the records (test_reporting).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dlion_api.measurements import RefusalCount, StreamRefusals
from dlion_api.names import Rank
from dlion_api.refusals import PeerRefusal
from dlion_worker.exchange import LinkDown, Refused
from dlion_worker.trainer.refusals import MOST_REFUSALS, QUARANTINE_AFTER, Refusals

PEER = Rank(3)


class Worker:
    """What refusals need of one, and what became of them."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.counts = StreamRefusals(())
        self.shut_out: list[Rank] = []
        self.measuring: Any = None
        reporter: Any = SimpleNamespace(event=self._event)
        sidecar: Any = SimpleNamespace(send=self._count, on_refused=self._listen)
        exchange: Any = SimpleNamespace(quarantine=lambda peer, _: self.shut_out.append(peer))
        self.refusals = Refusals(reporter, sidecar, lambda: exchange, lambda: 7)

    def _event(self, _reason: str, message: str, *, iteration: int, warning: bool) -> None:
        assert warning
        self.events.append((message, iteration))

    def _count(self, counts: StreamRefusals) -> None:
        self.counts = counts

    def _listen(self, call: Any) -> None:
        self.measuring = call


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_what_the_exchange_refuses_is_told_once_and_counted_always(worker: Worker) -> None:
    passed: list[Any] = []
    take = worker.refusals.sieve(passed.append)
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


def test_what_the_sidecar_refuses_is_told(worker: Worker) -> None:
    worker.measuring("a caller: x")
    worker.measuring("a caller: x")
    assert worker.events == [("measuring: a caller: x", 7)]
    assert worker.counts == StreamRefusals(())  # it counts itself


def test_strangers_do_not_fill_the_memory(worker: Worker) -> None:
    worker.refusals.report([Refused(None, str(n)) for n in range(2 * MOST_REFUSALS)])
    assert len(worker.events) == MOST_REFUSALS
    assert worker.counts.counts == (RefusalCount("Malformed", False, 2 * MOST_REFUSALS),)


def test_who_goes_on_is_shut_out(worker: Worker) -> None:
    for iteration in range(QUARANTINE_AFTER + 2):
        worker.refusals.refuse(PEER, "not finite", iteration)
    assert worker.shut_out == [PEER]
    assert worker.events[0] == ("worker 3: not finite", 0)
