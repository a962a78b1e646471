"""Test that workers whose pods have IPv6 addresses listen on all of them and link with each other.

Left out: sidecars and keeper, which format addresses by the same function (`dlion_api.addresses`).
"""

from __future__ import annotations

from contextlib import ExitStack

from dlion_core.links.events import LinkUp
from dlion_operator.pki.authority import CertificateAuthority
from ipv6 import needs_ipv6
from linked_workers import PLANT_A, Worker, credentials, identity, introduce


@needs_ipv6
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
