"""What whoever signs certificates and whoever bears them go by alike: how far they are backdated,
and whether two sets of authorities are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import timedelta

from dlion_api.names import SiteName

BACKDATED = timedelta(minutes=10)
"""How far `notBefore` lies back: the only allowance for clocks that differ between sites."""


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
