"""Workers of anchored rounds that trained apart, and the point where they merge.

Two sides of any size merge at the mean of their anchors, weighted by the samples that only one side
has trained on. They continue with equal weights and outer velocities. A side with too little
training, or none, takes over the other's anchor. A worker with more training is not outvoted.
Another cut during the merge blocks no worker. Samples count once, and a checkpoint keeps the
counts. A worker that was never cut off and lies about its anchor and samples changes nothing. A
holder that merged before it answered is replaced. Vectors of unknown workers are refused.

Left out: the exchange of rounds (test_adaptive.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_core.codecs import ValueCodec, encode_weights
from dlion_core.policies.interface import (
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    SendMessage,
)
from dlion_core.policies.iteration_guard import IterationGuard
from dlion_core.policies.partitions.version_vector import encode_version_vector
from dlion_core.policies.weights.anchor_merge import (
    ANCHOR,
    HEAD,
    Anchor,
    AnchorMerge,
    group_by_anchor,
)
from dlion_core.policies.weights.anchored_rounds import AnchoredRounds
from example_counts import examples
from policy_cluster import spec, with_small_merges
from weighing_cluster import WeighingCluster

if TYPE_CHECKING:
    from collections.abc import Collection

    from dlion_core.policies.interface import Instruction
    from policy_cluster import Replica

seeds = st.integers(0, 2**32)
ZERO, ONE, TWO, THREE = (Rank(rank) for rank in range(4))
MIN_SAMPLES = 10
"""Ten iterations of the spec's global batch of one sample."""


class SplitCluster(WeighingCluster):
    """Workers that send whole pseudo-gradients and whose links can be cut."""

    def __init__(self, sizes: list[int], seed: int, *, momentum: float = 0.0) -> None:
        parameters = {"codec": "float32", "density": 1, "localSteps": 2, "outerMomentum": momentum}
        job = spec(exchange={"policy": "adaptive", "parameters": parameters})
        job = with_small_merges(job)
        super().__init__(job, sizes, seed=seed % 999)
        self.order = np.random.default_rng(seed)
        self.down: set[tuple[Rank, Rank]] = set()

    def rounds(self, rank: Rank) -> AnchoredRounds:
        guard = self.replicas[rank].machine
        assert isinstance(guard, IterationGuard)
        assert isinstance(guard.machine, AnchoredRounds)
        return guard.machine

    def anchor(self, rank: Rank) -> np.ndarray:
        anchor_D = self.rounds(rank).anchor_D
        assert anchor_D is not None
        return anchor_D

    def cut(self, group: Collection[Rank]) -> None:
        for source, target in self.links:
            if (source in group) != (target in group) and (source, target) not in self.down:
                self.links[source, target].clear()
                self.down.add((source, target))
                self.handle(target, MemberLeft(source))

    def heal(self, *, at_once: bool = True) -> None:
        """`at_once`: all workers know the others' iterations before any worker makes another
        step."""
        healed, self.down = sorted(self.down), set()
        for source, target in healed:
            self.handle(target, MemberJoined(source, self.replicas[source].iteration))
        if at_once:
            self.deliver_all()

    def train(self, group: Collection[Rank], steps: int, *, learns: bool = True) -> None:
        """All workers train that number of iterations past the furthest, in any order, and
        everything arrives."""
        gradient_D = None if learns else np.zeros(self.layout.size, np.float32)
        end = max(self.replicas[rank].iteration for rank in group) + steps
        while behind := [rank for rank in group if self.replicas[rank].iteration < end]:
            may = [rank for rank in behind if self.may_step(rank)]
            in_transit = [link for link, queue in self.links.items() if queue]
            assert may or in_transit, f"blocked before {end}: {behind}"
            choice = int(self.order.integers(len(may) + len(in_transit)))
            if choice < len(may):
                self.step(may[choice], gradient_D)
            else:
                self.deliver(*in_transit[choice - len(may)])
        while in_transit := [link for link, queue in self.links.items() if queue]:
            self.deliver(*in_transit[int(self.order.integers(len(in_transit)))])

    def assert_equal(self) -> None:
        first, *others = (self.rounds(rank).state() for rank in self.ranks)
        for other in others:
            for name in ("anchor_D", "velocity_D"):
                np.testing.assert_array_equal(first.get(name, 0), other.get(name, 0))


