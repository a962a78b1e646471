"""Whether a site's operator believes the others by the bundles that the list has.

Called by `site_checks`. A site that still has an old bundle of another is the classical mistake:
all is well until a certificate is renewed. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dlion_api.errors import AbsentError, ContractError, DLionError
from dlion_cli.bundles import Bundle, read_bundle
from dlion_cli.checks import Check, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlion_cli.listed_sites import TrustedSite
    from dlion_cli.site_cluster import Operator

_UPGRADE: Final = (
    "See that the list has the newest bundles (`dlion trust show`), and upgrade it with the list: "
    "helm upgrade … -f sites.yaml"
)


def trust_check(site: str, operator: Operator, others: Sequence[TrustedSite]) -> Check:
    """One check of all the other sites' bundles there, as bad as the worst of them."""
    if isinstance(operator.trust, AbsentError):
        return Check(site, "trust", Outcome.FAIL, "it has nobody's bundle", _UPGRADE)
    if isinstance(operator.trust, DLionError):
        return Check(site, "trust", Outcome.UNKNOWN, str(operator.trust))
    failures, warnings = [], []
    for other in others:
        held = operator.trust.get(other.name)
        if held is None:
            failures.append(f"no bundle of {other.name}")
            continue
        try:
            bundle = read_bundle(held)
        except ContractError as error:
            failures.append(f"the bundle of {other.name} {error}")
            continue
        if not bundle.keys & other.bundle.keys:
            failures.append(f"another authority's bundle of {other.name} {_which(bundle)}")
        elif bundle.fingerprint != other.bundle.fingerprint:
            warnings.append(f"another bundle of {other.name}, for the same key {_which(bundle)}")
    listed = {other.name for other in others}
    warnings += [f"believes {name} too" for name in operator.trust if name not in listed]
    if failures or warnings:
        outcome = Outcome.FAIL if failures else Outcome.WARN
        return Check(site, "trust", outcome, "; ".join(failures + warnings), _UPGRADE)
    seen = f"it believes {', '.join(sorted(listed))} by the listed bundles"
    return Check(site, "trust", Outcome.OK, seen)


def _which(bundle: Bundle) -> str:
    return f"(until {bundle.ends:%Y-%m-%d}, sha256 {bundle.fingerprint[:29]}…)"
