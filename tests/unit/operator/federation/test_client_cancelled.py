"""Test that the client of a federation ends when it is cancelled.

It ends also if grpc.aio raises the error of its stream instead of the cancellation.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import grpc
import pytest

from dlion_api.names import SiteName
from dlion_api.wire import federation_pb2_grpc
from dlion_operator.federation.client import FederationClient
from dlion_operator.federation.credentials import Credentials
from dlion_operator.pki.authority import CertificateAuthority
from lost_cancellation import BreakingCall, assert_ends_when_cancelled

A, B = SiteName("plant-a"), SiteName("plant-b")


class Stub:
    """A stub whose streams break during their cancellation."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        del channel

    def Report(self) -> Any:  # noqa: N802 - as in the service
        return BreakingCall()


def test_a_client_that_is_cancelled_while_its_stream_breaks_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(federation_pb2_grpc, "FederationStub", Stub)
    credentials = Credentials(CertificateAuthority(A), timedelta(hours=1))
    credentials.trust({B: CertificateAuthority(B).bundle_pem})

    client = FederationClient(A, B, "127.0.0.1:9", credentials, dict)
    asyncio.run(assert_ends_when_cancelled(client.run()))
