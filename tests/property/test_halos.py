"""Policy `halos` against a naive reference.

Under random schedules every model of a site's server or of the global one is that of naive servers
with the same changes. Between sites one message travels for K changes, and only to the servers. A
stalled worker or site blocks no other. Changes count by their batches over the means of their
sites, and sites by theirs. A change of another site's worker is refused. Refused global weights do
not cut a site off. A worker that becomes the global server again starts from its site's
weights.

Left out: the optimizer of the servers (test_quorum_diloco), departures, hostile messages, restarts
(test_served_workers), accuracy (tests/simulated).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import SpecError
from dlion_api.names import Rank
from dlion_core.codecs import decode_gradient, decode_weights
from dlion_core.policies.interface import (
    Event,
    Instruction,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    ReplaceWeights,
    SendMessage,
    UpdateApplied,
)
from dlion_core.policies.served.served_worker import Form
from example_counts import examples
from sites_cluster import SitesCluster
from weights_cluster import weights_spec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

SIZE = 20
ME, ONE, TWO = Rank(0), Rank(1), Rank(2)
PLAIN = {
    "localLearningRate": 1, "localMomentum": 0, "globalLearningRate": 1, "globalMomentum": 0,
    "localSteps": 1, "mergeWeight": 1,
}  # fmt: skip


def cluster_of(sizes: list[int], sites: list[int], **parameters: object) -> SitesCluster:
    return SitesCluster(weights_spec("halos", **parameters), sizes, sites)


class Optimizer:
    """The delayed Nesterov momentum of the authors' code."""

    def __init__(self, rate: float, momentum: float, period: int) -> None:
        self.rate, self.momentum, self.period = rate, momentum, period
        self.velocity_D, self.open = np.zeros(SIZE), list[np.ndarray]()

    def step(self, gradient_D: Vector) -> Vector:
        self.open.append(gradient_D)
        step_D = self.rate * gradient_D
        if len(self.open) == self.period:
            self.velocity_D = self.momentum * self.velocity_D + np.mean(self.open, axis=0)
            step_D = step_D + self.rate * self.period * self.momentum * self.velocity_D
            self.open = []
        return step_D


class Site:
    """A naive server of a site."""

    def __init__(self, start_D: Vector) -> None:
        self.optimizer = Optimizer(0.3, 0.6, 3)
        self.model_D = self.merged_D = start_D.copy()
        self.count, self.waits = 0, False


