"""Tests of claimed magnitudes: destructive gradients and weights are refused with their sender's
name, honest ones are not.

One of three workers that sends 1e37 changes nothing: under a barrier, in rounds and without a
barrier. One of two workers does not either. A worker whose gradients have become small still
accepts others' gradients. Weights are compared with the worker's own. The peak of a message is that
of its values in every codec. A hundredfold gradient is reported once.

Left out: gradients that are wrong but plausible (SECURITY.md).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.protocol.refusals import CallerError, PeerRefusal
from dlion_core.codecs import ValueCodec, decode_gradient, encode_whole
from dlion_core.policies.claims.magnitudes import RecentPeaks, check_weights, excessive
from dlion_core.policies.factory import build
from dlion_core.policies.interface import (
    ApplyGradient,
    Instruction,
    Layout,
    LocalStepDone,
    MemberJoined,
    Message,
    MessageArrived,
    MessageKind,
    PolicyMachine,
    RejectMessage,
    ReportEvent,
)
from dlion_core.policies.iteration_guard import IterationGuard
from dlion_core.policies.weights.anchor_merge import HEAD
from dlion_core.policies.weights.local_rounds import LocalRounds
from example_counts import examples
from policy_cluster import spec
from weighing_cluster import View, WeighingCluster

ME, ONE, TWO = Rank(0), Rank(1), Rank(2)
SIZE = 4
LAYOUT = Layout(("w",), (SIZE,))


def machine(mode: str, ranks: list[Rank]) -> PolicyMachine:
    """Worker 0, whose weights are 0.1, with the policy `full`."""
    job = spec(exchange={"policy": "full", "codec": "float32"}, synchronization={"mode": mode})
    built = build(job, ME, LAYOUT, ranks, replica=View(np.full(SIZE, 0.1, np.float32)))
    for rank in ranks[1:]:
        built.handle(MemberJoined(rank))
    return built


def gradient(value: float) -> Message:
    payload = encode_whole(np.full(SIZE, value, np.float32), ValueCodec.FLOAT32)
    return Message(MessageKind.GRADIENT, 1, 4, 0, payload)


def step(value: float) -> LocalStepDone:
    return LocalStepDone(1, np.full(SIZE, value, np.float32), 4, 1.0)


def updates(instructions: list[Instruction]) -> list[float]:
    return [float(one.gradient_D[0]) for one in instructions if isinstance(one, ApplyGradient)]


def refused(instructions: list[Instruction]) -> list[tuple[Rank, PeerRefusal]]:
    return [(one.peer, one.kind) for one in instructions if isinstance(one, RejectMessage)]


@pytest.mark.parametrize("comes_first", [True, False])
@pytest.mark.parametrize("ranks", [[ME, ONE], [ME, ONE, TWO]])
def test_an_enormous_gradient_is_refused_and_its_sender_named(
    ranks: list[Rank], comes_first: bool
) -> None:
    worker = machine("synchronous", ranks)
    instructions: list[Instruction] = []
    events = [step(0.5), MessageArrived(ONE, gradient(1e37))]
    for event in reversed(events) if comes_first else events:
        instructions += worker.handle(event)  # type: ignore[arg-type]
    if TWO in ranks:
        instructions += worker.handle(MessageArrived(TWO, gradient(0.3)))
    assert updates(instructions) == [pytest.approx(0.4 if TWO in ranks else 0.5)]
    assert refused(instructions) == [(ONE, PeerRefusal.IMPLAUSIBLE)]


def test_without_a_barrier_an_enormous_gradient_is_refused_on_arrival() -> None:
    worker = machine("asynchronous", [ME, ONE])
    worker.handle(step(0.5))
    instructions = worker.handle(MessageArrived(ONE, gradient(1e37)))
    assert refused(instructions) == [(ONE, PeerRefusal.IMPLAUSIBLE)]
    instructions = worker.handle(LocalStepDone(2, np.full(SIZE, 0.5, np.float32), 4, 1.0))
    assert updates(instructions) == [pytest.approx(0.25)], (
        "half of the batch is the peer's, which sent no gradient"
    )


def test_a_gradient_before_the_first_step_is_compared_with_that_step() -> None:
    worker = machine("asynchronous", [ME, ONE, TWO])
    assert refused(worker.handle(MessageArrived(ONE, gradient(1e14)))) == []
    assert refused(worker.handle(MessageArrived(TWO, gradient(0.4)))) == []
    instructions = worker.handle(step(0.5))
    assert refused(instructions) == [(ONE, PeerRefusal.IMPLAUSIBLE)]
    assert abs(updates(instructions)[0]) < 0.5, "the refused gradient has no effect"


def test_large_gradients_of_raw_targets_are_accepted_before_the_first_step() -> None:
    """In a regression on prices, a worker with a large batch is the last to make its first step."""
    worker = machine("asynchronous", [ME, ONE])
    for iteration in range(1, 5):
        message = replace(gradient(2e5), iteration=iteration)
        assert refused(worker.handle(MessageArrived(ONE, message))) == []
    instructions = worker.handle(step(1.9e5))
    assert refused(instructions) == []
    assert updates(instructions)[0] > 1e5


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous", "bounded"])
@pytest.mark.parametrize("tiny", [0.0, 1e-3])
def test_a_small_gradient_of_one_sample_refuses_no_peer(mode: str, tiny: float) -> None:
    """The gradient of a batch of one may be zero or tiny at any step, for example behind dead
    units. Gradients of a regression on raw targets are large.
    """
    worker = machine(mode, [ME, ONE])
    instructions: list[Instruction] = []
    for iteration, own in enumerate([2e5, 3e4, tiny, 1e5, tiny], 1):
        own_D = np.full(SIZE, own, np.float32)
        instructions += worker.handle(LocalStepDone(iteration, own_D, 1, 1.0))
        message = replace(gradient(1.5e5), iteration=iteration)
        instructions += worker.handle(MessageArrived(ONE, message))
    assert refused(instructions) == []


def test_a_worker_without_gradients_refuses_no_large_one() -> None:
    assert excessive({ME: 0.0, ONE: 1e9}, ME, lambda: 0.5) == []
    assert [one.peer for one in excessive({ME: 0.0, ONE: 1e16}, ME, lambda: 0.5)] == [ONE]


def test_a_worker_with_zero_weights_refuses_no_gradient_and_no_weights() -> None:
    """With a warm-up the first steps are tiny."""
    assert excessive({ME: 1e-6, ONE: 1.0}, ME, lambda: 0.0) == []
    small_D = np.full(SIZE, 1e-6, np.float32)
    assert check_weights(small_D * 1e6, small_D) is not None


@pytest.mark.parametrize("theirs", [1e-8, 1.0, 0.99])
def test_a_worker_with_tiny_gradients_accepts_those_of_others(theirs: float) -> None:
    worker = machine("synchronous", [ME, ONE])
    worker.handle(step(1e-9))
    instructions = worker.handle(MessageArrived(ONE, gradient(theirs)))
    assert refused(instructions) == []
    assert updates(instructions) == [pytest.approx(theirs / 2, rel=0.2)]


def test_in_a_round_an_enormous_contribution_is_refused() -> None:
    job = spec(exchange={"policy": "adaptive", "parameters": {"codec": "float32", "density": 1}})
    cluster, calm = (WeighingCluster(job, [2, 2, 2]) for _ in "ab")
    for one in (cluster, calm):
        for rank in (ME, ONE):
            one.step(rank)
        for source, target in ((ME, ONE), (ONE, ME)):
            while one.links[source, target]:
                one.deliver(source, target)
    huge_D = np.full(cluster.layout.size, 1e37, np.float32)
    payload = HEAD.pack(0, 0, 2, 1) + bytes(encode_whole(huge_D, ValueCodec.FLOAT32))
    for rank in (ME, ONE):
        instructions = cluster.replicas[rank].machine.handle(
            MessageArrived(TWO, Message(MessageKind.WEIGHTS, 1, 2, payload=payload))
        )
        assert refused(instructions) == [(TWO, PeerRefusal.IMPLAUSIBLE)]


def test_the_reference_for_a_contribution_is_the_middle_of_the_others() -> None:
    """One bad worker of three can neither hide behind its own value nor accuse the others. Two of
    four cannot hide behind each other.
    """
    assert [one.peer for one in excessive({ME: 1.0, ONE: 1e9, TWO: 1.0}, ME, lambda: 1.0)] == [ONE]
    assert excessive({ME: 1.0, ONE: 1e-9, TWO: 1.0}, ME, lambda: 1.0) == []
    four = {ME: 1.0, ONE: 1e9, TWO: 1.0, Rank(3): 1e9}
    assert [one.peer for one in excessive(four, ME, lambda: 1.0)] == [ONE, 3]


def test_without_a_reference_an_absolute_bound_remains() -> None:
    assert excessive({ONE: 1e14}, ME, lambda: 0.0) == []
    assert excessive({ONE: 1e16}, ME, lambda: 0.0)


def test_weights_are_compared_with_the_workers_own() -> None:
    own_D = np.full(SIZE, 0.1, np.float32)
    assert check_weights(own_D * 999, own_D) is not None
    with pytest.raises(CallerError, match=r"weights up to 1e\+37; allowed: up to 1e\+03") as error:
        check_weights(np.full(SIZE, -1e37, np.float32), own_D)
    assert error.value.kind is PeerRefusal.IMPLAUSIBLE
    with pytest.raises(ContractError):
        check_weights(np.full(SIZE, 1e16, np.float32), None)


@given(
    values=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=600),
    codec=st.sampled_from(ValueCodec),
)
@settings(max_examples=examples(100), deadline=None)
def test_the_peak_of_a_message_is_that_of_its_values(
    values: list[float], codec: ValueCodec
) -> None:
    value_D = np.array(values, np.float32)
    part = decode_gradient(encode_whole(value_D, codec), value_D.size)
    found = float(np.abs(part.value_K).max())
    assert found <= part.peak * (1 + 1e-6)
    is_bound = codec in (ValueCodec.INT8, ValueCodec.INT4, ValueCodec.INT2)
    assert part.peak <= found * (3 if is_bound else 1 + 1e-6) + 1e-36, "except subnormals"


def test_a_hundredfold_gradient_is_reported_once() -> None:
    peaks = RecentPeaks()
    assert [peaks.add(ONE, 50.0), *(peaks.add(ONE, 1.0) for _ in range(20))] == [""] * 21
    assert peaks.add(ONE, 90.0) == ""
    assert peaks.add(ONE, 101.0) == "worker 1 sent values up to 1e+02; its median is 1"
    assert peaks.add(ONE, 102.0) == ""
    assert peaks.add(TWO, 1e9) == "", "there is no earlier gradient"


def test_the_size_of_first_gradients_is_not_unusual_later() -> None:
    """After convergence the median is close to zero. A merge of partitions, a restart or a new
    sample brings back earlier sizes.
    """
    peaks = RecentPeaks()
    for peak in (9.0, *[5e-8] * 200, 7.6):
        assert peaks.add(ONE, peak) == ""
    for peak in (*[5e-8] * 200, 7.6):
        assert peaks.add(TWO, peak) == "", "other workers had such gradients"
    assert peaks.add(TWO, 9.1) == "worker 2 sent values up to 9.1; its median is 5e-08"


def test_all_workers_compare_a_contribution_with_the_same_weights() -> None:
    """Their own weights differ within a round, so some would refuse what others accept."""
    job = spec(exchange={"policy": "adaptive"})
    cluster = WeighingCluster(job, [2, 2])
    for rank in (ME, ONE):
        cluster.step(rank)
        machine = cluster.replicas[rank].machine
        assert isinstance(machine, IterationGuard)
        rounds = machine.machine
        assert isinstance(rounds, LocalRounds)
        assert rounds.anchor_D is not None
        assert rounds.largest_weight() == float(np.abs(rounds.anchor_D).max())


def test_when_all_gradients_grow_only_the_first_sender_is_named() -> None:
    """One bad worker makes the model diverge. Then honest gradients grow as much."""
    worker = machine("synchronous", [ME, ONE, TWO])
    instructions: list[Instruction] = []
    sizes = [(0.5, 0.5, 0.4)] * 10 + [(0.6, 80.0, 0.7), (90.0, 9e2, 80.0), (3e3, 9e3, 9e4)]
    for iteration, (mine, bad, honest) in enumerate(sizes, 1):
        instructions += worker.handle(
            LocalStepDone(iteration, np.full(SIZE, mine, np.float32), 4, 1.0)
        )
        for sender, value in ((TWO, honest), (ONE, bad)):
            message = replace(gradient(value), iteration=iteration)
            instructions += worker.handle(MessageArrived(sender, message))
    texts = [one.text for one in instructions if isinstance(one, ReportEvent)]
    assert {text.split()[1] for text in texts} == {"1"}, texts
    assert any("sent values up to 80" in text for text in texts)
