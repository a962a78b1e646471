"""Groups of workers by link rates, with one gateway each: `exchange.topology: clustered`.

Defines the graph of a grouping, and the grouping that suits given rates. Used by `regrouping`, by
the sidecar's director, and by trainer and simulator. Pure, and without NumPy, which a sidecar does
not load. The same rates give the same groups everywhere.

Members of a group are all linked with each other, and so are the gateways. A link is *fast* if its
rate exceeds the level that best separates all rates into two classes (`fast_level`). If the classes
differ little, all links are fast. Groups are communities of the graph of fast links, weighted by
their distance above the level. So the side of the level on which a rate falls matters little.

Source: Otsu, A threshold selection method from gray-level histograms, 1979 (the level, over
logarithms of rates); Clauset, Newman and Moore, Finding community structure in very large networks,
2004 (communities, networkx's); Bansal, Blum and Chawla, Correlation clustering, 2004 (`misfit`).
Their combination is ours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from itertools import accumulate, combinations
from types import MappingProxyType
from typing import Final

from dlion_api.names import Rank
from dlion_api.protocol.measurements import Grouping

Groups = tuple[tuple[Rank, ...], ...]
"""Each worker once; members sorted, groups sorted by their first member."""

PairRates = Mapping[tuple[Rank, Rank], float]
"""Bytes per second by pair of lower and higher rank, where known."""

SEPARATION: Final = 3.0
"""Ratio of fast to slow rates that justifies groups. Below, a gateway's relay costs more than it
saves."""

KEPT_SEPARATION: Final = 2.0
"""Ratio that keeps existing groups."""

GATEWAY_GAIN: Final = 1.5
"""A gateway is replaced if another worker's links to the other groups are this much faster."""

MAX_VERSION: Final = 2**31
"""Maximum version: a thousand years with one every quarter of a minute."""


def groups_by_site(sites: Mapping[Rank, str]) -> Grouping:
    """Return the initial grouping: a group per site, with its lowest rank as gateway.

    >>> groups_by_site({0: "a", 1: "b", 2: "a"}).groups
    ((0, 2), (1,))
    """
    groups = sorted_groups(
        [rank for rank in sites if sites[rank] == site] for site in set(sites.values())
    )
    return Grouping(0, min(sites), groups, tuple(group[0] for group in groups))


def sorted_groups(groups: Iterable[Iterable[Rank]]) -> Groups:
    return tuple(sorted(tuple(sorted(group)) for group in groups))


@lru_cache(maxsize=8)
def graph_of_groups(grouping: Grouping) -> Mapping[Rank, frozenset[Rank]]:
    """Return the neighbours of each worker: its group, and for gateways the other gateways.
    Connected.

    >>> dict(graph_of_groups(Grouping(1, 0, ((0, 1), (2,)), (1, 2))))
    {0: frozenset({1}), 1: frozenset({0, 2}), 2: frozenset({1})}
    """
    gateways = frozenset(grouping.gateways)
    graph: dict[Rank, frozenset[Rank]] = {}
    for group in grouping.groups:
        for rank in group:
            beyond = gateways if rank in gateways else frozenset[Rank]()
            graph[rank] = (frozenset(group) | beyond) - {rank}
    return MappingProxyType(dict(sorted(graph.items())))


def grouping_problem(grouping: Grouping, ranks: Collection[Rank]) -> str:
    """Return what is invalid in a received grouping of those workers; empty: nothing."""
    members = [rank for group in grouping.groups for rank in group]
    if sorted(members) != sorted(ranks):
        return f"groups of {len(members)} workers; allowed: each of the job's {len(ranks)} once"
    if grouping.groups != sorted_groups(grouping.groups):
        return "groups or their members out of order"
    pairs = zip(grouping.groups, grouping.gateways, strict=False)
    if len(grouping.groups) != len(grouping.gateways) or any(g not in group for group, g in pairs):
        return f"gateways {list(grouping.gateways)[:8]}; allowed: a member of each group, in order"
    if grouping.decider not in ranks:
        return f"decider {grouping.decider}; allowed: a worker of the job"
    if not 0 <= grouping.version <= MAX_VERSION:
        return f"version {grouping.version}; allowed: 0 to {MAX_VERSION}"
    return ""


