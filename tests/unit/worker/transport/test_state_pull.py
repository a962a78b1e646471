"""Test that a peer that only announces its state does not hold the puller, over a real connection.

The other limits are those of the chunks (tests/unit/core/links/test_state_transfer.py).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from dlion_api.errors import UnavailableError
from dlion_api.wire.exchange_pb2 import StateChunk
from dlion_core.links.state_transfer import StateAssembler
from dlion_worker.transport import client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATH = "/test/PullState"


async def announce(_: bytes, __: Any) -> AsyncIterator[bytes]:
    while True:
        yield StateChunk().SerializeToString()
        await asyncio.sleep(0.01)


class Announcing(grpc.GenericRpcHandler):
    def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        return grpc.unary_stream_rpc_method_handler(announce)


async def pull() -> None:
    server = grpc.aio.server(handlers=[Announcing()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            method: client.PullMethod = channel.unary_stream(PATH)
            await client._take_state(method(b""), StateAssembler(1))
    finally:
        await server.stop(None)


def test_a_peer_whose_state_does_not_begin_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_GATHERING_S", 0.1)
    with pytest.raises(UnavailableError, match="has not begun after"):
        asyncio.run(asyncio.wait_for(pull(), 60.0))
