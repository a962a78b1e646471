"""Policy `localsgd` against a naive reference.

Rounds average by samples, with outer momentum, like the reference, for any order of steps and
messages. Replicas then agree bit for bit. One local step and a plain mean are synchronous
averaging. A worker that leaves, or returns with an old anchor, blocks no other and has equal
weights again. A worker that takes over weights in mid-round opens no round before the others, and
keeps its momentum. Invalid messages are refused. A restored machine continues identically.

Left out: accuracy (tests/simulated).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_core.codecs import encode_weights
from dlion_core.policies.interface import (
    ApplyGradient,
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
from example_counts import examples
from policy_cluster import LEARNING_RATE, linear_gradient, spec
from weighing_cluster import WeighingCluster, comparable, lose_for_a_while, own_step, run_at_random

if TYPE_CHECKING:
    from dlion_api.spec import Spec

seeds = st.integers(0, 2**32)
batches = st.lists(st.integers(1, 6), min_size=1, max_size=4)
PLAIN = {"outerLearningRate": 1, "outerMomentum": 0}
ME, ONE, TWO = Rank(0), Rank(1), Rank(2)


def job(**parameters: object) -> Spec:
    return spec(exchange={"policy": "localsgd", "codec": "float32", "parameters": parameters})


@given(
    seed=seeds,
    sizes=batches,
    steps=st.integers(1, 4),
    rate=st.sampled_from([0.5, 1.0]),
    momentum=st.sampled_from([0.0, 0.5]),
    nesterov=st.booleans(),
)
@settings(max_examples=examples(40), deadline=None)
def test_rounds_equal_those_of_the_reference(
    seed: int, sizes: list[int], steps: int, rate: float, momentum: float, nesterov: bool
) -> None:
    parameters = {
        "localSteps": steps,
        "outerLearningRate": rate,
        "outerMomentum": momentum,
        "nesterov": nesterov,
    }
    cluster, naive = (WeighingCluster(job(**parameters), sizes, seed=seed % 999) for _ in "ab")
    run_at_random(cluster, seed, steps=3 * steps)
    anchor_D = naive.replicas[ME].weights_D.astype(np.float64)
    velocity_D = np.zeros_like(anchor_D)
    for _ in range(3):
        mean_D = np.zeros_like(anchor_D)
        for rank in naive.ranks:
            weights_D = anchor_D.astype(np.float32)
            for _ in range(steps):
                weights_D -= LEARNING_RATE * linear_gradient(weights_D, *naive.batch(rank))[0]
            mean_D += weights_D * (sizes[rank] / sum(sizes))
        delta_D = anchor_D - mean_D
        velocity_D = momentum * velocity_D + delta_D
        anchor_D -= rate * (delta_D + momentum * velocity_D if nesterov else velocity_D)
    first, *others = cluster.replicas.values()
    np.testing.assert_allclose(first.weights_D, anchor_D, rtol=1e-3, atol=1e-4)
    for other in others:
        np.testing.assert_array_equal(first.weights_D, other.weights_D)


@given(seed=seeds)
@settings(max_examples=examples(20), deadline=None)
def test_batches_that_change_count_by_their_samples(seed: int) -> None:
    cluster = WeighingCluster(job(localSteps=2, **PLAIN), [1, 1])
    rng = np.random.default_rng(seed)
    mean_D, total = np.zeros(20), 0
    for rank in cluster.ranks:
        weights_D = cluster.replicas[rank].weights_D.copy()
        samples = 0
        for batch in rng.integers(1, 50, 2):
            gradient_D = rng.standard_normal(20).astype(np.float32)
            cluster.replicas[rank].local_batch_size = int(batch)
            cluster.step(rank, gradient_D)
            weights_D -= LEARNING_RATE * gradient_D
            samples += int(batch)
        mean_D, total = mean_D + samples * weights_D, total + samples
    cluster.deliver_all()
    for replica in cluster.replicas.values():
        np.testing.assert_allclose(replica.weights_D, mean_D / total, rtol=1e-4, atol=1e-5)


def test_a_part_with_the_samples_of_a_skipped_round_is_accepted() -> None:
    """A part of more samples than a round can have is refused. A worker that was restarted during
    an open round has trained on more since the last mean."""
    steps, batch = 3, 7
    found = job(localSteps=steps)
    sizes = replace(found.batching.global_batch_size, initial=10, max=10)
    found = replace(found, batching=replace(found.batching, global_batch_size=sizes))
    cluster = WeighingCluster(found, [batch, 3])
    for _ in range(steps):
        cluster.step(ME)
    state = cluster.replicas[ME].machine.state()
    restored = cluster.machine(ME, cluster.replicas[ME].weights_D)
    restored.restore(state)
    restored.handle(MemberJoined(ONE, steps))
    instructions = []
    for iteration in range(steps + 1, 2 * steps + 1):
        instructions = restored.handle(own_step(iteration, np.zeros(20, np.float32), batch))
        instructions += restored.handle(UpdateApplied())
    (part,) = (
        one.message
        for one in instructions
        if isinstance(one, SendMessage) and one.message.kind is MessageKind.WEIGHTS
    )
    assert part.weights_version == steps * 10
    cluster.links[ME, ONE].clear()
    refused = cluster.handle(ONE, MessageArrived(ME, part))
    assert not any(isinstance(one, RejectMessage) for one in refused)


def test_between_rounds_only_progress_is_sent_and_no_worker_waits() -> None:
    cluster = WeighingCluster(job(localSteps=3), [2, 2])
    for _ in range(3):
        assert cluster.may_step(ME)
        cluster.step(ME)
    assert [one.kind for one in cluster.links[ME, ONE]] == [MessageKind.PROGRESS] * 3 + [
        MessageKind.WEIGHTS
    ]
    assert cluster.replicas[ME].machine.waiting_for() == {ONE}


@given(seed=seeds, workers=st.integers(2, 4), turn=st.integers(1, 60), steps=st.integers(1, 4))
@settings(max_examples=examples(40), deadline=None)
def test_a_departing_worker_blocks_no_other(seed: int, workers: int, turn: int, steps: int) -> None:
    cluster = WeighingCluster(job(localSteps=steps), [2] * workers)
    run_at_random(cluster, seed, steps=4 * steps, leaves=(turn, Rank(seed % workers)))


@given(seed=seeds, away=st.integers(0, 12), codec=st.sampled_from(["float32", "float16"]))
@settings(max_examples=examples(30), deadline=None)
def test_a_worker_that_returns_with_an_old_anchor_has_equal_weights_again(
    seed: int, away: int, codec: str
) -> None:
    """With the plain mean, after the first round that all take part in."""
    exchange = {"policy": "localsgd", "codec": codec, "parameters": {"localSteps": 3, **PLAIN}}
    cluster = WeighingCluster(spec(exchange=exchange), [2, 3, 2], seed=seed % 99)
    run_at_random(cluster, seed, steps=4)
    lose_for_a_while(cluster, TWO, steps=away)
    run_at_random(cluster, seed, steps=24)
    first, *others = cluster.replicas.values()
    if len({replica.iteration for replica in cluster.replicas.values()}) == 1:
        for other in others:
            np.testing.assert_array_equal(first.weights_D, other.weights_D)


@pytest.mark.parametrize("round_before", [0, 2, 9])
def test_a_worker_that_takes_over_weights_in_mid_round_opens_the_next_with_all(
    round_before: int,
) -> None:
    """Whatever its own iteration was: before that it sends nothing, and no other waits for it."""
    cluster = WeighingCluster(job(localSteps=5, outerMomentum=0.5), [2, 2])
    machine = cluster.replicas[ME].machine
    cluster.handle(ME, MemberLeft(ONE))
    for iteration in range(1, 5 * round_before + 1):
        cluster.handle(ME, own_step(iteration, np.ones(20, np.float32), 2))
    velocity_D = machine.state().get("velocity_D")
    machine.take_over(23)
    cluster.handle(ME, MemberJoined(ONE, 23))
    cluster.links[ME, ONE].clear()
    for iteration in (24, 25):
        assert not machine.waiting_for()
        cluster.handle(ME, own_step(iteration, np.ones(20, np.float32), 2))
        machine.handle(MessageArrived(ONE, Message(MessageKind.PROGRESS, iteration, 2)))
    sent = [(one.kind, one.iteration) for one in cluster.links[ME, ONE]]
    progress, weights = MessageKind.PROGRESS, MessageKind.WEIGHTS
    assert sent == [(progress, 24), (progress, 25), (weights, 25)]
    assert machine.waiting_for() == {ONE}
    assert (velocity_D is not None) == bool(round_before)
    if velocity_D is not None:
        np.testing.assert_array_equal(machine.state()["velocity_D"], velocity_D)


@given(seed=seeds)
@settings(max_examples=examples(15), deadline=None)
def test_a_restored_machine_continues_identically(seed: int) -> None:
    parameters = {"localSteps": 3, "outerMomentum": 0.5}
    cluster = WeighingCluster(job(**parameters), [3, 5, 4])
    run_at_random(cluster, seed, steps=4)
    original = cluster.replicas[ME]
    twin_D = original.weights_D.copy()
    twin = cluster.machine(ME, twin_D)
    twin.restore(original.machine.state())
    for peer in (ONE, TWO):
        twin.handle(MemberJoined(peer, 4))
    rng = np.random.default_rng(seed)
    for iteration in range(5, 13):
        events = [own_step(iteration, rng.standard_normal(20).astype(np.float32), 3)]
        for peer in (ONE, TWO):
            progress = Message(MessageKind.PROGRESS, iteration, local_batch_size=4)
            events.append(MessageArrived(peer, progress))  # type: ignore[arg-type]
            if iteration % 3 == 0:
                payload = encode_weights(rng.standard_normal(20).astype(np.float32), "float32")
                weights = Message(MessageKind.WEIGHTS, iteration, 4, 12, payload)
                events.append(MessageArrived(peer, weights))  # type: ignore[arg-type]
        for event in events:
            instructions = cluster.handle(ME, event)
            pending = twin.handle(event)
            assert comparable(pending) == comparable(instructions)
            while pending:
                one = pending.pop(0)
                if isinstance(one, ApplyGradient):
                    twin_D -= LEARNING_RATE * one.gradient_D
                    pending = [*twin.handle(UpdateApplied()), *pending]
                if isinstance(one, ReplaceWeights):
                    twin_D[:] = one.weights_D
        assert twin.waiting_for() == original.machine.waiting_for()
        np.testing.assert_array_equal(twin_D, original.weights_D)


WHOLE = encode_weights(np.ones(20, np.float32), "float32")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Message(MessageKind.WEIGHTS, 3, 1, 1, b"xyz"), "3 bytes"),
        (Message(MessageKind.WEIGHTS, 2, 1, 1, WHOLE), "multiples of 3"),
        (Message(MessageKind.WEIGHTS, 3, 1, 0, WHOLE), "weights of 0 samples"),
        (Message(MessageKind.WEIGHTS, 3, 1, 10**9, WHOLE), "samples"),
        (Message(MessageKind.GRADIENT, 3, 1, 1, WHOLE), "GRADIENT"),
        (Message(MessageKind.PROGRESS, 3, 1, 1, b"x"), "payload"),
        (Message(MessageKind.PROGRESS, 0, 1), "iteration 0"),
    ],
)
def test_an_invalid_message_is_refused(message: Message, words: str) -> None:
    machine = WeighingCluster(job(localSteps=3), [2, 2]).replicas[ME].machine
    (refusal,) = machine.handle(MessageArrived(ONE, message))
    assert isinstance(refusal, RejectMessage)
    assert words in refusal.reason


def test_duplicate_or_late_weights_change_nothing() -> None:
    cluster = WeighingCluster(job(localSteps=1), [2, 2])
    cluster.step(ONE)
    message = cluster.links[ONE, ME][-1]
    cluster.step(ME)
    machine = cluster.replicas[ME].machine
    instructions = machine.handle(MessageArrived(ONE, message))
    assert [type(one) for one in instructions] == [ReplaceWeights]
    assert machine.handle(MessageArrived(ONE, message)) == []
    assert not machine.waiting_for()


def test_a_gradient_that_is_not_finite_is_never_used() -> None:
    cluster = WeighingCluster(job(), [2, 2])
    with pytest.raises(ValueError, match="NaN or infinite"):
        cluster.step(ME, np.full(20, np.nan, np.float32))
