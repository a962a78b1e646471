"""Policy `adpsgd`: pairs, their means, and random schedules of them.

An exchange leaves both with the same mean, and the sum of all weights unchanged, for any codec. The
own gradient is applied after it. None of 10,000 random schedules deadlocks, nor do schedules in
which members leave or links are replaced. The graph is bipartite. A restored worker continues
identically. Invalid messages are refused.

Left out: learning on real data (the report of the simulator).
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_core.codecs import encode_weights
from dlion_core.policies.interface import (
    Layout,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
)
from dlion_core.policies.weights.adpsgd import pairing_candidates
from example_counts import examples
from weights_cluster import (
    WeightsCluster,
    check_a_restored_worker_continues_identically,
    run_at_random,
    weights_spec,
)

seeds = st.integers(0, 2**32)
graphs = st.sampled_from(["complete", "ring"])
workers_of = st.integers(1, 6)


def cluster_of(
    workers: int, seed: int = 0, *, codec: str = "float32", **values: object
) -> WeightsCluster:
    job = weights_spec("adpsgd", codec=codec, **values)
    cluster = WeightsCluster(job, [2] * workers, seed=seed % 1000)
    for rank in cluster.ranks:  # replicas that differ
        rng = np.random.default_rng((seed, rank))
        cluster.replicas[rank].weights_D[:] = rng.standard_normal(cluster.layout.size)
    return cluster


def is_open(cluster: WeightsCluster, rank: Rank) -> bool:
    """Whether that worker's gradients wait for an answer."""
    return "adpsgd_gradient_D" in cluster.replicas[rank].machine.state()


@given(workers=workers_of, graph=graphs)
def test_no_worker_has_a_neighbour_on_its_own_side(workers: int, graph: str) -> None:
    ranks = [Rank(3 * place + 1) for place in range(workers)]
    for place, rank in enumerate(ranks):
        for peer in pairing_candidates(ranks, rank, graph):
            assert (ranks.index(peer) - place) % 2
            assert rank in pairing_candidates(ranks, peer, graph)
        if workers > 1:
            assert pairing_candidates(ranks, rank, graph)


@given(seed=seeds, codec=st.sampled_from(["float32", "float16"]))
@settings(max_examples=examples(30), deadline=None)
def test_an_exchange_leaves_both_with_the_mean_and_then_the_own_gradient_is_applied(
    seed: int, codec: str
) -> None:
    cluster = cluster_of(2, seed, codec=codec)
    active = cluster.ranks[0]
    before = cluster.weights().astype(np.float64)
    gradient_D = np.random.default_rng(seed).standard_normal(20).astype(np.float32)
    cluster.step(active, gradient_D)
    assert cluster.replicas[active].machine.waiting_for() == frozenset()
    np.testing.assert_array_equal(cluster.weights(), before.astype(np.float32))
    cluster.deliver_all()
    mean_D = before.mean(axis=0)
    after = cluster.weights()
    tolerance = 1e-6 if codec == "float32" else 5e-3
    np.testing.assert_allclose(after[1], mean_D, atol=tolerance)
    np.testing.assert_allclose(after[0], mean_D - cluster.rate * gradient_D, atol=tolerance)
    if codec == "float32":
        own = cluster.replicas[active]
        assert (own.instructions[-2].weights_D == after[1]).all()  # type: ignore[union-attr]


@given(seed=seeds, workers=workers_of, graph=graphs, codec=st.sampled_from(["float32", "float16"]))
@settings(max_examples=examples(40), deadline=None)
def test_only_updates_change_the_sum_of_all_weights(
    seed: int, workers: int, graph: str, codec: str
) -> None:
    cluster = cluster_of(workers, seed, graph=graph, codec=codec)
    before_D = cluster.weights().astype(np.float64).sum(axis=0)
    run_at_random(cluster, seed, steps=8)
    updates_D = sum(
        (one_D.astype(np.float64) for updates in cluster.updates.values() for one_D in updates),
        np.zeros(cluster.layout.size),
    )
    after_D = cluster.weights().astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(after_D, before_D + updates_D, atol=2e-5)


