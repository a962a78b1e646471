"""Test that a caller without a token cannot block the coordinator.

A call without a request ends after a time limit. One address has a limited number of such calls; a
further call is refused immediately. The coordinator serves other requests meanwhile, also those of
clients of earlier releases.

Left out: hostile requests (tests/cluster/test_hostile_connections.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import grpc
import grpc.aio
import pytest

from dlion_api.protocol.refusals import RefusalReason
from dlion_api.wire import coordination_pb2
from dlion_operator.coordinator import CoordinatorServer
from dlion_operator.coordinator.server import MAX_CALLS_PER_CONNECTION
from dlion_operator.coordinator.service import MAX_UNREAD_CALLS, SERVICE

WITHIN_S = 20.0


async def silence() -> AsyncIterator[bytes]:
    await asyncio.sleep(WITHIN_S)
    yield b""


async def end_of(call: grpc.aio.Call) -> tuple[grpc.StatusCode, str]:
    code = await call.code()
    return code, str(await call.details())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the server's counters have no event
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("name", ["Sign", "Join", "Report", "ReportDownload", "Follow"])
def test_a_call_without_a_request_ends(name: str) -> None:
    async def body() -> None:
        server = CoordinatorServer("127.0.0.1:0", None)
        server.service.request_within_s = 0.3
        port = await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream(f"/{SERVICE}/{name}")(silence())
            code, text = await end_of(call)
        assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, "no request within 0.3 s")
        assert server.service.refusals == {RefusalReason.MALFORMED: 1}
        await server.shut_down()

    asyncio.run(asyncio.wait_for(body(), WITHIN_S))


def test_one_address_has_a_limited_number_of_silent_calls() -> None:
    async def body() -> None:
        server = CoordinatorServer("127.0.0.1:0", None)
        port = await server.start()
        async with AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(
                    grpc.aio.insecure_channel(
                        f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]
                    )
                )
                for _ in range(MAX_UNREAD_CALLS // MAX_CALLS_PER_CONNECTION + 1)
            ]
            channel = channels[-1]
            silents = [each.stream_stream(f"/{SERVICE}/Join") for each in channels]
            silent = silents.pop()
            held = [each(silence()) for each in silents for _ in range(MAX_CALLS_PER_CONNECTION)]
            for call in held:
                await call.wait_for_connection()
            await until(lambda: sum(server.service._unread.values()) == MAX_UNREAD_CALLS)
            code, text = await end_of(silent(silence()))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "calls of this address wait for their request" in text
            for call in held:
                call.cancel()
            await until(lambda: not server.service._unread)
            request = coordination_pb2.JoinRequest(run="default/none/1").SerializeToString()
            code, text = await end_of(channel.unary_stream(f"/{SERVICE}/Join")(request))
            assert (code, "is not served here" in text) == (grpc.StatusCode.NOT_FOUND, True)
        assert server.service.refusals[RefusalReason.TOO_MUCH] == 1
        await server.shut_down()

    asyncio.run(asyncio.wait_for(body(), WITHIN_S))
