"""Test the streams between operators, over real gRPC and mutual TLS on loopback.

Operators report what they observe to each other, whichever starts first and after a restart of
either. A bundle that is added, changed or removed takes effect without a restart. Certificates are
renewed on open streams. An idle link is quiet. No other caller replaces an operator. Each hostile
or mistaken connection of a table is refused, counted and changes nothing.

Left out: the effect on a job (tests/unit/operator), two clusters (tests/cluster).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import CertificateSigningRequestBuilder, Name

from dlion_api.names import OperatorIdentity, SiteName
from dlion_api.protocol.refusals import REASON_KEY
from dlion_api.wire import federation_pb2 as wire
from dlion_operator.controller.metrics import FederationMetrics
from dlion_operator.federation import client as dialling_module
from dlion_operator.federation import node as node_module
from dlion_operator.federation import outbound_reports as telling_module
from dlion_operator.federation import service as service_module
from dlion_operator.federation.messages import MAX_STATEMENT_BYTES, site_hello, to_wire
from dlion_operator.federation.refusals import FederationRefusalReason
from dlion_operator.federation.reports import (
    Heartbeat,
    RunRemoved,
    RunReport,
    RunReported,
    TrainingFigures,
)
from dlion_operator.model import rate_limiter
from dlion_operator.pki.authority import CertificateAuthority, ServerIdentity
from federated import JOB, FederatedSite, federated_sites, report, until, worker

pytestmark = pytest.mark.patient

A, B, C = SiteName("plant-a"), SiteName("plant-b"), SiteName("plant-c")
LONG_S = 60.0
METRICS_PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def within(body: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test with a folder and a timeout of one minute."""

    def test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(node_module, "BUNDLES_INTERVAL_S", 0.1)
        monkeypatch.setattr(telling_module, "HEARTBEAT_INTERVAL_S", 1.0)
        monkeypatch.setattr(telling_module, "FIGURES_INTERVAL_S", 0.5)
        monkeypatch.setattr(dialling_module, "MAX_WAIT_S", 0.2)
        monkeypatch.setattr(dialling_module, "CONNECT_TIMEOUT_S", 2.0)

        async def run() -> None:
            async with asyncio.timeout(LONG_S):
                await body(tmp_path)

        asyncio.run(run())

    test.__name__ = body.__name__
    return test


@asynccontextmanager
async def running(*sites: FederatedSite) -> AsyncIterator[None]:
    """Run all of them, federated."""
    try:
        for site in sites:
            await site.start(*(other for other in sites if other is not site))
        yield
    finally:
        for site in sites:
            if site.node is not None:
                await site.node.close()


def heard(site: FederatedSite, other: SiteName) -> Any:
    assert site.node is not None
    return site.node.reports(JOB).get(other)


def knows(site: FederatedSite, others: dict[SiteName, RunReport]) -> bool:
    """Report whether that site has received exactly this, and is heard itself."""
    node = site.node
    assert node is not None
    return node.reports(JOB) == others and all(
        node.reachability(other).reachable and not node.problem(other) for other in others
    )


@within
async def test_three_sites_receive_the_reports_of_each_other(folder: Path) -> None:
    sites = federated_sites(folder, A, B, C)
    for rank, site in enumerate(sites):
        site.reports[JOB] = report(site.name, rank)
    async with running(*sites):
        for site in sites:
            others = {each.name: each.reports[JOB] for each in sites if each is not site}
            await until(partial(knows, site, others))
            assert set(site.news) == {JOB}
            assert site.node is not None
            for family in FederationMetrics(site.node).collect():
                name = family.name + ("_total" if family.type == "counter" else "")
                assert f"- `{name}` ({family.type}" in METRICS_PAGE, name
        first, second, _ = sites
        first.reports = {JOB: replace(first.reports[JOB], figures=TrainingFigures(True, 7, 3.5))}
        await until(lambda: heard(second, A).figures == TrainingFigures(True, 7, 3.5))
        first.reports = {}
        await until(lambda: heard(second, A) is None)


