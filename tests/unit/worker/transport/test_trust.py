"""Tests of trust in other sites' bundles.

A worker with new bundles checks peers by them from the next handshake on, in both directions, and
returns whether they differ. Earlier bundles no longer count. A worker without TLS ignores them. A
worker with a new certificate shows it from the next handshake on. It is due at half of the life of
the one before. TLS over loopback is real.

Left out: the path of bundles (tests/local/test_federated_runs, test_coordination).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from cryptography import x509

from dlion_api.errors import ContractError
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.security.credentials import (
    UnknownAuthorityError,
    WorkerCredentials,
    WorkerKey,
)

A, B = SiteName("plant-a"), SiteName("plant-b")
JOB = JobKey("default", "digits", "1")
HERE, THERE = (WorkerIdentity(Rank(n), site, "small", 0) for n, site in enumerate((A, B)))


def credentials(authority: CertificateAuthority, worker: WorkerIdentity) -> WorkerCredentials:
    """Credentials of a worker that knows only its own site."""
    key = WorkerKey()
    chain = authority.sign(key.csr_pem(), worker, JOB)
    return WorkerCredentials(key, chain, {authority.site: authority.bundle_pem})


@asynccontextmanager
async def serving(mine: WorkerCredentials) -> AsyncIterator[int]:
    server = grpc.aio.server()
    credentials = mine.server()
    assert credentials is not None
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(grace=None)


async def connects(port: int, theirs: WorkerCredentials) -> bool:
    """Return whether that worker completes TLS with the worker that serves here."""
    try:
        channel_credentials = theirs.channel(A)
    except UnknownAuthorityError:
        return False
    assert channel_credentials is not None
    options = [*theirs.target_options(HERE.dns_name(JOB)), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(
        f"127.0.0.1:{port}", channel_credentials, options=options
    ) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary("/nothing")(b"", timeout=10)
    return raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_new_bundles_count_from_the_next_handshake_on() -> None:
    authorities = {A: CertificateAuthority(A), B: CertificateAuthority(B)}
    both = {site: authority.bundle_pem for site, authority in authorities.items()}
    mine, theirs = credentials(authorities[A], HERE), credentials(authorities[B], THERE)

    async def body() -> None:
        async with serving(mine) as port:
            assert not await connects(port, theirs)
            assert theirs.trust(both)
            assert not await connects(port, theirs)
            assert mine.trust(both)
            assert await connects(port, theirs)
            mine.check_peer(theirs.certificate_chain_pem, THERE, JOB)
            assert not mine.trust(dict(both))
            assert mine.trust({**both, B: CertificateAuthority(B).bundle_pem})
            assert not await connects(port, theirs)
            with pytest.raises(ContractError, match="not by the authority of site plant-b"):
                mine.check_peer(theirs.certificate_chain_pem, THERE, JOB)

    asyncio.run(asyncio.wait_for(body(), 30))


def test_a_new_certificate_is_shown_from_the_next_handshake_on() -> None:
    authorities = {A: CertificateAuthority(A), B: CertificateAuthority(B)}
    both = {site: authority.bundle_pem for site, authority in authorities.items()}
    mine, theirs = credentials(authorities[A], HERE), credentials(authorities[B], THERE)
    assert mine.trust(both)
    assert theirs.trust(both)

    def shown(port: int) -> x509.Certificate:
        return x509.load_pem_x509_certificate(
            ssl.get_server_certificate(("127.0.0.1", port), timeout=10).encode()
        )

    async def body() -> None:
        async with serving(mine) as port:
            for renewal in range(1, 4):
                key = WorkerKey()
                chain = authorities[A].sign(key.csr_pem(), HERE, JOB)
                mine.renew(key, chain)
                assert mine.renewals == renewal
                assert await connects(port, theirs)
                served = await asyncio.to_thread(shown, port)
                assert served == x509.load_pem_x509_certificate(chain)

    asyncio.run(asyncio.wait_for(body(), 30))


@pytest.mark.parametrize(
    ("life", "signed_before", "due"),
    [
        (timedelta(hours=24), None, timedelta(hours=12)),
        (timedelta(minutes=2), None, timedelta(minutes=1)),
        (timedelta(hours=24), timedelta(hours=9), timedelta(hours=3)),
        (timedelta(hours=24), timedelta(hours=20), timedelta(0)),
        (timedelta(hours=24), timedelta(minutes=-9), timedelta(hours=12)),  # by a slow clock
        (timedelta(hours=24), timedelta(hours=-1), timedelta(minutes=1)),  # signed by a fast one
    ],
)
def test_a_certificate_is_replaced_at_half_of_its_life(
    life: timedelta, signed_before: timedelta | None, due: timedelta
) -> None:
    signed = datetime(2026, 1, 1, tzinfo=UTC)
    authority, key = CertificateAuthority(A, life=life, now=signed), WorkerKey()
    chain = authority.sign(key.csr_pem(), HERE, JOB, now=signed)
    now = None if signed_before is None else signed + signed_before
    mine = WorkerCredentials(key, chain, {A: authority.bundle_pem})
    assert mine.renewal_due_s(now=now) == due.total_seconds()


def test_a_worker_with_a_slow_clock_seldom_renews() -> None:
    """All its certificates begin in its future, although peers accept them."""
    signed = datetime(2026, 1, 1, tzinfo=UTC)
    slow, life = signed - timedelta(minutes=15), timedelta(hours=24)
    authority, key = CertificateAuthority(A, life=life, now=signed), WorkerKey()
    chain = authority.sign(key.csr_pem(), HERE, JOB, now=signed)
    mine = WorkerCredentials(key, chain, {A: authority.bundle_pem})
    minutes = [mine.renewal_due_s(now=slow) / 60]
    for now in (*[slow] * 5, signed, slow):
        mine.renew(key, chain, now=now)
        minutes.append(mine.renewal_due_s(now=now) / 60)
    assert minutes == [1, 2, 4, 8, 10, 10, 720, 2]
    for _ in range(2000):
        mine.renew(key, chain, now=slow)
    assert mine.renewal_due_s(now=slow) == 600


def test_a_worker_without_tls_ignores_bundles() -> None:
    off = WorkerCredentials.insecure()
    assert not off.trust({A: b"PEM"})
    assert not off.enabled
    assert off.site_bundles_pem == {}
