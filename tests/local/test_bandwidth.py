"""Test the bandwidth measurements between operators, over real gRPC and TLS on loopback.

An operator measures on demand what its link to another site carries, and publishes the result by
HTTP. The result never exceeds the rate of the link. A second request soon after returns the same
result. One measurement runs at a time, of bounded length, between authenticated operators. Each
refusal has a reason, is counted, and does not affect other callers.

Left out: what `dlion preflight` makes of it (tests/unit/cli/test_preflight_clusters.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import SiteName
from dlion_operator.controller.health import serve_metrics
from dlion_operator.federation import link_bandwidth, service
from dlion_operator.federation.node import FederationNode
from dlion_operator.federation.refusals import FederationRefusalReason
from dlion_operator.pki.authority import CertificateAuthority
from federated import FederatedSite, federated_sites
from operator_process import free_ports

A, B, C = SiteName("plant-a"), SiteName("plant-b"), SiteName("plant-c")


def within(body: Callable[[Path], Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test with a folder and a timeout of one minute."""

    def test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(link_bandwidth, "SEND_DURATION_S", 1.0)

        async def run() -> None:
            async with asyncio.timeout(60):
                await body(tmp_path)

        asyncio.run(run())

    test.__name__ = body.__name__
    return test


@asynccontextmanager
async def federated(
    a: FederatedSite, b: FederatedSite
) -> AsyncIterator[tuple[FederationNode, FederationNode]]:
    try:
        yield await a.start(b), await b.start(a)
    finally:
        for site in (a, b):
            if site.node is not None:
                await site.node.close()


@within
async def test_both_directions_are_measured_and_the_result_is_cached(folder: Path) -> None:
    a, b = federated_sites(folder, A, B)
    async with federated(a, b) as (here, there):
        first = await here.meter.bandwidth(B)
        assert (
            0
            < first.bytes_count
            < link_bandwidth.MAX_MEASUREMENT_BYTES + link_bandwidth.CHUNK_BYTES
        )
        assert first.bytes_per_s == pytest.approx(first.bytes_count / first.seconds)
        received = there.service.measured_bytes
        assert received == first.bytes_count + link_bandwidth.CHUNK_BYTES
        assert await here.meter.bandwidth(B) == first
        assert there.service.measured_bytes == received
        assert (await there.meter.bandwidth(A)).bytes_per_s > 0
        with pytest.raises(LookupError):
            await here.meter.bandwidth(C)


@asynccontextmanager
async def paced(port: int, bytes_per_s: float) -> AsyncIterator[int]:
    """Open a port that forwards to `port`, at `bytes_per_s` in each direction."""
    open_ones: set[asyncio.Task[None]] = set()

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        due_s = time.monotonic()
        try:
            while data := await source.read(4096):
                due_s = max(due_s, time.monotonic()) + len(data) / bytes_per_s
                await asyncio.sleep(due_s - time.monotonic())
                sink.write(data)
                await sink.drain()
        finally:
            sink.close()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", port, limit=4096)
        with contextlib.suppress(OSError):
            await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones.add(asyncio.create_task(join(reader, writer)))

    server = await asyncio.start_server(joined, "127.0.0.1", 0, limit=4096)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for each in open_ones:
            each.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)


@within
async def test_the_result_does_not_exceed_the_rate_of_the_link(folder: Path) -> None:
    a, b = federated_sites(folder, A, B)
    rate = 1_000_000.0
    async with paced(b.port, rate) as b.reached_at, federated(a, b) as (here, _there):
        assert 0 < (await here.meter.bandwidth(B)).bytes_per_s < 1.25 * rate


@within
async def test_one_measurement_runs_at_a_time(folder: Path) -> None:
    a, b = federated_sites(folder, A, B)
    async with federated(a, b) as (here, there):
        async with there.service.measuring:
            with pytest.raises(UnavailableError, match="another site is measuring now"):
                await here.meter.bandwidth(B)
        assert there.service.refusals == {FederationRefusalReason.TOO_MUCH: 1}
        assert (await here.meter.bandwidth(B)).bytes_count > 0