class LyingCluster(SplitCluster):
    """The last worker may lie: it claims another anchor, all samples and more, and sends zeros."""

    lies = False

    def _carry_out(self, replica: Replica, instruction: Instruction) -> None:
        is_sent = isinstance(instruction, SendMessage) and replica.rank == self.ranks[-1]
        if self.lies and is_sent and isinstance(instruction, SendMessage):
            instruction = replace(instruction, message=self.lie(instruction.message))
        super()._carry_out(replica, instruction)

    def lie(self, message: Message) -> Message:
        held = {**self.rounds(ZERO)._trained.held, self.ranks[-1]: 5 * message.iteration}
        payload = encode_version_vector(held)
        if message.kind is MessageKind.WEIGHTS:
            form, checksum, *rest = HEAD.unpack_from(message.payload)
            head = HEAD.pack(form, checksum ^ 1, *rest)
            zeros_D = np.zeros(self.layout.size, np.float32)
            is_anchor = form == ANCHOR
            zeros = payload + encode_weights(zeros_D, ValueCodec.FLOAT32)
            payload = head + (zeros if is_anchor else bytes(message.payload[HEAD.size :]))
        elif message.kind is not MessageKind.HELD:
            return message
        return replace(message, payload=payload)


def trained_apart(
    sizes: list[int], seed: int, steps: tuple[int, int], *, momentum: float = 0.0
) -> tuple[SplitCluster, list[Rank], list[Rank]]:
    """A cluster whose two sides trained apart for those numbers of steps."""
    cluster = SplitCluster(sizes, seed, momentum=momentum)
    cluster.train(cluster.ranks, 5)
    middle = 1 + seed % (len(sizes) - 1)
    one, other = cluster.ranks[:middle], cluster.ranks[middle:]
    cluster.cut(one)
    for group, count in zip((one, other), steps, strict=True):
        cluster.train(group, count)
    return cluster, one, other


def meeting(cluster: SplitCluster, *groups: list[Rank]) -> np.ndarray:
    """The definition: the mean of the anchors by the samples that only one side has."""
    vectors = [cluster.rounds(group[0]).state() for group in groups]
    samples = [
        sum(
            int(count) - int(vectors[1 - place].get(name, 0))
            for name, count in vectors[place].items()
            if name.startswith("held_samples_") and count > vectors[1 - place].get(name, 0)
        )
        for place in (0, 1)
    ]
    counting = [count if count >= MIN_SAMPLES else 0 for count in samples]
    if not any(counting):
        counting = [int(len(groups[0]) >= len(groups[1])), int(len(groups[0]) < len(groups[1]))]
    anchors = [cluster.anchor(group[0]).astype(np.float64) for group in groups]
    return np.average(anchors, axis=0, weights=counting)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    seed=seeds,
    rounds=st.integers(0, 8),
)
@settings(max_examples=examples(80), deadline=None)
def test_two_sides_merge_at_the_mean_by_samples(sizes: list[int], seed: int, rounds: int) -> None:
    """Gradients are zero during the merge, so that its result is that of the definition."""
    cluster, one, other = trained_apart(sizes, seed, (1 + 2 * rounds, 1 + 2 * rounds))
    expected_D = meeting(cluster, one, other)
    cluster.heal()
    cluster.train(cluster.ranks, 8, learns=False)
    np.testing.assert_allclose(cluster.anchor(one[0]), expected_D, rtol=1e-4, atol=1e-5)
    cluster.assert_equal()


