"""Policy `sparseloco` against its algorithm written from the paper, and its limits.

Rounds of several workers give the anchor of a reference with error feedback, top-k of each chunk
and the outer step, for any order of messages. With everything sent they are means by samples.
Unsent values and rounding errors stay, less their decay. Values are sent in two bits. All continue
from the same bits, also after a loss and a return. A worker that takes over weights opens no round
before the others. Hostile messages are refused and block no worker. A restored machine continues
identically.

Left out: the repair of other anchors (test_adaptive.py), whole jobs (tests/simulated).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import SpecError
from dlion_api.names import Rank
from dlion_core.codecs import ValueCodec, decode_gradient, encode_whole
from dlion_core.policies.catalogue import parameters_of
from dlion_core.policies.interface import (
    Layout,
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
from dlion_core.policies.iteration_guard import IterationGuard
from example_counts import examples
from policy_cluster import LEARNING_RATE, linear_gradient, spec
from weighing_cluster import WeighingCluster, lose_for_a_while, own_step, run_at_random

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dlion_api.spec import Spec

    Vector = NDArray[np.float64]

seeds = st.integers(0, 2**32)
batches = st.lists(st.integers(1, 6), min_size=2, max_size=4)
ME, ONE, TWO = Rank(0), Rank(1), Rank(2)
LAYOUT = Layout(("a", "b", "c"), (9, 16, 3))
SIZE = LAYOUT.size
HEAD = struct.Struct("<BIIH")
HEADER_BYTES = 16


def job(**parameters: object) -> Spec:
    return spec(exchange={"policy": "sparseloco", "parameters": parameters})


def cluster_of(found: Spec, sizes: list[int], seed: int = 0) -> WeighingCluster:
    return WeighingCluster(found, sizes, layout=LAYOUT, seed=seed % 999)


def assert_equal(cluster: WeighingCluster) -> None:
    first, *others = cluster.replicas.values()
    for other in others:
        np.testing.assert_array_equal(first.weights_D, other.weights_D)


def top_of_chunks(value_D: Vector, chunk: int, share: float) -> Vector:
    """The paper's TOP-k of each chunk."""
    top_D = np.zeros_like(value_D)
    for where in LAYOUT.slices():
        for start in range(where.start, where.stop, chunk):
            part = value_D[start : min(start + chunk, where.stop)]
            kept = max(1, int(share * part.size))
            largest = np.argsort(-np.abs(part), kind="stable")[:kept]
            top_D[start + largest] = part[largest]
    return top_D


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("steps", "chunk", "share", "beta", "alpha"),
    [(1, 4, 0.5, 0.95, 1.0), (3, 8, 0.3, 0.5, 0.7), (4, 4096, 0.1, 1.0, 1.0), (2, 5, 0.2, 0, 0.5)],
)
def test_rounds_are_those_of_the_paper(
    seed: int, steps: int, chunk: int, share: float, beta: float, alpha: float
) -> None:
    """Without rounding, and by samples, whereas the paper's workers count equally."""
    sizes, rounds = [2, 5, 3], 5
    found = job(
        localSteps=steps, chunk=chunk, share=share, feedback=beta, outerLearningRate=alpha,
        codec="float32",
    )  # fmt: skip
    cluster, naive = (cluster_of(found, sizes, seed) for _ in "ab")
    run_at_random(cluster, seed, steps=rounds * steps)
    anchor_D = naive.replicas[ME].weights_D.astype(np.float64)
    feedback = {rank: np.zeros(SIZE) for rank in naive.ranks}
    for _ in range(rounds):
        mean_D = np.zeros(SIZE)
        for rank in naive.ranks:
            weights_D = anchor_D.astype(np.float32)
            for _ in range(steps):
                weights_D -= LEARNING_RATE * linear_gradient(weights_D, *naive.batch(rank))[0]
            feedback[rank] = beta * feedback[rank] + anchor_D - weights_D
            sent_D = top_of_chunks(feedback[rank], chunk, share)
            feedback[rank] -= sent_D
            mean_D += sizes[rank] / sum(sizes) * sent_D
        anchor_D = anchor_D - alpha * mean_D
    np.testing.assert_allclose(cluster.replicas[ME].weights_D, anchor_D, rtol=1e-4, atol=1e-5)
    assert_equal(cluster)


