"""Policy `hop` against naive references, under random schedules.

Without backup workers and staleness it is synchronous averaging of weights. The average is that of
the newest weights within the staleness, weighted by their age. The gap never exceeds its bound. No
worker blocks, also if members leave or links are replaced. Only as many workers are skipped as
there are backup workers. A slow worker skips iterations. A restored worker continues identically.
Invalid messages are refused.

Left out: learning on real data (the report of the simulator).
"""

from __future__ import annotations

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
    ReplaceWeights,
)
from example_counts import examples
from policy_cluster import linear_gradient
from weights_cluster import (
    WeightsCluster,
    check_a_restored_worker_continues_identically,
    run_at_random,
    weights_spec,
)

sizes_of = st.lists(st.integers(1, 6), min_size=1, max_size=4)
seeds = st.integers(0, 2**32)
LAYOUT = Layout(("w",), (4,))
SYNCHRONOUS: dict[str, object] = {"backupWorkers": 0, "staleness": 0}


def cluster_of(sizes: list[int], seed: int = 0, **values: object) -> WeightsCluster:
    return WeightsCluster(weights_spec("hop", **values), sizes, seed=seed % 1000)


@given(sizes=sizes_of, seed=seeds, gap=st.integers(1, 4))
@settings(max_examples=examples(30), deadline=None)
def test_without_backup_and_staleness_it_is_synchronous_averaging(
    sizes: list[int], seed: int, gap: int
) -> None:
    cluster, naive = (cluster_of(sizes, seed, **SYNCHRONOUS, maxGap=gap) for _ in range(2))
    weights = naive.weights()
    run_at_random(cluster, seed, steps=8)
    for _ in range(8):
        for row, rank in enumerate(naive.ranks):
            gradient_D, _ = linear_gradient(weights[row], *naive.batch(rank))
            weights[row] -= naive.rate * gradient_D
        weights[:] = weights.mean(axis=0)
    np.testing.assert_allclose(cluster.weights(), weights, rtol=1e-4, atol=1e-5)
    assert (cluster.weights() == cluster.weights()[0]).all()


@given(
    sizes=sizes_of,
    seed=seeds,
    gap=st.integers(1, 6),
    backup=st.integers(0, 2),
    staleness=st.integers(0, 3),
    skip=st.integers(0, 3),
)
@settings(max_examples=examples(80), deadline=None)
def test_the_gap_keeps_its_bound_and_no_worker_blocks(
    sizes: list[int], seed: int, gap: int, backup: int, staleness: int, skip: int
) -> None:
    def check(cluster: WeightsCluster, rank: Rank) -> None:
        following = cluster.replicas[rank].machine.next_iteration()
        others = [one.iteration for one in cluster.replicas.values() if one.rank != rank]
        assert not others or following - min(others) <= gap

    backup = min(backup, max(1, len(sizes) - 2))  # more are refused
    cluster = cluster_of(
        sizes, seed, maxGap=gap, backupWorkers=backup, staleness=staleness, skipBehind=skip
    )
    run_at_random(cluster, seed, steps=12, check=check)


@given(seed=seeds, backup=st.integers(0, 1), staleness=st.integers(0, 2))
@settings(max_examples=examples(40), deadline=None)
def test_no_worker_blocks_when_a_member_leaves_or_links_are_replaced(
    seed: int, backup: int, staleness: int
) -> None:
    cluster = cluster_of([2, 3, 4], seed, backupWorkers=backup, staleness=staleness)
    rng = np.random.default_rng(seed)
    run_at_random(cluster, seed, steps=3)
    for _ in range(int(rng.integers(6))):
        rank = cluster.ranks[int(rng.integers(3))]
        if cluster.may_step(rank):
            cluster.step(rank)
    for rank, peer in ((Rank(0), Rank(1)), (Rank(1), Rank(0))):
        cluster.links[rank, peer].clear()
        cluster.handle(rank, MemberLeft(peer))
    for rank, peer in ((Rank(0), Rank(1)), (Rank(1), Rank(0))):
        cluster.handle(rank, MemberJoined(peer, cluster.replicas[peer].iteration))
    run_at_random(cluster, seed, steps=12)
    cluster.leave(Rank(2))
    run_at_random(cluster, seed, steps=16, alive=[Rank(0), Rank(1)])


def alone(gone: int = 0, **values: object) -> WeightsCluster:
    """One worker of four for hand-made messages, with weights of zero and a rate of one.

    `gone` others have left it. With as many backup workers as there are others it waits for none.
    """
    job = weights_spec("hop", **values)
    cluster = WeightsCluster(job, [2] * (4 + gone), layout=LAYOUT, rate=1.0)
    for peer in range(4, 4 + gone):
        cluster.handle(Rank(0), MemberLeft(Rank(peer)))
    cluster.replicas[Rank(0)].weights_D[:] = 0
    return cluster


def hear(cluster: WeightsCluster, sender: int, iteration: int, value: float | None = None) -> None:
    """Deliver a peer's token, and its weights if there is a value for them."""
    kinds = [Message(MessageKind.PROGRESS, iteration, 2)]
    if value is not None:
        payload = encode_weights(np.full(4, value, np.float32), "float32")
        kinds.append(Message(MessageKind.WEIGHTS, iteration, 2, payload=payload))
    for message in kinds:
        cluster.handle(Rank(0), MessageArrived(Rank(sender), message))