class Watched(SitesCluster):
    """Naive servers beside the real ones, with the same changes."""

    def __init__(self, sizes: list[int], sites: list[int], seed: int, accumulate: int) -> None:
        self.accumulate = accumulate
        self.naive: dict[str, Site] = {}
        self.given = {"local": 0, "global": 0}
        job = weights_spec(
            "halos", localSteps=2, accumulate=accumulate, mergeWeight=0.4, localLearningRate=0.3,
            localMomentum=0.6, localPeriod=3, globalLearningRate=0.5, globalMomentum=0.4,
            globalPeriod=2,
        )  # fmt: skip
        super().__init__(job, sizes, sites, seed=seed)
        start_D = self.replicas[ME].weights_D.astype(np.float64)
        self.naive = {site: Site(start_D) for site in self.sites.values()}
        self.global_D, self.optimizer = start_D.copy(), Optimizer(0.5, 0.4, 2)
        self.anchor_D = {rank: start_D.copy() for rank in self.ranks}
        self.samples = dict.fromkeys(self.ranks, 0)

    def _weight(self, rank: Rank) -> float:
        of_site = [self._batch(one) for one in self.ranks if self.sites[one] == self.sites[rank]]
        return self._batch(rank) / float(np.mean(of_site))

    def _site_weight(self, site: str) -> float:
        totals = dict.fromkeys(self.naive, 0)
        for rank in self.ranks:
            totals[self.sites[rank]] += self._batch(rank)
        return totals[site] / float(np.mean(list(totals.values())))

    def _batch(self, rank: Rank) -> int:
        return self.replicas[rank].local_batch_size

    def handle(self, rank: Rank, event: Event) -> list[Instruction]:
        if not self.naive:
            return super().handle(rank, event)
        expected = self._naive(rank, event)
        instructions = super().handle(rank, event)
        found: list[tuple[str, int, np.ndarray]] = []
        for one in instructions:
            if isinstance(one, ReplaceWeights):
                found.append(("local", int(rank), one.weights_D))
                self.anchor_D[rank] = one.weights_D.astype(np.float64)
            if isinstance(one, SendMessage) and one.message.kind is MessageKind.WEIGHTS:
                kind = {1: "local", 3: "global"}.get(one.message.weights_version % 4)
                if kind is not None:
                    found.append((kind, int(one.peer), decode_weights(one.message.payload, SIZE)))
        assert [one[:2] for one in found] == [one[:2] for one in expected]
        for (kind, _, found_D), (_, _, expected_D) in zip(found, expected, strict=True):
            self.given[kind] += 1
            np.testing.assert_allclose(found_D, expected_D, rtol=1e-3, atol=2e-4)
        return instructions

    def _naive(self, rank: Rank, event: Event) -> list[tuple[str, int, Vector]]:
        """The models that the worker sends, by receiver."""
        site = self.naive[self.sites[rank]]
        is_server = rank == min(one for one in self.ranks if self.sites[one] == self.sites[rank])
        if isinstance(event, UpdateApplied):
            self.samples[rank] += 1
            if self.samples[rank] == 2 and is_server:
                self.samples[rank] = 0
                change_D = self.replicas[rank].weights_D - self.anchor_D[rank]
                return self._local(site, rank, change_D.astype(np.float64))
        if not isinstance(event, MessageArrived) or event.message.kind is not MessageKind.WEIGHTS:
            return []
        message = event.message
        match message.weights_version % 4:
            case 0:
                return self._local(site, event.sender, as_vector(message.payload))
            case 1:
                return [("local", int(rank), decode_weights(message.payload, SIZE))]
            case 2:
                sender = self.sites[event.sender]
                gradient_D = -self._site_weight(sender) * as_vector(message.payload)
                self.global_D = self.global_D - self.optimizer.step(gradient_D)
                return [("global", int(event.sender), self.global_D)]
        site.model_D = 0.6 * site.model_D + 0.4 * decode_weights(message.payload, SIZE)
        site.merged_D, site.count, site.waits = site.model_D.copy(), 0, False
        return []

    def _local(self, site: Site, sender: Rank, change_D: Vector) -> list[tuple[str, int, Vector]]:
        site.model_D = site.model_D - site.optimizer.step(-self._weight(sender) * change_D)
        site.count += 1
        if site.count >= self.accumulate and not site.waits:
            if self.sites[sender] == self.sites[ME]:
                gradient_D = -self._site_weight(self.sites[ME]) * (site.model_D - site.merged_D)
                self.global_D = self.global_D - self.optimizer.step(gradient_D)
                site.model_D = 0.6 * site.model_D + 0.4 * self.global_D
                site.merged_D, site.count = site.model_D.copy(), 0
            else:
                site.waits = True
        return [("local", int(sender), site.model_D)]


def as_vector(payload: bytes | memoryview) -> Vector:
    return decode_gradient(payload, SIZE).weighted(np.float32(1)).astype(np.float64)


@given(
    seed=st.integers(0, 2**32),
    sites=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    accumulate=st.integers(1, 4),
)
@settings(max_examples=examples(60), deadline=None)
def test_every_model_equals_the_references(seed: int, sites: list[int], accumulate: int) -> None:
    sizes = np.random.default_rng(seed).integers(1, 9, sum(sites)).tolist()
    cluster = Watched(sizes, sites, seed % 999, accumulate)
    for rank in cluster.ranks:  # so that all know the batches of all
        cluster.step(rank)
    cluster.deliver_all()
    cluster.run(seed, steps=13)
    assert cluster.given["local"] >= 6 * len(sizes)
    assert (cluster.given["global"] > 0) == (len(sites) > 1)


def test_between_sites_one_message_for_k_changes_travels_to_servers_only() -> None:
    cluster = cluster_of([2] * 4, [2, 2], localSteps=1, accumulate=4)
    cluster.lockstep(12)
    sent = {
        (rank, one.peer): sum(
            other.message.kind is MessageKind.WEIGHTS
            for other in replica.instructions
            if isinstance(other, SendMessage) and other.peer == one.peer
        )
        for rank, replica in cluster.replicas.items()
        for one in replica.instructions
        if isinstance(one, SendMessage)
    }
    assert (sent[TWO, ME], sent[ME, TWO]) == (6, 6)  # of 24 changes in that site
    assert (sent[ONE, ME], sent[ME, ONE]) == (12, 12)
    others = {link: count for link, count in sent.items() if set(link) not in
              ({ME, ONE}, {ME, TWO}, {TWO, Rank(3)})}  # fmt: skip
    assert set(others.values()) == {0}


