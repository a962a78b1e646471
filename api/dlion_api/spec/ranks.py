"""The two ways to assign ranks to a job's workers; `job` selects one.

- `counted`: consecutive, in the manifest's order of sites, groups and workers. For a fixed set of
  workers: `dlion run`, `dlion simulate`.
- `by_group`: index times the number of groups of all sites, plus the position of its group. In a
  cluster counts change during a run, and sites learn of it at different times. This rank depends
  only on the groups' names and order, which are fixed for the run: ranks never change or collide.
"""

from typing import Final

from dlion_api.bounds import MAX_WORKERS_PER_GROUP
from dlion_api.names import GROUP, Rank, SiteName, WorkerIdentity
from dlion_api.spec.sites import Site

RANKS_ANNOTATION: Final = f"{GROUP}/ranks"
"""How ranks are assigned; on the manifest of pods and keeper, and on a run's Jobs."""
BY_GROUP: Final = "byGroup"
"""The annotation's value for ranks by group; without the annotation ranks are counted."""


def counted(sites: tuple[Site, ...]) -> tuple[WorkerIdentity, ...]:
    """Return all workers with consecutive ranks, by rank."""
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
    """Return all workers with ranks by group, by rank."""
    counts = [group.workers for site in sites for group in site.groups]
    workers = (
        by_group_at(sites, Rank(index * len(counts) + place))
        for place, count in enumerate(counts)
        for index in range(count)
    )
    return tuple(sorted(workers))


def by_group_in(sites: tuple[Site, ...], site: str, group: str, index: int) -> WorkerIdentity:
    """Return the worker with that index in its group, independent of the group's size.

    Raises: ValueError: There is no such group.
    """
    groups = [(each.name, its.name) for each in sites for its in each.groups]
    return by_group_at(sites, Rank(index * len(groups) + groups.index((site, group))))


def by_group_at(sites: tuple[Site, ...], rank: Rank) -> WorkerIdentity:
    """Return the worker of that rank, independent of its group's size.

    Raises: LookupError: The rank exceeds the largest allowed group.
    """
    groups = [(site.name, group.name) for site in sites for group in site.groups]
    index, place = divmod(rank, len(groups))
    if not 0 <= index < MAX_WORKERS_PER_GROUP:
        raise LookupError(f"rank {rank}; allowed: 0 to {len(groups) * MAX_WORKERS_PER_GROUP - 1}")
    site, group = groups[place]
    return WorkerIdentity(rank, SiteName(site), group, index)