def value(cluster: WeightsCluster) -> float:
    return float(cluster.replicas[Rank(0)].weights_D[0])


def zero_step(cluster: WeightsCluster) -> None:
    cluster.step(Rank(0), np.zeros(4, np.float32))


def replaced(cluster: WeightsCluster) -> int:
    return sum(isinstance(one, ReplaceWeights) for one in cluster.replicas[Rank(0)].instructions)


@given(
    heard=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 6), st.sampled_from([0.0, 1.0, -2.0, 8.0])),
        max_size=12,
        unique_by=lambda one: one[:2],
    ),
    staleness=st.integers(0, 4),
)
@settings(max_examples=examples(80), deadline=None)
def test_the_average_is_of_the_newest_weights_within_the_staleness_by_age(
    heard: list[tuple[int, int, float]], staleness: int
) -> None:
    cluster = alone(gone=1, staleness=staleness, backupWorkers=3, skipBehind=0, maxGap=20)
    naive: dict[int, dict[int, float]] = {}
    for iteration in range(1, 6):
        for sender, at, sent in sorted(heard, key=lambda one: one[1]):
            if at in {iteration, 6 if iteration == 1 else -1} and at not in naive.get(sender, {}):
                if at < max(naive.get(sender, {0: 0.0})):
                    continue
                hear(cluster, sender, at, sent)
                naive.setdefault(sender, {})[at] = sent
        own = value(cluster)
        zero_step(cluster)
        parts = [(staleness + 1, own)]
        for queue in naive.values():
            within = [at for at in queue if iteration - staleness <= at <= iteration]
            if within:
                parts.append((max(within) - (iteration - staleness) + 1, queue[max(within)]))
        expected = sum(count * one for count, one in parts) / sum(count for count, _ in parts)
        assert value(cluster) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_only_as_many_workers_are_skipped_as_there_are_backup_workers() -> None:
    cluster = alone(backupWorkers=1, staleness=0)
    zero_step(cluster)
    hear(cluster, 1, 1, 3.0)
    assert cluster.replicas[Rank(0)].machine.waiting_for() == {2, 3}
    hear(cluster, 2, 1, 6.0)
    assert value(cluster) == pytest.approx(3.0)
    hear(cluster, 3, 1, 1000.0)  # too late for its iteration
    assert value(cluster) == pytest.approx(3.0)


def test_early_weights_wait_for_their_iteration() -> None:
    cluster = alone(**SYNCHRONOUS)
    for sender in (1, 2, 3):
        hear(cluster, sender, 1, 1.0)
    hear(cluster, 1, 2, 9.0)
    zero_step(cluster)
    assert value(cluster) == pytest.approx(0.75)


def test_a_slow_worker_skips_iterations_and_takes_the_weights_of_the_next_one() -> None:
    cluster = alone(staleness=0, backupWorkers=0, skipBehind=2, maxGap=9)
    for sender in (1, 2, 3):
        for iteration in range(1, 4 + sender):
            hear(cluster, sender, iteration, 10.0 * iteration)
    zero_step(cluster)
    assert value(cluster) == pytest.approx(40.0)  # all at 4, which the slowest has finished
    assert cluster.replicas[Rank(0)].machine.next_iteration() == 5


def test_a_token_delays_a_worker_at_the_bound() -> None:
    cluster = alone(gone=1, backupWorkers=3, maxGap=2)
    zero_step(cluster)
    zero_step(cluster)
    machine = cluster.replicas[Rank(0)].machine
    assert machine.waiting_for() == {1, 2, 3}
    for sender in (1, 2, 3):
        hear(cluster, sender, 1)
    assert not machine.waiting_for()


@given(seed=seeds, backup=st.integers(0, 1), staleness=st.integers(0, 3))
@settings(max_examples=examples(20), deadline=None)
def test_a_restored_worker_continues_identically(seed: int, backup: int, staleness: int) -> None:
    cluster = cluster_of([3, 5, 2], seed, backupWorkers=backup, staleness=staleness)
    run_at_random(cluster, seed, steps=5)
    check_a_restored_worker_continues_identically(cluster, Rank(1), seed, steps=12)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message(MessageKind.WEIGHTS, 1, 2, payload=b"nonsense"), "8 bytes"),
        (
            Message(
                MessageKind.WEIGHTS,
                1,
                payload=bytes(encode_weights(np.ones(5, np.float32), "float32")),
            ),
            "model of 5",
        ),
        (Message(MessageKind.GRADIENT, 1, 2, payload=b""), "GRADIENT under policy hop"),
        (Message(MessageKind.PROGRESS, 0, 2), "iteration 0"),
        (Message(MessageKind.PROGRESS, 1, -1), "batch of -1"),
    ],
)
def test_an_invalid_message_is_refused_and_its_weights_are_not_waited_for(
    message: Message, reason: str
) -> None:
    cluster = alone(**SYNCHRONOUS)
    zero_step(cluster)
    hear(cluster, 2, 1, 1.0)
    hear(cluster, 3, 1, 2.0)
    machine = cluster.replicas[Rank(0)].machine
    refusal, *rest = machine.handle(MessageArrived(Rank(1), message))
    assert isinstance(refusal, RejectMessage)
    assert reason in refusal.reason
    if message.kind is MessageKind.WEIGHTS:
        (average,) = rest
        np.testing.assert_allclose(average.weights_D, 1.0)
