"""Signed statements: DSSE envelopes with the signer's certificate.

The keeper signs, `dlion fetch` verifies. The key is certified by the site's authority for the
keeper of one run; the certificates travel in the envelope. Envelopes are untrusted.

Source: https://github.com/secure-systems-lab/dsse, protocol and envelope 1.0. `cert` is ours.
"""

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.verification import PolicyBuilder, Store

from dlion_api.errors import ContractError
from dlion_api.protocol.provenance import MAX_STATEMENT_BYTES, read_object

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
MAX_ENVELOPE_BYTES: Final = 2 * MAX_STATEMENT_BYTES
"""The payload in base64, and certificates."""
MAX_CHAIN_BYTES: Final = 16 * 1024


@dataclass(frozen=True)
class SignedEnvelope:
    """A payload with one signature, not verified yet."""

    payload: bytes
    signature: bytes
    chain_pem: bytes
    """The signer's certificate, then those above it."""

    @classmethod
    def sign(
        cls, payload: bytes, signer: Callable[[bytes], tuple[bytes, bytes]]
    ) -> "SignedEnvelope":
        """`signer` returns the signature of a text and the chain of its key."""
        return cls(payload, *signer(_signed_text(payload)))

    def to_json(self) -> bytes:
        document = {
            "payloadType": PAYLOAD_TYPE,
            "payload": base64.b64encode(self.payload).decode(),
            "signatures": [
                {
                    "sig": base64.b64encode(self.signature).decode(),
                    "cert": self.chain_pem.decode(),
                }
            ],
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, content: bytes) -> "SignedEnvelope":
        """Read an envelope. Raises: ContractError: too long, or of a wrong form."""
        document = read_object(content, "envelope", max_bytes=MAX_ENVELOPE_BYTES)
        signatures = document.get("signatures")
        if document.get("payloadType") != PAYLOAD_TYPE:
            given = document.get("payloadType")
            raise ContractError(f"envelope of {given!r:.100}; allowed: {PAYLOAD_TYPE}")
        if not isinstance(signatures, list) or len(signatures) != 1:
            raise ContractError("envelope: not a list of one signature")
        (signature,) = signatures
        try:
            return cls(
                base64.b64decode(document["payload"], validate=True),
                base64.b64decode(signature["sig"], validate=True),
                signature["cert"].encode("ascii"),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ContractError(f"envelope: payload, sig or cert: {error!r:.200}") from error

    def verify(self, authority_pem: bytes, signer_uri: str, at: datetime) -> None:
        """Verify that this signer signed the payload, by an authority that was valid `at` then.

        Raises: ContractError (it did not).
        """
        if len(self.chain_pem) > MAX_CHAIN_BYTES:
            size = len(self.chain_pem)
            raise ContractError(f"certificates of {size} bytes; allowed: {MAX_CHAIN_BYTES}")
        try:
            store = Store(x509.load_pem_x509_certificates(authority_pem))
            leaf, *above = x509.load_pem_x509_certificates(self.chain_pem)
            _check_period(leaf, at)
            verifier = PolicyBuilder().store(store).time(at).build_client_verifier()
            subjects = verifier.verify(leaf, above).subjects or []
            key = leaf.public_key()
        except ContractError:
            raise
        except Exception as error:  # cryptography has no common error class
            raise ContractError(
                f"its certificate is not by the trusted authority, valid at {at}: {error}"
            ) from error
        if x509.UniformResourceIdentifier(signer_uri) not in subjects:
            given = ", ".join(str(name.value) for name in subjects) or "an unnamed signer"
            raise ContractError(f"signed by {given:.300}; allowed: {signer_uri}")
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ContractError(f"signed by a key of type {type(key).__name__}; allowed: EC")
        try:
            key.verify(self.signature, _signed_text(self.payload), ec.ECDSA(hashes.SHA256()))
        except InvalidSignature as error:
            raise ContractError("its signature does not match: it has been changed") from error


def _check_period(certificate: x509.Certificate, at: datetime) -> None:
    """Raises: ContractError."""
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if at > ends:
        raise ContractError(f"its certificate expired at {ends}, before it was saved at {at}")
    if at < begins:
        raise ContractError(f"its certificate is valid from {begins}, after it was saved at {at}")


def _signed_text(payload: bytes) -> bytes:
    """Return what DSSE signs: the payload with its type and both lengths."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