def test_a_stalled_worker_or_site_blocks_no_other() -> None:
    cluster = cluster_of([2] * 4, [2, 2], localSteps=1, accumulate=2)
    for _ in range(20):
        for rank in (ME, TWO):  # 1 and 3 stall
            cluster.step(rank)
        cluster.deliver_all()
    for _ in range(20):  # and now the other site
        cluster.step(ME)
        cluster.deliver_all()
    assert cluster.may_step(ME)
    assert cluster.may_step(ONE)


def test_a_site_continues_while_its_change_is_in_transit_and_takes_a_part_of_the_answer() -> None:
    cluster = cluster_of([2, 2], [1, 1], **{**PLAIN, "mergeWeight": 0.25}, accumulate=1)
    start_D = cluster.weights()[0]
    one_D = np.ones(SIZE, np.float32)
    cluster.step(ONE, one_D)
    for _ in range(2):  # these stay with the site
        cluster.step(ONE, one_D)
    while cluster.deliver(ONE, ME):
        pass
    while cluster.deliver(ME, ONE):
        pass
    cluster.step(ONE, np.zeros(SIZE, np.float32))
    # 0.75 of -3 steps, 0.25 of the global -1.
    np.testing.assert_allclose(cluster.weights()[1], start_D - 0.05 * 2.5, atol=1e-6)


def test_changes_count_by_batches_over_the_means() -> None:
    cluster = cluster_of([1, 3, 2], [2, 1], **PLAIN, accumulate=1)
    cluster.lockstep(1)
    start_D = cluster.replicas[ME].machine.state()["global_D"]
    cluster.step(
        ONE, np.ones(SIZE, np.float32)
    )  # three of the mean of two, in a site with four of the mean of three
    cluster.deliver_all()
    state = cluster.replicas[ME].machine.state()
    moved_D = np.asarray(state["global_D"]) - np.asarray(start_D)
    np.testing.assert_allclose(moved_D, np.full(SIZE, -0.05 * 1.5 * 4 / 3), atol=1e-5)


def test_a_change_of_another_sites_worker_is_refused() -> None:
    cluster = cluster_of([2, 2, 2], [2, 1], localSteps=1)
    cluster.step(ONE)
    change = next(one for one in cluster.links[ONE, ME] if one.kind is MessageKind.WEIGHTS)
    instructions = cluster.replicas[ME].machine.handle(MessageArrived(TWO, change))
    (refusal,) = [one for one in instructions if isinstance(one, RejectMessage)]
    assert "another site" in refusal.reason


def sent_to_global(cluster: SitesCluster, rank: Rank) -> list[Message]:
    """The changes of its site that this worker has sent."""
    return [
        one.message
        for one in cluster.replicas[rank].instructions
        if isinstance(one, SendMessage)
        and one.message.kind is MessageKind.WEIGHTS
        and one.message.weights_version % 4 == Form.SITE_CHANGE
    ]


def test_global_weights_that_are_refused_do_not_cut_a_site_off() -> None:
    """The next change includes the refused one, which the global server has applied."""
    cluster = cluster_of([2, 2], [1, 1], **PLAIN, accumulate=1)
    one_D = np.ones(SIZE, np.float32)
    cluster.step(ONE, one_D)
    (first,) = sent_to_global(cluster, ONE)
    wrong = Message(MessageKind.WEIGHTS, first.iteration, 0, int(Form.GLOBAL_MODEL), b"?")
    (refusal,) = cluster.replicas[ONE].machine.handle(MessageArrived(ME, wrong))
    assert isinstance(refusal, RejectMessage)
    cluster.step(ONE, one_D)
    _, second = sent_to_global(cluster, ONE)
    np.testing.assert_allclose(as_vector(second.payload), np.full(SIZE, -0.05), atol=1e-6)


def test_a_global_server_that_returns_begins_from_its_sites_weights() -> None:
    """It was the server while the other site was away. Its weights from then are out of date."""
    cluster = cluster_of([2, 2], [1, 1], localSteps=1, accumulate=1)
    cluster.leave(ME)
    cluster.run_at_least(0, steps=6)
    cluster.replace_worker(ME, ONE)
    cluster.run_at_least(0, steps=20)
    machine = cluster.replicas[ONE].machine
    before_D = np.asarray(machine.state()["global_D"])
    cluster.leave(ME)
    assert "global_D" not in machine.state()
    cluster.step(ONE)
    assert not np.allclose(machine.state()["global_D"], before_D, atol=1e-3)


@pytest.mark.parametrize("parameter", ["mergeWeight", "accumulate", "localPeriod"])
def test_parameters_of_zero_are_refused(parameter: str) -> None:
    with pytest.raises(SpecError, match=parameter):
        cluster_of([2], [1], **{parameter: 0})
