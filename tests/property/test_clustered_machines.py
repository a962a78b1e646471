"""Policies while workers are regrouped: links end and begin, and each worker learns of it
separately.

Under random schedules, with groupings that reach each worker at its own time, no worker blocks, for
any policy. `hop` averages by the graph of the newest grouping (naive mixing matrix), before and
after a change. Messages of a worker that may be linked later are accepted.

Left out: the groupings themselves (test_clusters.py), links (tests/local/test_clustered.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import graph_policies
from dlion_api.names import Rank
from dlion_api.protocol.measurements import Grouping
from dlion_core.policies.interface import (
    Event,
    Instruction,
    Layout,
    MemberJoined,
    MemberLeft,
    TopologyChanged,
)
from dlion_core.topology.clusters import graph_of_groups
from graph_policies import lockstep, mixing_matrix
from weights_cluster import WeightsCluster, run_at_random, weights_spec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlion_api.spec import Spec

SIZES = [2, 8, 3, 4, 1, 6]
GROUPINGS = [
    Grouping(0, Rank(0), ((0, 1, 2), (3, 4, 5)), (0, 3)),
    Grouping(1, Rank(0), ((0, 1, 2), (3, 4, 5)), (1, 5)),
    Grouping(2, Rank(0), ((0, 3), (1, 2, 4), (5,)), (3, 1, 5)),
    Grouping(3, Rank(0), ((0, 1, 2, 3, 4, 5),), (0,)),
    Grouping(4, Rank(0), ((0, 5), (1, 4), (2, 3)), (5, 4, 2)),
]


class GroupedCluster(WeightsCluster):
    """Each worker has a grouping; two workers are linked if each is the other's neighbour."""

    def __init__(self, job_spec: Spec, sizes: Iterable[int], **options: Any) -> None:
        sizes = list(sizes)
        self.held = {Rank(rank): GROUPINGS[0] for rank in range(len(sizes))}
        super().__init__(job_spec, sizes, layout=Layout(("a",), (7,)), **options)
        for rank in self.ranks:
            self.handle(rank, TopologyChanged(graph_of_groups(GROUPINGS[0])))

    def linked(self, one: Rank, other: Rank) -> bool:
        graphs = [graph_of_groups(self.held[rank]) for rank in (one, other)]
        return other in graphs[0][one] and one in graphs[1][other]

    def handle(self, rank: Rank, event: Event) -> list[Instruction]:
        if isinstance(event, MemberJoined) and not self.linked(rank, event.rank):
            return []
        return super().handle(rank, event)

    def regroup(self, rank: Rank, grouping: Grouping) -> None:
        """Give that worker a grouping."""
        before = {peer for peer in self.ranks if peer != rank and self.linked(rank, peer)}
        self.held[rank] = grouping
        after = {peer for peer in self.ranks if peer != rank and self.linked(rank, peer)}
        self.handle(rank, TopologyChanged(graph_of_groups(grouping)))
        for peer in sorted(before - after):
            for link in ((rank, peer), (peer, rank)):
                self.links[link].clear()
                self.handle(link[0], MemberLeft(link[1]))
        for peer in sorted(after - before):
            for one, other in ((rank, peer), (peer, rank)):
                self.handle(one, MemberJoined(other, self.replicas[other].iteration))


def clustered(job_spec: Spec) -> Spec:
    return replace(job_spec, exchange=replace(job_spec.exchange, topology="clustered"))


KINDS: dict[str, Spec] = {
    **graph_policies.KINDS,
    "hop without backup": weights_spec("hop", backupWorkers=0, staleness=0),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_worker_blocks_while_workers_are_regrouped(kind: str) -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        cluster = GroupedCluster(clustered(KINDS[kind]), SIZES, seed=seed)

        def hear(own: WeightsCluster, rank: Rank) -> None:
            """Now and then, before a step, give this worker the next grouping."""
            assert isinstance(own, GroupedCluster)
            newest = max(own.held.values()).version
            known = own.held[rank].version
            following = min(known + 1, len(GROUPINGS) - 1)
            if rng.random() < 0.3 and (known < newest or rng.random() < 0.5):  # noqa: B023
                own.regroup(rank, GROUPINGS[following])

        run_at_random(cluster, seed, steps=20, check=hear)
        assert max(cluster.held.values()).version >= 2
        for rank in cluster.ranks:
            cluster.regroup(rank, max(cluster.held.values()))
        run_at_random(cluster, seed, steps=24)


def test_hop_averages_by_the_newest_grouping() -> None:
    job_spec = weights_spec("hop", backupWorkers=0, staleness=0, skipBehind=0)
    cluster = GroupedCluster(clustered(job_spec), [4] * 6, rate=0.1)
    rng = np.random.default_rng(1)
    expected = cluster.weights().astype(np.float64)
    for grouping in (GROUPINGS[0], GROUPINGS[2], GROUPINGS[4]):
        for rank in cluster.ranks:
            cluster.regroup(rank, grouping)
        w = mixing_matrix(graph_of_groups(grouping))
        np.testing.assert_allclose(w.sum(axis=0), 1.0)
        expected = averaged(cluster, expected, w, rng)
        # A new link counts from its second step: the first round may lack it, so the reference is
        # reset there.
        if grouping is GROUPINGS[0]:
            np.testing.assert_allclose(cluster.weights(), expected, rtol=2e-5, atol=2e-5)
        expected = averaged(cluster, cluster.weights().astype(np.float64), w, rng)
        np.testing.assert_allclose(cluster.weights(), expected, rtol=2e-5, atol=2e-5)


def averaged(
    cluster: WeightsCluster, before: np.ndarray, w: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Four rounds of the cluster, and the weights of the reference."""
    gradients = rng.standard_normal((4, 6, 7)).astype(np.float32)
    lockstep(cluster, gradients)
    for of_step in gradients:
        before = w @ (before - 0.1 * of_step)
    return before
