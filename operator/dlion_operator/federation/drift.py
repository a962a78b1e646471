"""Find where the manifests of a job's sites differ, in a form that is equal at every site. Pure.

Sites may run different releases of DLion, of which only one knows some field. So fields are
compared one by one, by the hash of their values. A field that only one site knows is not a
difference if it has its default. The hash of the whole manifest includes such a field; it decides
only for manifests with more fields than are compared one by one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dlion_api.names import SiteName
from dlion_operator.federation.reports import SpecFingerprint

MAX_NAMED_PATHS = 5


@dataclass(frozen=True)
class Difference:
    """A site whose manifest differs from the majority's."""

    site: SiteName
    reference: SiteName
    """A site that has the majority's manifest."""
    paths: tuple[str, ...]
    """The fields that differ."""

    def __str__(self) -> str:
        named = ", ".join(self.paths[:MAX_NAMED_PATHS]) or "a field that is not compared separately"
        more = len(self.paths) - MAX_NAMED_PATHS
        named += f" and {more} more" if more > 0 else ""
        return f"the manifest of {self.site} differs from that of {self.reference} in {named}"


def agree(one: SpecFingerprint, other: SpecFingerprint) -> bool:
    """Whether two manifests agree in the part that must be equal at every site.

    >>> old = SpecFingerprint("h", {"trainer.seed": b"1"})
    >>> agree(old, SpecFingerprint("i", {"trainer.seed": b"1", "new": b"2"}, frozenset({"new"})))
    True
    >>> agree(old, SpecFingerprint("i", {"trainer.seed": b"1", "new": b"3"}))
    False
    """
    if one == other:
        return True
    if _paths(one, other):
        return False
    return (one.is_whole and other.is_whole) or one.spec_hash == other.spec_hash


def differences(prints: Mapping[SiteName, SpecFingerprint]) -> tuple[Difference, ...]:
    """Return each site whose manifest differs from the majority's; ties go to the first by name.

    >>> same = SpecFingerprint("h", {"trainer.seed": b"1"})
    >>> other = SpecFingerprint("i", {"trainer.seed": b"2"})
    >>> differing = differences({SiteName("a"): same, SiteName("b"): other, SiteName("c"): same})
    >>> [str(each) for each in differing]
    ['the manifest of b differs from that of a in trainer.seed']
    """
    sites = sorted(prints)

    def agreeing(site: SiteName) -> int:
        return sum(agree(prints[site], each) for each in prints.values())

    reference = max(sites, key=agreeing)
    right = prints[reference]
    return tuple(
        Difference(site, reference, _paths(right, prints[site]))
        for site in sites
        if not agree(right, prints[site])
    )


def _paths(one: SpecFingerprint, other: SpecFingerprint) -> tuple[str, ...]:
    both = one.fields.keys() & other.fields.keys()
    differing = {path for path in both if one.fields[path] != other.fields[path]}
    known_to_one = one.fields.keys() ^ other.fields.keys()
    return tuple(sorted(differing | (known_to_one - one.defaults - other.defaults)))
