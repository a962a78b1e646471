"""The list `sites` in a file of the chart's values: who trains together, believed by what.

Called by `trust`. Checks what the chart checks too, and what only a reader of certificates can.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from dlion_api.document import line_of, parse, setting
from dlion_api.errors import ContractError, Problem, SpecError
from dlion_api.spec.bounds import LABEL, LABEL_WORDS, MOST_SITES, SITE_NAME_LENGTH
from dlion_cli.bundles import Bundle, read_bundle

_ADDRESS: Final = re.compile(r"[^\s/]+:([0-9]{1,5})")
_SHOW: Final = "Run `dlion trust show` at that site and put in what it prints"


@dataclass(frozen=True, kw_only=True)
class ListedSite:
    """One entry, as it is written."""

    name: str = setting(
        "name of the site, as spec.sites of the manifests has it.",
        pattern=LABEL,
        pattern_words=LABEL_WORDS,
        max_length=SITE_NAME_LENGTH,
    )
    address: str = setting("host:port of its federation Service.", default="")
    bundle: str = setting("public certificates of its authority, PEM.", default="")


@dataclass(frozen=True, kw_only=True)
class SharedValues:
    """Of the chart's values those that are checked here."""

    sites: tuple[ListedSite, ...] = setting(
        "all sites that train together.", key="name", min_items=1, max_items=MOST_SITES
    )


@dataclass(frozen=True)
class TrustedSite:
    """One entry whose bundle will do."""

    name: str
    address: str
    bundle: Bundle


def trusted_sites(
    document: object,
    *,
    source: str,
    lines: Mapping[str, int],
    now: datetime,
    valid_for: timedelta,
) -> list[TrustedSite]:
    """The sites that a file of values lists, each with an address and a bundle of its own.

    A bundle has to hold now and for `valid_for` more.

    Raises: SpecError with everything that is wrong; UnavailableError where `cryptography` is not
    installed.
    """
    values: Any = document if isinstance(document, dict) else {}
    listed = {"sites": values["sites"]} if "sites" in values else {}
    sites = parse(SharedValues, listed, source=source, lines=lines).sites
    problems: list[Problem] = []
    found: list[TrustedSite] = []

    def note(path: str, message: str, advice: str = "", value: str = "") -> None:
        line = line_of(path, lines)
        problems.append(Problem(path, message, value, advice=advice, line=line))

    for index, site in enumerate(sites):
        at = f"sites[{index}]"
        if wrong := address_fault(site.address):
            note(f"{at}.address", wrong, "Give host:port of its federation Service", site.address)
        try:
            bundle = _bundle(site, now, valid_for)
        except ContractError as error:
            note(f"{at}.bundle", f"of {site.name} {error}", _SHOW)
        else:
            found.append(TrustedSite(site.name, site.address, bundle))
    for path, message in _shared(sites, found):
        note(path, message, "Each site has its own")
    if problems:
        raise SpecError(sorted(problems, key=lambda each: each.line or 0), source=source)
    return found


def address_fault(address: str) -> str:
    """What is wrong with the address of a federation Service; empty where nothing is."""
    if not address:
        return "is missing"
    form = _ADDRESS.fullmatch(address)
    return "" if form and 0 < int(form[1]) < 65536 else "is no host:port"


def _bundle(site: ListedSite, now: datetime, valid_for: timedelta) -> Bundle:
    """Raises: ContractError with what is wrong with it, to be read after the site's name."""
    if not site.bundle:
        raise ContractError("is missing")
    bundle = read_bundle(site.bundle)
    if strangers := bundle.sites - {site.name}:
        raise ContractError(f"is of site {', '.join(sorted(strangers))}")
    if bundle.begins > now:
        raise ContractError(f"holds from {bundle.begins:%Y-%m-%d %H:%M} UTC only; check the clock")
    if bundle.ends <= now:
        raise ContractError(f"has run out on {bundle.ends:%Y-%m-%d}")
    if bundle.ends <= now + valid_for:
        raise ContractError(f"runs out on {bundle.ends:%Y-%m-%d}, in {(bundle.ends - now).days} d")
    return bundle


def _shared(sites: tuple[ListedSite, ...], found: list[TrustedSite]) -> list[tuple[str, str]]:
    """Path and words of each address and key that an earlier site has, too."""
    at = {site.name: f"sites[{index}]" for index, site in enumerate(sites)}
    addresses: dict[str, str] = {}
    keys: dict[bytes, str] = {}
    shared: list[tuple[str, str]] = []
    for site in sites:
        first = addresses.setdefault(site.address, site.name)
        if site.address and first != site.name:
            shared.append((f"{at[site.name]}.address", f"is that of {first}, too"))
    for trusted in found:
        others = {keys.setdefault(key, trusted.name) for key in trusted.bundle.keys}
        for other in sorted(others - {trusted.name}):
            words = f"of {trusted.name} has the key of {other}'s, so that each could pass for both"
            shared.append((f"{at[trusted.name]}.bundle", words))
    return shared
