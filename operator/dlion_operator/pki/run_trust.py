"""The CA bundles by which a run's workers trust each other, if its job names authorities. Pure.

Each site reports its own bundle. Known bundles are stored on the run's Jobs, so that a restarted
operator keeps trusting sites that have not reported yet.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from types import MappingProxyType

from cryptography.hazmat.primitives import serialization

from dlion_api.errors import ContractError
from dlion_api.names import SiteName
from dlion_operator.pki.authority_bundles import checked_run_bundle, valid_now
from dlion_operator.pki.certificate_issuer import pem

Bundles = Mapping[SiteName, bytes]
"""Site → public certificates, PEM."""

MAX_STORED_BYTES = 128 * 1024
"""Half of the limit for all annotations of an object."""


def trusted_bundles(
    sites: Iterable[SiteName], reported: Bundles, stored: Bundles, now: datetime
) -> Bundles:
    """Return each site's reported bundle, else its stored one, without expired certificates.

    Invalid bundles are left out.
    """
    bundles = {site: _valid(reported.get(site) or stored.get(site) or b"", now) for site in sites}
    return {site: bundle for site, bundle in bundles.items() if bundle}


def shared_keys(
    bundles: Bundles, own: SiteName, kept: Bundles, before: Bundles = MappingProxyType({})
) -> Mapping[SiteName, SiteName]:
    """Return sites that are not trusted because they share a key with another site, and that site.

    An authority with another site's key could sign for that site's workers. A certificate is
    public, so any site can claim it: the site that had the key before keeps it, and so does `own`.
    If no site had it, none of them is trusted. `before` is what was known when this operator
    started: sites that shared a key then, as earlier releases allowed, may keep sharing it.
    """
    keys = {site: _keys(bundle) for site, bundle in bundles.items()}
    had = {site: _keys(bundle) for site, bundle in kept.items()} | {own: keys.get(own, set())}
    had_then = {site: _keys(bundle) for site, bundle in before.items()}
    sharing = {}
    for site in bundles.keys() - {own}:
        for other in sorted(bundles.keys() - {site}, key=lambda each: (each != own, each)):
            shared = keys[site] & keys[other]
            is_its_own = shared <= had.get(site, set()) and not shared & had.get(other, set())
            is_of_both = shared <= had_then.get(site, set()) & had_then.get(other, set())
            if shared and not is_its_own and not is_of_both:
                sharing[site] = other
                break
    return sharing


def _keys(bundle: bytes) -> set[bytes]:
    """Return the public keys of a bundle. Raises: ContractError if one is unreadable."""
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    certificates = checked_run_bundle(bundle)
    try:
        return {each.public_key().public_bytes(*form) for each in certificates}
    except Exception as error:  # what cryptography raises for odd keys has no common class
        raise ContractError("holds a certificate whose key cannot be read") from error


def _valid(bundle: bytes, now: datetime) -> bytes:
    """Return the bundle without expired certificates; empty if it is invalid."""
    try:
        valid = pem(*valid_now(checked_run_bundle(bundle), now)) if bundle else b""
        if valid:
            _keys(valid)  # must be readable for `shared_keys`
    except ContractError:
        return b""
    return valid


def bundles_to_text(bundles: Bundles, own: SiteName) -> str:
    """Format bundles for an annotation: this site's own first, others by name up to the limit."""
    kept: dict[str, str] = {}
    size = 2
    for site in sorted(bundles, key=lambda site: (site != own, site)):
        text = bundles[site].decode("ascii")
        size += len(json.dumps({site: text}))
        if size <= MAX_STORED_BYTES:
            kept[site] = text
    return json.dumps(kept, sort_keys=True, separators=(",", ":"))


def bundles_from_text(text: str) -> dict[SiteName, bytes]:
    """Parse what `bundles_to_text` wrote. Skip anything invalid: annotations can be edited."""
    try:
        values = dict(json.loads(text or "{}"))
    except (ValueError, TypeError, RecursionError):
        return {}
    bundles = {}
    for site, bundle in values.items():
        try:
            bundles[SiteName(site)] = pem(*checked_run_bundle(str(bundle).encode("ascii")))
        except (ContractError, UnicodeError):
            continue
    return bundles
