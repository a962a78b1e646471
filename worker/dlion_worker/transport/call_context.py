"""The caller's certificate of a gRPC call, and the metadata of a rejected one."""

from __future__ import annotations

from typing import Any

import grpc.aio

from dlion_api.protocol.refusals import REASON_KEY, PeerRefusal

CallContext = grpc.aio.ServicerContext[Any, Any]


def certificate_of(context: CallContext) -> bytes | None:
    """The certificate that the caller presented, as PEM; None without one."""
    return next(iter(context.auth_context().get("x509_pem_cert", ())), None)


def refusal_metadata(kind: PeerRefusal | None) -> tuple[tuple[str, str], ...]:
    """Trailing metadata with the reason why a call is rejected."""
    return () if kind is None else ((REASON_KEY, str(kind)),)
