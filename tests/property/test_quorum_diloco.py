"""Policy `quorum-diloco` against naive references.

The server's momentum is Nesterov's, and with a period the delayed form of its source. If all are
waited for, every round is DiLoCo's. Under random schedules every answer is that of a naive server
with the same changes. With a quorum the outer step waits for the window and no longer, and slow
links shorten the window. A late change is answered at once and counts in the next step. Steps made
while waiting are kept. Changes count by samples times samples per step, or by samples.

Left out: departures, hostile messages, restarts (test_served_workers), accuracy (tests/simulated).
"""

from __future__ import annotations

from math import ceil, floor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_core.codecs import decode_gradient, decode_weights
from dlion_core.policies.interface import (
    BudgetsChanged,
    Event,
    Instruction,
    LocalStepDone,
    Message,
    MessageArrived,
    MessageKind,
    ReplaceWeights,
    SendMessage,
    UpdateApplied,
)
from dlion_core.policies.served.outer_optimizer import DelayedNesterov
from example_counts import examples
from policy_cluster import linear_gradient
from sites_cluster import SitesCluster
from weights_cluster import weights_spec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

seeds = st.integers(0, 2**32)
batches = st.lists(st.integers(1, 6), min_size=1, max_size=5)
ME, ONE, TWO = Rank(0), Rank(1), Rank(2)
SIZE = 20
PLAIN = {"outerLearningRate": 1, "outerMomentum": 0, "overlapSteps": 0}


def cluster_of(sizes: list[int], seed: int = 0, **parameters: object) -> SitesCluster:
    job = weights_spec("quorum-diloco", **parameters)
    return SitesCluster(job, sizes, [len(sizes)], seed=seed % 999)


@given(
    seed=seeds,
    count=st.integers(1, 9),
    period=st.integers(1, 4),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
)
def test_the_servers_step_is_the_delayed_form(
    seed: int, count: int, period: int, momentum: float
) -> None:
    rng = np.random.default_rng(seed)
    optimizer = DelayedNesterov(0.3, momentum, period)
    velocity_D, open_ = np.zeros(3), list[np.ndarray]()
    for _ in range(count):
        gradient_D = rng.standard_normal(3)
        open_.append(gradient_D)
        expected_D = 0.3 * gradient_D
        if len(open_) == period:
            velocity_D = momentum * velocity_D + np.mean(open_, axis=0)
            expected_D = expected_D + 0.3 * period * momentum * velocity_D
            open_ = []
        found_D = optimizer.step(gradient_D.astype(np.float32))
        np.testing.assert_allclose(found_D, expected_D, rtol=1e-4, atol=1e-5)
        restored = DelayedNesterov(0.3, momentum, period)
        restored.restore(optimizer.state("x_"), "x_")
        optimizer = restored


@given(
    seed=seeds,
    sizes=batches,
    steps=st.integers(1, 4),
    rate=st.sampled_from([0.5, 1.0]),
    momentum=st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=examples(40), deadline=None)
def test_if_all_are_waited_for_every_round_is_dilocos(
    seed: int, sizes: list[int], steps: int, rate: float, momentum: float
) -> None:
    parameters = {
        "localSteps": steps, "overlapSteps": 0, "quorum": 1, "weights": "samples",
        "outerLearningRate": rate, "outerMomentum": momentum,
    }  # fmt: skip
    cluster, naive = (cluster_of(sizes, seed, **parameters) for _ in "ab")
    cluster.run(seed, steps=3 * steps)
    global_D = naive.replicas[ME].weights_D.astype(np.float64)
    velocity_D = np.zeros_like(global_D)
    for _ in range(3):
        mean_D = np.zeros_like(global_D)
        for rank in naive.ranks:
            weights_D = global_D.copy()
            for _ in range(steps):
                at_D = weights_D.astype(np.float32)
                weights_D -= 0.05 * linear_gradient(at_D, *naive.batch(rank))[0]
            mean_D += weights_D * (sizes[rank] / sum(sizes))
        delta_D = global_D - mean_D
        velocity_D = momentum * velocity_D + delta_D
        global_D -= rate * (delta_D + momentum * velocity_D)
    for replica in cluster.replicas.values():
        np.testing.assert_allclose(replica.weights_D, global_D, rtol=1e-3, atol=1e-4)


