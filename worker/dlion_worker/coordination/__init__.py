"""The worker's client for its coordinator: certificates, membership and progress reports.

`CoordinationClient` runs background threads. A saved membership and incarnation counter let a
worker restart while the coordinator is unreachable.
"""

from dlion_worker.coordination.client import CoordinationClient
from dlion_worker.coordination.saved_state import delete_membership, next_incarnation
from dlion_worker.coordination.signing import SignedCertificate, request_certificate

__all__ = [
    "CoordinationClient",
    "SignedCertificate",
    "delete_membership",
    "next_incarnation",
    "request_certificate",
]
