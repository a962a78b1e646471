"""A process's proof, whenever it asks for a certificate, that it is the one that asked before: its
token alone could be shown by whoever has read it. What follows: `dlion_operator.bearers`."""

from __future__ import annotations

import time
from pathlib import Path

from dlion_api.trust import signing_statement
from dlion_api.wire import coordination_pb2
from dlion_worker.kept_credentials import kept_proof_key


def proof_of(folder: Path, *, run: str, role: str, csr_pem: bytes) -> coordination_pb2.SigningProof:
    """The proof for that request, by the key of that role that is kept in the folder.

    Raises:
        OSError: a new key cannot be kept.
    """
    key = kept_proof_key(folder, role)
    # Since the machine started: it only ever grows, over processes of the pod too.
    count = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    signature = key.signed(signing_statement(run, role, csr_pem, count))
    return coordination_pb2.SigningProof(key_der=key.public_der(), count=count, signature=signature)