@pytest.mark.timeout(300)
def test_no_deadlock_in_random_schedules() -> None:
    """10,000 schedules at the full number of examples: one or two steps a worker, in random
    order."""
    count = examples(1250)
    done = 0
    graphs = ((2, "complete"), (3, "ring"), (4, "complete"), (5, "ring"))
    for (workers, graph), overlap in itertools.product(graphs, (False, True)):
        job = weights_spec("adpsgd", graph=graph, overlap=overlap)
        cluster = WeightsCluster(job, [2] * workers, layout=Layout(("w",), (1,)))
        zero_D = np.zeros(1, np.float32)
        for seed in range(count):
            rng = np.random.default_rng((workers, overlap, seed))
            left = dict.fromkeys(cluster.ranks, int(rng.integers(1, 3)))
            while True:
                ready = [rank for rank, count in left.items() if count and cluster.may_step(rank)]
                links = [link for link, queue in cluster.links.items() if queue]
                if not ready and not links:
                    break
                choice = int(rng.integers(len(ready) + len(links)))
                if choice < len(ready):
                    left[ready[choice]] -= 1
                    cluster.step(ready[choice], zero_D)
                else:
                    cluster.deliver(*links[choice - len(ready)])
            assert not any(left.values()), f"deadlock in schedule {seed}"
            for rank in cluster.ranks:  # every exchange is complete
                assert not is_open(cluster, rank), f"no answer in schedule {seed}"
            for replica in cluster.replicas.values():
                replica.instructions.clear()
            done += 1
    assert done == 8 * count


@given(seed=seeds, graph=graphs, overlap=st.booleans())
@settings(max_examples=examples(40), deadline=None)
def test_no_worker_blocks_when_members_leave_or_links_are_replaced(
    seed: int, graph: str, overlap: bool
) -> None:
    cluster = cluster_of(4, seed, graph=graph, overlap=overlap)
    rng = np.random.default_rng(seed)
    run_at_random(cluster, seed, steps=2)
    for _ in range(int(rng.integers(8))):
        rank = cluster.ranks[int(rng.integers(4))]
        if cluster.may_step(rank):
            cluster.step(rank)
    pair = (Rank(0), Rank(1))
    for rank, peer in (pair, pair[::-1]):
        cluster.links[rank, peer].clear()
        cluster.handle(rank, MemberLeft(peer))
    for rank, peer in (pair, pair[::-1]):
        cluster.handle(rank, MemberJoined(peer, cluster.replicas[peer].iteration))
    run_at_random(cluster, seed, steps=14)
    cluster.leave(Rank(1))
    cluster.leave(Rank(3))
    run_at_random(cluster, seed, steps=18, alive=[Rank(0), Rank(2)])  # no worker left to ask


def test_a_request_from_before_its_sender_is_a_member_is_answered_later() -> None:
    cluster = cluster_of(2)
    active, passive = cluster.ranks
    cluster.handle(passive, MemberLeft(active))
    cluster.step(active, np.zeros(20, np.float32))
    cluster.deliver_all()
    assert is_open(cluster, active)
    cluster.handle(passive, MemberJoined(active))
    cluster.deliver_all()
    assert not is_open(cluster, active)
    assert (cluster.weights()[0] == cluster.weights()[1]).all()


def test_a_duplicate_request_is_answered_once() -> None:
    cluster = cluster_of(2)
    active, passive = cluster.ranks
    cluster.step(active, np.zeros(20, np.float32))
    request = next(m for m in cluster.links[active, passive] if m.kind is MessageKind.WEIGHTS)
    machine = cluster.replicas[passive].machine
    assert len(machine.handle(MessageArrived(active, request))) == 2
    assert machine.handle(MessageArrived(active, request)) == []