class Watched(SitesCluster):
    """A naive server beside the real one, with the same changes and steps."""

    def __init__(self, sizes: list[int], seed: int, quorum: float, overlap: int) -> None:
        self.quorum, self.window = quorum, floor(0.5 * overlap)
        self.version, self.given = 0, dict[int, int]()
        self.changes: list[tuple[int, int, int, Vector]] = []
        self.due = set[int]()
        self.opened_at = self.answers = 0
        self.global_D = self.outer_D = np.zeros(SIZE)
        self.sent_D: np.ndarray | None = None
        parameters = {
            "localSteps": 2, "overlapSteps": overlap, "quorum": quorum, "grace": 0.5,
        }  # fmt: skip
        job = weights_spec("quorum-diloco", **parameters)
        super().__init__(job, sizes, [len(sizes)], seed=seed)
        self.global_D = self.replicas[ME].weights_D.astype(np.float64)
        self.anchor_D, self.steps, self.waits = self.global_D, 0, False

    def handle(self, rank: Rank, event: Event) -> list[Instruction]:
        if rank != ME:
            return super().handle(rank, event)
        expected = self._naive(event)
        before_D = self.replicas[ME].weights_D.copy()
        instructions = super().handle(rank, event)
        found = {
            int(one.peer): decode_weights(one.message.payload, SIZE)
            for one in instructions
            if isinstance(one, SendMessage) and one.message.kind is MessageKind.WEIGHTS
        }
        replaced = [one.weights_D for one in instructions if isinstance(one, ReplaceWeights)]
        assert found.keys() | ({0} if replaced else set()) == expected
        for weights_D in found.values():
            self.answers += 1
            np.testing.assert_allclose(weights_D, self.global_D, rtol=1e-3, atol=1e-4)
        if replaced:
            assert self.sent_D is not None
            kept_D = self.global_D + (before_D - self.sent_D)
            self.anchor_D, self.waits = self.global_D.copy(), False
            np.testing.assert_allclose(replaced[0], kept_D, rtol=1e-3, atol=1e-4)
        return instructions

    def _naive(self, event: Event) -> set[int]:
        """Ranks that are answered now, 0 for the server itself."""
        answered = set()
        if isinstance(event, UpdateApplied):
            replica = self.replicas[ME]
            self.steps += 1
            if not self.waits and self.steps >= 2:
                samples = self.steps * replica.local_batch_size
                self.sent_D, self.waits, self.steps = replica.weights_D.copy(), True, 0
                change_D = self.sent_D - self.anchor_D
                self._count(0, samples, replica.local_batch_size, change_D)
        if isinstance(event, MessageArrived) and event.message.kind is MessageKind.WEIGHTS:
            message = event.message
            assert message.weights_version % 4 == 0
            change_D = decode_gradient(message.payload, SIZE).weighted(np.float32(1))
            samples = message.weights_version // 4
            self._count(
                event.sender, samples, message.local_batch_size, change_D.astype(np.float64)
            )
        ranks = {one[0] for one in self.changes}
        waited = self.replicas[ME].machine.state()["iteration"]
        is_over = len(ranks) >= ceil(self.quorum * len(self.ranks)) and (
            int(waited) - self.opened_at >= self.window
        )
        if isinstance(event, LocalStepDone):
            return set()  # its gradient is applied next
        if self.changes and (len(ranks) == len(self.ranks) or is_over):
            answered |= self._outer_step()
        late = {one for one in self.due if self.given.get(one, 0) < self.version}
        self.given |= dict.fromkeys(late, self.version)
        self.due -= late
        return answered | late

    def _count(self, rank: int, samples: int, batch: int, change_D: Vector) -> None:
        if not self.changes:
            self.opened_at = int(self.replicas[ME].machine.state()["iteration"])
        self.changes.append((rank, samples, batch, change_D))
        self.due.add(rank)

    def _outer_step(self) -> set[int]:
        summed: dict[int, tuple[int, int, Vector]] = {}
        for rank, samples, batch, change_D in self.changes:
            before, _, before_D = summed.get(rank, (0, 0, np.zeros(SIZE)))
            summed[rank] = (before + samples, batch, before_D + change_D)
        total = sum(samples * batch for samples, batch, _ in summed.values())
        delta_D = -sum(s * b / total * change_D for s, b, change_D in summed.values())
        self.outer_D = 0.5 * self.outer_D + delta_D
        self.global_D = self.global_D - 0.7 * (delta_D + 0.5 * self.outer_D)
        self.version += 1
        due, self.due, self.changes = self.due, set(), []
        self.given |= dict.fromkeys(due, self.version)
        return due


