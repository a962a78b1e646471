"""Processes of plant-b that dial plant-a of `hostile_scene` with invalid credentials, and their own
reports.

A server that refuses inside TLS knows nothing of the caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from dlion_api.names import Rank
from dlion_api.protocol.measurements import Capacity, CapacitySource
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.protocol.refusals import PeerRefusal
from dlion_core.links.events import Refused
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey
from dlion_worker.sidecar.peer_client import PeerSidecarClient
from federated import FederatedSite
from hostile_proofs import EARLY, EXPIRED, SERVER_ONLY, Prove, foreign
from hostile_scene import INCARNATION, A, B, Scene
from linked_workers import Worker
from operator_process import free_ports

PROOFS: dict[str, Prove] = {
    "a foreign authority": foreign,
    "expired": EXPIRED,
    "not yet valid": EARLY,
    "for servers alone": SERVER_ONLY,
}

ReportsRefusal = Callable[[], bool]
"""Returns whether that caller has reported that it is not believed."""


@contextlib.contextmanager
def mistaken_workers(at: Scene) -> Iterator[dict[str, ReportsRefusal]]:
    """Trainers and sidecars that dial, by name."""
    with contextlib.ExitStack() as stack:
        refusals: dict[str, ReportsRefusal] = {}
        for words, prove in PROOFS.items():
            credentials = _credentials(at, prove)
            refusals[f"trainer, {words}"] = stack.enter_context(_trainer(at, credentials))
            refusals[f"sidecar, {words}"] = stack.enter_context(_sidecar(at, credentials))
        yield refusals


def _credentials(at: Scene, prove: Prove) -> WorkerCredentials:
    proof = prove(at)
    assert proof is not None
    bundles = {site: authority.bundle_pem for site, authority in at.authorities.items()}
    return WorkerCredentials(WorkerKey.from_pem(proof.key_pem), proof.chain_pem, bundles)


def _victim(at: Scene) -> Member:
    exchange, measuring = at.address_of("exchange"), at.address_of("measuring")
    return Member(at.victim, 1, MemberState.READY, exchange, measuring)


@contextlib.contextmanager
def _trainer(at: Scene, credentials: WorkerCredentials) -> Iterator[ReportsRefusal]:
    dialler = Worker(at.worker(B), credentials, INCARNATION, job=at.job)
    dialler.exchange.set_members(Membership(1, at.job, 2, (_victim(at), dialler.member())))

    def is_refused() -> bool:
        found = dialler.wait_for(Refused, lambda event: event.outgoing)
        return found.kind is PeerRefusal.NOT_BELIEVED

    try:
        yield is_refused
    finally:
        dialler.exchange.close()


class _Beside:
    """The worker beside the sidecar that dials."""

    def __init__(self, at: Scene) -> None:
        self._rank = at.worker(B).rank
        self.reported: set[PeerRefusal] = set()

    def own(self) -> Capacity:
        return Capacity(self._rank, 100.0, 1.0, CapacitySource.RATE, 1)

    def incarnation(self) -> int:
        return INCARNATION

    def handle_capacity(self, capacity: Capacity, incarnation: int) -> None:
        raise AssertionError("plant-a's sidecar has answered")

    def count_sent(self, _peer: Rank, _sent_bytes: int) -> None:
        """The sidecar's traffic is not checked."""

    def refused(self, kind: PeerRefusal, words: str, *, dialled: bool) -> None:
        assert dialled
        self.reported.add(kind)


@contextlib.contextmanager
def _sidecar(at: Scene, credentials: WorkerCredentials) -> Iterator[ReportsRefusal]:
    beside = _Beside(at)

    async def begin() -> PeerSidecarClient:
        caller = PeerSidecarClient(
            job=at.job,
            rank=at.worker(B).rank,
            worker=beside,
            credentials=credentials,
            dial=lambda _: None,
        )
        caller.set_peers([_victim(at)])
        return caller

    caller = at.neighbour.do(begin())
    try:
        yield lambda: beside.reported == {PeerRefusal.NOT_BELIEVED}
    finally:
        at.neighbour.do(caller.close())


@contextlib.contextmanager
def mistaken_operator(at: Scene) -> Iterator[ReportsRefusal]:
    """Dial as plant-b's operator, with a certificate of an authority that plant-a does not know."""
    folder = at.pods.folder / "mistaken"
    folder.mkdir()
    site = FederatedSite(B, folder, free_ports(1)[0], CertificateAuthority(B))
    node = at.neighbour.do(site.start(at.neighbour.other))
    dialler = node.clients[A]
    try:
        # The reason of a closed handshake; at an address without a listener it is "refused".
        words = "has this site's bundle"
        yield lambda: words in dialler.problem and "refused" not in dialler.problem
    finally:
        at.neighbour.do(node.close())
