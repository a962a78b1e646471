"""Which rank each worker of a job has.

What goes in: the two ways to number workers. What stays out: which of them a job's are numbered by
(`job`).

- `counted`: through sites, groups and workers in the manifest's order, without a gap. For workers
  that are known for good: `dlion run`, `dlion simulate`.
- By group: index times the number of groups of all sites, plus the place of its group among them.
  In a cluster counts change while a run lasts, and sites learn of it at different moments. Such a
  rank follows from the groups' names and order alone, which are the same at every site and stand
  for the whole run: nobody's rank moves, and no two workers ever have the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dlion_api.names import GROUP, Rank, SiteName, WorkerIdentity
from dlion_api.spec.bounds import MOST_WORKERS

if TYPE_CHECKING:
    from dlion_api.spec.sites import Site

RANKS_ANNOTATION: Final = f"{GROUP}/ranks"
"""Of a manifest as pods and keeper have it, and of a run's Jobs: how its ranks are made."""
BY_GROUP: Final = "byGroup"
"""That annotation's value for ranks by group; without it they are counted."""


def counted(sites: tuple[Site, ...]) -> tuple[WorkerIdentity, ...]:
    """All workers, by rank."""
    places = [
        (site.name, group.name, index)
        for site in sites
        for group in site.groups
        for index in range(group.workers)
    ]
    return tuple(
        WorkerIdentity(Rank(rank), SiteName(site), group, index)
        for rank, (site, group, index) in enumerate(places)
    )


def by_group(sites: tuple[Site, ...]) -> tuple[WorkerIdentity, ...]:
    """All workers, by rank."""
    counts = [group.workers for site in sites for group in site.groups]
    workers = (
        by_group_at(sites, Rank(index * len(counts) + place))
        for place, count in enumerate(counts)
        for index in range(count)
    )
    return tuple(sorted(workers))


def by_group_in(sites: tuple[Site, ...], site: str, group: str, index: int) -> WorkerIdentity:
    """The worker with that index in its group, whatever the group's count.

    Raises: ValueError: there is no such group.
    """
    groups = [(each.name, its.name) for each in sites for its in each.groups]
    return by_group_at(sites, Rank(index * len(groups) + groups.index((site, group))))


def by_group_at(sites: tuple[Site, ...], rank: Rank) -> WorkerIdentity:
    """The worker of that rank, whatever its group's count.

    Raises: LookupError: no group may ever grow as large.
    """
    groups = [(site.name, group.name) for site in sites for group in site.groups]
    index, place = divmod(rank, len(groups))
    if not 0 <= index < MOST_WORKERS:
        raise LookupError(f"rank {rank}; allowed: 0 to {len(groups) * MOST_WORKERS - 1}")
    site, group = groups[place]
    return WorkerIdentity(rank, SiteName(site), group, index)
