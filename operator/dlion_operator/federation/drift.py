"""Where the manifests of a job's sites differ, in words that are the same at every site. Pure.

Called with what all sites have said, this one included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from dlion_api.names import SiteName
from dlion_operator.federation.reports import SpecPrint

MOST_NAMED = 5


@dataclass(frozen=True)
class Difference:
    """A site whose manifest is not that of the others."""

    site: SiteName
    reference: SiteName
    """A site that has the manifest of most."""
    paths: tuple[str, ...]
    """The fields that differ."""

    def __str__(self) -> str:
        named = ", ".join(self.paths[:MOST_NAMED]) or "a field that is not told apart"
        more = len(self.paths) - MOST_NAMED
        named += f" and {more} more" if more > 0 else ""
        return f"the manifest of {self.site} differs from that of {self.reference} in {named}"


def differences(prints: Mapping[SiteName, SpecPrint]) -> tuple[Difference, ...]:
    """Each site whose manifest is not that of most; among equals the first site by name is right.

    >>> same, other = SpecPrint("h", {"trainer.seed": b"1"}), SpecPrint("i", {"trainer.seed": b"2"})
    >>> found = differences({SiteName("a"): same, SiteName("b"): other, SiteName("c"): same})
    >>> [str(each) for each in found]
    ['the manifest of b differs from that of a in trainer.seed']
    """
    sites = sorted(prints)
    counts = Counter(prints[site].spec_hash for site in sites)
    if len(counts) < 2:
        return ()
    reference = max(sites, key=lambda site: counts[prints[site].spec_hash])
    right = prints[reference]
    return tuple(
        Difference(site, reference, _paths(right.fields, prints[site].fields))
        for site in sites
        if prints[site].spec_hash != right.spec_hash
    )


def _paths(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> tuple[str, ...]:
    every = sorted(one.keys() | other.keys())
    return tuple(path for path in every if one.get(path) != other.get(path))
