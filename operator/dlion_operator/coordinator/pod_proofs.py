"""Verify that a pod's proof belongs to its request; see `dlion_operator.pki.token_bindings`."""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dlion_api.errors import ContractError
from dlion_api.protocol.trust import proof_statement
from dlion_api.wire import coordination_pb2
from dlion_operator.pki.token_bindings import Proof

ProvedRequest = (
    coordination_pb2.SignRequest | coordination_pb2.JoinRequest | coordination_pb2.FollowRequest
)


def checked_proof(request: ProvedRequest, use: str, csr_pem: bytes = b"") -> Proof:
    """Return the verified proof of a size-checked request; empty if it carries none.

    Raises:
        ContractError: The key cannot be read or has not signed this request.
    """
    if not request.HasField("proof"):
        return Proof()
    proof = request.proof
    try:
        key = serialization.load_der_public_key(proof.key_der)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ContractError(f"proof: its key cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ContractError(f"proof: a key of type {type(key).__name__}; allowed: EC P-256")
    statement = proof_statement(request.run, use, csr_pem, proof.count)
    try:
        key.verify(proof.signature, statement, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise ContractError("proof: its key has not signed this request") from error
    # Normalised, because the key's encoding identifies the pod.
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return Proof(key.public_bytes(*form), proof.count)
