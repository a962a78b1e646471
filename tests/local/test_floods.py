"""Flood each port of `port_table`, whose server runs in a process of its own.

Memory and descriptors of the process stay within bounds and return after the flood. The connections
of honest callers stay, and new callers are served during a flood below the limit and after each
flood. Floods are connections without a word or with half a request, TLS handshakes without a
certificate or a call, calls without a request, oversized messages, and all calls at once.

Deadlines are shorter than in use, except in the slow test. Bounds are counts and bytes. Left out:
the contents of calls (tests/fuzz, tests/cluster/test_hostile_connections.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
import time
from typing import TYPE_CHECKING, Self

import grpc
import grpc.aio
import pytest

import port_table as ports
from dlion_api.protocol.port_limits import prepare_process
from flood_callers import SERVERS, FloodedPort, flooded_port

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

WITHIN_S = 60.0
SLACK = 160
"""Descriptors and threads for the process's own work during a flood. An asyncio server accepts up
to twice its backlog before it counts."""
KEPT_DESCRIPTORS = 16
"""Descriptors of honest callers, which come and go, may be open at the end of a flood."""
KIB_OF_CONNECTION = 64
KEPT_MIB = 32
"""Memory of the allocator and of code that a flood runs first."""
LIMITS = "dlion_api.protocol.port_limits."
HANDSHAKE = {f"{LIMITS}HANDSHAKE_WITHIN_S": 6}
SHORT: dict[str, dict[str, float]] = {
    **dict.fromkeys(ports.GRPC, HANDSHAKE),
    ports.WORKER_METRICS: {"dlion_worker.metrics_server.CONNECTION_WITHIN_S": 5},
    ports.OPERATOR_METRICS: {"dlion_operator.controller.health.SILENCE_S": 5},
    ports.HEALTH: {"dlion_operator.controller.health.SILENCE_S": 5},
    ports.SOCKET: {},
}
"""Shorter deadlines of each port."""
GRPC = [row for row in ports.ROWS if row.where in ports.GRPC]
HTTP_HEAD = (
    b"GET /metrics HTTP/1.1\r\n" + (b"X: " + bytes(4000).replace(b"\0", b"x") + b"\r\n") * 30
)
QUICK_CONNECTIONS = 1280
"""Above most limits of connections, also where the server closes those with a wrong beginning. The
slow test exceeds all limits."""
WORDS = (b"", b"PRI * HTTP/2.0\r\n", b"\x16\x03\x01\x02\x00\x01", HTTP_HEAD)
"""What callers send that go on with nothing: the begin of HTTP/2, of TLS, of HTTP."""


def eventually(true: Callable[[], bool], what: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < give_up_s, what()
        time.sleep(0.05)


class Peak:
    """The highest figures of a process during a flood, against those before it."""

    def __init__(self, port: FloodedPort) -> None:
        self._server = port.server
        self._before = port.server.descriptors()
        self._before_threads = port.server.threads()
        self._before_mib = port.server.resident_mib()
        self.descriptors = self.threads = 0
        self.mib = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.1):
            self.descriptors = max(self.descriptors, self._server.descriptors() - self._before)
            self.threads = max(self.threads, self._server.threads() - self._before_threads)
            self.mib = max(self.mib, self._server.resident_mib() - self._before_mib)

    def check(self, connections: int) -> None:
        """Check the bounds for a limit of connections, and that descriptors return."""
        eventually(lambda: self._left() <= KEPT_DESCRIPTORS, self._left)
        print(
            f"{connections} connections allowed; most {self.descriptors} descriptors,"
            f" {self.threads} threads, {self.mib:.0f} MiB; then {self._left()} descriptors,"
            f" {self._server.resident_mib() - self._before_mib:.0f} MiB"
        )
        assert self.descriptors <= connections + SLACK
        assert self.threads <= min(connections, 128) + SLACK
        assert self.mib <= connections * KIB_OF_CONNECTION / 1024 + KEPT_MIB

    def _left(self) -> int:
        return self._server.descriptors() - self._before


@contextlib.contextmanager
def silent_connections(
    port: FloodedPort, count: int, words: Sequence[bytes] = WORDS
) -> Iterator[list[socket.socket]]:
    """Open them, each with a part of a request; the server may have closed some."""
    opened: list[socket.socket] = []
    try:
        for number in range(count):
            with contextlib.suppress(OSError):
                opened.append(port.connect())
                opened[-1].send(words[number % len(words)])
        yield opened
    finally:
        for each in opened:
            each.close()


@pytest.fixture(autouse=True)
def many_descriptors() -> None:
    prepare_process()


@pytest.mark.parametrize("row", ports.ROWS, ids=lambda row: row.where)
def test_connections_without_a_request_are_bounded_and_end(row: ports.Row, tmp_path: Path) -> None:
    with flooded_port(row.where, tmp_path, SHORT[row.where]) as port, Peak(port) as peak:
        with silent_connections(port, min(row.connections // 2, QUICK_CONNECTIONS)):
            port.fresh()
        count = min(2 * (row.connections + SLACK), QUICK_CONNECTIONS)
        # The trainer's socket closes what has a wrong beginning, and keeps those without a word.
        words = WORDS[:1] if row.where == ports.SOCKET else WORDS
        with silent_connections(port, count, words):
            port.established()
            if row.where == ports.SOCKET:  # only a trainer can reach it, so it has no deadline
                port.fresh()
                eventually(lambda: peak.descriptors >= row.connections // 2, lambda: peak)
            else:
                peak.check(row.connections)
                port.fresh()
        peak.check(row.connections)
        port.established()


@pytest.mark.parametrize("where", [ports.WORKER_METRICS, ports.OPERATOR_METRICS, ports.HEALTH])
def test_a_request_is_served_while_others_open_connections_all_the_time(
    where: str, tmp_path: Path
) -> None:
    row = next(each for each in ports.ROWS if each.where == where)
    ended = threading.Event()
    opened = 0

    def flood(port: FloodedPort) -> None:
        nonlocal opened
        while not ended.is_set():
            with contextlib.suppress(OSError), silent_connections(port, 50):
                opened += 50

    with flooded_port(where, tmp_path, {}) as port, Peak(port) as peak:
        flooding = threading.Thread(target=flood, args=(port,))
        flooding.start()
        try:
            eventually(lambda: opened > row.connections, lambda: opened)
            served, tries = 0, 0
            while served < 5:
                tries += 1
                assert tries < 50
                with contextlib.suppress(OSError):
                    port.fresh()
                    served += 1
        finally:
            ended.set()
            flooding.join()
        print(f"{served} of {tries} requests served beside {opened} connections")
        peak.check(row.connections)


@pytest.mark.parametrize("row", GRPC, ids=lambda row: row.where)
def test_handshakes_without_a_certificate_or_a_call_are_bounded_and_end(
    row: ports.Row, tmp_path: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    short = {**HANDSHAKE, f"{LIMITS}IDLE_WITHIN_S": 3}
    count = min(200, row.connections - SLACK)
    with flooded_port(row.where, tmp_path, short) as port, Peak(port) as peak:
        with contextlib.ExitStack() as stack:
            for number in range(count):
                with contextlib.suppress(OSError):
                    wrapped = stack.enter_context(context.wrap_socket(port.connect()))
                    if number % 2:  # the begin of HTTP/2 with empty settings, and no call
                        wrapped.send(
                            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)
                        )
            port.fresh()
            peak.check(count)
        port.fresh()


@pytest.mark.parametrize("row", GRPC, ids=lambda row: row.where)
def test_connections_of_a_known_caller_without_a_call_end(row: ports.Row, tmp_path: Path) -> None:
    """They answer pings, so that only the deadline for a call ends them."""

    async def body(port: FloodedPort, peak: Peak) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for number in range(2 * KEPT_DESCRIPTORS):
                channel = await stack.enter_async_context(port.channel(number))
                async with asyncio.timeout(WITHIN_S):
                    await channel.channel_ready()
            await asyncio.to_thread(peak.check, 2 * KEPT_DESCRIPTORS)
            await asyncio.to_thread(port.fresh)

    short = {**HANDSHAKE, f"{LIMITS}IDLE_WITHIN_S": 3}
    with flooded_port(row.where, tmp_path, short) as port, Peak(port) as peak:
        asyncio.run(body(port, peak))


SHORT_REQUESTS = {
    **dict.fromkeys(ports.GRPC, f"{LIMITS}REQUEST_WITHIN_S"),
    ports.KEEPER: "dlion_worker.artifact_server.service.SILENCE_TIMEOUT_S",
    ports.FEDERATION: "dlion_operator.federation.service.SILENT_AFTER_S",
}
"""The deadline of a request at each port."""
OF_ONE_CALLER = {
    ports.EXCHANGE: (8, 16),
    ports.MEASURING: (20, 16),
    ports.KEEPER: (8, 8),
    ports.COORDINATOR: (16, 256),
    ports.FEDERATION: (32, 4),
}
"""Calls of a connection, and calls of a caller that wait for their request."""


async def silent_calls(
    port: FloodedPort, stack: contextlib.AsyncExitStack, connections: int, each: int, callers: int
) -> list[grpc.aio.StreamStreamCall]:
    """Open calls that send no request, by that number of certificates."""
    calls: list[grpc.aio.StreamStreamCall] = []
    for number in range(connections):
        channel = await stack.enter_async_context(port.channel(number % callers))
        method = channel.stream_stream(ports.GRPC[port.where])
        calls += [method() for _ in range(each)]
    return calls


async def codes(calls: list[grpc.aio.StreamStreamCall]) -> list[grpc.StatusCode]:
    async with asyncio.timeout(WITHIN_S):
        return [await call.code() for call in calls]


def is_served(port: FloodedPort) -> bool:
    """Return False also while the server still counts the calls of the flood."""
    with contextlib.suppress(grpc.RpcError):
        port.fresh()
        return True
    return False


REFUSED = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED}


@pytest.mark.parametrize("row", GRPC, ids=lambda row: row.where)
def test_calls_without_a_request_of_one_caller_are_bounded(row: ports.Row, tmp_path: Path) -> None:
    of_connection, most = OF_ONE_CALLER[row.where]
    connections = 2 * most // of_connection + 2

    async def body(port: FloodedPort) -> None:
        async with contextlib.AsyncExitStack() as stack:
            calls = await silent_calls(port, stack, connections, of_connection, 1)

            def ended() -> int:
                return sum(call.done() for call in calls)

            await asyncio.to_thread(eventually, lambda: ended() >= len(calls) - most, ended)
            assert set(await codes([call for call in calls if call.done()])) <= REFUSED
            if row.where not in (ports.COORDINATOR, ports.FEDERATION):
                await asyncio.to_thread(port.fresh)  # a caller with another certificate

    # No admitted call ends during the test.
    constants = {SHORT_REQUESTS[row.where]: 600}
    with flooded_port(row.where, tmp_path, constants) as port, Peak(port) as peak:
        asyncio.run(body(port))
        peak.check(connections)
        eventually(lambda: is_served(port), lambda: "not served after the flood")


@pytest.mark.parametrize("row", GRPC, ids=lambda row: row.where)
def test_admitted_calls_without_a_request_end(row: ports.Row, tmp_path: Path) -> None:
    async def body(port: FloodedPort) -> None:
        async with contextlib.AsyncExitStack() as stack:
            calls = await silent_calls(port, stack, 1, min(OF_ONE_CALLER[row.where]), 1)
            ended = set(await codes(calls))
        assert not ended & {*REFUSED, grpc.StatusCode.OK}, ended

    with flooded_port(row.where, tmp_path, {SHORT_REQUESTS[row.where]: 2}) as port:
        asyncio.run(body(port))


MAX_CALLS = {
    ports.EXCHANGE: ("dlion_worker.transport.peer_exchange.MAX_CALLS", 64),
    ports.MEASURING: ("dlion_worker.sidecar.measuring_service.MAX_CALLS", 256),
    ports.KEEPER: ("dlion_worker.artifact_server.process.MAX_CALLS", 256),
    ports.COORDINATOR: ("dlion_operator.coordinator.server.MAX_CALLS", 64),
}
"""Calls of all callers. Those of the exchange and the coordinator are thousands in use."""


@pytest.mark.slow
@pytest.mark.parametrize("where", MAX_CALLS)
def test_calls_of_all_callers_are_bounded_and_end(where: str, tmp_path: Path) -> None:
    of_connection, of_caller = OF_ONE_CALLER[where]
    each = min(of_connection, of_caller)
    name, most = MAX_CALLS[where]
    connections = most // each + 2

    async def body(port: FloodedPort) -> None:
        async with contextlib.AsyncExitStack() as stack:
            calls = await silent_calls(port, stack, connections, each, connections)
            ended = await codes(calls)
        refused = ended.count(grpc.StatusCode.RESOURCE_EXHAUSTED)
        # The peer's link is a call, too.
        assert 0 <= refused - (len(calls) - most) <= 2
        await asyncio.to_thread(port.fresh)

    # Long enough for all calls to begin before the first one ends.
    constants = {SHORT_REQUESTS[where]: 25, name: most}
    with flooded_port(where, tmp_path, constants) as port, Peak(port) as peak:
        asyncio.run(body(port))
        peak.check(connections)


@pytest.mark.parametrize("row", GRPC, ids=lambda row: row.where)
def test_oversized_messages_are_refused_within_bounds(row: ports.Row, tmp_path: Path) -> None:
    assert isinstance(row.message_bytes, int)
    message = bytes(3 * row.message_bytes)

    async def body(port: FloodedPort) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for number in range(8):
                channel = await stack.enter_async_context(port.channel(number))
                call = channel.stream_stream(ports.GRPC[row.where])()
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await call.write(message)
                code = (await codes([call]))[0]
                # INTERNAL where the caller's write fails before it has read the answer.
                assert code in {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL}
            await asyncio.to_thread(port.fresh)

    with flooded_port(row.where, tmp_path, {}) as port, Peak(port) as peak:
        asyncio.run(body(port))
        peak.check(8)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", GRPC, ids=lambda row: row.where)
def test_the_deadlines_in_use_end_connections_without_a_request(
    row: ports.Row, tmp_path: Path
) -> None:
    with (
        flooded_port(row.where, tmp_path, {}) as port,
        Peak(port) as peak,
        silent_connections(port, row.connections + 512),
    ):
        port.established()
        peak.check(row.connections)
        port.fresh()


def test_each_row_has_a_server_and_each_grpc_port_its_cases() -> None:
    assert {row.where for row in ports.ROWS} == set(SERVERS)
    assert {row.where for row in GRPC} == set(OF_ONE_CALLER)
