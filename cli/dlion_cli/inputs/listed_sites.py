"""Reads and validates the list `sites` in the chart's values.

Adds checks of certificates to those of the chart's schema.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from dlion_api.bounds import LABEL_FORM, MAX_SITES, SITE_NAME_LENGTH
from dlion_api.document import line_of, parse, setting
from dlion_api.errors import ContractError, Problem, SpecError
from dlion_cli.inputs.bundles import Bundle, read_bundle
from dlion_cli.inputs.manifests import read_document, source_of

_ADDRESS: Final = re.compile(r"[^\s/]+:([0-9]{1,5})")
_UPDATE_BUNDLE_ADVICE: Final = "Run `dlion trust show` at that site and copy its output"


@dataclass(frozen=True, kw_only=True)
class ListedSite:
    """One entry as written."""

    name: str = setting(
        "name of the site, as spec.sites of the manifests has it.",
        **LABEL_FORM,
        max_length=SITE_NAME_LENGTH,
    )
    address: str = setting("host:port of its federation Service.", default="")
    bundle: str = setting("public certificates of its authority, PEM.", default="")


@dataclass(frozen=True, kw_only=True)
class SharedValues:
    """The chart's values that are validated here."""

    sites: tuple[ListedSite, ...] = setting(
        "all sites that train together.", key="name", min_items=1, max_items=MAX_SITES
    )


@dataclass(frozen=True)
class TrustedSite:
    """One entry with a valid bundle."""

    name: str
    address: str
    bundle: Bundle


def read_sites(file: str, *, valid_for: timedelta) -> list[TrustedSite]:
    """The sites in a values file, each with its own address and bundle, valid now and for
    `valid_for`.

    Raises: as `read_document`; SpecError with every problem; UnavailableError if `cryptography` is
    not installed.
    """
    document, lines = read_document(file)
    source, now = source_of(file), datetime.now(UTC)
    values: Any = document if isinstance(document, dict) else {}
    listed = {"sites": values["sites"]} if "sites" in values else {}
    sites = parse(SharedValues, listed, source=source, lines=lines).sites
    problems: list[Problem] = []
    trusted: list[TrustedSite] = []

    def note(path: str, message: str, advice: str = "", value: str = "") -> None:
        line = line_of(path, lines)
        problems.append(Problem(path, message, value, advice=advice, line=line))

    for index, site in enumerate(sites):
        at = f"sites[{index}]"
        if wrong := address_problem(site.address):
            note(f"{at}.address", wrong, "Give host:port of its federation Service", site.address)
        try:
            bundle = _bundle(site, now, valid_for)
        except ContractError as error:
            note(f"{at}.bundle", f"of {site.name} {error}", _UPDATE_BUNDLE_ADVICE)
        else:
            trusted.append(TrustedSite(site.name, site.address, bundle))
    for path, message in _shared(sites, trusted):
        note(path, message, "Each site has its own")
    if problems:
        raise SpecError(sorted(problems, key=lambda each: each.line or 0), source=source)
    return trusted


def address_problem(address: str) -> str:
    """The problem of a federation Service's address; empty if it is valid."""
    if not address:
        return "is missing"
    form = _ADDRESS.fullmatch(address)
    return "" if form and 0 < int(form[1]) < 65536 else "is not host:port"


def _bundle(site: ListedSite, now: datetime, valid_for: timedelta) -> Bundle:
    """Raises: ContractError with a message that follows the site's name."""
    if not site.bundle:
        raise ContractError("is missing")
    bundle = read_bundle(site.bundle)
    if strangers := bundle.sites - {site.name}:
        raise ContractError(f"is of site {', '.join(sorted(strangers))}")
    if bundle.not_before > now:
        raise ContractError(
            f"is valid only from {bundle.not_before:%Y-%m-%d %H:%M} UTC; check the clock"
        )
    if bundle.not_after <= now:
        raise ContractError(f"expired on {bundle.not_after:%Y-%m-%d}")
    if bundle.not_after <= now + valid_for:
        raise ContractError(
            f"expires on {bundle.not_after:%Y-%m-%d}, in {(bundle.not_after - now).days} d"
        )
    return bundle


def _shared(
    sites: tuple[ListedSite, ...], trusted_entries: list[TrustedSite]
) -> list[tuple[str, str]]:
    """Path and message for each address and key that an earlier site has too."""
    at = {site.name: f"sites[{index}]" for index, site in enumerate(sites)}
    addresses: dict[str, str] = {}
    keys: dict[bytes, str] = {}
    shared: list[tuple[str, str]] = []
    for site in sites:
        first = addresses.setdefault(site.address, site.name)
        if site.address and first != site.name:
            shared.append((f"{at[site.name]}.address", f"is also that of {first}"))
    for trusted in trusted_entries:
        others = {keys.setdefault(key, trusted.name) for key in trusted.bundle.keys}
        for other in sorted(others - {trusted.name}):
            message = (
                f"of {trusted.name} has the same key as {other}'s: each could impersonate both"
            )
            shared.append((f"{at[trusted.name]}.bundle", message))
    return shared