@given(seed=seeds, restored=st.integers(0, 2))
@settings(max_examples=examples(20), deadline=None)
def test_a_restored_worker_continues_identically(seed: int, restored: int) -> None:
    cluster = cluster_of(3, seed)
    run_at_random(cluster, seed, steps=4)
    check_a_restored_worker_continues_identically(cluster, Rank(restored), seed, steps=9)


def test_without_overlap_an_active_worker_waits_for_the_answer() -> None:
    cluster = cluster_of(2, overlap=False)
    cluster.step(Rank(0))
    assert cluster.replicas[Rank(0)].machine.waiting_for() == {1}
    cluster.deliver_all()
    assert cluster.may_step(Rank(0))
    cluster.step(Rank(1))
    assert cluster.may_step(Rank(1))  # a passive one never is
    cluster.step(Rank(0))
    cluster.handle(Rank(0), MemberLeft(Rank(1)))
    assert cluster.may_step(Rank(0))


def test_steps_made_while_waiting_for_an_answer_count_as_one() -> None:
    cluster = cluster_of(2)
    mean_D = cluster.weights().mean(axis=0)
    for value, batch in ((1.0, 2), (4.0, 4)):
        cluster.replicas[Rank(0)].local_batch_size = batch
        cluster.step(Rank(0), np.full(20, value, np.float32))
    asked = [one.kind for one in cluster.links[Rank(0), Rank(1)]]
    assert asked.count(MessageKind.WEIGHTS) == 1
    cluster.deliver_all()
    np.testing.assert_allclose(cluster.weights()[0], mean_D - cluster.rate * 3.0, atol=1e-6)


def test_gradients_that_wait_for_an_answer_are_applied_after_a_restart() -> None:
    cluster = cluster_of(2)
    cluster.step(Rank(0), np.full(20, 2.0, np.float32))
    replica = cluster.replicas[Rank(0)]
    again = cluster.built(replica)
    again.restore(replica.machine.state())
    assert again.next_iteration() == 2
    (descent,) = again.handle(MemberJoined(Rank(1), 1))
    np.testing.assert_array_equal(descent.gradient_D, 2.0)


def weights(iteration: int, size: int = 20) -> Message:
    payload = encode_weights(np.ones(size, np.float32), "float32")
    return Message(MessageKind.WEIGHTS, iteration, 2, payload=payload)


@pytest.mark.parametrize(
    ("receiver", "sender", "message", "reason"),
    [
        (1, 0, weights(1, 19), "model of 19"),
        (1, 3, weights(1), "not a neighbour"),
        (0, 2, weights(1), "not a neighbour"),
        (1, 9, weights(1), "message from worker 9"),
        (1, 0, Message(MessageKind.GRADIENT, 1, 2), "GRADIENT under policy adpsgd"),
        (1, 0, weights(0), "iteration 0"),
    ],
)
def test_an_invalid_message_is_refused_and_changes_nothing(
    receiver: int, sender: int, message: Message, reason: str
) -> None:
    machine = cluster_of(4).replicas[Rank(receiver)].machine
    (refusal,) = machine.handle(MessageArrived(Rank(sender), message))
    assert isinstance(refusal, RejectMessage)
    assert reason in refusal.reason


def test_a_worker_does_not_wait_after_an_invalid_answer() -> None:
    cluster = cluster_of(2)
    cluster.step(Rank(0), np.ones(20, np.float32))
    before_D = cluster.weights()[0].copy()
    machine = cluster.replicas[Rank(0)].machine
    refusal, descent = machine.handle(MessageArrived(Rank(1), weights(1, 19)))
    assert isinstance(refusal, RejectMessage)
    assert descent.gradient_D.sum() == 20  # type: ignore[union-attr]
    assert not is_open(cluster, Rank(0))
    np.testing.assert_array_equal(before_D, cluster.weights()[0])


def test_an_unexpected_answer_changes_nothing() -> None:
    machine = cluster_of(2).replicas[Rank(0)].machine
    assert machine.handle(MessageArrived(Rank(1), weights(1))) == []
