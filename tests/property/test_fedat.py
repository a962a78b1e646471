"""Policy `fedat` against a naive reference.

The tiers' weights sum to 1, mirror the counts, and are equal for equal counts. One tier is
averaging by samples with the proximal term in every step. Under random schedules every global model
of the server is the reference's, within the decimals of the polyline. The order of answers decides
the tiers. A departing worker, also the server, blocks no other and can return. Invalid messages are
refused and not waited for. Restored machines continue identically.

Left out: the polyline's own bounds (test_codecs), accuracy (tests/simulated).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import SpecError
from dlion_api.names import Rank
from dlion_core.codecs.polyline import decode_polyline, encode_polyline
from dlion_core.policies.interface import (
    Event,
    Instruction,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    ReplaceWeights,
    SendMessage,
    UpdateApplied,
)
from dlion_core.policies.weights.fedat import tier_weights
from example_counts import examples
from policy_cluster import linear_gradient
from sites_cluster import SitesCluster
from weighing_cluster import own_step
from weights_cluster import WeightsCluster, comparable, weights_spec

if TYPE_CHECKING:
    from dlion_api.spec import Spec

seeds = st.integers(0, 2**32)
batches = st.lists(st.integers(1, 6), min_size=1, max_size=5)
ME, ONE, TWO = Rank(0), Rank(1), Rank(2)


def job(**parameters: object) -> Spec:
    return weights_spec("fedat", **parameters)


def cluster_of(sizes: list[int], seed: int = 0, **parameters: object) -> SitesCluster:
    return SitesCluster(job(**parameters), sizes, [len(sizes)], seed=seed % 999)


@given(counts=st.lists(st.integers(1, 1000), min_size=1, max_size=9))
def test_weights_of_tiers_sum_to_one_and_mirror_the_counts(counts: list[int]) -> None:
    weights = tier_weights(counts)
    assert sum(weights) == pytest.approx(1)
    for mine, mirrored in zip(weights, reversed(counts), strict=True):
        assert mine == pytest.approx(mirrored / sum(counts))
    assert tier_weights([7] * len(counts)) == pytest.approx([1 / len(counts)] * len(counts))


@given(seed=seeds, sizes=batches, steps=st.integers(1, 4), pull=st.sampled_from([0, 0.5, 3.0]))
@settings(max_examples=examples(40), deadline=None)
def test_one_tier_averages_by_samples_with_the_proximal_term(
    seed: int, sizes: list[int], steps: int, pull: float
) -> None:
    parameters = {"tiers": [1] * len(sizes), "localSteps": steps, "proximal": pull, "decimals": 9}
    cluster, naive = (cluster_of(sizes, seed, **parameters) for _ in "ab")
    cluster.run(seed, steps=3 * steps)
    global_D = naive.replicas[ME].weights_D.astype(np.float64)
    for _ in range(3):
        mean_D = np.zeros_like(global_D)
        for rank in naive.ranks:
            weights_D = global_D.copy()
            for _ in range(steps):
                gradient_D, _ = linear_gradient(weights_D.astype(np.float32), *naive.batch(rank))
                weights_D -= 0.05 * (gradient_D + pull * (weights_D - global_D))
            mean_D += weights_D * (sizes[rank] / sum(sizes))
        global_D = mean_D
    for replica in cluster.replicas.values():
        np.testing.assert_allclose(replica.weights_D, global_D, rtol=1e-3, atol=1e-4)


class Watched(SitesCluster):
    """A naive server beside the real one, with the same answers."""

    def __init__(self, tiers: list[int], sizes: list[int], decimals: int, seed: int) -> None:
        self.tiers, self.decimals = tiers, decimals
        self.answers: dict[int, tuple[int, np.ndarray]] = {}
        self.models: dict[int, np.ndarray] = {}
        self.counts: dict[int, int] = {}
        self.samples = self.steps = self.given = 0
        parameters = {"tiers": tiers, "decimals": decimals, "localSteps": 2, "proximal": 0.3}
        super().__init__(job(**parameters), sizes, [len(sizes)], seed=seed)

    def handle(self, rank: Rank, event: Event) -> list[Instruction]:
        if rank == ME and isinstance(event, MessageArrived):
            message = event.message
            if message.kind is MessageKind.WEIGHTS:
                weights_D = decode_polyline(message.payload, 20, self.decimals)
                self.answers[event.sender] = (message.weights_version, weights_D)
        if rank == ME and isinstance(event, UpdateApplied):
            self.steps += 1
            self.samples += self.replicas[ME].local_batch_size
            if self.steps % 2 == 0:
                self.answers[ME] = (self.samples, self.replicas[ME].weights_D.copy())
                self.samples = 0
        expected_D = self._end_rounds() if rank == ME else None
        instructions = super().handle(rank, event)
        if rank == ME:
            found = [
                decode_polyline(one.message.payload, 20, self.decimals)
                for one in instructions
                if isinstance(one, SendMessage) and one.message.kind is MessageKind.WEIGHTS
            ] + [one.weights_D for one in instructions if isinstance(one, ReplaceWeights)]
            assert bool(found) == (expected_D is not None)
            for found_D in found:
                self.given += 1
                bound = 0.5 * 10**-self.decimals + 1e-5
                np.testing.assert_allclose(found_D, expected_D, rtol=1e-5, atol=bound)
        return instructions

    def _end_rounds(self) -> np.ndarray | None:
        for tier in sorted(set(self.tiers)):
            members = [rank for rank in self.ranks if self.tiers[rank] == tier]
            if not all(rank in self.answers for rank in members):
                continue
            answers = [self.answers.pop(rank) for rank in members]
            total = sum(samples for samples, _ in answers)
            self.models[tier] = sum(s / total * w.astype(np.float64) for s, w in answers)  # type: ignore[assignment]
            self.counts[tier] = self.counts.get(tier, 0) + 1
            known = sorted(self.models)
            updates = sum(self.counts[one] for one in known)
            return sum(  # type: ignore[return-value]
                self.counts[known[-1 - place]] / updates * self.models[one]
                for place, one in enumerate(known)
            )
        return None


@given(
    seed=seeds,
    tiers=st.lists(st.integers(1, 3), min_size=2, max_size=5),
    decimals=st.sampled_from([2, 4, 6]),
)
@settings(max_examples=examples(60), deadline=None)
def test_every_global_model_equals_the_references(
    seed: int, tiers: list[int], decimals: int
) -> None:
    sizes = np.random.default_rng(seed).integers(1, 9, len(tiers)).tolist()
    cluster = Watched(tiers, sizes, decimals, seed % 999)
    cluster.run(seed, steps=12)
    assert cluster.given >= 6 * len(set(tiers))


def test_a_fast_tier_does_not_wait_for_a_slow_one() -> None:
    cluster = cluster_of([2, 2, 2], tiers=[1, 1, 2], localSteps=1)
    for _ in range(5):
        cluster.step(ME)
        cluster.step(ONE)
        cluster.deliver_all()
    assert cluster.may_step(ME)
    server = cluster.replicas[ME].machine.state()
    assert (server["tier_count_1"], server.get("tier_count_2")) == (5, None)
    cluster.step(TWO)
    cluster.deliver_all()
    assert cluster.replicas[ME].machine.state()["tier_count_2"] == 1


@pytest.mark.parametrize(
    ("count", "tiers"), [(2, [1, 2, 2, 1]), (4, [2, 4, 3, 1]), (9, [2, 4, 3, 1])]
)
def test_the_order_of_answers_decides_the_tiers(count: int, tiers: list[int]) -> None:
    cluster = cluster_of([2] * 4, tierCount=count, profileRounds=2, localSteps=1)
    for _ in range(2):
        assert not isinstance(cluster.replicas[ME].machine.state().get("tier_of_0"), int)
        for rank in (Rank(3), ME, TWO, ONE):
            cluster.step(rank)
            while rank != ME and cluster.deliver(rank, ME):
                pass
        cluster.deliver_all()
    state = cluster.replicas[ME].machine.state()
    assert [state[f"tier_of_{rank}"] for rank in cluster.ranks] == tiers


def test_a_server_that_takes_over_weights_keeps_its_tiers_and_their_models() -> None:
    cluster = cluster_of([2] * 4, tierCount=2, profileRounds=1, localSteps=1)
    cluster.run(0, steps=6)
    machine = cluster.replicas[ME].machine
    before = machine.state()
    machine.take_over(9)
    after = machine.state()
    assert (after["iteration"], "anchor_D" in after, after["round_steps"]) == (9, False, 0)
    lasting = {"version", "profiled", "tier_of_0", "tier_model_1", "tier_count_1", "global_D"}
    assert lasting <= before.keys()
    assert all(np.array_equal(after[name], before[name]) for name in lasting)


@given(seed=seeds, sizes=batches, turn=st.integers(0, 120), declared=st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_a_departing_worker_blocks_no_other(
    seed: int, sizes: list[int], turn: int, declared: bool
) -> None:
    tiers = [1 + at % 2 for at in range(len(sizes))] if declared else []
    cluster = cluster_of(sizes, seed, tiers=tiers, tierCount=2, localSteps=2)
    rng = np.random.default_rng(seed)
    for _ in range(turn):
        cluster.turn(rng, steps=12)
    cluster.leave(Rank(int(rng.integers(len(sizes)))))
    cluster.run_at_least(seed, steps=30)


@given(seed=seeds, turn=st.integers(0, 120), away=st.integers(0, 60), gone=st.integers(0, 3))
@settings(max_examples=examples(100), deadline=None)
def test_a_returning_worker_takes_part_again(seed: int, turn: int, away: int, gone: int) -> None:
    cluster = cluster_of([2, 3, 1, 2], seed, tierCount=2, localSteps=2, profileRounds=1)
    rng = np.random.default_rng(seed)
    for _ in range(turn):
        cluster.turn(rng, steps=10)
    kept = cluster.replicas[Rank(gone)].machine.state()
    cluster.leave(Rank(gone))
    for _ in range(away):
        cluster.turn(rng, steps=10)
    cluster.replace_worker(Rank(gone), min(cluster.alive), kept if gone == ME else None)
    cluster.run_at_least(seed, steps=40)
    state = cluster.replicas[ME].machine.state()
    assert all(int(state[f"tier_count_{tier}"]) >= 2 for tier in (1, 2))


@pytest.mark.parametrize("rounds_before", [0, 3])
def test_an_answer_before_its_link_event_blocks_no_worker(rounds_before: int) -> None:
    cluster = WeightsCluster(job(tiers=[1, 1], localSteps=1), [2, 2])
    client = Rank(1)
    cluster.lockstep(rounds_before)
    cluster.handle(ME, MemberLeft(client))
    cluster.handle(client, MemberLeft(ME))
    cluster.handle(client, MemberJoined(ME))
    cluster.step(client)
    while cluster.deliver(client, ME):
        pass
    cluster.handle(ME, MemberJoined(client, cluster.replicas[client].iteration))
    for _ in range(20):
        for rank in cluster.ranks:
            if cluster.may_step(rank):
                cluster.step(rank)
        cluster.deliver_all()
    assert all(one.iteration >= rounds_before + 15 for one in cluster.replicas.values())


def test_without_the_server_no_worker_is_pulled_to_its_last_weights() -> None:
    cluster = cluster_of([2, 2, 2], tiers=[1, 1, 1], localSteps=1, proximal=3.0)
    cluster.lockstep(3)
    cluster.step(ONE)
    cluster.leave(ME)  # one has answered, the other has not
    gradient_D = np.ones(20, np.float32)
    cluster.step(TWO, gradient_D)
    for rank in (ONE, TWO):
        before_D = cluster.replicas[rank].weights_D.copy()
        for _ in range(4):
            cluster.step(rank, gradient_D)
        moved_D = cluster.replicas[rank].weights_D - before_D
        np.testing.assert_allclose(moved_D, -4 * cluster.rate * gradient_D, atol=1e-6)


def test_a_worker_that_missed_a_profile_round_is_in_the_slowest_tier() -> None:
    cluster = cluster_of([2] * 4, tierCount=3, profileRounds=2, localSteps=1)
    late = Rank(3)

    def answer(ranks: list[Rank]) -> None:
        for rank in ranks:
            cluster.step(rank)
            while rank != ME and cluster.deliver(rank, ME):
                pass
        cluster.deliver_all()

    cluster.leave(late)
    answer([ONE, ME, TWO])
    cluster.replace_worker(late, ME)
    cluster.deliver_all()
    answer([late, ONE, ME, TWO])
    state = cluster.replicas[ME].machine.state()
    assert [state.get(f"tier_of_{rank}") for rank in cluster.ranks] == [2, 1, 3, None]
    answer([TWO])
    assert "tier_count_3" not in cluster.replicas[ME].machine.state()  # it waits for the late one
    answer([late])
    assert cluster.replicas[ME].machine.state()["tier_count_3"] == 1


def test_an_empty_tier_has_no_weight() -> None:
    cluster = cluster_of([2, 2, 2], tiers=[1, 1, 2], localSteps=1)
    cluster.lockstep(3)
    cluster.leave(TWO)
    cluster.alive.discard(TWO)
    for rank in (ME, ONE):
        cluster.step(rank)
    answers = [cluster.replicas[rank].weights_D.copy() for rank in (ME, ONE)]
    while cluster.deliver(ONE, ME):
        pass
    np.testing.assert_allclose(cluster.replicas[ME].weights_D, np.mean(answers, axis=0), atol=1e-4)


@given(seed=seeds, rank=st.sampled_from([ME, ONE]))
@settings(max_examples=examples(20), deadline=None)
def test_a_restored_machine_continues_identically(seed: int, rank: Rank) -> None:
    """Its peers' links are new; a server sends them the global weights again."""
    cluster = cluster_of([3, 5, 4], seed, tierCount=2, localSteps=2, profileRounds=1)
    cluster.lockstep(7)
    twin = copy.deepcopy(cluster)
    restored = twin.replicas[rank]
    state = restored.machine.state()
    restored.machine = twin.built(restored)
    restored.machine.restore(copy.deepcopy(state))
    for peer in cluster.ranks:
        if peer != rank:
            restored.machine.handle(MemberJoined(peer, 7))
    assert str(restored.machine.state()) == str(state)
    rng = np.random.default_rng(seed)
    for iteration in range(8, 14):
        vector_D = rng.standard_normal(20).astype(np.float32)
        answer = Message(MessageKind.WEIGHTS, iteration, 2, 1000, encode_polyline(vector_D, 4))
        sender = Rank(int(rng.choice([1, 2]))) if rank == ME else ME
        for one in (cluster, twin):
            one.replicas[rank].instructions.clear()
            if not one.replicas[rank].machine.waiting_for():
                one.handle(rank, own_step(iteration, vector_D, 2))
            if iteration % 2 == 0:
                one.handle(rank, MessageArrived(sender, replace(answer, weights_version=iteration)))
        assert comparable(cluster.replicas[rank].instructions) == comparable(
            twin.replicas[rank].instructions
        )
    np.testing.assert_array_equal(cluster.weights(), twin.weights())


