"""What whoever signs certificates and whoever bears them go by alike: how far they are
backdated, when one is to be replaced, what a pod proves with its token, and whether two sets of
authorities are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime, timedelta

from dlion_api.names import SiteName

BACKDATED = timedelta(minutes=10)
"""How far `notBefore` lies back: the only allowance for clocks that differ between sites."""

RENEWED_AT = 1 / 2
"""Part of its life after which a worker's, a keeper's and a coordinator's certificate is replaced.

A connection goes by two certificates and is remade with the newer one of whoever dials, while the
other may be as old as that. At half of their lives neither ends before the connection does.
"""


def renewal_after(not_before: datetime, not_after: datetime) -> timedelta:
    """How long after it was signed a certificate of these bounds is to be replaced.

    >>> signed = datetime(2026, 1, 1)
    >>> renewal_after(signed - BACKDATED, signed + timedelta(hours=24))
    datetime.timedelta(seconds=43200)
    """
    return (not_after - not_before - BACKDATED) * RENEWED_AT


JOINING, FOLLOWING = "join", "follow"
"""What a pod proves itself for, beside requests for certificates (called by their role)."""


def proof_statement(run: str, use: str, csr_pem: bytes, count: int) -> bytes:
    """What a pod proves to have said: for what its token is, and for which key's certificate.

    >>> proof_statement("default/digits#1", "trainer", b"-----BEGIN", 7)
    b'dlion.v1alpha1.PodProof\\x00default/digits#1\\x00trainer\\x007\\x00-----BEGIN'
    """
    head = f"dlion.v1alpha1.PodProof\0{run}\0{use}\0{count}\0"
    return head.encode() + csr_pem


def trust_print(site_bundles_pem: Mapping[SiteName, bytes]) -> str:
    """A fingerprint of these bundles by site; empty where there are none.

    >>> trust_print({"a": b"1", "b": b"2"}) == trust_print({"b": b"2", "a": b"1"})
    True
    """
    if not site_bundles_pem:
        return ""
    digest = hashlib.sha256()
    for site in sorted(site_bundles_pem):
        digest.update(hashlib.sha256(site.encode()).digest())
        digest.update(hashlib.sha256(site_bundles_pem[site]).digest())
    return digest.hexdigest()[:32]
