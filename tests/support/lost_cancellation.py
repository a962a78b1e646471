"""A stream that raises its error when it is cancelled.

`StreamStreamCall.read` of grpc.aio does so between the status and the initial metadata. Real
streams are cancelled at that moment in one of twenty attempts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc


async def assert_ends_when_cancelled(body: Coroutine[Any, Any, None]) -> None:
    """Cancel it once, while it reads; assert that it ends."""
    task = asyncio.create_task(body)
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.wait({task}, timeout=2.0)
    try:
        assert task.cancelled(), "it did not end"
    finally:
        while not task.done():
            task.cancel()
            await asyncio.sleep(0.01)


class BreakingCall:
    """Takes every message, answers none, and raises when its reader is cancelled."""

    def done(self) -> bool:
        return False

    def cancel(self) -> bool:
        return True

    async def write(self, message: object) -> None:
        del message

    async def read(self) -> bytes:
        try:
            return await asyncio.Future()
        except asyncio.CancelledError:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE, nothing, nothing, "Cancelling all calls"
            ) from None
