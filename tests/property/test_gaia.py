"""Policy `gaia` against naive references, under random schedules.

At threshold 0 it is joint training by `full`, momentum included. Sent and kept entries follow the
paper's rule and sum up to the updates. No worker begins a step before the significant entries
announced to it, nor beyond the clock bound. None blocks, also if a member leaves. A restored worker
continues identically. Invalid messages are refused.

Left out: learning on real data (the report of the simulator).
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_core.codecs import ValueCodec, decode_gradient, encode_whole
from dlion_core.policies.interface import (
    Layout,
    MemberJoined,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    SendMessage,
)
from dlion_core.policies.weights.gaia import is_significant
from example_counts import examples
from policy_cluster import linear_gradient
from weights_cluster import (
    MOMENTUM,
    WeightsCluster,
    check_a_restored_worker_continues_identically,
    run_at_random,
    weights_spec,
)

sizes_of = st.lists(st.integers(1, 6), min_size=1, max_size=4)
seeds = st.integers(0, 2**32)
entries = st.sampled_from([0.0, 0.5, -0.5, 1.0, -2.0, 1e-3])


def cluster_of(
    sizes: list[int], seed: int = 0, *, momentum: bool = False, **values: object
) -> WeightsCluster:
    job = weights_spec("gaia", initial=sum(sizes), **values)
    return WeightsCluster(job, sizes, seed=seed % 1000, momentum=momentum)


def sent_by(cluster: WeightsCluster, rank: Rank, to: Rank) -> list[tuple[int, np.ndarray]]:
    """Iteration and entries of each `WEIGHTS` message from one worker to another."""
    return [
        (
            one.message.iteration,
            decode_gradient(one.message.payload, cluster.layout.size).weighted(np.float32(1)),
        )
        for one in cluster.replicas[rank].instructions
        if isinstance(one, SendMessage)
        and one.peer == to
        and one.message.kind is MessageKind.WEIGHTS
    ]


@given(sizes=sizes_of, seed=seeds, momentum=st.booleans())
@settings(max_examples=examples(30), deadline=None)
def test_at_threshold_0_it_equals_training_on_the_joint_batch(
    sizes: list[int], seed: int, momentum: bool
) -> None:
    cluster, joint = (
        cluster_of(sizes, seed, momentum=momentum, threshold=0, clockBound=0) for _ in range(2)
    )
    weights_D = joint.weights()[0].copy()
    velocity_D = np.zeros_like(weights_D)
    run_at_random(cluster, seed, steps=12)
    for _ in range(12):
        batches = [joint.batch(rank) for rank in joint.ranks]
        x_BD, y_B = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        gradient_D, _ = linear_gradient(weights_D, x_BD, y_B)
        velocity_D = (MOMENTUM if momentum else 0) * velocity_D - cluster.rate * gradient_D
        weights_D += velocity_D
    for row_D in cluster.weights():
        assert np.linalg.norm(row_D - weights_D) <= 1e-4 * np.linalg.norm(weights_D)


@given(
    start=st.lists(entries, min_size=20, max_size=20),
    gradients=st.lists(st.lists(entries, min_size=20, max_size=20), min_size=1, max_size=6),
    threshold=st.sampled_from([0.0, 0.01, 0.1, 0.5]),
    decay=st.sampled_from(["inv_sqrt", "none", "lr"]),
    codec=st.sampled_from(["float32", "float16"]),
)
@settings(max_examples=examples(60), deadline=None)
def test_sent_and_kept_entries_follow_the_rule_and_sum_up_to_the_updates(
    start: list[float],
    gradients: list[list[float]],
    threshold: float,
    decay: str,
    codec: str,
) -> None:
    job = weights_spec("gaia", initial=4, codec=codec, threshold=threshold, decay=decay)
    cluster = WeightsCluster(job, [2, 2])
    me, peer = cluster.ranks
    cluster.replicas[me].weights_D[:] = start
    kept_D = np.zeros(20, np.float32)
    for step, gradient in enumerate(gradients, start=1):
        cluster.step(me, np.array(gradient, np.float32))
        kept_D = kept_D + cluster.updates[me][-1]
        bound = threshold / np.sqrt(step) if decay == "inv_sqrt" else threshold
        weights_D = cluster.replicas[me].weights_D.astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio_D = np.abs(kept_D.astype(np.float64) / weights_D)
        expected_D = np.where((ratio_D > bound) | (weights_D == 0), kept_D, np.float32(0))
        got_D = np.zeros(20, np.float32)
        for iteration, entries_D in sent_by(cluster, me, peer):
            if iteration == step:
                got_D = entries_D
        np.testing.assert_allclose(got_D, expected_D, rtol=1e-3 if codec == "float16" else 0)
        kept_D = kept_D - got_D
        state = cluster.replicas[me].machine.state()
        np.testing.assert_array_equal(state["gaia_accumulated_D"], kept_D)
    whole_D = sum(cluster.updates[me]).astype(np.float64)
    sent_D = sum((one_D for _, one_D in sent_by(cluster, me, peer)), np.zeros(20))
    np.testing.assert_allclose(sent_D + kept_D, whole_D, atol=1e-6)


def test_the_threshold_follows_a_learning_rate_that_follows_the_batch() -> None:
    job = weights_spec("gaia", initial=8, threshold=0.1, decay="lr")
    optimizer = replace(job.trainer.optimizer, learning_rate_scaling="sqrt")
    size = replace(job.batching.global_batch_size, growth=True)
    batching = replace(job.batching, policy="goodput", global_batch_size=size)
    job = replace(job, batching=batching, trainer=replace(job.trainer, optimizer=optimizer))
    cluster = WeightsCluster(job, [16, 16])
    cluster.lockstep(2)
    machine = cluster.replicas[Rank(0)].machine
    assert machine.machine.threshold() == pytest.approx(0.2)  # four times the batch, twice the rate


@pytest.mark.parametrize("joins_again", [False, True])
def test_a_worker_that_takes_over_weights_drops_pending_entries_and_keeps_lowering_the_threshold(
    joins_again: bool,
) -> None:
    job = weights_spec("gaia", initial=4, threshold=10.0, decay="inv_sqrt")
    cluster = WeightsCluster(job, [2, 2])
    cluster.lockstep(4)
    machine = cluster.replicas[Rank(0)].machine
    assert np.any(machine.state()["gaia_accumulated_D"])
    if joins_again:
        machine = machine.restarted()
        assert machine.next_iteration() == 1
    machine.take_over(9)
    assert not np.any(machine.state()["gaia_accumulated_D"])
    assert machine.next_iteration() == 10
    assert machine.machine.threshold() == pytest.approx(5.0)


@given(
    seed=seeds,
    threshold=st.sampled_from([0.0, 0.05, 0.5]),
    stay=st.sampled_from([1, 2]),
    linked=st.integers(0, 3),
)
@settings(max_examples=examples(40), deadline=None)
def test_a_worker_that_takes_over_weights_gets_the_donors_unsent_entries_once(
    seed: int, threshold: float, stay: int, linked: int
) -> None:
    """Also those that others sent it while it was linked and had no weights yet."""
    job = weights_spec("gaia", initial=6, threshold=threshold)
    cluster = WeightsCluster(job, [2] * (stay + 1), seed=seed % 1000)
    donor, joining = Rank(0), Rank(stay)
    cluster.leave(joining)
    for at in range(8):
        if at == 8 - linked:
            for rank in cluster.ranks[:stay]:
                cluster.handle(rank, MemberJoined(joining))
        for rank in cluster.ranks[:stay]:
            cluster.step(rank)
        while any(cluster.deliver(*link) for link in cluster.links if joining not in link):
            pass
    new_worker, given = cluster.replicas[joining], cluster.replicas[donor]
    new_worker.machine = cluster.built(new_worker)
    new_worker.weights_D[:] = given.weights_D - cluster.withheld[donor]
    new_worker.iteration = given.iteration
    new_worker.machine.take_over(given.iteration)
    for rank in cluster.ranks[:stay]:
        if not linked:
            cluster.handle(rank, MemberJoined(joining, new_worker.iteration))
        kept = [m for m in cluster.links[rank, joining] if m.kind is not MessageKind.PROGRESS]
        cluster.links[rank, joining] = deque(kept)  # as the inbox does with early steps
        cluster.handle(joining, MemberJoined(rank, cluster.replicas[rank].iteration))
    zero_D = np.zeros(cluster.layout.size, np.float32)
    for one in cluster.replicas.values():  # everything that is kept becomes significant
        one.machine.machine._parameters = replace(one.machine.machine._parameters, threshold=0.0)
    for _ in range(3):
        for rank in cluster.ranks:
            cluster.step(rank, zero_D)
        cluster.deliver_all()
    for row_D in cluster.weights():
        np.testing.assert_allclose(row_D, cluster.weights()[0], atol=1e-5)


def test_a_worker_with_its_own_checkpoint_misses_nothing_of_a_slower_one() -> None:
    cluster = WeightsCluster(weights_spec("gaia", initial=4, threshold=0.0), [2, 2])
    ahead, behind = cluster.ranks
    cluster.lockstep(4)
    for _ in range(2):
        cluster.step(ahead)
        cluster.deliver_all()
    for rank in cluster.ranks:
        replica = cluster.replicas[rank]
        state = replica.machine.state()
        replica.machine = cluster.built(replica)
        replica.machine.restore(state)
    for rank, peer in (
        (ahead, behind),
        (behind, ahead),
    ):  # as the inbox reports it: the own iteration
        cluster.handle(rank, MemberJoined(peer, cluster.replicas[rank].iteration))
    for _ in range(2):
        cluster.step(behind)
        cluster.deliver_all()
    np.testing.assert_allclose(*cluster.weights(), atol=1e-6)


def test_a_zero_weight_makes_any_update_significant_and_a_tie_with_the_threshold_does_not() -> None:
    weights_D = np.array([0, 2, 2, -2], np.float32)
    accumulated_D = np.array([1e-30, 1, 1.5, -1.5], np.float32)
    np.testing.assert_array_equal(
        is_significant(accumulated_D, weights_D, 0.5), [True, False, True, True]
    )


@given(sizes=sizes_of, seed=seeds, bound=st.integers(0, 4), threshold=st.sampled_from([0, 0.05]))
@settings(max_examples=examples(40), deadline=None)
def test_no_step_begins_beyond_the_clock_bound_or_before_announced_entries(
    sizes: list[int], seed: int, bound: int, threshold: float
) -> None:
    def check(cluster: WeightsCluster, rank: Rank) -> None:
        last = cluster.replicas[rank].iteration
        assert min(replica.iteration for replica in cluster.replicas.values()) >= last - bound
        for source in cluster.ranks:
            heard = cluster.replicas[rank].machine.machine.synchronizer
            if source != rank:
                in_transit = [
                    message.iteration
                    for message in cluster.links[source, rank]
                    if message.kind is MessageKind.WEIGHTS
                ]
                announced = [
                    message.iteration
                    for message in cluster.links[source, rank]
                    if message.kind is MessageKind.PROGRESS
                ]
                unreceived = min(announced, default=heard.finished(source) + 1)
                assert all(iteration >= unreceived for iteration in in_transit)

    cluster = cluster_of(sizes, seed, threshold=threshold, clockBound=bound)
    run_at_random(cluster, seed, steps=10, check=check)


@given(seed=seeds, bound=st.integers(0, 3))
@settings(max_examples=examples(30), deadline=None)
def test_a_departing_worker_blocks_no_other(seed: int, bound: int) -> None:
    cluster = cluster_of([2, 3, 4], seed, clockBound=bound)
    run_at_random(cluster, seed, steps=4)
    cluster.step(Rank(2)) if cluster.may_step(Rank(2)) else None
    cluster.step(Rank(0)) if cluster.may_step(Rank(0)) else None
    cluster.leave(Rank(2))
    run_at_random(cluster, seed, steps=10, alive=[Rank(0), Rank(1)])


@pytest.mark.parametrize("bound", [0, 2])
@given(seed=seeds)
@settings(max_examples=examples(10), deadline=None)
def test_a_restored_worker_continues_identically(bound: int, seed: int) -> None:
    cluster = cluster_of([3, 5], seed, threshold=0.05, decay="inv_sqrt", clockBound=bound)
    me, peer = cluster.ranks
    run_at_random(cluster, seed, steps=5)
    if bound == 0:  # an early message
        early = encode_whole(np.full(20, 0.25, np.float32), ValueCodec.FLOAT32)
        cluster.handle(me, MessageArrived(peer, Message(MessageKind.WEIGHTS, 6, 5, payload=early)))
    check_a_restored_worker_continues_identically(cluster, me, seed, steps=10)


LAYOUT = Layout(("w",), (4,))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message(MessageKind.WEIGHTS, 1, 2, payload=b"nonsense"), "8 bytes"),
        (Message(MessageKind.WEIGHTS, 0, 2, payload=b""), "iteration 0"),
        (Message(MessageKind.GRADIENT, 1, 2, payload=b""), "GRADIENT under policy gaia"),
        (Message(MessageKind.PROGRESS, 1, 10**9), "batch of 1000000000"),
        (Message(MessageKind.PROGRESS, 1, 2, payload=b"x"), "PROGRESS with a payload"),
    ],
)
def test_an_invalid_message_is_refused_and_not_waited_for(message: Message, reason: str) -> None:
    cluster = WeightsCluster(weights_spec("gaia"), [2, 2], layout=LAYOUT)
    machine = cluster.replicas[Rank(0)].machine
    machine.handle(MessageArrived(Rank(1), Message(MessageKind.PROGRESS, 1, 2, 1)))
    assert machine.waiting_for() == {1}
    (refusal,) = machine.handle(MessageArrived(Rank(1), message))
    assert isinstance(refusal, RejectMessage)
    assert reason in refusal.reason
    assert not (machine.waiting_for() and message.kind is MessageKind.WEIGHTS and message.iteration)


def test_an_update_that_is_not_finite_is_never_sent() -> None:
    cluster = WeightsCluster(weights_spec("gaia"), [2, 2], layout=LAYOUT)
    with pytest.raises(ValueError, match="NaN or infinite"):
        cluster.step(Rank(0), np.full(4, np.inf, np.float32))


def test_unknown_workers_are_refused_and_duplicate_entries_are_added_once() -> None:
    cluster = WeightsCluster(weights_spec("gaia"), [2, 2], layout=LAYOUT)
    machine = cluster.replicas[Rank(0)].machine
    payload = encode_whole(np.ones(4, np.float32), ValueCodec.FLOAT32)
    message = Message(MessageKind.WEIGHTS, 1, 2, payload=payload)
    (refusal,) = machine.handle(MessageArrived(Rank(7), message))
    assert isinstance(refusal, RejectMessage)
    assert len(machine.handle(MessageArrived(Rank(1), message))) == 1
    assert machine.handle(MessageArrived(Rank(1), message)) == []
