"""Proves that a request comes from the pod that first used its token.

A stolen token alone is then not enough to request a certificate, join or follow. See
`dlion_operator.pki.token_bindings` for the other side.
"""

from __future__ import annotations

import time
from pathlib import Path

from dlion_api.names import JobKey
from dlion_api.protocol.trust import proof_statement
from dlion_api.wire import coordination_pb2
from dlion_worker.security.credential_store import load_or_create_proof_key, next_proof_count


def make_pod_proof(
    folder: Path, *, job: JobKey, use: str, csr_pem: bytes = b""
) -> coordination_pb2.PodProof:
    """Sign a request with the key that all processes of the pod share in that folder.

    Raises: OSError (a new key cannot be saved).
    """
    key = load_or_create_proof_key(folder)
    # Nanoseconds since boot, but above the saved count: a sandbox may start at zero again.
    count = next_proof_count(folder, use, time.clock_gettime_ns(time.CLOCK_BOOTTIME))
    signature = key.sign(proof_statement(str(job), use, csr_pem, count))
    return coordination_pb2.PodProof(key_der=key.public_der(), count=count, signature=signature)
