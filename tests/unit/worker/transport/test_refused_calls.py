"""Tests of call errors that a retry alone does not fix.

They are a peer's reason, a peer that cannot authenticate itself, and one that closes every
handshake. The last is reported only after some time.

Left out: gRPC's real messages (tests/cluster/test_hostile_connections).
"""

from __future__ import annotations

import grpc
import pytest

from dlion_api.protocol.refusals import REASON_KEY, PeerRefusal
from dlion_worker.call_errors import CLOSED_FOR_S, ClosedHandshakes, refusal_of

CLOSED = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:192.0.2.7:1: "
NOT_BELIEVED = PeerRefusal.NOT_BELIEVED


def error(code: grpc.StatusCode, details: str, reason: str = "") -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata(*([(REASON_KEY, reason)] if reason else []))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)


@pytest.mark.parametrize(
    ("met", "kind"),
    [
        (error(grpc.StatusCode.FAILED_PRECONDITION, "x", "WrongRun"), PeerRefusal.WRONG_RUN),
        (error(grpc.StatusCode.FAILED_PRECONDITION, "x", "OfLater"), PeerRefusal.MALFORMED),
        (error(grpc.StatusCode.INVALID_ARGUMENT, "x"), PeerRefusal.MALFORMED),
        (
            error(grpc.StatusCode.UNAVAILABLE, CLOSED + "SSL_ERROR_SSL: WRONG_VERSION_NUMBER"),
            PeerRefusal.UNPROVEN,
        ),
        (
            error(
                grpc.StatusCode.UNAVAILABLE,
                CLOSED + "Custom verification check failed: Hostname Verification Check failed.",
            ),
            PeerRefusal.UNPROVEN,
        ),
        (error(grpc.StatusCode.UNAVAILABLE, CLOSED + "Socket closed"), NOT_BELIEVED),
        (  # of a peer that is killed during the handshake
            error(
                grpc.StatusCode.UNAVAILABLE,
                CLOSED + "Handshake read failed (recvmsg:Connection reset by peer (104))",
            ),
            NOT_BELIEVED,
        ),
        (error(grpc.StatusCode.UNAVAILABLE, CLOSED + "Connection refused"), None),
        (error(grpc.StatusCode.UNAVAILABLE, "Socket closed"), None),  # of an open stream
        (error(grpc.StatusCode.ABORTED, "replaced by a newer stream"), None),
    ],
)
def test_a_call_error_has_its_cause(met: grpc.aio.AioRpcError, kind: PeerRefusal | None) -> None:
    assert refusal_of(met) is kind


def test_a_handshake_that_is_closed_once_is_not_reported() -> None:
    handshakes = ClosedHandshakes()
    assert not handshakes.should_report(NOT_BELIEVED, 0.0)
    assert not handshakes.should_report(NOT_BELIEVED, CLOSED_FOR_S - 1.0)
    assert not handshakes.should_report(None, CLOSED_FOR_S)  # for example, the peer was away
    assert not handshakes.should_report(NOT_BELIEVED, CLOSED_FOR_S + 1.0)
    assert handshakes.should_report(NOT_BELIEVED, 2.0 * CLOSED_FOR_S + 1.0)


def test_other_errors_are_reported_at_once() -> None:
    assert ClosedHandshakes().should_report(PeerRefusal.UNPROVEN, 0.0)
    assert not ClosedHandshakes().should_report(None, 0.0)
