"""Two groups that trained apart merge at the mean of their weights by samples, under any schedule.

Against that formula: all replicas end at (m1 w1 + m2 w2) / (m1 + m2), for any message order, with
duplicate messages and with a second cut during the merge. A group that was paused takes the other's
weights. Two workers whose link was cut take those of one that heard both all the time, and that one
skips no iteration. No group's samples count twice, however often they merge.

A short gap changes nothing. Requests without an answer delay no worker. A new worker's weights are
kept. A restored worker knows which samples its weights contain. Invalid messages are refused. Sides
at different iterations continue at the same one.

Left out: that drift falls in a real job (tests/simulated/test_faults.py).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_api.protocol.refusals import PeerRefusal
from dlion_core.codecs import encode_weights
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.factory import build
from dlion_core.policies.interface import (
    Layout,
    LocalStepDone,
    MemberJoined,
    MemberLeft,
    MergeReplicas,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    SendMessage,
)
from dlion_core.policies.partitions.partition_merge import MAX_VECTORS_PER_STEP, PartitionMerge
from dlion_core.policies.partitions.pending_pulls import LOOSE_ANSWER_TIMEOUT_STEPS
from dlion_core.policies.partitions.version_vector import (
    MAX_WORKER_SAMPLES,
    SampleCounter,
    decode_version_vector,
    encode_version_vector,
    missing_samples,
)
from example_counts import examples
from policy_cluster import spec
from weights_cluster import WeightsCluster

if TYPE_CHECKING:
    from collections.abc import Collection

    from dlion_api.spec import Spec
    from dlion_core.policies.interface import PolicyMachine
    from policy_cluster import Replica

SLACK = {"asynchronous": None, "bounded": 3, "synchronous": 0}


def full(mode: str) -> Spec:
    exchange = {"policy": "full", "codec": "float32"}
    return spec(exchange=exchange, synchronization={"mode": mode, "maxStaleness": 3})


def folding(
    job_spec: Spec, replica: Replica, ranks: Collection[Rank], layout: Layout, least: int
) -> PolicyMachine:
    mode = job_spec.synchronization.mode
    return PartitionMerge(
        build(job_spec, replica.rank, layout, ranks),
        PolicyContext(job_spec, replica.rank, tuple(ranks), layout),
        replica,
        min_samples=least,
        slack=SLACK[mode],
    )


class SplitCluster(WeightsCluster):
    """Workers with zero gradients; the test sets the trained weights of groups."""

    def __init__(
        self, sizes: list[int], seed: int, *, min_samples: int = 1, mode: str = "asynchronous"
    ) -> None:
        self.min_samples = min_samples
        self.rng = np.random.default_rng(seed)
        super().__init__(full(mode), sizes, seed=seed % 1000, rate=0)

    def built(self, replica: Replica) -> PolicyMachine:
        return folding(self.job_spec, replica, self.ranks, self.layout, self.min_samples)

    def across(self, group: Collection[Rank]) -> list[tuple[Rank, Rank]]:
        return [link for link in self.links if (link[0] in group) != (link[1] in group)]

    def cut(self, group: Collection[Rank]) -> None:
        """Cut the links between that group and the others; messages in transit are lost."""
        for source, target in self.across(group):
            self.links[source, target].clear()
            self.handle(target, MemberLeft(source))

    def heal(self, group: Collection[Rank]) -> None:
        for source, target in self.across(group):
            self.handle(target, MemberJoined(source, self.replicas[source].iteration))

    def train(self, group: Collection[Rank], steps: int) -> int:
        """Make steps in each worker of the group, which ends at its own weights; return its
        samples."""
        for _ in range(steps):
            for rank in group:
                self.step(rank)
            self.deliver_all()
        trained_D = self.rng.standard_normal(self.layout.size).astype(np.float32)
        for rank in group if steps else ():
            self.replicas[rank].weights_D[:] = trained_D
        return steps * sum(self.replicas[rank].local_batch_size for rank in group)

    def deliver_at_random(self, most: int | None = None) -> None:
        """Deliver messages until none is in transit, or at most that number; some come twice."""
        while most is None or most > 0:
            links = [link for link, queue in self.links.items() if queue]
            if not links:
                return
            link = links[self.rng.integers(len(links))]
            if self.rng.random() < 0.3:
                self.links[link].append(self.links[link][0])
            self.deliver(*link)
            most = None if most is None else most - 1

    def round_at_random(self) -> None:
        """A step of each worker that may step, in any order, with some messages in between."""
        for rank in self.rng.permutation(self.ranks):
            if self.may_step(rank):
                self.step(rank)
            self.deliver_at_random(int(self.rng.integers(6)))
        self.deliver_at_random()

    def folds(self) -> int:
        return sum(
            isinstance(one, MergeReplicas) for r in self.replicas.values() for one in r.instructions
        )


sizes_of = st.lists(st.integers(1, 6), min_size=2, max_size=5)


def mean_by_samples(w1_D: np.ndarray, m1: int, w2_D: np.ndarray, m2: int) -> np.ndarray:
    """The definition."""
    return (m1 * w1_D.astype(np.float64) + m2 * w2_D.astype(np.float64)) / (m1 + m2)


def two_groups(
    sizes: list[int], seed: int, steps: tuple[int, int]
) -> tuple[SplitCluster, list[Rank], np.ndarray]:
    """A cluster whose groups have trained apart, one group, and the expected merged weights."""
    cluster = SplitCluster(sizes, seed)
    cluster.lockstep(2)
    middle = 1 + seed % (len(sizes) - 1)
    one, other = cluster.ranks[:middle], cluster.ranks[middle:]
    cluster.cut(one)
    m1, m2 = cluster.train(one, steps[0]), cluster.train(other, steps[1])
    w1_D = cluster.replicas[one[0]].weights_D.copy()
    w2_D = cluster.replicas[other[0]].weights_D.copy()
    meeting_D = mean_by_samples(w1_D, m1, w2_D, m2) if m1 + m2 else w1_D
    return cluster, one, meeting_D


@given(
    sizes=sizes_of,
    seed=st.integers(0, 2**32),
    steps=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    until_the_second_cut=st.none() | st.integers(0, 40),
)
@settings(max_examples=examples(150), deadline=None)
def test_groups_merge_at_the_mean_by_samples(
    sizes: list[int], seed: int, steps: tuple[int, int], until_the_second_cut: int | None
) -> None:
    cluster, one, meeting_D = two_groups(sizes, seed, steps)
    cluster.heal(one)
    if until_the_second_cut is not None:
        cluster.deliver_at_random(until_the_second_cut)
        cluster.cut(one)
        cluster.deliver_at_random()
        cluster.heal(one)
    cluster.deliver_at_random()
    for weights_D in cluster.weights():
        np.testing.assert_allclose(weights_D, meeting_D, rtol=1e-5, atol=1e-6)
    held = [replica.machine.held for replica in cluster.replicas.values()]
    assert all(each == held[0] for each in held)


@given(sizes=sizes_of, seed=st.integers(0, 2**32))
@settings(max_examples=examples(30), deadline=None)
def test_weights_are_never_folded_twice(sizes: list[int], seed: int) -> None:
    cluster, one, meeting_D = two_groups(sizes, seed, (3, 2))
    for _ in range(3):
        cluster.heal(one)
        cluster.deliver_at_random()
        np.testing.assert_allclose(cluster.weights()[-1], meeting_D, rtol=1e-5, atol=1e-6)
        folds = cluster.folds()
        cluster.cut(one)
    assert folds == len(sizes)  # each worker's weights once, at the first merge


@given(
    sizes=sizes_of,
    seed=st.integers(0, 2**32),
    steps=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    mode=st.sampled_from(["bounded", "synchronous"]),
)
@example(sizes=[1, 1, 1, 1], seed=0, steps=(12, 0), mode="synchronous")  # caught up step by step
@settings(max_examples=examples(40), deadline=None)
def test_sides_at_different_iterations_continue_at_the_same_one(
    sizes: list[int], seed: int, steps: tuple[int, int], mode: str
) -> None:
    cluster = SplitCluster(sizes, seed, mode=mode)
    cluster.lockstep(2)
    one, other = cluster.ranks[:1], cluster.ranks[1:]
    cluster.cut(one)
    for group, count in zip((one, other), steps, strict=True):
        cluster.train(group, count)
    cluster.heal(one)
    for _ in range(12 + abs(steps[0] - steps[1])):
        cluster.round_at_random()
    apart = [replica.iteration for replica in cluster.replicas.values()]
    assert max(apart) - min(apart) <= SLACK[mode] + 1
    for rank in cluster.ranks:  # the last update contains a part of every worker's
        assert cluster.replicas[rank].descents()[-1].samples == sum(sizes)
        assert cluster.replicas[rank].machine.next_iteration() == apart[rank] + 1


def test_a_peer_that_claims_to_be_absurdly_far_ahead_is_not_followed() -> None:
    cluster = SplitCluster([4, 4], seed=0, mode="bounded")
    cluster.lockstep(2)
    machine = cluster.replicas[Rank(0)].machine
    for claimed, expected in ((2**53, 3), (50, 51)):
        machine.handle(MemberLeft(Rank(1)))
        machine.handle(MemberJoined(Rank(1)))
        held = Message(MessageKind.HELD, claimed, payload=encode_version_vector({}))
        machine.handle(MessageArrived(Rank(1), held))
        assert machine.next_iteration() == expected


@given(
    seed=st.integers(0, 2**32),
    apart=st.integers(1, 20),
    in_transit=st.integers(0, 60),
    local_batch_sizes=st.lists(st.integers(2, 6), min_size=2, max_size=4),
)
@settings(max_examples=examples(40), deadline=None)
def test_training_while_weights_are_in_transit_is_kept(
    seed: int, apart: int, in_transit: int, local_batch_sizes: list[int]
) -> None:
    """Also if they are longer in transit than the link was down."""
    least = 10 * sum(local_batch_sizes)
    cluster = SplitCluster(local_batch_sizes, seed, min_samples=least)
    cluster.rate = np.float32(1)
    gradient_D = np.ones(cluster.layout.size, np.float32)
    one, other = cluster.ranks[:1], cluster.ranks[1:]

    def rounds(count: int, *, folding: bool = True) -> None:
        """In each round, every worker makes one iteration, whomever it hears."""
        for _ in range(count):
            for rank in cluster.ranks:
                cluster.step(rank, gradient_D)
            for source, target in cluster.links:
                queue = cluster.links[source, target]
                held_back = [m for m in queue if m.kind is MessageKind.FOLD and not folding]
                for message in [m for m in queue if m not in held_back]:
                    queue.remove(message)
                    cluster.handle(target, MessageArrived(source, message))

    rounds(2)
    cluster.cut(one)
    samples = [sum(local_batch_sizes[rank] for rank in group) for group in (one, other)]
    rounds(least // min(samples) + apart)
    for group in (one, other):
        for rank in group:
            cluster.replicas[rank].weights_D[:] = len(group)
    cluster.heal(one)
    began = cluster.replicas[cluster.ranks[0]].iteration
    rounds(in_transit, folding=False)
    rounds(8)
    made = cluster.replicas[cluster.ranks[0]].iteration - began
    mean = (samples[0] * len(one) + samples[1] * len(other)) / sum(samples)
    assert cluster.folds() == len(local_batch_sizes)
    for weights_D in cluster.weights():  # except for an iteration while the request was in transit
        np.testing.assert_allclose(weights_D, mean - made, atol=2.5)
    rounds(1)
    held = [replica.machine.held for replica in cluster.replicas.values()]
    assert max(missing_samples(a, b) for a in held for b in held) < least


def test_three_groups_merge_one_after_another() -> None:
    cluster = SplitCluster([2, 3, 4], seed=1)
    cluster.lockstep(1)
    a, b, c = cluster.ranks
    cluster.cut([a])
    cluster.cut([b])  # each is isolated
    samples = {rank: cluster.train([rank], steps) for rank, steps in ((a, 5), (b, 1), (c, 2))}
    weights = {rank: cluster.replicas[rank].weights_D.copy() for rank in cluster.ranks}
    for source, target in ((a, b), (b, a)):
        cluster.handle(target, MemberJoined(source))
    cluster.deliver_at_random()
    for source, target in ((a, c), (c, a), (b, c), (c, b)):
        cluster.handle(target, MemberJoined(source))
    cluster.deliver_at_random()
    expected_D = sum(samples[r] * weights[r].astype(np.float64) for r in cluster.ranks)
    for row_D in cluster.weights():
        np.testing.assert_allclose(row_D, expected_D / sum(samples.values()), rtol=1e-5, atol=1e-6)


def between_two(cluster: SplitCluster, healed: bool) -> None:
    """The only link between the first two breaks, or is up again."""
    one, other = cluster.ranks[:2]
    for source, target in ((one, other), (other, one)):
        if healed:
            cluster.handle(target, MemberJoined(source, cluster.replicas[source].iteration))
        else:
            cluster.links[source, target].clear()
            cluster.handle(target, MemberLeft(source))


@given(
    sizes=st.lists(st.integers(1, 6), min_size=3, max_size=5),
    seed=st.integers(0, 2**32),
    steps=st.integers(1, 5),
    until_the_second_cut=st.none() | st.integers(0, 20),
)
@settings(max_examples=examples(80), deadline=None)
def test_two_whose_link_was_cut_take_the_weights_of_one_linked_with_both(
    sizes: list[int], seed: int, steps: int, until_the_second_cut: int | None
) -> None:
    cluster = SplitCluster(sizes, seed)
    cluster.lockstep(2)
    between_two(cluster, healed=False)
    cluster.train(cluster.ranks, steps)
    one, other, *thirds = cluster.ranks
    for rank in (one, other):
        cluster.replicas[rank].weights_D += np.float32(rank + 1)
    whole_D = cluster.replicas[thirds[0]].weights_D.copy()
    between_two(cluster, healed=True)
    if until_the_second_cut is not None:
        cluster.deliver_at_random(until_the_second_cut)
        between_two(cluster, healed=False)
        cluster.deliver_at_random()
        between_two(cluster, healed=True)
    cluster.deliver_at_random()
    np.testing.assert_allclose(cluster.weights(), [whole_D] * len(sizes), rtol=1e-6, atol=1e-6)
    assert cluster.folds() == 2
    held = [replica.machine.held for replica in cluster.replicas.values()]
    assert all(each == held[0] for each in held)


@given(seed=st.integers(0, 2**32), steps=st.integers(7, 14))
@settings(max_examples=examples(20), deadline=None)
def test_a_third_worker_skips_no_iteration(seed: int, steps: int) -> None:
    cluster = SplitCluster([2, 2, 2], seed, mode="synchronous", min_samples=13)
    cluster.lockstep(2)
    between_two(cluster, healed=False)
    cluster.train(cluster.ranks, steps)
    between_two(cluster, healed=True)
    third = cluster.ranks[2]
    before = cluster.replicas[third].iteration
    for done in range(12):
        assert cluster.replicas[third].machine.next_iteration() == before + done + 1
        while cluster.replicas[third].iteration == before + done:
            cluster.round_at_random()
    assert cluster.folds() == 2


@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(20), deadline=None)
def test_in_lock_step_all_continue_from_the_same_weights(seed: int) -> None:
    """Every update moves all weights by one; two are a hundred away before. A returning worker
    skips iterations that its peer has done already, a few if messages are slow."""
    cluster = SplitCluster([2, 2, 2], seed, mode="synchronous", min_samples=13)
    cluster.rate = np.float32(1)
    gradient_D = np.ones(cluster.layout.size, np.float32)
    start_D = cluster.replicas[Rank(2)].weights_D.astype(np.float64)

    def until(iteration: int) -> None:
        while min(replica.iteration for replica in cluster.replicas.values()) < iteration:
            for rank in cluster.rng.permutation(cluster.ranks):
                if cluster.may_step(rank) and cluster.replicas[rank].iteration < iteration:
                    cluster.step(rank, gradient_D)
                cluster.deliver_at_random(int(cluster.rng.integers(4)))

    until(2)
    cluster.deliver_all()
    between_two(cluster, healed=False)
    until(12)
    cluster.deliver_all()
    for rank in cluster.ranks[:2]:
        cluster.replicas[rank].weights_D += 100
    between_two(cluster, healed=True)
    until(30)
    cluster.deliver_all()
    assert cluster.folds() == 2
    np.testing.assert_allclose(cluster.weights()[2], start_D - 30, atol=1e-4)
    for weights_D in cluster.weights()[:2]:
        np.testing.assert_allclose(weights_D, start_D - 30, atol=5.1)


@pytest.mark.parametrize("later", [0, 1, 2])
def test_in_lock_step_weights_are_compared_with_those_of_the_same_iteration(later: int) -> None:
    """This worker requests weights after its first iteration and has made one more when they
    arrive."""
    cluster = SplitCluster([4, 4, 4], seed=0, mode="synchronous")
    cluster.rate = np.float32(1)
    gradient_D = np.ones(cluster.layout.size, np.float32)
    replica = cluster.replicas[Rank(0)]
    after = []

    def iteration() -> None:
        for rank in cluster.ranks:
            cluster.step(rank, gradient_D)
        cluster.deliver_all()
        after.append(replica.weights_D.copy())

    iteration()
    for peer in (Rank(1), Rank(2)):
        held = Message(MessageKind.HELD, 1, payload=encode_version_vector({Rank(1): 400}))
        cluster.handle(Rank(0), MessageArrived(peer, held))
    for link in cluster.links:
        cluster.links[link].clear()
    iteration()
    theirs_D = np.full(cluster.layout.size, 7, np.float32)
    payload = encode_version_vector({Rank(0): 0, Rank(1): 400}) + encode_weights(
        theirs_D, "float32"
    )
    message = Message(MessageKind.FOLD, 1 + later, payload=payload)
    cluster.handle(Rank(0), MessageArrived(Rank(1), message))
    assert cluster.folds() == (later < 2)  # one that is ahead is waited for
    iteration()
    (fold,) = [one for one in replica.instructions if isinstance(one, MergeReplicas)]
    np.testing.assert_array_equal(fold.since_D, after[later] if later < 2 else after[1] - 1)
    np.testing.assert_array_equal(fold.weights_D, theirs_D)


@pytest.mark.parametrize("rounds_in_transit", [0, 1, 3, 6])
@pytest.mark.parametrize("mode", ["asynchronous", "bounded"])
def test_the_worker_linked_with_both_is_asked_for_any_message_delay(
    mode: str, rounds_in_transit: int
) -> None:
    """If steps do not wait for all messages, several are made while one is in transit."""
    cluster = SplitCluster([2, 2, 2], seed=0, mode=mode, min_samples=25)
    sent_at: dict[tuple[Rank, Rank], list[int]] = {link: [] for link in cluster.links}

    def rounds(numbers: range) -> None:
        for number in numbers:
            for rank in cluster.ranks:
                if cluster.may_step(rank):
                    cluster.step(rank)
            for link, queue in cluster.links.items():
                sent = sent_at[link]
                del sent[: max(0, len(sent) - len(queue))]  # a cut took what was in transit
                sent += [number] * (len(queue) - len(sent))
                while sent and sent[0] <= number - rounds_in_transit:
                    del sent[0]
                    message = queue[0]
                    del queue[0]
                    cluster.handle(link[1], MessageArrived(link[0], message))
                sent += [number] * (len(queue) - len(sent))

    rounds(range(20))
    between_two(cluster, healed=False)
    rounds(range(20, 80))
    between_two(cluster, healed=True)
    rounds(range(80, 150))
    folds = [
        (r, f)
        for r in cluster.ranks
        for f in cluster.replicas[r].instructions
        if isinstance(f, MergeReplicas)
    ]
    assert [(rank, fold.sender, fold.own_samples) for rank, fold in folds] == [(0, 2, 0), (1, 2, 0)]


def test_a_peer_that_does_not_report_its_samples_is_not_waited_for_long() -> None:
    cluster = SplitCluster([4, 4, 4], seed=0)
    cluster.lockstep(1)
    machine = cluster.replicas[Rank(0)].machine
    (question,) = machine.handle(held_message({Rank(1): 400}))
    assert isinstance(question, SendMessage)
    assert (question.peer, question.message.kind) == (Rank(2), MessageKind.HELD_REQUEST)
    gradient_D = np.zeros(cluster.layout.size, np.float32)
    asked_at = next(
        iteration
        for iteration in range(2, 99)
        for one in machine.handle(LocalStepDone(iteration, gradient_D, 4, 0.0))
        if isinstance(one, SendMessage) and one.message.kind is MessageKind.FOLD_REQUEST
    )
    assert asked_at == 1 + LOOSE_ANSWER_TIMEOUT_STEPS


def test_a_worker_answers_repeated_requests_only_a_few_times_a_step() -> None:
    cluster = SplitCluster([4, 4], seed=0)
    cluster.lockstep(1)
    machine = cluster.replicas[Rank(0)].machine
    question = MessageArrived(Rank(1), Message(MessageKind.HELD_REQUEST, 1))
    assert [len(machine.handle(question)) for _ in range(20)] == [1] * MAX_VECTORS_PER_STEP + [
        0
    ] * 12
    machine.handle(LocalStepDone(2, np.zeros(cluster.layout.size, np.float32), 4, 0.0))
    (answer,) = machine.handle(question)
    assert isinstance(answer, SendMessage)
    assert decode_version_vector(answer.message.payload, cluster.ranks)[0] == machine.held


def test_a_short_gap_changes_nothing() -> None:
    cluster = SplitCluster([4, 4], seed=0, min_samples=21)
    cluster.lockstep(1)
    for steps, folds in ((5, 0), (1, 2)):  # 20 samples apart, then 24
        cluster.cut([Rank(0)])
        cluster.train([Rank(0)], steps)
        cluster.train([Rank(1)], steps)
        cluster.heal([Rank(0)])
        cluster.deliver_at_random()
        assert cluster.folds() == folds


def test_a_new_worker_keeps_the_weights_that_it_has_taken_over() -> None:
    cluster = SplitCluster([4, 4], seed=0)
    cluster.cut([Rank(1)])
    cluster.train([Rank(0)], 5)
    new_worker = cluster.replicas[Rank(1)]
    new_worker.weights_D[:] = cluster.replicas[Rank(0)].weights_D  # pulled, before its first step
    cluster.heal([Rank(1)])
    cluster.deliver_all()
    assert new_worker.machine.held == {Rank(0): 20}
    cluster.lockstep(2)
    assert cluster.folds() == 0


def test_a_restored_worker_knows_the_samples_in_its_weights() -> None:
    cluster = SplitCluster([4, 3], seed=0)
    cluster.lockstep(3)
    replica = cluster.replicas[Rank(0)]
    again = cluster.built(replica)
    again.restore(replica.machine.state())
    assert again.held == replica.machine.held == {Rank(0): 12, Rank(1): 9}
    instructions = again.handle(LocalStepDone(4, np.zeros(cluster.layout.size, np.float32), 4, 0.0))
    assert not any(isinstance(one, RejectMessage) for one in instructions)
    assert again.held == {Rank(0): 16, Rank(1): 9}


def test_missing_samples() -> None:
    assert missing_samples({}, {}) == 0
    assert missing_samples({Rank(0): 5}, {Rank(0): 3, Rank(1): 7}) == 7
    assert missing_samples({Rank(0): 3}, {Rank(0): 5}) == 2


@pytest.mark.parametrize("iterations", [0, 2])
def test_more_samples_than_a_worker_can_have_made_are_refused(iterations: int) -> None:
    """At 2^50 samples a peer's weights would count alone. Before the first step, this worker would
    pass the count on."""
    cluster = SplitCluster([4, 4], seed=0, mode="synchronous")
    cluster.lockstep(iterations)
    machine = cluster.replicas[Rank(0)].machine
    before = machine.held
    for samples in (10**5 * (iterations + 1), 2**50, MAX_WORKER_SAMPLES):
        (refused,) = machine.handle(held_message({Rank(1): samples}))
        assert isinstance(refused, RejectMessage)
        assert (refused.peer, refused.kind) == (Rank(1), PeerRefusal.IMPLAUSIBLE)
        assert f"{samples} samples of worker 1; allowed: up to " in refused.reason
    assert machine.held == before


def test_a_count_stays_within_what_peers_accept() -> None:
    counter = SampleCounter()
    counter.include({Rank(1): MAX_WORKER_SAMPLES})
    counter.count(Rank(1), 1, 5)
    assert counter.held == {Rank(1): MAX_WORKER_SAMPLES}


def asked(cluster: SplitCluster) -> PolicyMachine:
    """Worker 0's machine, which has just asked worker 1 for its weights."""
    cluster.lockstep(1)
    machine = cluster.replicas[Rank(0)].machine
    instructions = machine.handle(held_message({Rank(1): 400}))
    assert [one.message.kind for one in instructions if isinstance(one, SendMessage)] == [
        MessageKind.FOLD_REQUEST
    ]
    return machine


