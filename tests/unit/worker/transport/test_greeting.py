"""Tests of the address in a hello.

A hello has the address at which its sender accepts streams. A peer of another site that dials
another address gets none. An address from such a peer, as in an earlier release, is ignored.

Left out: real links (tests/local/test_links.py).
"""

from __future__ import annotations

import pytest

from dlion_api.names import SiteName
from dlion_api.wire.exchange_pb2 import Frame, Hello
from dlion_worker.security.credentials import WorkerCredentials
from dlion_worker.transport.peer_links import PeerExchangeConfig, PeerLink, PeerLinks
from linked_workers import JOB, PLANT_A, PLANT_B, identity

HERE, NEW, FAR = "10.0.0.1:7440", "10.0.0.9:7440", "192.0.2.7:30000"


class Dialled:
    """A stream that must not be ended."""

    def end(self, reason: str) -> None:
        raise AssertionError(reason)


def link(peer_site: SiteName, *, is_exposed: bool) -> PeerLink:
    proof = WorkerCredentials.insecure()
    local = PeerExchangeConfig(JOB, identity(0), 1, proof, is_exposed=is_exposed)
    shared = PeerLinks(local, lambda event: None, HERE)
    return PeerLink(identity(1, peer_site), shared)


@pytest.mark.parametrize(
    ("site", "is_exposed", "address"),
    [
        (PLANT_A, False, HERE),
        (PLANT_B, False, HERE),
        (PLANT_A, True, HERE),
        (PLANT_B, True, ""),
    ],
)
def test_a_hello_has_an_address_that_the_peer_can_dial(
    site: SiteName, is_exposed: bool, address: str
) -> None:
    greeting = link(site, is_exposed=is_exposed)
    greeting.outgoing_started(Dialled())
    data = greeting.next_frame(0.0)
    assert data is not None
    assert Frame.FromString(data).hello.address == address


@pytest.mark.parametrize(
    ("site", "is_exposed", "address", "target"),
    [
        (PLANT_A, False, NEW, NEW),
        (PLANT_B, False, NEW, NEW),
        (PLANT_A, True, NEW, NEW),
        (PLANT_B, True, NEW, FAR),
        (PLANT_B, True, "", FAR),
    ],
)
def test_a_hello_changes_the_address_of_a_peer_that_is_dialled_by_it(
    site: SiteName, is_exposed: bool, address: str, target: str
) -> None:
    there = link(site, is_exposed=is_exposed)
    there.set_member(1, FAR)
    there.accept_stream(Hello(incarnation=1, address=address), Dialled())
    assert there.target == target