WHOLE = encode_polyline(np.ones(20, np.float32), 4)


@pytest.mark.parametrize(
    ("at", "message", "words"),
    [
        (ME, Message(MessageKind.WEIGHTS, 1, 1, 1, b"xyz"), "3 bytes"),
        (ME, Message(MessageKind.WEIGHTS, 1, 1, 0, WHOLE), "0 samples"),
        (ME, Message(MessageKind.WEIGHTS, 1, 1, 10**9, WHOLE), "samples"),
        (ME, Message(MessageKind.GRADIENT, 1, 1, 1, WHOLE), "GRADIENT"),
        (ONE, Message(MessageKind.WEIGHTS, 1, 1, 1, WHOLE), "the server is 0"),
        (ONE, Message(MessageKind.PROGRESS, 1, 1, 1, b"x"), "payload"),
    ],
)
def test_an_invalid_message_is_refused(at: Rank, message: Message, words: str) -> None:
    machine = cluster_of([2, 2, 2]).replicas[at].machine
    instructions = machine.handle(MessageArrived(TWO, message))
    (refusal,) = [one for one in instructions if isinstance(one, RejectMessage)]
    assert words in refusal.reason


def test_a_server_does_not_wait_after_an_invalid_message() -> None:
    cluster = cluster_of([2, 2], tiers=[1, 1], localSteps=1)
    cluster.step(ME)
    cluster.step(ONE)
    server, client = cluster.replicas[ME].machine, cluster.replicas[ONE].machine
    assert (server.waiting_for(), client.waiting_for()) == ({ONE}, {ME})
    instructions = server.handle(MessageArrived(ONE, Message(MessageKind.WEIGHTS, 1, 2, 2, b"?")))
    assert {type(one) for one in instructions} == {RejectMessage, SendMessage, ReplaceWeights}
    assert not server.waiting_for()
    (refusal,) = client.handle(MessageArrived(ME, Message(MessageKind.WEIGHTS, 1, 0, 1, b"?")))
    assert isinstance(refusal, RejectMessage)
    assert not client.waiting_for()


def test_a_manifest_with_an_unfit_server_or_tiers_is_refused() -> None:
    with pytest.raises(SpecError, match="server"):
        cluster_of([2, 2], server=7)
    with pytest.raises(SpecError, match="tiers"):
        cluster_of([2, 2], tiers=[1])


def test_a_gradient_that_is_not_finite_is_never_used() -> None:
    cluster = cluster_of([2, 2])
    with pytest.raises(ValueError, match="NaN or infinite"):
        cluster.step(ME, np.full(20, np.nan, np.float32))
