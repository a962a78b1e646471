"""Exchange graph of `exchange.topology`, the same at every worker.

Used by `factory`, by the sidecar's director, and by trainer and simulator, which link only
neighbours. Pure: a graph follows from topology, degree, seed and ranks. It covers all workers that
may ever take part and is connected. Absent workers are missing from it, even if that disconnects
others. Under `clustered` it contains all possible links; `clusters` defines the current ones.

- `ring`: each worker and its neighbours by rank.
- `randomRegular`: each with `degree` others, drawn by networkx until the graph is connected. With
  degree 2 a ring in random order. Above half of the workers, the complement of such a graph. It is
  connected, since each worker has more than half of the others (Dirac).
- `bipartite`: workers at even positions (by rank) with those at odd ones: all of them, or `degree`.
  The latter is a circulant over both sides in random order (ours), in which two adjacent links form
  a ring through all.
- `staged`: the first worker with each other one.

Source: Steger and Wormald, Generating random regular graphs quickly, 1999 (networkx's algorithm).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from dlion_api.names import Rank
from dlion_api.spec import Exchange, Job, Spec

if TYPE_CHECKING:
    import networkx as nx  # At run time only where a graph needs it: `dlion validate` has none.

CLUSTERED: Final = "clustered"
STAGED: Final = "staged"


def graph_of(spec: Spec, ranks: Collection[Rank]) -> Mapping[Rank, frozenset[Rank]]:
    """Return the neighbours of each of those workers. Raises ValueError for a topology that cannot
    be built (`Spec`'s rules exclude it)."""
    exchange = spec.exchange
    return _graph(exchange.topology, exchange.degree, spec.trainer.seed, tuple(sorted(ranks)))


def neighbours_of(job: Job, rank: Rank) -> frozenset[Rank]:
    """Return the possible neighbours of a job's worker. Workers by which a group may grow are not
    included; they are linked with all (`Job.may_grow`)."""
    return graph_of(job.spec, {rank, *(worker.rank for worker in job.workers())})[rank]


def is_all_to_all(job: Job, rank: Rank) -> bool:
    """Whether a worker always exchanges with all others; under `clustered` its links change."""
    others = {worker.rank for worker in job.workers()} - {rank}
    return job.spec.exchange.topology != CLUSTERED and neighbours_of(job, rank) >= others


def min_neighbours(exchange: Exchange, count: int) -> int:
    """Return the smallest number of neighbours among `count` workers, without drawing a graph.

    >>> from dlion_api.spec import Exchange
    >>> min_neighbours(Exchange(), 6), min_neighbours(Exchange(topology="ring"), 6)
    (5, 2)
    """
    others = max(0, count - 1)
    if exchange.topology == "ring":
        return min(2, others)
    if exchange.topology == "randomRegular":
        return others if exchange.degree is None else exchange.degree
    if exchange.topology == "bipartite":
        return count // 2 if exchange.degree is None else exchange.degree
    if exchange.topology == STAGED:
        return min(1, others)
    return others


def ring_neighbours(ranks: Sequence[Rank], rank: Rank) -> frozenset[Rank]:
    """Return the one or two neighbours on the ring of those ranks; itself if alone.

    >>> sorted(ring_neighbours([0, 1, 2, 3], 0)), sorted(ring_neighbours([0, 2], 2))
    ([1, 3], [0])
    """
    place, count = ranks.index(rank), len(ranks)
    return frozenset({ranks[(place + 1) % count], ranks[(place - 1) % count]})


@lru_cache(maxsize=8)
def _graph(
    topology: str, degree: int | None, seed: int, ranks: tuple[Rank, ...]
) -> Mapping[Rank, frozenset[Rank]]:
    if topology in ("allToAll", CLUSTERED):
        everyone = frozenset(ranks)
        return MappingProxyType({rank: everyone - {rank} for rank in ranks})
    if topology == STAGED:
        first, *others = ranks
        star = {rank: frozenset({first}) for rank in others}
        return MappingProxyType({first: frozenset(others), **star})
    built = _built(topology, degree, random.Random(seed), len(ranks))  # noqa: S311 - no secret
    return MappingProxyType(
        {rank: frozenset(ranks[other] for other in built[at]) for at, rank in enumerate(ranks)}
    )


def _built(topology: str, degree: int | None, rng: random.Random, count: int) -> nx.Graph[int]:
    """Build the graph over positions 0 to `count` - 1."""
    import networkx as nx  # all-to-all does not need it

    if count < 2:
        raise ValueError(f"topology {topology} of {count} workers; allowed: at least two")
    if topology == "ring":
        ring: nx.Graph[int] = nx.cycle_graph(count) if count > 2 else nx.path_graph(2)
        return ring
    if topology == "randomRegular" and degree is not None:
        return _random_regular(degree, rng, count)
    if topology == "bipartite":
        return nx.Graph(_between_sides(degree, rng, count))
    raise ValueError(
        f"topology {topology!r} with degree {degree}; allowed: allToAll, ring, randomRegular with"
        " a degree, bipartite, clustered, staged"
    )


def _random_regular(degree: int, rng: random.Random, count: int) -> nx.Graph[int]:
    import networkx as nx

    if degree >= count or degree * count % 2 or (degree == 1 and count > 2):
        raise ValueError(
            f"degree {degree} with {count} workers; allowed: 2 to {count - 1}, one of both even"
        )
    if degree == 2:
        order = rng.sample(range(count), count)
        return nx.Graph(zip(order, [*order[1:], order[0]], strict=True))
    if 2 * degree > count - 1:
        sparse = nx.random_regular_graph(count - 1 - degree, count, seed=rng)
        dense: nx.Graph[int] = nx.complement(sparse)
        return dense
    while True:
        drawn: nx.Graph[int] = nx.random_regular_graph(degree, count, seed=rng)
        if nx.is_connected(drawn):
            return drawn


def _between_sides(degree: int | None, rng: random.Random, count: int) -> Iterable[tuple[int, int]]:
    evens, odds = list(range(0, count, 2)), list(range(1, count, 2))
    if degree is None:
        return [(even, odd) for even in evens for odd in odds]
    side = len(odds)
    if count % 2 or degree > side or (degree == 1 and side > 1):
        raise ValueError(
            f"degree {degree} between sides of {len(evens)} and {side} workers; allowed: equal "
            f"sides and 2 to {side}"
        )
    rng.shuffle(evens)
    rng.shuffle(odds)
    return [
        (even, odds[(at + step) % side]) for at, even in enumerate(evens) for step in range(degree)
    ]


def relative_mixing_weights(graph: Mapping[Rank, frozenset[Rank]], rank: Rank) -> dict[Rank, float]:
    """Return each worker's weight in an average at `rank`, relative to the plain mean.

    Metropolis-Hastings weights 1 / (1 + the larger number of neighbours), over 1 / (1 + the own
    number); the worker itself gets the rest. The mixing matrix is symmetric and doubly stochastic.
    If all have equally many neighbours, each weight is exactly 1.

    Source: Xiao and Boyd, Fast linear iterations for distributed averaging, 2004.

    >>> graph = {0: frozenset({1, 2}), 1: frozenset({0}), 2: frozenset({0})}
    >>> relative_mixing_weights(graph, 0), relative_mixing_weights(graph, 1)
    ({0: 1.0, 1: 1.0, 2: 1.0}, {1: 1.3333333333333335, 0: 0.6666666666666666})
    """
    own = 1 + len(graph[rank])
    others = {peer: own / max(own, 1 + len(graph[peer])) for peer in sorted(graph[rank])}
    return {rank: 1.0 + sum(1.0 - weight for weight in others.values()), **others}


def lazy_mixing_row(
    graph: Mapping[Rank, frozenset[Rank]], rank: Rank, self_weight: float
) -> dict[Rank, float]:
    """Return the worker's row of s I + (1 - s) M, where M gives each link 1 / the larger degree.

    Symmetric, with row sums of 1. The smallest eigenvalue of M is at least -1, so that of the row's
    matrix is at least 2 s - 1.
    """
    share = 1 - self_weight
    others = {peer: share / max(len(graph[rank]), len(graph[peer])) for peer in sorted(graph[rank])}
    return dict(sorted({**others, rank: 1 - sum(others.values())}.items()))
