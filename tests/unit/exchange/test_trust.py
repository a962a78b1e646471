"""Facts: a worker that hears of other bundles judges peers by them from the next handshake on, in
both directions, and says whether they are others; what it trusted before no longer counts; a worker
without TLS takes no notice. Real TLS over loopback.

Left out: how bundles come to it (tests/local/test_federated_runs, test_coordination).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from dlion_api.errors import ContractError
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_operator.authority import Authority
from dlion_worker.credentials import WorkerCredentials, WorkerKey

A, B = SiteName("plant-a"), SiteName("plant-b")
JOB = JobKey("default", "digits", "1")
HERE, THERE = (WorkerIdentity(Rank(n), site, "small", 0) for n, site in enumerate((A, B)))


def credentials(authority: Authority, worker: WorkerIdentity) -> WorkerCredentials:
    """Of a worker that knows its own site alone."""
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
    """Whether that worker gets past TLS to the one that serves here."""
    try:
        channel_credentials = theirs.channel(A)
    except ContractError:
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
    authorities = {A: Authority(A), B: Authority(B)}
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
            assert mine.trust({**both, B: Authority(B).bundle_pem})
            assert not await connects(port, theirs)
            with pytest.raises(ContractError, match="not by the authority of site plant-b"):
                mine.check_peer(theirs.certificate_chain_pem, THERE, JOB)

    asyncio.run(asyncio.wait_for(body(), 30))


def test_a_worker_without_tls_takes_no_notice() -> None:
    off = WorkerCredentials.insecure()
    assert not off.trust({A: b"PEM"})
    assert not off.enabled
    assert off.site_bundles_pem == {}