@given(
    seed=seeds,
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    quorum=st.sampled_from([0.25, 0.5, 0.9, 1]),
    overlap=st.sampled_from([0, 2, 4]),
)
@settings(max_examples=examples(60), deadline=None)
def test_every_answer_equals_the_references(
    seed: int, sizes: list[int], quorum: float, overlap: int
) -> None:
    cluster = Watched(sizes, seed % 999, quorum, overlap)
    cluster.run_at_least(seed, steps=12)
    assert cluster.answers >= 2 * (len(sizes) - 1)


def steps(cluster: SitesCluster, rank: Rank, count: int) -> None:
    """Make that number of steps of one worker, whose messages reach the server."""
    for _ in range(count):
        assert cluster.may_step(rank)
        cluster.step(rank, np.ones(SIZE, np.float32))
        while rank != ME and cluster.deliver(rank, ME):
            pass


def answered(cluster: SitesCluster, rank: Rank) -> bool:
    """Whether an answer for that worker is in transit."""
    return any(one.kind is MessageKind.WEIGHTS for one in cluster.links[ME, rank])


def test_a_stalled_worker_blocks_no_other_and_its_late_change_counts_in_the_next_step() -> None:
    cluster = cluster_of([2, 2, 2], localSteps=2, quorum=0.6, **PLAIN)
    start_D = cluster.weights()[0]
    for rank in (ME, ONE):
        steps(cluster, rank, 2)
    np.testing.assert_allclose(cluster.weights()[0], start_D - 0.1, atol=1e-6)
    cluster.deliver_all()
    steps(cluster, TWO, 2)
    assert answered(cluster, TWO)
    cluster.deliver_all()
    np.testing.assert_allclose(cluster.weights()[2], start_D - 0.1, atol=1e-6)
    steps(cluster, ME, 2)  # with the late change, that is a quorum
    np.testing.assert_allclose(cluster.weights()[0], start_D - 0.2, atol=1e-6)
    assert cluster.may_step(ONE)


def test_a_worker_that_counts_twice_in_a_step_has_both_changes_summed() -> None:
    cluster = cluster_of([2, 2, 2, 2], localSteps=1, quorum=0.75, **PLAIN)
    start_D = cluster.weights()[0]
    for rank in (ME, ONE, TWO):
        steps(cluster, rank, 1)
    cluster.deliver_all()
    for _ in range(2):  # late, and in time
        steps(cluster, Rank(3), 1)
        cluster.deliver_all()
    assert not cluster.may_step(Rank(3))
    steps(cluster, ME, 1)
    steps(cluster, ONE, 1)
    # 4 samples with a change of 2 steps, 2 and 2 samples with one: their mean is 1.5 steps.
    np.testing.assert_allclose(cluster.weights()[0], start_D - 0.05 - 0.075, atol=1e-6)