@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    seed=seeds,
    steps=st.tuples(st.integers(0, 17), st.integers(0, 17)),
    momentum=st.sampled_from([0.0, 0.9]),
    again=st.none() | st.integers(1, 9),
)
@example([6, 5, 1, 5, 4], 233, (11, 9), 0.9, None)  # once equal anchors, unequal velocities
@settings(max_examples=examples(80), deadline=None)
def test_all_workers_become_equal_after_a_merge(
    sizes: list[int], seed: int, steps: tuple[int, int], momentum: float, again: int | None
) -> None:
    """Also after another cut during the merge."""
    cluster, one, other = trained_apart(sizes, seed, steps, momentum=momentum)
    cluster.heal(at_once=False)
    if again is not None:
        for turn in range(again):
            rank = cluster.ranks[turn % len(cluster.ranks)]
            if cluster.may_step(rank):
                cluster.step(rank)
            cluster.deliver(*sorted(cluster.links)[turn % len(cluster.links)])
        cluster.cut(one)
        for group in (one, other):
            cluster.train(group, 3)
        cluster.heal(at_once=False)
    cluster.train(cluster.ranks, 12)
    cluster.assert_equal()


@pytest.mark.parametrize("was_cut", [False, True])
def test_a_worker_in_step_that_lies_about_its_anchor_changes_nothing(was_cut: bool) -> None:
    cluster = LyingCluster([2, 2, 2], 0)
    cluster.train(cluster.ranks, 20)
    if was_cut:
        cluster.cut([TWO])
        cluster.heal()
        cluster.train(cluster.ranks, 4)  # it has their anchor again
    before_D = cluster.anchor(ZERO).copy()
    cluster.lies = True
    cluster.train(cluster.ranks, 40, learns=False)
    for rank in (ZERO, ONE):
        np.testing.assert_array_equal(cluster.anchor(rank), before_D)


def test_a_contribution_of_a_restarted_worker_requests_nothing_from_it() -> None:
    """In the first round its new process has no anchor to answer with. A worker that asked it for
    one would never continue."""
    cluster = SplitCluster([2, 2, 2], 0)
    lost, donor, last = cluster.ranks
    cluster.replicas[lost].weights_D += 1  # as a worker that has joined within a round
    for rank in (lost, donor):
        while cluster.rounds(rank).open is None:
            cluster.step(rank)
    while cluster.deliver(lost, donor):
        pass
    cluster.leave(lost)
    again, iteration = cluster.replicas[lost], cluster.replicas[donor].iteration
    again.weights_D = cluster.replicas[donor].weights_D.copy()
    again.machine = cluster.machine(lost, again.weights_D)
    assert isinstance(again.machine, IterationGuard)
    again.machine.take_over(iteration)
    again.iteration = iteration
    for rank in (donor, last):
        cluster.handle(lost, MemberJoined(rank, cluster.replicas[rank].iteration))
        cluster.handle(rank, MemberJoined(lost, iteration))
    cluster.step(last)
    cluster.deliver_all()  # the donor's round closes before the new process makes a step
    cluster.train(cluster.ranks, 8)
    cluster.assert_equal()


def test_a_checkpoint_keeps_the_sample_counts_of_its_anchor() -> None:
    cluster, one, other = trained_apart([2, 3], 0, (21, 21))
    expected_D = meeting(cluster, one, other)
    kept = cluster.replicas[ONE].machine.state()
    cluster.replicas[ONE].machine = cluster.machine(ONE, cluster.replicas[ONE].weights_D)
    cluster.replicas[ONE].machine.restore(kept)
    cluster.heal()
    cluster.train(cluster.ranks, 8, learns=False)
    np.testing.assert_allclose(cluster.anchor(ZERO), expected_D, rtol=1e-4, atol=1e-5)
    cluster.assert_equal()


def test_the_groups_of_a_round() -> None:
    checksums = {ZERO: 7, ONE: 5, TWO: 5, THREE: 7, Rank(4): 1}
    assert group_by_anchor(checksums) == [[ZERO, THREE], [ONE, TWO], [Rank(4)]]
    assert group_by_anchor({ZERO: 7, ONE: 5, TWO: 5}) == [[ONE, TWO], [ZERO]]


def anchor(value: float, iteration: int = 8, **held: int) -> Anchor:
    vector = {Rank(int(name[1:])): samples for name, samples in held.items()}
    return Anchor(vector, iteration, 2, np.full(4, value, np.float32), None)


