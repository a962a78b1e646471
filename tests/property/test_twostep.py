"""Policy `twostep` against its rule in naive form, and its limits.

On every link released + pending = the sum of velocities, bit for bit. A release's cost is within
the cost model's bound, and with one more entry it would not be. The threshold rises as the link's
rate falls, and as its delay grows. Each release counts at the receiver by its samples. Models of
sites combine to their mean by samples, in turns that do not shift when weights are taken over. No
worker blocks. A restored worker continues identically. Invalid messages and double momentum are
refused.

Left out: accuracy (docs/policies.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import SpecError
from dlion_api.names import Rank
from dlion_api.spec import Spec
from dlion_core.codecs import (
    HEADER_BYTES,
    ValueCodec,
    coded_bytes,
    decode_gradient,
    encode_weights,
    encode_whole,
)
from dlion_core.policies.catalogue import parameters_of
from dlion_core.policies.factory import build
from dlion_core.policies.gradient.twostep import LinkReleases
from dlion_core.policies.interface import (
    ApplyGradient,
    AverageWeights,
    BudgetsChanged,
    MemberJoined,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    SendMessage,
    SendWeights,
    UpdateApplied,
)
from dlion_core.policies.parameters import TwostepParameters
from example_counts import examples
from policy_cluster import LEARNING_RATE, spec
from weighing_cluster import View, WeighingCluster, comparable, own_step, run_at_random

if TYPE_CHECKING:
    from dlion_core.policies.interface import Flat, PolicyMachine

ME, ONE, TWO = Rank(0), Rank(1), Rank(2)
SIZE = 200
seeds = st.integers(0, 2**32)
rates = st.integers(0, 900)


def job(*, optimizers: float = 0.0, codec: str = "float32", **values: object) -> Spec:
    """A job whose optimizer may have a momentum, too."""
    built = spec(exchange={"policy": "twostep", "codec": codec, "parameters": values})
    optimizer = replace(built.trainer.optimizer, momentum=optimizers)
    return replace(built, trainer=replace(built.trainer, optimizer=optimizer))


class Sites(WeighingCluster):
    """Workers 0 and 1 at one site, each other one at its own."""

    def machine(self, rank: Rank, weights_D: Flat) -> PolicyMachine:
        sites = {peer: "a" if peer < 2 else f"b{peer}" for peer in self.ranks}
        view = View(weights_D)
        return build(self.job_spec, rank, self.layout, self.ranks, sites=sites, replica=view)


def whole_numbers(rng: np.random.Generator, size: int) -> Flat:
    """With a momentum of one half, sums of velocities are exact. Many ties, half of them zeros."""
    return (rng.integers(-5, 6, size) * (rng.random(size) < 0.5)).astype(np.float32)


@pytest.mark.parametrize("codec", [ValueCodec.FLOAT32, ValueCodec.FLOAT16])  # exact here
@given(
    seed=seeds,
    rate=st.dictionaries(st.sampled_from([ONE, TWO]), rates),
    delay=st.floats(0, 3),
    threshold=st.sampled_from([0.0, 4.0]),
)
@settings(deadline=None, max_examples=examples(50))
def test_released_and_pending_are_the_sum_of_velocities_within_the_cost_bound(
    codec: ValueCodec, seed: int, rate: dict[Rank, int], delay: float, threshold: float
) -> None:
    rng = np.random.default_rng(seed)
    releases = LinkReleases(SIZE, codec, TwostepParameters(momentum=0.5, threshold=threshold))
    velocity_D = np.zeros(SIZE, np.float32)
    owed = {peer: np.zeros(SIZE, np.float32) for peer in (ONE, TWO)}
    waited = dict.fromkeys(owed, 0)
    for _ in range(10):
        gradient_D = whole_numbers(rng, SIZE)
        velocity_D = np.float32(0.5) * velocity_D + gradient_D
        links = BudgetsChanged(rate, {ONE: delay})
        sent = releases.prepare(gradient_D, [ONE, TWO], links)
        np.testing.assert_array_equal(sent.own.weighted(np.float32(1)), velocity_D)
        for peer in owed:
            owed[peer] += velocity_D
            waited[peer] += 1
            latency = delay if peer == ONE else 0.0
            share = min(1.0, max(0.0, waited[peer] - latency))
            room = rate.get(peer, float("inf")) * share if share else 0.0
            passing_D = np.abs(owed[peer]) >= max(threshold, 2.0**-149)
            fits = coded_bytes(int(passing_D.sum()), SIZE, codec) <= room
            released_D = np.zeros(SIZE, np.float32)
            if peer in sent.payloads:
                assert len(sent.payloads[peer]) <= room
                part = decode_gradient(sent.payloads[peer], SIZE)
                released_D = part.weighted(np.float32(1))
                waited[peer] = 0
            where_D = released_D != 0
            if fits:
                np.testing.assert_array_equal(where_D, passing_D)
            elif where_D.any():
                assert np.abs(owed[peer])[where_D].min() >= np.abs(owed[peer])[~where_D].max()
                assert coded_bytes(int(where_D.sum()) + 1, SIZE, codec) > room
            owed[peer] -= released_D
            state = releases.state()
            np.testing.assert_array_equal(state[f"twostep_gathered_D_of_{peer}"], owed[peer])


@given(seed=seeds, rates_=st.lists(rates, min_size=2, max_size=2), delay=st.floats(0, 1))
@settings(deadline=None, max_examples=examples(60))
def test_the_threshold_rises_as_the_rate_falls_and_as_the_delay_grows(
    seed: int, rates_: list[int], delay: float
) -> None:
    gradient_D = np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)
    releases = LinkReleases(SIZE, ValueCodec.FLOAT16, TwostepParameters())
    fast, slow = max(rates_), min(rates_)
    releases.prepare(gradient_D, [ONE, TWO], BudgetsChanged({ONE: fast, TWO: slow}))
    assert releases.threshold[TWO] >= releases.threshold[ONE]
    far = LinkReleases(SIZE, ValueCodec.FLOAT16, TwostepParameters())
    far.prepare(gradient_D, [ONE], BudgetsChanged({ONE: fast}, {ONE: delay}))
    assert far.threshold[ONE] >= releases.threshold[ONE]


def test_the_threshold_rises_with_the_entries_that_fit() -> None:
    gradient_D = np.arange(1, SIZE + 1, dtype=np.float32)
    releases = LinkReleases(SIZE, ValueCodec.FLOAT32, TwostepParameters())
    fits = {entries: coded_bytes(entries, SIZE, ValueCodec.FLOAT32) for entries in (40, 10, 1)}
    for entries, bytes_ in fits.items():
        releases = LinkReleases(SIZE, ValueCodec.FLOAT32, TwostepParameters())
        releases.prepare(gradient_D, [ONE], BudgetsChanged({ONE: bytes_}))
        assert releases.threshold[ONE] == SIZE + 1 - entries
    releases.prepare(gradient_D, [ONE], BudgetsChanged({ONE: HEADER_BYTES}))
    assert releases.threshold[ONE] == float("inf")


def test_a_slow_link_is_used_less_often() -> None:
    rng = np.random.default_rng(3)
    releases = LinkReleases(SIZE, ValueCodec.FLOAT16, TwostepParameters())
    links = BudgetsChanged({ONE: 1000, TWO: 1000}, {ONE: 0.2, TWO: 2.5})
    sent = [
        sorted(releases.prepare(whole_numbers(rng, SIZE), [ONE, TWO], links).payloads)
        for _ in range(9)
    ]
    assert sent == [[ONE], [ONE], [ONE, TWO]] * 3


@given(seed=seeds, batches=st.lists(st.integers(1, 5), min_size=2, max_size=4))
@settings(max_examples=examples(20), deadline=None)
def test_every_release_counts_by_its_samples_at_every_receiver(
    seed: int, batches: list[int]
) -> None:
    cluster = WeighingCluster(job(bound=3, momentum=0.5), batches, seed=seed % 999)
    rng = np.random.default_rng(seed)
    for rank in cluster.ranks:  # a first round of zeros, so that all learn the batch sizes
        cluster.step(rank, np.zeros(20, np.float32))
    cluster.deliver_all()
    start_D, gathered = cluster.replicas[ME].weights_D.copy(), np.zeros(20)
    velocity_of = {rank: np.zeros(20) for rank in cluster.ranks}
    for _ in range(30):
        rank = cluster.ranks[int(rng.integers(len(batches)))]
        budget = int(rng.choice([0, 30, 60, 500]))
        cluster.budgets(rank, dict.fromkeys(set(cluster.ranks) - {rank}, budget))
        if cluster.may_step(rank):
            gradient_D = whole_numbers(rng, 20)
            cluster.step(rank, gradient_D)
            velocity_of[rank] = 0.5 * velocity_of[rank] + gradient_D
            gathered += batches[rank] / sum(batches) * velocity_of[rank]
        else:
            cluster.deliver_all()
    cluster.deliver_all()
    for rank, replica in cluster.replicas.items():
        waiting_D = sum(
            batches[peer]
            / sum(batches)
            * cluster.replicas[peer].machine.state().get(f"twostep_gathered_D_of_{rank}", 0)
            for peer in cluster.ranks
        )
        moved_D = (start_D - replica.weights_D) / float(LEARNING_RATE)
        np.testing.assert_allclose(moved_D, gathered - waiting_D, atol=1e-3)


def test_models_of_sites_combine_to_their_mean_by_samples() -> None:
    batches = [3, 1, 6, 2]  # sites of 4, 6 and 2 samples
    cluster = Sites(job(combineEverySteps=2, momentum=0), batches)
    for rank in cluster.ranks:  # a first round of zeros, so that all learn the batch sizes
        cluster.step(rank, np.zeros(20, np.float32))
    cluster.deliver_all()
    for replica in cluster.replicas.values():
        replica.weights_D[:] = np.arange(20) * (replica.rank + 1)
    before = [replica.weights_D.astype(np.float64) for replica in cluster.replicas.values()]
    returned = [
        cluster.handle(rank, own_step(2, np.zeros(20, np.float32), batches[rank]))
        for rank in cluster.ranks
    ]
    receivers = [
        [one.peer for one in instructions if isinstance(one, SendWeights)]
        for instructions in returned
    ]
    assert receivers == [[2, 3], [], [0, 1, 3], [0, 1, 2]]
    cluster.deliver_all()
    for rank, own in zip(cluster.ranks, before, strict=True):
        of_site = [before[0] if rank > 1 else own, before[2], before[3]]
        mean_D = np.average(of_site, axis=0, weights=[4, 6, 2])
        np.testing.assert_allclose(cluster.replicas[rank].weights_D, mean_D, rtol=1e-5)


def test_a_worker_that_takes_over_weights_sends_its_sites_model_with_the_others() -> None:
    cluster = Sites(job(combineEverySteps=4), [2, 2, 2])
    machine = cluster.replicas[ME].machine
    machine.take_over(9)
    for peer in (ONE, TWO):
        cluster.handle(ME, MemberJoined(peer, 9))
    receivers = []
    for iteration in (10, 11, 12):
        instructions = machine.handle(own_step(iteration, np.ones(20, np.float32), 2))
        receivers.append([one.peer for one in instructions if isinstance(one, SendWeights)])
        for peer in (ONE, TWO):
            machine.handle(MessageArrived(peer, Message(MessageKind.PROGRESS, iteration, 2)))
    assert receivers == [[], [], [TWO]]


def test_a_model_of_the_own_site_or_a_duplicate_is_not_merged() -> None:
    cluster = Sites(job(combineEverySteps=2), [2, 2, 2])
    machine = cluster.replicas[ME].machine
    weights = Message(MessageKind.WEIGHTS, 2, payload=encode_weights(np.ones(20), "float32"))
    (refusal,) = machine.handle(MessageArrived(ONE, weights))
    assert isinstance(refusal, RejectMessage)
    (mix,) = machine.handle(MessageArrived(TWO, weights))
    assert isinstance(mix, AverageWeights)
    assert mix.fraction == pytest.approx(1 / 3)  # two workers here, one there
    assert machine.handle(MessageArrived(TWO, weights)) == []
    (refusal,) = machine.handle(
        MessageArrived(TWO, Message(MessageKind.WEIGHTS, 4, payload=b"nonsense"))
    )
    assert isinstance(refusal, RejectMessage)


@given(seed=seeds, bound=st.integers(0, 3))
@settings(max_examples=examples(20), deadline=None)
def test_a_departing_worker_blocks_no_other(seed: int, bound: int) -> None:
    cluster = Sites(job(bound=bound, combineEverySteps=2), [2, 3, 4], seed=seed % 99)
    run_at_random(cluster, seed, steps=4)
    cluster.leave(TWO)
    for rank in (ME, ONE):
        state = cluster.replicas[rank].machine.state()
        assert f"twostep_gathered_D_of_{TWO}" not in state
    for _ in range(10):
        for rank in (ME, ONE):
            assert cluster.may_step(rank)
            cluster.step(rank)
        cluster.deliver_all()


@given(seed=seeds)
@settings(max_examples=examples(10), deadline=None)
def test_a_restored_machine_continues_identically(seed: int) -> None:
    cluster = Sites(job(combineEverySteps=3), [3, 5, 4])
    for rank in cluster.ranks:
        cluster.budgets(rank, dict.fromkeys(set(cluster.ranks) - {rank}, 30))
    run_at_random(cluster, seed, steps=5)
    original = cluster.replicas[ME]
    twin_D = original.weights_D.copy()
    twin = cluster.machine(ME, twin_D)
    twin.restore(original.machine.state())
    for peer in (ONE, TWO):
        twin.handle(MemberJoined(peer, 5))
    rng = np.random.default_rng(seed)
    for iteration in range(6, 12):
        gradients = [rng.standard_normal(20).astype(np.float32) for _ in range(2)]
        velocity = encode_whole(gradients[1], ValueCodec.FLOAT32)
        velocity_messages = (
            Message(MessageKind.GRADIENT, iteration, n, 0, velocity) for n in (4, 5)
        )
        for event in (
            BudgetsChanged({ONE: 30, TWO: 60}, {TWO: 1.5}),
            own_step(iteration, gradients[0], 3),
            *(
                MessageArrived(peer, one)
                for peer, one in zip((TWO, ONE), velocity_messages, strict=True)
            ),
        ):
            instructions, again = cluster.handle(ME, event), twin.handle(event)
            assert comparable(again) == comparable(instructions)
            for one in again:
                if isinstance(one, ApplyGradient):
                    twin_D -= LEARNING_RATE * one.gradient_D
                    twin.handle(UpdateApplied())
    np.testing.assert_array_equal(twin_D, original.weights_D)


def test_staleness_is_reported() -> None:
    cluster = WeighingCluster(job(), [2, 2])
    for _ in range(3):
        cluster.step(ONE)
    cluster.step(ME)
    cluster.deliver_all()
    state = cluster.replicas[ME].machine.state()
    assert (state["staleness_count"], state["staleness_max"]) == (3, 1)


def test_every_member_is_notified_of_a_step_without_a_release() -> None:
    cluster = WeighingCluster(job(), [2, 2, 2])
    cluster.budgets(ME, {ONE: 0, TWO: 0})
    cluster.step(ME)
    sent = [one for one in cluster.replicas[ME].instructions if isinstance(one, SendMessage)]
    assert [(one.peer, one.message.kind) for one in sent] == [
        (ONE, MessageKind.PROGRESS),
        (TWO, MessageKind.PROGRESS),
    ]


def test_a_gradient_that_is_not_finite_is_refused_and_leaves_no_trace() -> None:
    releases = LinkReleases(3, ValueCodec.FLOAT32, TwostepParameters())
    with pytest.raises(ValueError, match="NaN or infinite"):
        releases.prepare(np.array([1, np.nan, 0], np.float32), [ONE], BudgetsChanged({}))
    assert not any(np.any(value) for value in releases.state().values())


def test_momentum_here_and_in_the_optimizer_is_refused() -> None:
    layout = WeighingCluster(job(), [1]).layout
    with pytest.raises(SpecError, match="policy twostep applies momentum"):
        build(job(optimizers=0.9), ME, layout, [ME])


@pytest.mark.parametrize("wrong", [{"ratio": 0}, {"momentum": 1}, {"threshold": -1}, {"share": 1}])
def test_parameters_out_of_bounds_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SpecError, match=next(iter(wrong))):
        parameters_of(spec(exchange={"policy": "twostep", "parameters": wrong}))
