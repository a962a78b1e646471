"""Policies on graphs in which not all workers exchange with all: only neighbours are members.

Under random schedules no worker blocks, also if one leaves. A message from a worker that is not a
neighbour is refused. `hop` averages by the graph (naive mixing matrix). `d2` on a ring equals its
own ring, bit for bit. `eventgrad` averages with all neighbours. `adpsgd` keeps the mean of all
weights.

Left out: the graphs themselves (test_topology.py), links (tests/local/test_topologies.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import graph_policies
from dlion_api.names import Rank
from dlion_api.spec import Spec
from dlion_core.policies.factory import build
from dlion_core.policies.interface import (
    Event,
    Instruction,
    Layout,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
)
from dlion_core.topology.topology import graph_of
from graph_policies import lockstep, mixing_matrix
from weights_cluster import WeightsCluster, run_at_random, weights_spec

LAYOUT = Layout(("a",), (7,))
RANDOM = ("randomRegular", 3)
RING = ("ring", None)


class GraphCluster(WeightsCluster):
    """Only neighbours are linked."""

    def __init__(self, job_spec: Spec, sizes: Iterable[int], **options: Any) -> None:
        sizes = list(sizes)
        self.graph = graph_of(job_spec, [Rank(rank) for rank in range(len(sizes))])
        super().__init__(job_spec, sizes, layout=LAYOUT, **options)

    def handle(self, rank: Rank, event: Event) -> list[Instruction]:
        if isinstance(event, MemberJoined | MemberLeft) and event.rank not in self.graph[rank]:
            return []
        return super().handle(rank, event)


def on(graph: tuple[str, int | None], job_spec: Spec) -> Spec:
    exchange = replace(job_spec.exchange, topology=graph[0], degree=graph[1])
    return replace(job_spec, exchange=exchange)


KINDS: dict[str, Spec] = {
    **graph_policies.KINDS,
    "d2": weights_spec("d2"),
    "adpsgd": weights_spec("adpsgd", overlap=False),
}
SERVED = {"fedat", "halos", "quorum-diloco"}


@pytest.mark.parametrize("graph", [RING, RANDOM], ids=["ring", "random"])
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("leaves", [False, True])
def test_no_worker_blocks(kind: str, graph: tuple[str, int | None], leaves: bool) -> None:
    if kind == "adpsgd" and graph is RANDOM:
        graph = ("bipartite", 2)
    for seed in range(4):
        cluster = GraphCluster(on(graph, KINDS[kind]), [2, 8, 3, 4, 1, 6], seed=seed)
        run_at_random(cluster, seed, steps=3)
        alive = cluster.ranks
        if leaves:
            alive = [rank for rank in cluster.ranks if rank != 2]
            cluster.leave(Rank(2))
        run_at_random(cluster, seed, steps=7, alive=alive)


@pytest.mark.parametrize("graph", [RING, ("allToAll", None)], ids=["ring", "all"])
@pytest.mark.parametrize("kind", sorted({*KINDS, *SERVED, "none"}))
def test_the_learning_rate_follows_the_batch_of_all_workers(
    kind: str, graph: tuple[str, int | None]
) -> None:
    job_spec = KINDS[kind] if kind in KINDS else weights_spec(kind)
    growing = replace(job_spec.batching.global_batch_size, initial=30)
    job_spec = replace(job_spec, batching=replace(job_spec.batching, global_batch_size=growing))
    if kind in SERVED:
        graph = ("allToAll", None)
    cluster = GraphCluster(on(graph, job_spec), [5] * 6)
    run_at_random(cluster, 1, steps=4)
    for replica in cluster.replicas.values():
        batches = {one.global_batch_size or one.samples for one in replica.descents()}
        assert batches == {30}


@pytest.mark.parametrize("policy", ["full", "hop", "async"])
def test_a_message_from_a_worker_other_than_a_neighbour_is_refused(policy: str) -> None:
    job_spec = on(RING, weights_spec(policy))
    ranks = [Rank(rank) for rank in range(5)]
    replica: Any = type("View", (), {"weights_D": np.zeros(7, np.float32)})()
    machine = build(job_spec, Rank(0), LAYOUT, ranks, replica=replica)
    hello = Message(MessageKind.PROGRESS, 1, 4)
    (refusal,) = machine.handle(MessageArrived(Rank(2), hello))
    assert isinstance(refusal, RejectMessage)
    assert "allowed: [1, 4]" in refusal.reason
    assert not machine.handle(MessageArrived(Rank(1), hello))


@pytest.mark.parametrize("graph", [RING, RANDOM, ("bipartite", 2)])
def test_eventgrad_averages_with_all_neighbours(graph: tuple[str, int | None]) -> None:
    cluster = GraphCluster(on(graph, weights_spec("eventgrad", threshold=0, bound=0)), [4] * 8)
    before = cluster.weights().astype(np.float64)
    for rank in cluster.ranks:  # apart from each other
        before[rank] += int(rank)
        cluster.replicas[rank].weights_D[:] = before[rank]
    lockstep(cluster, np.zeros((1, 8, 7), np.float32))
    for rank in cluster.ranks:
        mean_D = before[sorted({rank, *cluster.graph[rank]})].mean(axis=0)
        np.testing.assert_allclose(cluster.weights()[rank], mean_D, atol=1e-5)


@pytest.mark.parametrize("graph", [RING, RANDOM, ("bipartite", None)])
def test_hop_averages_by_the_graph(graph: tuple[str, int | None]) -> None:
    count = 7 if graph[0] == "bipartite" else 8
    job_spec = on(graph, weights_spec("hop", backupWorkers=0, staleness=0, skipBehind=0))
    cluster = GraphCluster(job_spec, [4] * count, rate=0.1)
    w = mixing_matrix(cluster.graph)
    gradients = np.random.default_rng(1).standard_normal((6, count, 7)).astype(np.float32)
    expected = cluster.weights().astype(np.float64)
    for of_step in gradients:
        expected = w @ (expected - 0.1 * of_step)
    lockstep(cluster, gradients)
    np.testing.assert_allclose(cluster.weights(), expected, rtol=2e-5, atol=2e-5)


def test_d2_on_a_ring_is_its_own_ring() -> None:
    gradients = np.random.default_rng(2).standard_normal((9, 6, 7)).astype(np.float32)
    own = WeightsCluster(weights_spec("d2", mixing="ring"), [4] * 6, layout=LAYOUT)
    graph = GraphCluster(on(RING, weights_spec("d2")), [4] * 6)
    for cluster in (own, graph):
        lockstep(cluster, gradients)
    np.testing.assert_allclose(graph.weights(), own.weights(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("graph", [RING, ("bipartite", 2), ("bipartite", None)])
def test_pairs_on_a_graph_keep_the_mean_and_come_together(graph: tuple[str, int | None]) -> None:
    cluster = GraphCluster(on(graph, weights_spec("adpsgd", overlap=False)), [4] * 6, rate=0.0)
    rng = np.random.default_rng(3)
    for rank in cluster.ranks:
        cluster.replicas[rank].weights_D[:] = rng.standard_normal(7)
    before = cluster.weights()
    run_at_random(cluster, 4, steps=60)
    after = cluster.weights()
    np.testing.assert_allclose(after.mean(axis=0), before.mean(axis=0), atol=1e-5)
    assert np.ptp(after, axis=0).max() < 0.1 * np.ptp(before, axis=0).max()