def test_a_worker_with_training_is_not_outvoted() -> None:
    """By two that have not trained and have their own anchor."""
    trained, initial = anchor(1.0, w0=50), anchor(5.0)
    merge = AnchorMerge(8, [ONE, ZERO], 1, min_samples=10, vectors={ONE: {}})
    assert merge.choose(trained.held) == set()
    np.testing.assert_array_equal(merge.merged(trained).anchor_D, trained.anchor_D)
    merge = AnchorMerge(8, [ONE, ZERO], 0, min_samples=10, vectors={ZERO: {ZERO: 50}})
    assert merge.choose(initial.held) == {ZERO}
    merge.anchors[ZERO] = trained
    np.testing.assert_array_equal(merge.merged(initial).anchor_D, trained.anchor_D)


def test_a_holder_that_merged_before_it_answered_is_replaced() -> None:
    merge = AnchorMerge(8, [ONE, ZERO], 1, min_samples=10)
    own = anchor(1.0, w0=50, w1=20)
    merge.vectors[ONE] = {ZERO: 20, ONE: 50}
    assert merge.choose(own.held) == {ONE}
    merge.anchors[ONE] = anchor(5.0, 10, w0=50, w1=50)
    found = merge.merged(own)
    np.testing.assert_array_equal(found.anchor_D, np.full(4, 5.0))
    assert (found.iteration, found.held) == (10, {ZERO: 50, ONE: 50})


def test_without_its_only_holder_a_worker_continues_from_its_own_anchor() -> None:
    merge = AnchorMerge(8, [ONE, ZERO], 1, min_samples=10)
    own = anchor(1.0, w0=5)
    merge.vectors[ONE] = {ONE: 50}
    assert merge.choose(own.held) == {ONE}
    merge.lost(ONE)
    assert not merge.awaited()
    found = merge.merged(own)
    assert found.held == own.held
    np.testing.assert_array_equal(found.anchor_D, own.anchor_D)


def test_three_groups_merge_by_the_samples_of_each_alone() -> None:
    merge = AnchorMerge(8, [ZERO, ONE, TWO], 0, min_samples=10)
    own = anchor(0.0, w0=100)
    merge.vectors |= {ONE: {ZERO: 50, ONE: 50}, TWO: {TWO: 9}}
    assert merge.choose(own.held) == {ONE}
    merge.anchors[ONE] = anchor(3.0, w0=50, w1=50)
    found = merge.merged(own)
    np.testing.assert_allclose(found.anchor_D, 1.5)
    assert found.held == {ZERO: 100, ONE: 50}


def test_training_of_two_groups_is_not_lost_to_a_third_without_it() -> None:
    """Neither of the two has enough that both of the others lack."""
    merge = AnchorMerge(8, [ZERO, ONE, TWO], 0, min_samples=10)
    own = anchor(0.0, w0=100, w3=12)
    merge.vectors |= {ONE: {TWO: 60, Rank(3): 12, ONE: 12}, TWO: {TWO: 60, ZERO: 12, ONE: 6}}
    assert merge.choose(own.held) == {ONE}
    merge.anchors[ONE] = anchor(3.0, w1=12, w2=60, w3=12)
    found = merge.merged(own)
    np.testing.assert_allclose(found.anchor_D, 3.0 * 72 / (100 + 72))
    assert found.held == {ZERO: 100, ONE: 12, TWO: 60, Rank(3): 12}


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        encode_version_vector({Rank(9): 5}),
        encode_version_vector({ONE: 2**60}),
        encode_version_vector({ONE: 5}) + b"x",
    ],
)
def test_an_impossible_vector_is_refused_and_blocks_no_worker(payload: bytes) -> None:
    cluster, _, _ = trained_apart([2, 3], 0, (3, 3))
    cluster.heal()
    for rank in (ZERO, ONE):
        for _ in range(2):
            cluster.step(rank)
    while not cluster.links[ZERO, ONE] or cluster.links[ZERO, ONE][-1].kind is not (
        MessageKind.HELD_REQUEST
    ):
        assert cluster.deliver(ONE, ZERO)
    machine = cluster.replicas[ZERO].machine
    assert machine.waiting_for() == {ONE}
    instructions = machine.handle(
        MessageArrived(ONE, Message(MessageKind.HELD, 10, payload=payload))
    )
    assert any(isinstance(each, RejectMessage) for each in instructions)
    assert not machine.waiting_for()
