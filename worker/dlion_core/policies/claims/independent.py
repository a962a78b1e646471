"""Which workers of a run cannot be bad together, by their sites. Pure.

Called by `deviations` and `lasting_differences`. Who controls a site has all its workers, which
then hide each other if a worker is compared with the largest of all others. So with three sites or
more of like data it is compared with those of other sites. With two, one could be as bad as the
other, and each worker counts for itself.
"""

from collections.abc import Hashable, Iterable, Mapping
from heapq import nlargest

from dlion_api.names import Rank

MIN_SITES = 3


def units_of(ranks: Iterable[Rank], sites: Mapping[Rank, str]) -> dict[Rank, Hashable]:
    """Return what each worker is part of: its site, or itself if these are of fewer than three.

    >>> units_of([Rank(0), Rank(1)], {Rank(0): "a", Rank(1): "b"})
    {0: 0, 1: 1}
    """
    found: dict[Rank, Hashable] = {rank: sites.get(rank, rank) for rank in ranks}
    return found if len(set(found.values())) >= MIN_SITES else {rank: rank for rank in found}


def largest_elsewhere(
    values: Mapping[Rank, float], units: Mapping[Rank, Hashable]
) -> dict[Rank, float]:
    """Return for each worker the largest value outside its unit, at least 0.

    >>> largest_elsewhere({Rank(0): 9.0, Rank(1): 8.0, Rank(2): 1.0}, {0: "a", 1: "a", 2: "b"})
    {0: 1.0, 1: 1.0, 2: 9.0}
    """
    largest: dict[Hashable, float] = {}
    for rank, value in values.items():
        largest[units[rank]] = max(value, largest.get(units[rank], 0.0))
    if not largest:
        return {}
    first, *rest = nlargest(2, largest, key=largest.__getitem__)
    second = largest[rest[0]] if rest else 0.0
    return {rank: second if units[rank] == first else largest[first] for rank in values}