@within
async def test_the_greeting_is_not_timed(folder: Path) -> None:
    """The greeting adds a round trip, which would make fast and long links seem slow."""
    sizes, greetings = list[int](), list[int]()
    take, sites_of = link_bandwidth.ChunkTimer.take, service.sites_of

    def named(greeting: Any) -> tuple[SiteName, SiteName]:
        greetings.append(len(greeting.payload))
        return sites_of(greeting)

    def recorded(self: link_bandwidth.ChunkTimer, size_bytes: int, now_s: float) -> None:
        sizes.append(size_bytes)
        take(self, size_bytes, now_s)

    a, b = federated_sites(folder, A, B)
    async with federated(a, b) as (here, _):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service, "sites_of", named)
            patch.setattr(link_bandwidth.ChunkTimer, "take", recorded)
            measured = await here.meter.bandwidth(B)
    assert greetings == [0]
    assert set(sizes) == {link_bandwidth.CHUNK_BYTES}
    assert measured.bytes_count == sum(sizes[1:])


@within
async def test_a_measurement_that_is_too_long_is_refused(folder: Path) -> None:
    a, b = federated_sites(folder, A, B)
    async with federated(a, b) as (here, there):
        most = 4 * link_bandwidth.CHUNK_BYTES
        take = link_bandwidth.ChunkTimer.take

        def strict(self: link_bandwidth.ChunkTimer, size_bytes: int, now_s: float) -> None:
            with pytest.MonkeyPatch.context() as bound:
                bound.setattr(link_bandwidth, "MAX_MEASUREMENT_BYTES", most)
                take(self, size_bytes, now_s)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link_bandwidth, "MAX_MEASUREMENT_BYTES", 2**40)  # the sender has no bound
            patch.setattr(link_bandwidth.ChunkTimer, "take", strict)
            # The status may be INTERNAL: this caller continues to send (grpc/grpc#36066).
            with pytest.raises(ContractError):
                await here.meter.bandwidth(B)
        assert there.service.refusals == {FederationRefusalReason.MALFORMED: 1}
        assert there.service.measured_bytes <= most + link_bandwidth.CHUNK_BYTES
        assert not there.service.measuring.locked(), "the slot is free again"


@within
async def test_an_operator_of_another_authority_is_refused(folder: Path) -> None:
    a, b = federated_sites(folder, A, B)
    async with federated(a, b) as (here, there):
        here.credentials.replace_authority(CertificateAuthority(A))
        with pytest.raises(UnavailableError):
            await here.meter.bandwidth(B)
        assert there.service.measured_bytes == 0


@within
async def test_a_site_that_claims_another_name_is_refused(folder: Path) -> None:
    a, b, c = federated_sites(folder, A, B, C)
    try:
        here, there = await a.start(b), await b.start(a, c)
        here.meter._own = C
        with pytest.raises(ContractError, match="UNAUTHENTICATED"):
            await here.meter.bandwidth(B)
        here.meter._own, there.service._own = A, C
        with pytest.raises(ContractError, match="NOT_FOUND"):
            await here.meter.bandwidth(B)
        assert there.service.refusals[FederationRefusalReason.BAD_CERTIFICATE] == 1
        assert there.service.refusals[FederationRefusalReason.WRONG_SITE] == 1
        assert there.service.measured_bytes == 0
    finally:
        for site in (a, b):
            if site.node is not None:
                await site.node.close()


def fetch_page(port: int, path: str) -> tuple[int, dict[str, Any]]:
    """Return the status code and document of a page of an operator's metrics port."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@within
async def test_an_operator_that_may_not_measure_names_the_setting(folder: Path) -> None:
    a, b = federated_sites(folder, A, B)
    (port,) = free_ports(1)
    async with federated(a, b) as (_, there):
        runner = await serve_metrics(CollectorRegistry(), port)
        try:
            code, document = await asyncio.to_thread(fetch_page, port, f"bandwidth/{B}")
            assert (code, "federation.measureOnDemand" in document["message"]) == (404, True)
            assert there.service.measured_bytes == 0
        finally:
            await runner.cleanup()


@within
async def test_the_result_is_served_by_http(folder: Path) -> None:
    a, b = federated_sites(folder, A, B)
    (port,) = free_ports(1)
    async with federated(a, b) as (here, there):
        runner = await serve_metrics(CollectorRegistry(), port, here.meter.bandwidth)
        try:
            code, document = await asyncio.to_thread(fetch_page, port, f"bandwidth/{B}")
            assert (code, document["site"]) == (200, B)
            assert document["bytesPerSecond"] == pytest.approx(
                document["bytes"] / document["seconds"]
            )
            code, document = await asyncio.to_thread(fetch_page, port, "bandwidth/nowhere")
            assert code == 404
            assert "'nowhere' is not among the sites" in document["message"]
            await there.close()
            here.meter._last.clear()
            code, document = await asyncio.to_thread(fetch_page, port, f"bandwidth/{B}")
            assert code == 503
            assert document["message"].startswith(f"site {B}: UNAVAILABLE")
        finally:
            await runner.cleanup()
