"""Where the manifests of a job's sites differ, in words that are the same at every site. Pure.

Called with what all sites have said, this one included. Sites may have different releases of DLion,
one of which knows a field that the other does not. So each field is judged by itself, by the hash
of its value, and one that only one site knows is no difference where it need not be written: its
manifest says nothing there either. The hash of the whole, which such a field changes, decides only
where a manifest has more fields than are told apart.
"""

from __future__ import annotations

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


def agree(one: SpecPrint, other: SpecPrint) -> bool:
    """Whether two manifests are the same in what must be the same everywhere.

    >>> old = SpecPrint("h", {"trainer.seed": b"1"})
    >>> agree(old, SpecPrint("i", {"trainer.seed": b"1", "new": b"2"}, frozenset({"new"})))
    True
    >>> agree(old, SpecPrint("i", {"trainer.seed": b"1", "new": b"3"}))
    False
    """
    if one == other:
        return True
    if _paths(one, other):
        return False
    return (one.is_whole and other.is_whole) or one.spec_hash == other.spec_hash


def differences(prints: Mapping[SiteName, SpecPrint]) -> tuple[Difference, ...]:
    """Each site whose manifest is not that of most; among equals the first site by name is right.

    >>> same, other = SpecPrint("h", {"trainer.seed": b"1"}), SpecPrint("i", {"trainer.seed": b"2"})
    >>> found = differences({SiteName("a"): same, SiteName("b"): other, SiteName("c"): same})
    >>> [str(each) for each in found]
    ['the manifest of b differs from that of a in trainer.seed']
    """
    sites = sorted(prints)

    def like_it(site: SiteName) -> int:
        return sum(agree(prints[site], each) for each in prints.values())

    reference = max(sites, key=like_it)
    right = prints[reference]
    return tuple(
        Difference(site, reference, _paths(right, prints[site]))
        for site in sites
        if not agree(right, prints[site])
    )


def _paths(one: SpecPrint, other: SpecPrint) -> tuple[str, ...]:
    """Fields in which they differ."""
    both = one.fields.keys() & other.fields.keys()
    differing = {path for path in both if one.fields[path] != other.fields[path]}
    known_to_one = one.fields.keys() ^ other.fields.keys()
    return tuple(sorted(differing | (known_to_one - one.defaults - other.defaults)))