@given(seed=seeds, sizes=batches, codec=st.sampled_from(["float32", "float16", "int4", "int2"]))
@settings(max_examples=examples(40), deadline=None)
def test_all_continue_from_the_same_bits(seed: int, sizes: list[int], codec: str) -> None:
    cluster = cluster_of(job(codec=codec, localSteps=3, share=0.2), sizes, seed)
    run_at_random(cluster, seed, steps=15)
    assert_equal(cluster)


@given(seed=seeds, codec=st.sampled_from(["float32", "int4", "int2"]), beta=st.sampled_from([1, 0]))
@settings(max_examples=examples(30), deadline=None)
def test_unsent_values_stay_less_their_decay(seed: int, codec: str, beta: float) -> None:
    found = job(codec=codec, localSteps=2, share=0.2, feedback=beta)
    cluster = cluster_of(found, [2, 2], seed)
    machine = cluster.replicas[ME].machine
    kept_D = np.zeros(SIZE, np.float32)
    for _ in range(4):
        anchor_D = cluster.replicas[ME].weights_D.copy()
        for _ in range(2):
            for rank in cluster.ranks:
                cluster.step(rank)
        found_D = kept_D + (anchor_D - cluster.replicas[ME].weights_D)
        payload = cluster.links[ME, ONE][-1].payload[HEAD.size :]
        sent_D = decode_gradient(payload, SIZE).weighted(np.float32(1))
        kept_D = np.asarray(machine.state()["residual_D"], np.float32)
        np.testing.assert_allclose(kept_D, beta * (found_D - sent_D), rtol=1e-4, atol=1e-5)
        cluster.deliver_all()


def test_values_are_sent_in_two_bits_by_default() -> None:
    """A message of ten values has a header, a scale, ten values and their positions."""
    layout = Layout(("w",), (1000,))
    cluster = WeighingCluster(job(localSteps=1, share=0.01), [2, 2], layout=layout)
    cluster.step(ME)
    payload = bytes(cluster.links[ME, ONE][-1].payload)[HEAD.size :]
    assert payload[1] == 7
    assert decode_gradient(payload, 1000).coded_K.size == 10
    values_end = HEADER_BYTES + 2 + 3
    assert values_end < len(payload) < values_end + 13


def test_between_rounds_only_progress_is_sent_and_no_worker_waits() -> None:
    cluster = cluster_of(job(localSteps=3), [2, 2])
    for _ in range(3):
        assert cluster.may_step(ME)
        cluster.step(ME)
    kinds = [one.kind for one in cluster.links[ME, ONE]]
    assert kinds == [MessageKind.PROGRESS] * 3 + [MessageKind.WEIGHTS]
    assert cluster.replicas[ME].machine.waiting_for() == {ONE}


@given(seed=seeds, workers=st.integers(2, 4), turn=st.integers(1, 60), steps=st.integers(1, 4))
@settings(max_examples=examples(30), deadline=None)
def test_a_lost_worker_blocks_no_other_and_the_rest_become_equal(
    seed: int, workers: int, turn: int, steps: int
) -> None:
    cluster = cluster_of(job(localSteps=steps, share=0.3), [2] * workers)
    lost = Rank(seed % workers)
    run_at_random(cluster, seed, steps=6 * steps, leaves=(turn, lost))
    left = [cluster.replicas[rank] for rank in cluster.ranks if rank != lost]
    for other in left[1:]:
        np.testing.assert_array_equal(left[0].weights_D, other.weights_D)


@given(seed=seeds, away=st.integers(0, 12))
@settings(max_examples=examples(30), deadline=None)
def test_a_worker_that_returns_is_equal_again(seed: int, away: int) -> None:
    """After the round in which it takes over the others' anchor."""
    cluster = cluster_of(job(localSteps=4, share=0.3), [2, 3, 2], seed)
    run_at_random(cluster, seed, steps=5)
    lose_for_a_while(cluster, TWO, steps=away)
    run_at_random(cluster, seed, steps=40)
    assert_equal(cluster)


def test_a_worker_that_takes_over_weights_in_mid_round_opens_the_next_with_all() -> None:
    cluster = cluster_of(job(localSteps=5), [2, 2])
    machine = cluster.replicas[ME].machine
    assert isinstance(machine, IterationGuard)
    cluster.handle(ME, MemberLeft(ONE))
    machine.take_over(23)
    cluster.handle(ME, MemberJoined(ONE, 23))
    cluster.links[ME, ONE].clear()
    for iteration in (24, 25):
        assert not machine.waiting_for()
        cluster.handle(ME, own_step(iteration, np.ones(SIZE, np.float32), 2))
        machine.handle(MessageArrived(ONE, Message(MessageKind.PROGRESS, iteration, 2, 5)))
    sent = [(one.kind, one.iteration) for one in cluster.links[ME, ONE]]
    progress, weights = MessageKind.PROGRESS, MessageKind.WEIGHTS
    assert sent == [(progress, 24), (progress, 25), (weights, 25)]
    assert machine.waiting_for() == {ONE}


