"""A pod's proof, whenever it asks for a certificate, joins or follows, that it is the one that came
first: its token alone could be shown by whoever has read it. See `dlion_operator.bearers`."""

from __future__ import annotations

import time
from pathlib import Path

from dlion_api.names import JobKey
from dlion_api.trust import proof_statement
from dlion_api.wire import coordination_pb2
from dlion_worker.kept_credentials import kept_proof_key, next_count


def proof_of(
    folder: Path, *, job: JobKey, use: str, csr_pem: bytes = b""
) -> coordination_pb2.PodProof:
    """The proof for that request, by the key that all processes of the pod keep in that folder.

    Raises:
        OSError: a new key cannot be kept.
    """
    key = kept_proof_key(folder)
    # Since the machine started, and above what was kept: a sandbox may begin at nought again.
    count = next_count(folder, use, time.clock_gettime_ns(time.CLOCK_BOOTTIME))
    signature = key.signed(proof_statement(str(job), use, csr_pem, count))
    return coordination_pb2.PodProof(key_der=key.public_der(), count=count, signature=signature)
