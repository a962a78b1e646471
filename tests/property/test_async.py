"""Policy `async` against plain SGD and a naive reference.

Without delay it is plain SGD. Gradients count once, whole or by their share. On a quadratic with
delay, compensated updates end nearer the optimum. Compensation follows its formula. Staleness is
counted, and its bound holds. A restored machine continues identically. A departing worker blocks no
other.

Left out: real links (tests/local), accuracy (tests/simulated).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_core.codecs import ValueCodec, encode_whole
from dlion_core.policies.interface import (
    ApplyGradient,
    BudgetsChanged,
    Layout,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    ReplaceWeights,
    UpdateApplied,
)
from example_counts import examples
from policy_cluster import LEARNING_RATE, linear_gradient, spec
from weighing_cluster import WeighingCluster, comparable, own_step, run_at_random

if TYPE_CHECKING:
    from dlion_api.spec import Spec

seeds = st.integers(0, 2**32)
ME, ONE, TWO = Rank(0), Rank(1), Rank(2)


def job(**parameters: object) -> Spec:
    return spec(exchange={"policy": "async", "codec": "float32", "parameters": parameters})


def whole(value_D: np.ndarray, iteration: int, batch: int = 1) -> Message:
    payload = encode_whole(value_D.astype(np.float32), ValueCodec.FLOAT32)
    return Message(MessageKind.GRADIENT, iteration, local_batch_size=batch, payload=payload)


@pytest.mark.parametrize("compensation", [0.0, 0.5])
@given(seed=seeds, batch=st.integers(1, 6))
@settings(max_examples=examples(15), deadline=None)
def test_without_delay_it_is_plain_sgd(compensation: float, seed: int, batch: int) -> None:
    """One worker steps at a time, with a server that does not step."""
    parameters = {"server": 0, "step": "whole", "compensation": compensation, "bound": 100}
    cluster, plain = (WeighingCluster(job(**parameters), [1, batch], seed=seed % 999) for _ in "ab")
    weights_D = plain.replicas[ONE].weights_D
    for _ in range(10):
        cluster.step(ONE)
        assert cluster.replicas[ONE].machine.waiting_for() == {ME}
        cluster.deliver_all()
        weights_D -= LEARNING_RATE * linear_gradient(weights_D, *plain.batch(ONE))[0]
    for rank in (ME, ONE):
        np.testing.assert_array_equal(cluster.replicas[rank].weights_D, weights_D)
    assert cluster.replicas[ME].machine.state()["staleness_max"] == 0


@pytest.mark.parametrize("server", [None, 0])
@pytest.mark.parametrize("step", ["whole", "share"])
@given(seed=seeds, batches=st.lists(st.integers(1, 5), min_size=2, max_size=4))
@settings(max_examples=examples(15), deadline=None)
def test_every_gradient_counts_once(
    step: str, server: int | None, seed: int, batches: list[int]
) -> None:
    """By its share of the samples, once all batch sizes are known, or whole."""
    parameters = {"step": step, "bound": 3} | ({} if server is None else {"server": server})
    cluster = WeighingCluster(job(**parameters), batches, seed=seed % 999)
    for rank in cluster.ranks:  # a first round of zeros, so that all learn the batch sizes
        cluster.step(rank, np.zeros(20, np.float32))
    cluster.deliver_all()
    start_D = cluster.replicas[ME].weights_D.copy()
    rng, expected_D = np.random.default_rng(seed), np.zeros(20)
    for _ in range(30):
        rank = cluster.ranks[int(rng.integers(len(batches)))]
        if cluster.may_step(rank):
            gradient_D = rng.standard_normal(20).astype(np.float32)
            cluster.step(rank, gradient_D)
            weight = 1.0 if step == "whole" else batches[rank] / sum(batches)
            expected_D -= float(LEARNING_RATE) * weight * gradient_D
        else:
            cluster.deliver_all()
    cluster.deliver_all()
    for rank in cluster.ranks if server is None else [ME]:
        moved_D = cluster.replicas[rank].weights_D - start_D
        np.testing.assert_allclose(moved_D, expected_D, atol=1e-5)


@given(seed=seeds, lambda_=st.floats(0.01, 2))
@settings(max_examples=examples(30), deadline=None)
def test_compensation_follows_its_formula(seed: int, lambda_: float) -> None:
    parameters = {"compensation": lambda_, "step": "whole", "bound": 100}
    cluster = WeighingCluster(job(**parameters), [1, 1, 1], seed=seed % 999)
    rng, replica = np.random.default_rng(seed), cluster.replicas[ME]
    then_D = {ONE: replica.weights_D.copy(), TWO: replica.weights_D.copy()}
    count_of = {ONE: 0, TWO: 0}
    for turn in range(12):
        gradient_D = rng.standard_normal(20).astype(np.float32)
        now_D = replica.weights_D.astype(np.float64)
        sender = (ME, ONE, TWO)[int(rng.integers(3))]
        if sender == ME:
            cluster.step(ME, gradient_D)
            expected_D = gradient_D.astype(np.float64)
        else:
            count_of[sender] += 1
            message = whole(gradient_D, count_of[sender])
            cluster.handle(ME, MessageArrived(sender, message))
            expected_D = gradient_D + lambda_ * gradient_D**2.0 * (now_D - then_D[sender])
            then_D[sender] = replica.weights_D.copy()
        (
            np.testing.assert_allclose(
                replica.weights_D, now_D - float(LEARNING_RATE) * expected_D, rtol=1e-4, atol=1e-5
            ),
            turn,
        )


@given(delay=st.integers(2, 5), start=st.floats(0.5, 2), pace=st.floats(0.8, 1.1))
@settings(max_examples=examples(30), deadline=None)
def test_compensated_updates_with_delay_end_nearer_the_optimum(
    delay: int, start: float, pace: float
) -> None:
    """Workers in turn send the slope at the weights of `delay` updates ago, at a learning rate near
    the largest that converges."""
    highest = 2 * np.sin(np.pi / (2 * (2 * delay + 1)))
    curvature = pace * highest / float(LEARNING_RATE)
    uncompensated, compensated = (
        farthest_at_the_end(delay, start, curvature, compensation)
        for compensation in (0.0, 0.08 / (highest * start**2))
    )
    assert compensated < uncompensated


def farthest_at_the_end(delay: int, start: float, curvature: float, compensation: float) -> float:
    """The largest distance from the optimum in the last updates of many."""
    parameters = {"server": 0, "step": "whole", "compensation": compensation, "bound": 10**6}
    layout = Layout(("w",), (1,))
    cluster = WeighingCluster(job(**parameters), [1] * (delay + 2), layout=layout)
    for replica in cluster.replicas.values():
        replica.weights_D[:] = start
    for peer in cluster.ranks[1:]:  # they read that start
        cluster.handle(ME, MemberLeft(peer))
        cluster.handle(ME, MemberJoined(peer))
    distances = []
    for turn in range(12 * delay):
        rank = cluster.ranks[1 + turn % (delay + 1)]
        cluster.step(rank, np.float32(curvature) * cluster.replicas[rank].weights_D)
        cluster.deliver_all()
        distances.append(abs(float(cluster.replicas[ME].weights_D[0])))
    assert cluster.replicas[ME].machine.state()["staleness_max"] == delay
    return max(distances[-2 * delay - 2 :])


@given(seed=seeds, workers=st.integers(2, 4), bound=st.integers(0, 3))
@settings(max_examples=examples(20), deadline=None)
def test_no_worker_is_further_ahead_than_the_bound(seed: int, workers: int, bound: int) -> None:
    class Bounded(WeighingCluster):
        def step(self, rank: Rank, gradient_D: np.ndarray | None = None) -> None:
            last = self.replicas[rank].iteration
            assert min(one.iteration for one in self.replicas.values()) >= last - bound
            super().step(rank, gradient_D)

    run_at_random(Bounded(job(bound=bound), [2] * workers), seed, steps=10)


@pytest.mark.parametrize("server", [None, 1])
@given(seed=seeds, workers=st.integers(2, 4), turn=st.integers(1, 40), gone=st.integers(0, 1))
@settings(max_examples=examples(20), deadline=None)
def test_a_departing_worker_blocks_no_other(
    server: int | None, seed: int, workers: int, turn: int, gone: int
) -> None:
    parameters = {"bound": 2} | ({} if server is None else {"server": server})
    cluster = WeighingCluster(job(**parameters), [2] * workers)
    run_at_random(cluster, seed, steps=8, leaves=(turn, Rank(gone)))


def test_a_returning_worker_gets_the_servers_weights() -> None:
    cluster = WeighingCluster(job(server=0), [2, 2, 2])
    cluster.lockstep(3)
    replica = cluster.replicas[ONE]
    kept, weights_D = replica.machine.state(), replica.weights_D.copy()
    cluster.lockstep(2)
    cluster.leave(ONE)
    cluster.restore_worker(ONE, kept, weights_D)
    cluster.deliver_all()
    np.testing.assert_array_equal(cluster.replicas[ONE].weights_D, cluster.replicas[ME].weights_D)
    cluster.lockstep(2)


@pytest.mark.parametrize("server", [None, 0])
@given(seed=seeds)
@settings(max_examples=examples(10), deadline=None)
def test_a_restored_machine_continues_identically(server: int | None, seed: int) -> None:
    parameters = {"compensation": 0.1} | ({} if server is None else {"server": server})
    cluster = WeighingCluster(job(**parameters), [3, 5, 4])
    run_at_random(cluster, seed, steps=5)
    original = cluster.replicas[ME]
    twin_D = original.weights_D.copy()
    twin = cluster.machine(ME, twin_D)
    twin.restore(original.machine.state())
    for peer in (ONE, TWO):
        twin.handle(MemberJoined(peer, 5))
    rng = np.random.default_rng(seed)
    for iteration in range(6, 10):
        gradients = [rng.standard_normal(20).astype(np.float32) for _ in range(3)]
        for event in (
            BudgetsChanged({}),
            own_step(iteration, gradients[0], 3),
            MessageArrived(TWO, whole(gradients[2], iteration, 4)),
            MessageArrived(ONE, whole(gradients[1], iteration, 5)),
        ):
            instructions = cluster.handle(ME, event)
            again = twin.handle(event)
            assert comparable(again) == comparable(instructions)
            for one in again:
                if isinstance(one, ApplyGradient):
                    twin_D -= LEARNING_RATE * one.gradient_D
                    twin.handle(UpdateApplied())
    np.testing.assert_array_equal(twin_D, original.weights_D)


def test_a_server_also_answers_an_invalid_message() -> None:
    cluster = WeighingCluster(job(server=0), [2, 2])
    invalid = Message(MessageKind.GRADIENT, 1, local_batch_size=2, payload=b"nonsense")
    instructions = cluster.replicas[ME].machine.handle(MessageArrived(ONE, invalid))
    assert [type(one).__name__ for one in instructions] == ["RejectMessage", "SendWeights"]


def test_a_worker_refuses_invalid_weights_and_does_not_wait_for_others() -> None:
    cluster = WeighingCluster(job(server=0), [2, 2])
    cluster.step(ONE)
    machine = cluster.replicas[ONE].machine
    (refusal,) = machine.handle(MessageArrived(ME, Message(MessageKind.WEIGHTS, 1, payload=b"x")))
    assert isinstance(refusal, RejectMessage)
    assert not machine.waiting_for()


def test_duplicate_weights_are_applied_once() -> None:
    cluster = WeighingCluster(job(server=0), [2, 2])
    cluster.step(ONE)
    cluster.deliver(ONE, ME)
    arrived = MessageArrived(ME, cluster.links[ME, ONE][-1])
    machine = cluster.replicas[ONE].machine
    assert [type(one) for one in machine.handle(arrived)] == [ReplaceWeights]
    assert machine.handle(arrived) == []


def test_a_gradient_that_overflows_under_compensation_is_refused() -> None:
    cluster = WeighingCluster(job(compensation=1.0), [2, 2])
    cluster.step(ME)
    huge = MessageArrived(ONE, whole(np.full(20, 1e30), 1))
    refusal, *_ = cluster.replicas[ME].machine.handle(huge)
    assert isinstance(refusal, RejectMessage)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Message(MessageKind.GRADIENT, 1, local_batch_size=10, payload=b"xyz"), "3 bytes"),
        (Message(MessageKind.GRADIENT, 1, local_batch_size=10**9, payload=b"xyz"), "batch of"),
        (Message(MessageKind.PROGRESS, 1, local_batch_size=1, payload=b"x"), "payload"),
        (Message(MessageKind.PROGRESS, 0, local_batch_size=1), "iteration 0"),
        (Message(MessageKind.WEIGHTS, 1, payload=b"x"), "not the server"),
    ],
)
def test_an_invalid_message_is_refused(message: Message, words: str) -> None:
    machine = WeighingCluster(job(), [2, 2]).replicas[ME].machine
    (refusal,) = machine.handle(MessageArrived(ONE, message))
    assert isinstance(refusal, RejectMessage)
    assert words in refusal.reason
