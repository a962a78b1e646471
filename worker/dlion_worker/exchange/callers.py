"""What a call says of its caller, and what a caller that is refused is told.

Called by `service` and `pulls`.
"""

from __future__ import annotations

from typing import Any

import grpc.aio

from dlion_api.refusals import REASON_KEY, PeerRefusal

Context = grpc.aio.ServicerContext[Any, Any]


def certificate_of(context: Context) -> bytes | None:
    """The certificate that the caller has shown, PEM; None: none."""
    return next(iter(context.auth_context().get("x509_pem_cert", ())), None)


def told(kind: PeerRefusal | None) -> tuple[tuple[str, str], ...]:
    """Trailing metadata that say why a call is refused."""
    return () if kind is None else ((REASON_KEY, str(kind)),)
