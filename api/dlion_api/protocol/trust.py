"""Rules that issuers and owners of certificates share: backdating, renewal, pods' proofs and
fingerprints of CA bundles."""

import hashlib
from collections.abc import Mapping
from datetime import datetime, timedelta

from dlion_api.names import SiteName

CLOCK_SKEW_ALLOWANCE = timedelta(minutes=10)
"""How far `notBefore` is in the past: the only tolerance for clock skew between sites."""

RENEWAL_FRACTION = 1 / 2
"""Fraction of its lifetime after which a certificate of worker, keeper or coordinator is renewed.

A connection uses two certificates and is replaced when the client's is renewed; the server's may
then be as old. With one half, neither expires before the connection is replaced.
"""


def renewal_after(not_before: datetime, not_after: datetime) -> timedelta:
    """Return how long after its signing a certificate with these bounds is to be renewed.

    >>> signed = datetime(2026, 1, 1)
    >>> renewal_after(signed - CLOCK_SKEW_ALLOWANCE, signed + timedelta(hours=24))
    datetime.timedelta(seconds=43200)
    """
    return (not_after - not_before - CLOCK_SKEW_ALLOWANCE) * RENEWAL_FRACTION


JOINING, FOLLOWING = "join", "follow"
"""Uses of a pod's proof, besides certificate requests, whose use is their role."""


def proof_statement(run: str, use: str, csr_pem: bytes, count: int) -> bytes:
    """Return the statement that a pod signs: its run, use, counter and certificate request.

    >>> proof_statement("default/digits#1", "trainer", b"-----BEGIN", 7)
    b'dlion.v1alpha1.PodProof\\x00default/digits#1\\x00trainer\\x007\\x00-----BEGIN'
    """
    head = f"dlion.v1alpha1.PodProof\0{run}\0{use}\0{count}\0"
    return head.encode() + csr_pem


def trust_fingerprint(site_bundles_pem: Mapping[SiteName, bytes]) -> str:
    """Return a fingerprint of the sites' CA bundles; empty if there are none.

    >>> trust_fingerprint({"a": b"1", "b": b"2"}) == trust_fingerprint({"b": b"2", "a": b"1"})
    True
    """
    if not site_bundles_pem:
        return ""
    digest = hashlib.sha256()
    for site in sorted(site_bundles_pem):
        digest.update(hashlib.sha256(site.encode()).digest())
        digest.update(hashlib.sha256(site_bundles_pem[site]).digest())
    return digest.hexdigest()[:32]