@pytest.mark.parametrize("within", [True, False])
def test_the_outer_step_waits_for_the_window_and_no_longer(within: bool) -> None:
    cluster = cluster_of([2, 2, 2], localSteps=2, overlapSteps=4, quorum=0.6, weights="samples")
    steps(cluster, ONE, 2)  # the window begins
    steps(cluster, ME, 3)
    assert not answered(cluster, ONE)
    if within:
        steps(cluster, TWO, 2)
        assert answered(cluster, ONE)
        assert answered(cluster, TWO)
        return
    steps(cluster, ME, 1)
    assert answered(cluster, ONE)
    assert not answered(cluster, TWO)


@pytest.mark.parametrize(
    ("grace", "budget", "expected"),
    [(1, 10**6, 4), (0.5, 10**6, 2), (1, 40, 2), (1, 4, 0), (0, 10**6, 0)],
)
def test_the_window_is_the_overlap_minus_the_answers(
    grace: float, budget: int, expected: int
) -> None:
    """Weights of 80 bytes take two steps on a link that carries 40 bytes in one."""
    cluster = cluster_of([2, 2, 2], localSteps=2, overlapSteps=4, quorum=0.6, grace=grace)
    fraction = cluster.job_spec.network.bandwidth_fraction
    links = BudgetsChanged({ONE: int(fraction * budget), TWO: 10**9})
    cluster.handle(ME, links)
    steps(cluster, ONE, 2)
    made = 0
    while not answered(cluster, ONE):
        steps(cluster, ME, 1)
        made += 1
    assert made == max(2, expected)  # its own change makes the quorum


def test_steps_made_while_waiting_are_kept() -> None:
    cluster = cluster_of([2, 2], localSteps=2, **{**PLAIN, "overlapSteps": 3}, quorum=1)
    start_D = cluster.weights()[0]
    steps(cluster, ONE, 5)
    assert not cluster.may_step(ONE)
    steps(cluster, ME, 2)
    cluster.deliver_all()
    np.testing.assert_allclose(cluster.weights()[1], start_D - 0.1 - 3 * 0.05, atol=1e-6)
    np.testing.assert_allclose(cluster.weights()[0], start_D - 0.1, atol=1e-6)
    steps(cluster, ONE, 1)  # three since the change: the next one is due
    sent = [
        one.message for one in cluster.replicas[ONE].instructions if isinstance(one, SendMessage)
    ]
    change = [one for one in sent if one.kind is MessageKind.WEIGHTS][-1]
    part_D = decode_gradient(change.payload, SIZE).weighted(np.float32(1))
    np.testing.assert_allclose(part_D, np.full(SIZE, -4 * 0.05), atol=1e-6)


@pytest.mark.parametrize(("weights", "share"), [("samples", 0.75), ("rate", 0.9)])
def test_changes_count_by_samples_or_by_their_rate_too(weights: str, share: float) -> None:
    cluster = cluster_of([3, 1], localSteps=1, weights=weights, quorum=1, **PLAIN)
    start_D = cluster.weights()[0]
    cluster.step(ONE, np.zeros(SIZE, np.float32))
    cluster.step(ME, np.ones(SIZE, np.float32))
    cluster.deliver_all()
    for weights_D in cluster.weights():
        np.testing.assert_allclose(weights_D, start_D - 0.05 * share, atol=1e-6)


def test_a_change_of_a_site_is_refused() -> None:
    cluster = cluster_of([2, 2], localSteps=1)
    cluster.step(ONE)
    change = next(one for one in cluster.links[ONE, ME] if one.kind is MessageKind.WEIGHTS)
    wrong = Message(change.kind, 1, 2, change.weights_version + 2, change.payload)
    instructions = cluster.replicas[ME].machine.handle(MessageArrived(ONE, wrong))
    assert any("of a site" in getattr(one, "reason", "") for one in instructions)
