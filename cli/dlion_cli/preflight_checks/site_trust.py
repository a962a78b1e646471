"""Checks whether a site's operator has the listed bundles of the other sites.

An outdated bundle works until the other site renews its certificate. Called by `site_checks`. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dlion_api.errors import AbsentError, ContractError, DLionError
from dlion_cli.inputs.bundles import Bundle, read_bundle
from dlion_cli.preflight_checks.checks import Check, CheckOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlion_cli.inputs.listed_sites import TrustedSite
    from dlion_cli.preflight_checks.site_cluster import OperatorSnapshot

_UPGRADE: Final = (
    "Check that the list has the newest bundles (`dlion trust show`), and upgrade it with the "
    "list: helm upgrade … -f sites.yaml"
)


def trust_check(site: str, operator: OperatorSnapshot, others: Sequence[TrustedSite]) -> Check:
    """One check of all other sites' bundles; its outcome is the worst of them."""
    if isinstance(operator.trust, AbsentError):
        return Check(site, "trust", CheckOutcome.FAIL, "it has no bundles", _UPGRADE)
    if isinstance(operator.trust, DLionError):
        return Check(site, "trust", CheckOutcome.UNKNOWN, str(operator.trust))
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
            failures.append(f"another authority's bundle of {other.name} {_describe(bundle)}")
        elif bundle.fingerprint != other.bundle.fingerprint:
            warnings.append(f"another bundle of {other.name}, for the same key {_describe(bundle)}")
    listed = {other.name for other in others}
    warnings += [f"also trusts {name}" for name in operator.trust if name not in listed]
    if failures or warnings:
        outcome = CheckOutcome.FAIL if failures else CheckOutcome.WARN
        return Check(site, "trust", outcome, "; ".join(failures + warnings), _UPGRADE)
    observed = f"it trusts {', '.join(sorted(listed))} by the listed bundles"
    return Check(site, "trust", CheckOutcome.OK, observed)


def _describe(bundle: Bundle) -> str:
    return f"(until {bundle.not_after:%Y-%m-%d}, sha256 {bundle.fingerprint[:29]}…)"
