"""The worker's side of the coordinator: certificate, membership down, progress up.

What goes in: `CoordinationClient` with its background threads, and the small state that lets a
worker come back while the coordinator is away (kept membership, incarnation counter). What stays
out: gradients and weights (`dlion_worker.exchange`), and what a worker does with a membership.

Called by the trainer (all of it), the sidecar (`request_certificate`) and the local runner
(`forget_membership`).
"""

from dlion_worker.coordination.client import CoordinationClient
from dlion_worker.coordination.kept import forget_membership, next_incarnation
from dlion_worker.coordination.signing import SignedCertificate, request_certificate

__all__ = [
    "CoordinationClient",
    "SignedCertificate",
    "forget_membership",
    "next_incarnation",
    "request_certificate",
]