def held_message(held: dict[Rank, int], extra: bytes = b"") -> MessageArrived:
    return MessageArrived(
        Rank(1), Message(MessageKind.HELD, 1, payload=encode_version_vector(held) + extra)
    )


WEIGHTS = bytes(encode_weights(np.ones(20, np.float32), "float32"))


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (MessageKind.HELD, b""),
        (MessageKind.HELD, struct.pack("<I", 1)),
        (MessageKind.HELD, struct.pack("<I", 2**32 - 1)),
        (MessageKind.HELD, struct.pack("<IIQIQ", 2, 1, 5, 1, 6)),  # one worker twice
        (MessageKind.HELD, encode_version_vector({Rank(7): 5})),  # no worker of this run
        (MessageKind.HELD, encode_version_vector({Rank(1): 2**53 + 1})),
        (MessageKind.HELD, encode_version_vector({Rank(1): 5}) + b"x"),
        (MessageKind.FOLD, b""),
        (MessageKind.FOLD, encode_version_vector({Rank(1): 400})),  # without weights
        (MessageKind.FOLD, encode_version_vector({Rank(1): 400}) + WEIGHTS[:-1]),
        (MessageKind.FOLD, encode_version_vector({Rank(1): 400}) + WEIGHTS[:8] + b"\xff" * 80),
        (MessageKind.FOLD, encode_version_vector({Rank(7): 400}) + WEIGHTS),
    ],
)
def test_an_invalid_message_is_refused_and_changes_nothing(
    kind: MessageKind, payload: bytes
) -> None:
    cluster = SplitCluster([4, 4], seed=0)
    machine = asked(cluster)
    before = machine.held
    instructions = machine.handle(MessageArrived(Rank(1), Message(kind, 1, payload=payload)))
    assert [type(one) for one in instructions] == [RejectMessage]
    assert machine.held == before
    valid = machine.handle(held_message({Rank(1): 500}))  # it can be asked again
    assert kind is MessageKind.HELD or any(isinstance(one, SendMessage) for one in valid)


