"""Real exchanges on loopback for tests and benchmarks: authorities, certificates, memberships."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_core.links.events import ExchangeEvent, StateRequest, StateSnapshot
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey
from dlion_worker.transport import PeerExchange, PeerExchangeConfig

JOB = JobKey("default", "cifar10", "1")
PLANT_A = SiteName("plant-a")
PLANT_B = SiteName("plant-b")
WITHIN_S = 20.0


def identity(rank: int, site: SiteName = PLANT_A) -> WorkerIdentity:
    """The worker of that rank, the only one of its index at that site."""
    return WorkerIdentity(Rank(rank), site, "small", rank)


def credentials(
    worker: WorkerIdentity, authorities: dict[SiteName, CertificateAuthority], job: JobKey = JOB
) -> WorkerCredentials:
    """A key and a certificate as the coordinator of that worker's site issues them."""
    key = WorkerKey()
    chain = authorities[worker.site].sign(key.csr_pem(), worker, job)
    return WorkerCredentials(key, chain, {s: a.bundle_pem for s, a in authorities.items()})


class Worker:
    """An exchange that puts its events in a queue."""

    def __init__(
        self, who: WorkerIdentity, proof: WorkerCredentials, incarnation: int = 1, **settings: Any
    ) -> None:
        self.who = who
        self.incarnation = incarnation
        self.state = StateSnapshot(7, 700, b"state of " + who.name.encode())
        self.events: queue.Queue[ExchangeEvent] = queue.Queue()
        config = PeerExchangeConfig(settings.pop("job", JOB), who, incarnation, proof, **settings)
        self.wanted: list[StateRequest] = []
        self.exchange = PeerExchange(config, self.events.put, self._provide)
        self.exchange.start()

    def _provide(self, wanted: StateRequest) -> StateSnapshot:
        self.wanted.append(wanted)
        return self.state

    def member(self, state: MemberState = MemberState.READY) -> Member:
        """This worker as a membership lists it."""
        return Member(self.who, self.incarnation, state, self.exchange.address)

    def wait_for(self, kind: type[Any], where: Callable[[Any], bool] = lambda event: True) -> Any:
        """Return the next event of that kind; drop those before it."""
        until_s = time.monotonic() + WITHIN_S
        dropped = []
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                event = self.events.get(timeout=left_s)
            except queue.Empty:
                break
            if isinstance(event, kind) and where(event):
                return event
            dropped.append(event)
        raise AssertionError(f"{self.who.name}: no {kind.__name__} in {WITHIN_S} s, but {dropped}")


def introduce(*workers: Worker, version: int = 1, job: JobKey = JOB) -> Membership:
    """Give all workers a membership of all."""
    membership = Membership(version, job, len(workers), tuple(w.member() for w in workers))
    for worker in workers:
        worker.exchange.set_members(membership)
    return membership


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true."""
    give_up_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < give_up_s, "did not come true"
        time.sleep(0.01)
