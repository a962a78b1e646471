"""Tests of a cancelled renewal of a stream.

It ends also if grpc.aio raises its call's error instead of the cancellation. Its connector waits
for it before it connects again.
"""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from dlion_api.names import SiteName
from dlion_worker.security.credentials import WorkerCredentials
from dlion_worker.transport import client
from dlion_worker.transport.peer_links import PeerExchangeConfig, PeerLink, PeerLinks
from linked_workers import JOB, identity
from lost_cancellation import BreakingCall, assert_ends_when_cancelled


async def closed() -> None:
    """Close the connection at once."""


def connection(*_: Any) -> SimpleNamespace:
    return SimpleNamespace(call=BreakingCall(), close=closed)


def test_a_renewal_that_is_cancelled_while_its_call_breaks_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "StreamConnection", connection)

    async def cancel() -> None:
        local = PeerExchangeConfig(JOB, identity(0), 1, WorkerCredentials.insecure())
        peer = identity(1, SiteName("plant-b"))
        link = PeerLink(peer, PeerLinks(local, lambda event: None))
        connector = client.PeerConnector(link, local, random.Random(1))
        connector.renew()
        renewal = connector._migrate_on_renewal(SimpleNamespace(), "127.0.0.1:9")  # type: ignore[arg-type]
        await assert_ends_when_cancelled(renewal)

    asyncio.run(cancel())