@asynccontextmanager
async def counted(site: FederatedSite, *, delay_s: float = 0.0) -> AsyncIterator[list[int]]:
    """Count the bytes in both directions between that site's port and its callers.

    Every byte is delayed by `delay_s`.
    """
    sizes: list[int] = []
    relays: set[asyncio.Task[None] | None] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                sizes.append(len(data))
                await asyncio.sleep(delay_s)
                writer.write(data)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relays.add(asyncio.current_task())
        try:
            there, back = await asyncio.open_connection("127.0.0.1", site.port)
        except ConnectionError:
            writer.close()
            return
        await asyncio.gather(pump(reader, back), pump(there, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    site.reached_at = server.sockets[0].getsockname()[1]
    async with server:
        yield sizes
    await asyncio.gather(*filter(None, relays))


@within
async def test_an_idle_link_is_quiet(folder: Path) -> None:
    a, b = federated_sites(folder, A, B)
    a.reports[JOB] = report(A, 0)
    async with counted(b) as passed, running(a, b):
        await until(lambda: heard(b, A) and a.node and a.node.clients[B].connected)
        assert a.node is not None
        sent_before, before = a.node.clients[B].sent_bytes, sum(passed)
        await until(lambda: a.node.clients[B].sent_bytes > sent_before + 3)  # two heartbeats
        on_the_wire = sum(passed) - before
        print(f"{on_the_wire} bytes on the wire for two heartbeats, both ways")
        assert 0 < on_the_wire < 2000


@within
async def test_distant_sites_receive_the_reports_of_each_other(folder: Path) -> None:
    """A round trip takes 0.3 s, and a handshake several times that."""
    a, b = federated_sites(folder, A, B)
    a.reports[JOB] = report(A, 0)
    async with counted(b, delay_s=0.15), running(a, b):
        await until(lambda: heard(b, A))
        assert a.node is not None
        await until(lambda: not a.node.problem(B))
        round_trip_s = a.node.clients[B].round_trip_s
        assert round_trip_s is not None
        assert round_trip_s > 0.25


@within
async def test_an_operator_that_restarts_is_heard_again(folder: Path) -> None:
    a, b = federated_sites(folder, A, B)
    a.reports[JOB], b.reports[JOB] = report(A, 0), report(B, 1)
    async with running(a, b):
        await until(lambda: heard(a, B) and heard(b, A))
        assert a.node is not None
        assert b.node is not None
        await b.node.close()
        await until(lambda: "listens at that address" in a.node.problem(B))
        assert heard(a, B) == b.reports[JOB]  # the last known report
        b.reports[JOB] = replace(b.reports[JOB], figures=TrainingFigures(True, 9, 1.0))
        await b.start(a)
        await until(lambda: heard(a, B).figures.iteration == 9)
        await until(lambda: heard(b, A) and not a.node.problem(B))


@within
async def test_bundles_are_added_changed_and_removed_without_a_restart(folder: Path) -> None:
    a, b = federated_sites(folder, A, B)
    a.reports[JOB], b.reports[JOB] = report(A, 0), report(B, 1)
    right = b.bundle_file.read_bytes()
    b.bundle_file.write_bytes(
        CertificateAuthority(B).bundle_pem
    )  # of another authority with that name
    async with running(a, b):
        assert a.node is not None
        assert b.node is not None
        await until(lambda: b.node.clients[A].failures and a.node.clients[B].failures)
        assert heard(a, B) is None
        b.bundle_file.write_bytes(right)
        await until(lambda: heard(a, B) and heard(b, A))
        # Its authority gets a new certificate, which the others use later.
        b.authority = b.authority.renewed()
        b.node.credentials.replace_authority(b.authority)
        b.bundle_file.write_bytes(b.authority.bundle_pem)
        await until(lambda: a.bundles[-1] == {B: b.authority.bundle_pem})
        b.reports[JOB] = replace(b.reports[JOB], figures=TrainingFigures(True, 2, 1.0))
        await until(lambda: heard(a, B).figures.iteration == 2)
        b.bundle_file.write_text("no bundle")
        await until(lambda: "holds no certificates" in a.node.problem(B))
        assert not a.node.is_bundle_valid(B)
        assert a.bundles[-1] == {B: b.authority.bundle_pem}, "the earlier report is kept"
        b.reports[JOB] = replace(b.reports[JOB], figures=TrainingFigures(True, 3, 1.0))
        await until(lambda: heard(a, B).figures.iteration == 3)
        b.bundle_file.write_bytes(
            CertificateAuthority(B, now=datetime.now(UTC) - timedelta(days=400)).bundle_pem
        )
        await until(lambda: "expired on" in a.node.problem(B))
        assert not a.node.has_bundle(B)
        assert a.bundles[-1] == {}
        await until(lambda: a.node.service.refusals[FederationRefusalReason.BAD_CERTIFICATE])
        assert heard(a, B)


@within
async def test_streams_continue_across_renewals(folder: Path) -> None:
    a, b = federated_sites(folder, A, B)
    a.life = b.life = timedelta(seconds=6)
    async with running(a, b):
        assert a.node is not None
        assert b.node is not None
        await until(lambda: b.node.service.streams == 3)
        a.reports = {JOB: report(A, 0, iteration=7)}
        await until(lambda: heard(b, A) and heard(b, A).figures.iteration == 7)
        assert not b.node.service.refusals
        assert not a.node.clients[B].failures


@within
async def test_a_stream_continues_while_its_successor_cannot_be_opened(folder: Path) -> None:
    a, b = federated_sites(folder, A, B)
    a.reports[JOB] = report(A, 0)
    async with running(a, b):
        await until(lambda: heard(b, A))
        assert a.node is not None
        assert b.node is not None
        dialler = a.node.clients[B]
        a.node.credentials.replace_authority(
            CertificateAuthority(A)
        )  # plant B rejects its certificates
        for iteration in (7, 8):
            failures = dialler.failures
            a.reports = {JOB: report(A, 0, iteration=iteration)}
            await until(lambda expected=iteration: heard(b, A).figures.iteration == expected)
            assert dialler.connected
            await until(lambda before=failures: dialler.failures > before)
        assert b.node.service.streams == 1
        a.node.credentials.replace_authority(a.authority)
        await until(lambda: b.node.service.streams == 2)
        a.reports = {JOB: report(A, 0, iteration=9)}
        await until(lambda: heard(b, A).figures.iteration == 9)
        assert not b.node.service.refusals
        assert dialler.connected


# ---- hostile and mistaken connections ---------------------------------------------------------


@dataclass
class Scene:
    """Plant A, which receives the calls, and the authorities of all plants."""

    called: FederatedSite
    authorities: dict[SiteName, CertificateAuthority]

    def identity(self, site: SiteName = B, **arguments: Any) -> ServerIdentity:
        return self.authorities[site].operator_identity(life=timedelta(hours=1), **arguments)

    def channel(self, identity: ServerIdentity | None) -> grpc.aio.Channel:
        """Open a channel to plant A with that certificate, as an honest operator does."""
        options = (
            ("grpc.ssl_target_name_override", OperatorIdentity(A).dns_name),
            ("grpc.use_local_subchannel_pool", 1),
        )
        credentials = grpc.ssl_channel_credentials(
            self.authorities[A].bundle_pem,
            identity.key_pem if identity else None,
            identity.certificate_chain_pem if identity else None,
        )
        return grpc.aio.secure_channel(f"127.0.0.1:{self.called.port}", credentials, options)


def forged(scene: Scene) -> ServerIdentity:
    """Plant C's valid authority signs for plant B's operator."""
    authority = scene.authorities[C]
    authority.site = B
    try:
        return scene.identity(C)
    finally:
        authority.site = C


def of_a_worker(scene: Scene) -> ServerIdentity:
    """Plant B's authority has signed it for a worker."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = CertificateSigningRequestBuilder().subject_name(Name([]))
    csr = request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    chain = scene.authorities[B].sign(csr, worker(B, 1), JOB)
    return ServerIdentity(pem, chain, ago(0), ago(0))


def ago(hours: float) -> datetime:
    return datetime.now(UTC) - timedelta(hours=hours)


IN_TLS: dict[str, Callable[[Scene], ServerIdentity | None]] = {
    "no certificate": lambda scene: None,
    "a foreign authority of the right name": lambda scene: CertificateAuthority(
        B
    ).operator_identity(),
    "expired": lambda scene: scene.identity(now=ago(2)),
    "not yet valid": lambda scene: scene.identity(now=ago(-2)),
    "its own authority's": lambda scene: scene.identity(A),
}

HELLO = site_hello(B, A).SerializeToString()
WHOLE = to_wire(
    RunReported(JOB, report(B, 1).spec, report(B, 1).workers, report(B, 1).figures)
).SerializeToString()


LONG_UNKNOWN_FIELD = b"\x7a\x80\x80\xc0\x01" + bytes(3 * 2**20)


TO_A = wire.LinksTo(site=A, connected=1, expected=1)


def changed(change: Callable[[wire.RunReport], object]) -> bytes:
    """Return a valid report with one error."""
    statement = wire.Statement.FromString(WHOLE)
    change(statement.run)
    return statement.SerializeToString()


Reason = FederationRefusalReason
Identify = Callable[[Scene], ServerIdentity]
PAST_TLS: dict[str, tuple[Identify, list[bytes], FederationRefusalReason]] = {
    "another site's name on a good authority": (forged, [HELLO], Reason.BAD_CERTIFICATE),
    "a worker's certificate": (of_a_worker, [HELLO], Reason.BAD_CERTIFICATE),
    "claims to be another site": (
        Scene.identity, [site_hello(C, A).SerializeToString()], Reason.BAD_CERTIFICATE,
    ),
    "claims to be the called site": (
        Scene.identity, [site_hello(A, A).SerializeToString()], Reason.BAD_CERTIFICATE,
    ),
    "claims to be an unknown site": (
        Scene.identity, [site_hello(SiteName("x"), A).SerializeToString()],
        Reason.BAD_CERTIFICATE,
    ),
    "takes it for another site": (
        Scene.identity, [site_hello(B, C).SerializeToString()], Reason.WRONG_SITE,
    ),
    "no greeting": (Scene.identity, [WHOLE], Reason.MALFORMED),
    "an empty statement": (Scene.identity, [b""], Reason.MALFORMED),
    "no site's name": (
        Scene.identity, [site_hello(SiteName("B/"), A).SerializeToString()], Reason.MALFORMED,
    ),
    "garbage": (Scene.identity, [b"\xff" * 99], Reason.MALFORMED),
    "garbage after the greeting": (Scene.identity, [HELLO, b"\x0a\xff"], Reason.MALFORMED),
    "two greetings": (Scene.identity, [HELLO, HELLO], Reason.MALFORMED),
    "half a report": (
        Scene.identity,
        [HELLO, to_wire(RunReported(JOB, figures=TrainingFigures())).SerializeToString()],
        Reason.MALFORMED,
    ),
    "no run's name": (
        Scene.identity, [HELLO, changed(lambda run: setattr(run, "run", "../x#1"))],
        Reason.MALFORMED,
    ),
    "a long bundle": (
        Scene.identity, [HELLO, changed(lambda run: setattr(run, "bundle_pem", b"x" * 16_385))],
        Reason.MALFORMED,
    ),
    "a short hash": (
        Scene.identity, [HELLO, changed(lambda run: setattr(run.spec, "spec_hash", b"short"))],
        Reason.MALFORMED,
    ),
    "a default of no field": (
        Scene.identity, [HELLO, changed(lambda run: run.spec.defaults.append("other"))],
        Reason.MALFORMED,
    ),
    "a rank twice": (
        Scene.identity,
        [HELLO, changed(lambda run: run.workers.members.append(run.workers.members[0]))],
        Reason.MALFORMED,
    ),
    "an unknown state": (
        Scene.identity, [HELLO, changed(lambda run: setattr(run.workers.members[0], "state", "?"))],
        Reason.MALFORMED,
    ),
    "a long address": (
        Scene.identity,
        [
            HELLO,
            changed(lambda run: setattr(run.workers.members[0], "exchange_address", "x" * 999)),
        ],
        Reason.MALFORMED,
    ),
    "not a number": (
        Scene.identity,
        [HELLO, changed(lambda run: setattr(run.figures, "samples_per_s", float("nan")))],
        Reason.MALFORMED,
    ),
    "links to a site twice": (
        Scene.identity, [HELLO, changed(lambda run: run.figures.links.extend([TO_A, TO_A]))],
        Reason.MALFORMED,
    ),
    "links of no number": (
        Scene.identity,
        [HELLO, changed(lambda run: run.figures.links.add(site=A, bytes_per_s=float("nan")))],
        Reason.MALFORMED,
    ),
    "too much at once": (
        Scene.identity,
        # The last one is refused: a refusal during the caller's write has no reason (see below).
        [HELLO, *[to_wire(Heartbeat()).SerializeToString() + LONG_UNKNOWN_FIELD] * 3],
        Reason.TOO_MUCH,
    ),
}  # fmt: skip


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    """Plant A, which trusts plants B and C; B has reported a run and is away."""
    a, b, c = federated_sites(folder, A, B, C)
    b.reports[JOB] = report(B, 1)
    try:
        await a.start(b, c)
        await b.start(a)
        await until(lambda: heard(a, B))
        assert b.node is not None
        await b.node.close()
        yield Scene(a, {site.name: site.authority for site in (a, b, c)})
    finally:
        if a.node is not None:
            await a.node.close()


async def called(channel: grpc.aio.Channel, contents: list[bytes]) -> grpc.aio.AioRpcError:
    """Return the status with which the call with these messages ended."""
    stream = channel.stream_stream("/dlion.v1alpha1.Federation/Report")()
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # the call has ended
        for content in contents:
            await stream.write(content)
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await stream.read() is not grpc.aio.EOF:
            pass  # the welcome
    code = await stream.code()
    return grpc.aio.AioRpcError(
        code, await stream.initial_metadata(), await stream.trailing_metadata()
    )


@asynccontextmanager
async def at_any_pace() -> AsyncIterator[None]:
    """Allow a burst of statements and no more, however long they take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rate_limiter, "RECORDS_PER_S", 0.0)
        yield


@within
async def test_a_hostile_certificate_opens_no_stream(folder: Path) -> None:
    async with scene(folder) as at:
        assert at.called.node is not None
        node = at.called.node
        streams = node.service.streams
        for number, (what, identify) in enumerate(IN_TLS.items(), 1):
            begun = node.credentials.handshakes
            async with at.channel(identify(at)) as channel:
                error = await called(channel, [HELLO])
            assert error.code() is grpc.StatusCode.UNAVAILABLE, what
            assert node.credentials.handshakes > begun, (what, number)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{at.called.port}") as channel:
            assert (await called(channel, [HELLO])).code() is grpc.StatusCode.UNAVAILABLE
        assert node.service.streams == streams
        assert heard(at.called, B) == report(B, 1)


@within
async def test_a_hostile_message_is_refused_with_a_reason(folder: Path) -> None:
    async with scene(folder) as at, at_any_pace():
        assert at.called.node is not None
        node = at.called.node
        for what, (identify, contents, reason) in PAST_TLS.items():
            before = node.service.refusals[reason]
            async with at.channel(identify(at)) as channel:
                error = await called(channel, contents)
            metadata = dict(error.trailing_metadata() or ())
            assert metadata.get(REASON_KEY) == reason, (what, error)
            assert node.service.refusals[reason] == before + 1, what
            assert heard(at.called, B) == report(B, 1), what
        assert node.reports(JOB).keys() == {B}


@within
async def test_a_refusal_of_a_certificate_waits_for_the_greeting(folder: Path) -> None:
    """A refusal that arrives during the caller's write becomes INTERNAL, without its reason."""
    async with scene(folder) as at, at.channel(forged(at)) as channel:
        assert at.called.node is not None
        service = at.called.node.service
        streams = service.streams
        call = channel.stream_stream("/dlion.v1alpha1.Federation/Report")()
        await until(lambda: service.streams > streams)
        assert not service.refusals
        await call.write(HELLO)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert dict(await call.trailing_metadata()).get(REASON_KEY) == Reason.BAD_CERTIFICATE
        assert service.refusals == {Reason.BAD_CERTIFICATE: 1}


@within
async def test_silent_callers_that_are_refused_hold_few_streams(folder: Path) -> None:
    async with scene(folder) as at, at.channel(forged(at)) as channel:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service_module, "HELLO_WAIT_S", LONG_S)
            open_stream = channel.stream_stream("/dlion.v1alpha1.Federation/Report")
            calls = [open_stream() for _ in range(service_module.MAX_WAITING_REFUSALS + 3)]
            await until(lambda: sum(call.done() for call in calls) == 3)
            for call in calls:
                call.cancel()
        patient, begun_s = open_stream(), time.monotonic()
        assert await patient.code() is grpc.StatusCode.UNAUTHENTICATED
        assert time.monotonic() - begun_s >= 0.9 * service_module.HELLO_WAIT_S


INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
UNKNOWN_FIELD = b"\x7a\x80\x80\x80\x02" + bytes(MAX_STATEMENT_BYTES)


@within
async def test_a_huge_statement_is_refused(folder: Path) -> None:
    async with scene(folder) as at, at.channel(at.identity()) as channel:
        for content, codes in (
            (to_wire(Heartbeat()).SerializeToString() + UNKNOWN_FIELD, {INVALID}),
            # From gRPC: not counted, and INTERNAL where the caller's write fails first.
            (b"\x12" * (2 * MAX_STATEMENT_BYTES + 1), {EXHAUSTED, grpc.StatusCode.INTERNAL}),
        ):
            error = await called(channel, [HELLO, content])
            assert error.code() in codes
        assert at.called.node is not None
        assert at.called.node.service.refusals == {Reason.MALFORMED: 1}
        assert heard(at.called, B) == report(B, 1)


@within
async def test_the_newest_stream_of_a_site_is_used(folder: Path) -> None:
    async with scene(folder) as at, at.channel(at.identity()) as channel:
        call = channel.stream_stream("/dlion.v1alpha1.Federation/Report")
        older, newer = call(), call()
        for stream in (older, newer):
            await stream.write(HELLO)
            await stream.read()
        await older.write(to_wire(RunRemoved(JOB)).SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await older.read()
        assert dict(raised.value.trailing_metadata())[REASON_KEY] == Reason.REPLACED
        assert heard(at.called, B)
        await newer.write(WHOLE)
        await newer.write(to_wire(RunRemoved(JOB)).SerializeToString())
        await until(lambda: heard(at.called, B) is None)


@within
async def test_a_workers_certificate_does_not_replace_an_operator(folder: Path) -> None:
    """It is refused before one of its messages is read, so it can hold neither calls nor memory."""
    async with scene(folder) as at, contextlib.AsyncExitStack() as stack:
        assert at.called.node is not None
        service, proof = at.called.node.service, of_a_worker(at)
        most = service_module.MAX_CALLS_PER_CONNECTION
        silent: list[Any] = []
        for _ in range(service_module.MAX_STREAMS // most):
            channel = await stack.enter_async_context(at.channel(proof))
            call = channel.stream_stream("/dlion.v1alpha1.Federation/Report")
            silent += [call() for _ in range(most)]
        channel = await stack.enter_async_context(at.channel(proof))
        silent.append(channel.stream_unary("/dlion.v1alpha1.Federation/Measure")())
        async with at.channel(at.identity()) as honest:
            stream = honest.stream_stream("/dlion.v1alpha1.Federation/Report")()
            await stream.write(HELLO)
            assert await stream.read() is not grpc.aio.EOF
        async with asyncio.timeout(service_module.SILENT_AFTER_S / 2):
            for each in silent:
                assert await each.code() is grpc.StatusCode.UNAUTHENTICATED
        assert service.refusals == {Reason.BAD_CERTIFICATE: len(silent)}


@within
async def test_the_streams_of_a_site_are_bounded(folder: Path) -> None:
    """The oldest streams of the site are closed; streams of other sites remain."""
    async with (
        scene(folder) as at,
        at.channel(at.identity()) as channel,
        at.channel(at.identity(C)) as other,
    ):
        third = other.stream_stream("/dlion.v1alpha1.Federation/Report")()
        await third.write(site_hello(C, A).SerializeToString())
        await third.read()
        call = channel.stream_stream("/dlion.v1alpha1.Federation/Report")
        streams = [call() for _ in range(service_module.MAX_STREAMS_OF_SITE + 3)]
        await until(lambda: sum(stream.done() for stream in streams) == 3)
        for stream in (each for each in streams if each.done()):
            metadata = dict(await stream.trailing_metadata())
            assert metadata[REASON_KEY] == Reason.REPLACED
        newest = call()
        await newest.write(HELLO)
        await newest.read()
        await until(lambda: sum(stream.done() for stream in streams) == 4)
        assert not third.done()


def test_a_silent_stream_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with scene(tmp_path) as at, at.channel(at.identity()) as channel:
            monkeypatch.setattr(service_module, "SILENT_AFTER_S", 0.2)
            error = await called(channel, [HELLO])
            assert dict(error.trailing_metadata() or ())[REASON_KEY] == Reason.SILENT

    asyncio.run(asyncio.wait_for(body(), LONG_S))
