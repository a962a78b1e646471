"""Policies that exchange on any graph, and their common parts, for tests of graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from policy_cluster import spec
from weights_cluster import WeightsCluster, weights_spec

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dlion_api.names import Rank
    from dlion_api.spec import Spec

KINDS: dict[str, Spec] = {
    "full in lock step": spec(exchange={"policy": "full"}, synchronization={"mode": "synchronous"}),
    "full, bounded": spec(
        exchange={"policy": "full"}, synchronization={"mode": "bounded", "maxStaleness": 1}
    ),
    "selective in lock step": spec(
        exchange={"propagation": "selective", "propagationPeers": 1},
        synchronization={"mode": "synchronous"},
    ),
    "gaia": weights_spec("gaia"),
    "hop": weights_spec("hop"),
    "eventgrad": weights_spec("eventgrad", bound=0),
    "localsgd": weights_spec("localsgd", localSteps=2),
    "async": weights_spec("async", bound=1),
}


def mixing_matrix(graph: Mapping[Rank, Collection[Rank]]) -> np.ndarray:
    """Return naive Metropolis weights [n, n]: by the larger degree of a pair; a row sums to 1."""
    w = np.zeros((len(graph), len(graph)))
    for one in graph:
        for other in graph[one]:
            w[one, other] = 1 / (1 + max(len(graph[one]), len(graph[other])))
        w[one, one] = 1 - w[one].sum()
    return w


def lockstep(cluster: WeightsCluster, gradients: np.ndarray) -> None:
    """Step all workers with these gradients, one for each, [steps, workers, D]."""
    for of_step in gradients:
        for rank in cluster.ranks:
            cluster.step(rank, of_step[rank].copy())
        cluster.deliver_all()