def test_unrequested_weights_and_unknown_workers_change_nothing() -> None:
    cluster = SplitCluster([4, 4], seed=0)
    cluster.lockstep(1)
    machine = cluster.replicas[Rank(0)].machine
    fold = Message(MessageKind.FOLD, 1, payload=encode_version_vector({Rank(1): 400}) + WEIGHTS)
    assert machine.handle(MessageArrived(Rank(1), fold)) == []
    request = Message(MessageKind.FOLD_REQUEST, 1)
    assert machine.handle(MessageArrived(Rank(1), request)) == []  # it got no report
    (refused,) = machine.handle(MessageArrived(Rank(9), fold))
    assert isinstance(refused, RejectMessage)


def test_new_workers_are_counted_if_a_group_may_grow() -> None:
    job_spec, layout = full("bounded"), Layout(("w",), (20,))
    replica = SplitCluster([4, 4], seed=0).replicas[Rank(0)]
    machine = PartitionMerge(
        build(job_spec, Rank(0), layout, [Rank(0), Rank(1)], grows=True),
        PolicyContext(job_spec, Rank(0), (Rank(0), Rank(1)), layout, grows=True),
        replica,
        min_samples=1,
        slack=3,
    )
    new_worker = Rank(7)
    machine.handle(MemberJoined(new_worker))
    held = Message(MessageKind.HELD, 1, payload=encode_version_vector({new_worker: 9, Rank(3): 5}))
    assert machine.handle(MessageArrived(new_worker, held)) == []
    assert machine.held == {new_worker: 9, Rank(3): 5}
    for absurd in (struct.pack("<I", 2**31), encode_version_vector({Rank(999): 1})):
        message = Message(MessageKind.HELD, 1, payload=absurd)
        (refused,) = machine.handle(MessageArrived(new_worker, message))
        assert isinstance(refused, RejectMessage)
    assert machine.held == {new_worker: 9, Rank(3): 5}