def test_a_restored_machine_continues_identically() -> None:
    cluster = cluster_of(job(localSteps=2, share=0.3), [3, 5])
    run_at_random(cluster, 3, steps=5)
    original = cluster.replicas[ME]
    twin_D = original.weights_D.copy()
    twin = cluster.machine(ME, twin_D)
    twin.restore(original.machine.state())
    twin.handle(MemberJoined(ONE, 5))
    cluster.links[ME, ONE].clear()
    cluster.handle(ME, own_step(6, np.ones(SIZE, np.float32), 3))
    instructions = twin.handle(own_step(6, np.ones(SIZE, np.float32), 3))
    twin_D -= LEARNING_RATE * np.ones(SIZE, np.float32)
    instructions += twin.handle(UpdateApplied())
    sent = [bytes(one.message.payload) for one in instructions if isinstance(one, SendMessage)]
    assert sent == [bytes(one.payload) for one in cluster.links[ME, ONE]]
    assert sent[-1]


def test_a_gradient_that_is_not_finite_is_never_used() -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        cluster_of(job(), [2, 2]).step(ME, np.full(SIZE, np.nan, np.float32))


# ---- hostile messages ----------------------------------------------------------------------------

PART = bytes(encode_whole(np.ones(SIZE, np.float32), ValueCodec.FLOAT32))
NAN = PART.replace(np.float32(1).tobytes(), np.float32(np.nan).tobytes())
BEYOND = PART[:2] + b"\3" + PART[3:12] + np.uint32(1).tobytes() + PART[16:20] + b"\x1c\0"
"""One entry, at a place past the last."""


def contribution(samples: int = 4, steps: int = 3, part: bytes = PART, kind: int = 0) -> Message:
    payload = HEAD.pack(kind, 0, samples, steps) + part
    return Message(MessageKind.WEIGHTS, 3, 1, payload=payload)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Message(MessageKind.WEIGHTS, 3, 1, payload=b"xyz"), "3 bytes"),
        (contribution(kind=2), "form 2"),
        (contribution(steps=4), "4 local steps; allowed: form 0 or 1, 3 to 3 steps"),
        (contribution(steps=2), "2 local steps"),
        (contribution(samples=0), "0 samples"),
        (contribution(samples=2**31), "samples"),
        (contribution(part=PART[:-1]), "bytes"),
        (contribution(part=NAN), "NaN"),
        (contribution(part=BEYOND), "positions"),
        (Message(MessageKind.GRADIENT, 3, 1, 1, PART), "GRADIENT"),
        (Message(MessageKind.PROGRESS, 0, 1), "iteration 0"),
    ],
)
def test_an_invalid_message_is_refused(message: Message, words: str) -> None:
    machine = cluster_of(job(localSteps=3), [2, 2]).replicas[ME].machine
    (refusal,) = machine.handle(MessageArrived(ONE, message))
    assert isinstance(refusal, RejectMessage)
    assert words in refusal.reason
    assert machine.handle(MessageArrived(ONE, contribution())) == []


def test_an_invalid_contribution_blocks_no_worker() -> None:
    cluster = cluster_of(job(localSteps=1), [2, 2])
    cluster.step(ME)
    machine = cluster.replicas[ME].machine
    assert machine.waiting_for() == {ONE}
    instructions = machine.handle(
        MessageArrived(ONE, Message(MessageKind.WEIGHTS, 1, 1, payload=b"x"))
    )
    assert [type(one) for one in instructions] == [RejectMessage, ReplaceWeights]


@pytest.mark.parametrize(
    "wrong",
    [
        {"localSteps": 0},
        {"localSteps": 1001},
        {"share": 0},
        {"chunk": 0},
        {"codec": "polyline"},
        {"feedback": 1.1},
        {"outerLearningRate": 0},
    ],
)
def test_parameters_out_of_bounds_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SpecError, match=next(iter(wrong))):
        parameters_of(job(**wrong))
