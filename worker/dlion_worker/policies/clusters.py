"""Groups of workers by what their links carry, with a gateway each: `exchange.topology: clustered`.

Owns the graph of a grouping, and which grouping suits given rates. Called by `regrouping`, which
says when to take another one, by the sidecar's director, and by trainer and simulator for the
graph. Pure, and without NumPy, which a sidecar does not load: the same rates give the same groups
everywhere.

Members of a group are all linked with each other, gateways with each other. A link is *fast* where
it carries more than the level that parts all rates into two classes best (`fast_level`); classes
that hardly differ are one, and all links are fast. Groups are the communities of the graph of fast
links, each counting by how far it is above the level, so that it matters little on which side of
it a rate in between falls.

Source: Otsu, A threshold selection method from gray-level histograms, 1979 (the level, over the
logarithms of rates); Clauset, Newman and Moore, Finding community structure in very large networks,
2004 (communities, networkx's); Bansal, Blum and Chawla, Correlation clustering, 2004 (`misfit`).
Their combination is ours.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate, combinations
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from dlion_api.measurements import Grouping
from dlion_api.names import Rank

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

Groups = tuple[tuple[Rank, ...], ...]
"""Each worker once; members in order, groups by their first member."""

SEPARATION: Final = 3.0
"""Links are of two classes where the fast ones carry so many times what the slow ones do: below
that a gateway's relay costs more than it saves."""

KEPT_SEPARATION: Final = 2.0
"""Where there are groups already, as long as they carry so many times as much."""

GATEWAY_GAIN: Final = 1.5
"""Another gateway takes over where its links to the other groups carry so many times as much."""


MOST_VERSION: Final = 2**31
"""Of a grouping: a thousand years of one every quarter of a minute."""


def by_sites(sites: Mapping[Rank, str]) -> Grouping:
    """Before any link is known: a group for each site, its lowest rank the gateway.

    >>> by_sites({0: "a", 1: "b", 2: "a"}).groups
    ((0, 2), (1,))
    """
    groups = sorted_groups(
        [rank for rank in sites if sites[rank] == site] for site in set(sites.values())
    )
    return Grouping(0, min(sites), groups, tuple(group[0] for group in groups))


def sorted_groups(groups: Iterable[Iterable[Rank]]) -> Groups:
    """Those groups in the one order in which they are told."""
    return tuple(sorted(tuple(sorted(group)) for group in groups))


@lru_cache(maxsize=8)
def graph_of_groups(grouping: Grouping) -> Mapping[Rank, frozenset[Rank]]:
    """With whom each worker exchanges: its group, and gateways with each other. Connected.

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


def problem_of(grouping: Grouping, ranks: Collection[Rank]) -> str:
    """What is wrong with a grouping of those workers that somebody told; empty: nothing."""
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
    if not 0 <= grouping.version <= MOST_VERSION:
        return f"version {grouping.version}; allowed: 0 to {MOST_VERSION}"
    return ""


def fast_level(bytes_per_s: Iterable[float], separation: float) -> float:
    """What a link must carry more than to be fast; 0 where rates are not of two classes.

    The level is the middle of the two classes whose means, over logarithms, are furthest apart for
    their sizes (Otsu).

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


def find_groups(rates: Mapping[tuple[Rank, Rank], float], separation: float) -> Groups:
    """Groups of the workers that those pairs name. All rates must be above 0."""
    import networkx as nx  # a job of another topology does without

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


def misfit(
    groups: Iterable[Collection[Rank]],
    rates: Mapping[tuple[Rank, Rank], float],
    separation: float,
) -> float:
    """How far groups are from what links say: fast links between groups and slow ones inside, by
    their distance from the level, over the same of all links. 0 to 1; 0 is a perfect fit.

    Where links are of one class all are fast, and alike.
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
    groups: Groups,
    rates: Mapping[tuple[Rank, Rank], float],
    present: Collection[Rank],
    before: Collection[Rank],
) -> tuple[Rank, ...]:
    """Of each group the one whose links to all other groups carry most, by their geometric mean.

    One that is a gateway `before` stays unless another's carry `GATEWAY_GAIN` times as much. Who
    is not `present` is none, except where nobody of a group is; what is not known counts as
    nothing known of anybody.
    """
    return tuple(_gateway(group, rates, present, before) for group in groups)


def _gateway(
    group: tuple[Rank, ...],
    rates: Mapping[tuple[Rank, Rank], float],
    present: Collection[Rank],
    before: Collection[Rank],
) -> Rank:
    candidates = [rank for rank in group if rank in present] or list(group)
    outside = {rank for pair in rates for rank in pair}.difference(group)
    means = {rank: _mean_log(rank, outside, rates) for rank in candidates}
    best = max(candidates, key=lambda rank: (means[rank], -rank))
    kept = [rank for rank in candidates if rank in before]
    if kept and means[best] - means[kept[0]] < math.log(GATEWAY_GAIN):
        return kept[0]
    return best


def _mean_log(
    rank: Rank, outside: Collection[Rank], rates: Mapping[tuple[Rank, Rank], float]
) -> float:
    """Of the rates from there to those outside; 0 where none is known."""
    pairs = [(min(rank, other), max(rank, other)) for other in sorted(outside)]
    logs = [math.log(rates[pair]) for pair in pairs if pair in rates]
    return math.fsum(logs) / len(logs) if logs else 0.0


def pairs_of(ranks: Iterable[Rank]) -> list[tuple[Rank, Rank]]:
    """All pairs among those workers, the lower rank first."""
    return list(combinations(sorted(ranks), 2))
