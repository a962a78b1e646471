"""By which authorities the workers of one run know each other, where its job names them. Pure.

Each site says which its own is; what was known is kept on the run's Jobs, so that an operator that
starts anew takes nobody's trust away, whom it has not heard yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from types import MappingProxyType

from cryptography.hazmat.primitives import serialization

from dlion_api.errors import ContractError
from dlion_api.names import SiteName
from dlion_api.spec import Job
from dlion_operator.authority_bundles import checked_run_bundle, valid_now
from dlion_operator.issuing import pem
from dlion_operator.job_authority import NamedAuthority

Bundles = Mapping[SiteName, bytes]
"""Site → public certificates, PEM."""

NAMED_MODES = ("Secret", "CertManager")
"""Of `tls.mode`: the job names an authority of its own for each site."""
MAX_KEPT_BYTES = 128 * 1024
"""Half of what all annotations of an object may take."""


def names_authority(job: Job) -> bool:
    """Whether that job's workers are signed for by an authority that it names."""
    return job.spec.tls.mode in NAMED_MODES


def authority_of(job: Job, found: NamedAuthority | None) -> NamedAuthority | None:
    """What there is of the authority that the job names; None: it names none."""
    if not names_authority(job):
        return None
    return found or NamedAuthority(None, "the authority that tls names has not been read yet")


def known(sites: Iterable[SiteName], told: Bundles, kept: Bundles, now: datetime) -> Bundles:
    """Of each of these sites what it says, else what was kept; of that what holds now. What is no
    bundle of authorities is left out."""
    found = {site: _holding(told.get(site) or kept.get(site) or b"", now) for site in sites}
    return {site: bundle for site, bundle in found.items() if bundle}


def same_keys(
    bundles: Bundles, own: SiteName, kept: Bundles, before: Bundles = MappingProxyType({})
) -> Mapping[SiteName, SiteName]:
    """Sites that are not believed, as an authority of theirs has the key of another site's, for
    whose workers it could sign: and which other site that is.

    A certificate is public, and anybody can say that it is theirs: who had that key before, and
    this site itself, stand. Where nobody did, none of them is believed. `before` is what was known
    when this operator started: sites that shared a key then, as earlier releases allowed, share it
    on.
    """
    keys = {site: _keys(bundle) for site, bundle in bundles.items()}
    had = {site: _keys(bundle) for site, bundle in kept.items()} | {own: keys.get(own, set())}
    had_then = {site: _keys(bundle) for site, bundle in before.items()}
    found = {}
    for site in bundles.keys() - {own}:
        for other in sorted(bundles.keys() - {site}, key=lambda each: (each != own, each)):
            shared = keys[site] & keys[other]
            is_its_own = shared <= had.get(site, set()) and not shared & had.get(other, set())
            is_of_both = shared <= had_then.get(site, set()) & had_then.get(other, set())
            if shared and not is_its_own and not is_of_both:
                found[site] = other
                break
    return found


def _keys(bundle: bytes) -> set[bytes]:
    """The public keys of these certificates. Raises: ContractError where one cannot be read."""
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    certificates = checked_run_bundle(bundle)
    try:
        return {each.public_key().public_bytes(*form) for each in certificates}
    except Exception as error:  # what cryptography raises for odd keys has no common class
        raise ContractError("holds a certificate whose key cannot be read") from error


def _holding(bundle: bytes, now: datetime) -> bytes:
    try:
        holding = pem(*valid_now(checked_run_bundle(bundle), now)) if bundle else b""
        if holding:
            _keys(holding)  # which are compared with other sites'
    except ContractError:
        return b""
    return holding


def written(bundles: Bundles, own: SiteName) -> str:
    """These, for an annotation: this site's own in any case, others by name while there is room."""
    kept: dict[str, str] = {}
    size = 2
    for site in sorted(bundles, key=lambda site: (site != own, site)):
        text = bundles[site].decode("ascii")
        size += len(json.dumps({site: text}))
        if size <= MAX_KEPT_BYTES:
            kept[site] = text
    return json.dumps(kept, sort_keys=True, separators=(",", ":"))


def read(text: str) -> dict[SiteName, bytes]:
    """What `written` made; whatever is nothing of the kind is left: annotations can be edited."""
    try:
        found = dict(json.loads(text or "{}"))
    except (ValueError, TypeError, RecursionError):
        return {}
    bundles = {}
    for site, bundle in found.items():
        try:
            bundles[SiteName(site)] = pem(*checked_run_bundle(str(bundle).encode("ascii")))
        except (ContractError, UnicodeError):
            continue
    return bundles
