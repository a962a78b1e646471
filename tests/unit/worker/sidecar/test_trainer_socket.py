"""Tests of the trainer's socket: a sidecar that ends disconnects its trainer without a traceback in
the log.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dlion_worker.sidecar.trainer_socket import TrainerSocket

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_an_end_with_a_connected_trainer_logs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        arrived = asyncio.Event()

        def connected() -> tuple[()]:
            arrived.set()
            return ()

        served = TrainerSocket(
            tmp_path / "socket", on_record=lambda _: None, on_connected=connected
        )
        await served.start()
        reader, writer = await asyncio.open_unix_connection(tmp_path / "socket")
        await arrived.wait()
        await served.close()
        assert not served.connected()
        assert await reader.read() == b""
        writer.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(body(), 20))
    assert caplog.text == ""