def fast_level(bytes_per_s: Iterable[float], separation: float) -> float:
    """Return the rate that a fast link must exceed; 0 if rates are not of two classes.

    It is the middle of the two classes whose means, over logarithms, are furthest apart for their
    sizes (Otsu).

    >>> round(fast_level([100, 100, 100, 4, 4, 4], 3.0)), fast_level([100, 90, 60], 3.0)
    (20, 0.0)
    """
    logs = sorted(map(math.log, bytes_per_s))
    sums = list(accumulate(logs))
    best, gap, level = -1.0, 0.0, 0.0
    for below in range(1, len(logs)):
        above = len(logs) - below
        low, high = sums[below - 1] / below, (sums[-1] - sums[below - 1]) / above
        if (between := below * above * (high - low) ** 2) > best:
            best, gap, level = between, high - low, math.exp((low + high) / 2)
    return level if gap >= math.log(separation) else 0.0


def find_groups(rates: PairRates, separation: float) -> Groups:
    """Return groups of the workers in those pairs. All rates must be above 0."""
    import networkx as nx  # only this topology needs it

    ranks = sorted({rank for pair in rates for rank in pair})
    level = fast_level(rates.values(), separation)
    if level == 0.0:
        return (tuple(ranks),)
    graph: nx.Graph[Rank] = nx.Graph()
    graph.add_nodes_from(ranks)
    for (one, other), rate in sorted(rates.items()):
        if rate > level:
            graph.add_edge(one, other, weight=math.log(rate / level))
    return sorted_groups(nx.community.greedy_modularity_communities(graph, weight="weight"))


def misfit(groups: Iterable[Collection[Rank]], rates: PairRates, separation: float) -> float:
    """Return how badly groups fit the rates, from 0 (perfect) to 1.

    It sums the distance from the level of fast links between groups and of slow ones inside,
    relative to the sum over all links. If links are of one class, all are fast and equal.
    """
    level = fast_level(rates.values(), separation)
    group_of = {rank: at for at, group in enumerate(groups) for rank in group}
    wrong, total = 0.0, 0.0
    for (one, other), rate in sorted(rates.items()):
        excess = math.log(rate / level) if level else 1.0
        total += abs(excess)
        if (excess > 0) != (group_of[one] == group_of[other]):
            wrong += abs(excess)
    return wrong / total if total else 0.0


def choose_gateways(
    groups: Groups, rates: PairRates, present: Collection[Rank], before: Collection[Rank]
) -> tuple[Rank, ...]:
    """Return for each group the worker with the fastest links to all other groups (geometric mean).

    A gateway of `before` is kept unless another is faster by `GATEWAY_GAIN`. Only `present` workers
    qualify, unless none of the group is. Unknown rates are ignored.
    """
    ranks = {rank for pair in rates for rank in pair}
    gateways = []
    for group in groups:
        candidates = [rank for rank in group if rank in present] or list(group)
        outside = ranks.difference(group)
        means = {rank: _mean_log(rank, outside, rates) for rank in candidates}
        best = max(candidates, key=lambda rank: (means[rank], -rank))
        kept = next((rank for rank in candidates if rank in before), best)
        gateways.append(kept if means[best] - means[kept] < math.log(GATEWAY_GAIN) else best)
    return tuple(gateways)


def _mean_log(rank: Rank, outside: Collection[Rank], rates: PairRates) -> float:
    """Mean logarithm of the known rates to those outside; 0 if none is known."""
    pairs = [(min(rank, other), max(rank, other)) for other in sorted(outside)]
    logs = [math.log(rates[pair]) for pair in pairs if pair in rates]
    return math.fsum(logs) / len(logs) if logs else 0.0


def pairs_of(ranks: Iterable[Rank]) -> list[tuple[Rank, Rank]]:
    """Return all pairs of those workers, the lower rank first."""
    return list(combinations(sorted(ranks), 2))
