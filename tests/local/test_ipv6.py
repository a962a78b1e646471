"""Test that workers whose pods have IPv6 addresses listen on all of them and link with each other.

Left out: sidecars and keeper, which format addresses by the same function (`dlion_api.addresses`).
"""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from dlion_core.links.events import LinkUp
from dlion_operator.pki.authority import CertificateAuthority
from linked_workers import PLANT_A, Worker, credentials, identity, introduce


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as it:
            it.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_workers_link_over_ipv6() -> None:
    authorities = {PLANT_A: CertificateAuthority(PLANT_A)}
    with ExitStack() as closing:
        workers = []
        for rank in range(2):
            who = identity(rank)
            proof = credentials(who, authorities)
            worker = Worker(who, proof, listen_host="::", advertise_host="::1")
            closing.callback(worker.exchange.close)
            assert worker.exchange.address.startswith("[::1]:")
            workers.append(worker)
        introduce(*workers)
        for worker in workers:
            worker.wait_for(LinkUp)
