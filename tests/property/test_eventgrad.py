"""Policy `eventgrad` against its rule in naive form, under random schedules.

At threshold 0 and in lock step it is gossip of weights at every step. A variable is sent exactly
when its norm has changed enough, in the warm-up, or after too long a silence, with a fixed or an
adaptive threshold. Receivers average with the last received values. A new neighbour gets
everything. No worker exceeds the bound or blocks, also if a member leaves. A restored worker
continues identically. Invalid messages are refused.

Left out: accuracy (docs/policies.md).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.codecs import ValueCodec, encode_whole
from dlion_core.policies.interface import (
    Layout,
    MemberJoined,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    SendMessage,
)
from dlion_core.policies.parameters import EventgradParameters
from dlion_core.policies.weights.eventgrad import NormTrigger, VariableCodec
from example_counts import examples
from policy_cluster import linear_gradient
from weights_cluster import (
    WeightsCluster,
    check_a_restored_worker_continues_identically,
    run_at_random,
    weights_spec,
)

ME, ONE, TWO, THREE = map(Rank, range(4))
LAYOUT = Layout(("a", "b", "c"), (5, 12, 3))
sizes_of = st.lists(st.integers(1, 6), min_size=1, max_size=5)
seeds = st.integers(0, 2**32)


def cluster_of(sizes: list[int], seed: int = 0, **values: object) -> WeightsCluster:
    return WeightsCluster(weights_spec("eventgrad", **values), sizes, seed=seed % 1000)


def sent_by(cluster: WeightsCluster, rank: Rank, to: Rank) -> dict[int, list[bool]]:
    """The variables that one worker sent to another, by iteration."""
    variables = VariableCodec(cluster.layout, ValueCodec.FLOAT32)
    return {
        one.message.iteration: variables.decoded(one.message.payload)[0].tolist()
        for one in cluster.replicas[rank].instructions
        if isinstance(one, SendMessage)
        and one.peer == to
        and one.message.kind is MessageKind.WEIGHTS
    }


@pytest.mark.parametrize("graph", ["ring", "complete"])
@given(sizes=sizes_of, seed=seeds, adaptive=st.booleans())
@settings(max_examples=examples(20), deadline=None)
def test_at_threshold_0_it_is_gossip_of_weights_at_every_step(
    graph: str, sizes: list[int], seed: int, adaptive: bool
) -> None:
    values: dict[str, object] = {"horizon": 0} if adaptive else {"threshold": 0}
    values |= {"graph": graph, "bound": 0, "warmupSteps": 0, "maxSilentSteps": 0}
    cluster, plain = (cluster_of(sizes, seed, **values) for _ in range(2))
    run_at_random(cluster, seed, steps=8)
    count = len(sizes)
    mixing = np.zeros((count, count))
    for worker in range(count):
        beside = {(worker - 1) % count, worker, (worker + 1) % count}
        row = range(count) if graph == "complete" else sorted(beside)
        mixing[worker, list(row)] = 1 / len(row)
    weights = plain.weights().astype(np.float64)
    for _ in range(8):
        gradients = [
            linear_gradient(weights[rank].astype(np.float32), *plain.batch(rank))[0]
            for rank in plain.ranks
        ]
        weights = mixing @ weights - float(plain.rate) * np.array(gradients)
    np.testing.assert_allclose(cluster.weights(), weights, rtol=1e-3, atol=1e-4)


@given(
    seed=seeds,
    horizon=st.sampled_from([0.0, 0.9, 1.0, 1.1]),
    threshold=st.sampled_from([None, 0.0, 0.3]),
    warmup=st.integers(0, 4),
    silent=st.integers(0, 6),
)
@settings(max_examples=examples(60), deadline=None)
def test_a_variable_is_sent_exactly_when_its_change_passes_the_threshold(
    seed: int, horizon: float, threshold: float | None, warmup: int, silent: int
) -> None:
    parameters = EventgradParameters(
        horizon=horizon, threshold=threshold, warmup_steps=warmup, max_silent_steps=silent
    )
    trigger, rng = NormTrigger(LAYOUT, parameters), np.random.default_rng(seed)
    weights_D = rng.standard_normal(LAYOUT.size).astype(np.float32)
    sent = [{"norm": 0.0, "at": 0, "slopes": [0.0, 0.0], "threshold": 0.0} for _ in LAYOUT.sizes]
    for step in range(1, 25):
        weights_D += 0.1 * rng.standard_normal(LAYOUT.size).astype(np.float32)
        fired_L = trigger.fired(weights_D)
        for fired, where, last in zip(fired_L, LAYOUT.slices(), sent, strict=True):
            norm = math.sqrt(math.fsum(float(value) ** 2 for value in weights_D[where]))
            change, since = abs(norm - last["norm"]), step - last["at"]
            last["threshold"] = threshold if threshold is not None else last["threshold"] * horizon
            passes = change >= last["threshold"]
            assert fired == (passes or step < warmup or bool(silent and since >= silent)), step
            if fired:
                last["slopes"] = [last["slopes"][1], change / since]
                last |= {"norm": norm, "at": step, "threshold": sum(last["slopes"]) / 2}


@given(seed=seeds, silent=st.integers(1, 7))
@settings(max_examples=examples(20), deadline=None)
def test_silence_is_bounded(seed: int, silent: int) -> None:
    values = {"threshold": 10**6, "warmupSteps": 0, "maxSilentSteps": silent, "bound": 2}
    cluster = cluster_of([2, 3, 2], seed, **values)
    run_at_random(cluster, seed, steps=20)
    for variable in range(3):
        sent = [at for at, chosen in sent_by(cluster, ME, ONE).items() if chosen[variable]]
        assert sent == sorted({1, *range(silent, 21, silent)})


def test_receivers_average_with_the_last_values_and_know_zeros_from_silence() -> None:
    values = {"threshold": 1.0, "warmupSteps": 0, "maxSilentSteps": 0, "graph": "complete"}
    cluster = cluster_of([1, 1], **values)
    mine_D, theirs_D = (cluster.replicas[rank].weights_D for rank in (ME, ONE))
    mine_D[:], theirs_D[:] = 4, 0
    theirs_D[:5] = 8
    theirs_D[17:] = 0.1  # too little to be sent, except to a new neighbour
    still_D = np.zeros(20, np.float32)
    cluster.step(ONE, still_D)
    cluster.deliver_all()
    cluster.step(ME, still_D)  # all variables of a new neighbour: zeros, and the small change too
    np.testing.assert_allclose(mine_D, [6] * 5 + [2] * 12 + [2.05] * 3, rtol=1e-6)
    theirs_D[:5], theirs_D[17:] = 80, 0.2
    cluster.step(ONE, still_D)
    cluster.deliver_all()
    cluster.step(ME, still_D)
    assert sent_by(cluster, ONE, ME) == {1: [True] * 3, 2: [True, False, False]}
    np.testing.assert_allclose(mine_D, [43] * 5 + [1] * 12 + [1.075] * 3, rtol=1e-6)


def test_a_new_neighbour_is_sent_everything() -> None:
    cluster = cluster_of([1] * 4, threshold=10**6, warmupSteps=0, maxSilentSteps=0)
    cluster.lockstep(3)
    assert sent_by(cluster, ME, ONE) == {1: [True] * 3}
    assert sent_by(cluster, ME, TWO) == {}  # on the other side of the ring
    cluster.leave(ONE)
    cluster.step(ME)
    assert sent_by(cluster, ME, TWO) == {4: [True] * 3}
    cluster.handle(ME, MemberJoined(ONE, 3))
    cluster.step(ME)
    assert sent_by(cluster, ME, ONE) == {1: [True] * 3, 5: [True] * 3}


@given(sizes=sizes_of, seed=seeds, bound=st.integers(0, 3), horizon=st.sampled_from([0, 1]))
@settings(max_examples=examples(30), deadline=None)
def test_no_worker_exceeds_the_bound_or_blocks(
    sizes: list[int], seed: int, bound: int, horizon: float
) -> None:
    def check(cluster: WeightsCluster, rank: Rank) -> None:
        last = cluster.replicas[rank].iteration
        assert min(replica.iteration for replica in cluster.replicas.values()) >= last - bound

    cluster = cluster_of(sizes, seed, bound=bound, horizon=horizon, warmupSteps=2)
    run_at_random(cluster, seed, steps=10, check=check)


@given(seed=seeds, bound=st.integers(0, 3))
@settings(max_examples=examples(30), deadline=None)
def test_a_departing_worker_blocks_no_other(seed: int, bound: int) -> None:
    cluster = cluster_of([2, 3, 4, 2], seed, bound=bound)
    run_at_random(cluster, seed, steps=4)
    for rank in (TWO, ME):
        if cluster.may_step(rank):
            cluster.step(rank)
    cluster.leave(TWO)
    run_at_random(cluster, seed, steps=10, alive=[ME, ONE, THREE])


@pytest.mark.parametrize("bound", [0, 2])
@given(seed=seeds)
@settings(max_examples=examples(10), deadline=None)
def test_a_restored_worker_continues_identically(bound: int, seed: int) -> None:
    cluster = cluster_of([3, 5, 2], seed, bound=bound, warmupSteps=2)
    run_at_random(cluster, seed, steps=5)
    check_a_restored_worker_continues_identically(cluster, ME, seed, steps=10)


def variables_message(iteration: int, chosen: list[bool], value: float = 1.0) -> Message:
    variables = VariableCodec(LAYOUT, ValueCodec.FLOAT32)
    payload = variables.encoded(np.full(20, value, np.float32), np.array(chosen))
    return Message(MessageKind.WEIGHTS, iteration, 2, payload=payload)


def test_a_worker_that_takes_over_weights_keeps_its_thresholds_and_warm_up() -> None:
    cluster = cluster_of([2, 2], warmupSteps=3)
    cluster.lockstep(5)
    machine = cluster.replicas[ME].machine
    before = machine.state()
    machine.take_over(9)
    after = machine.state()
    names = [name for name in before if name.startswith("eventgrad_trigger_")]
    assert before["eventgrad_trigger_steps"] == 5
    assert all(np.array_equal(after[name], before[name]) for name in names)
    assert not [name for name in after if name.startswith("eventgrad_last")]


def test_a_checkpoint_contains_early_messages() -> None:
    cluster = cluster_of([2, 2], bound=0)
    machine = cluster.replicas[ME].machine
    machine.handle(MessageArrived(ONE, variables_message(1, [True, False, False])))
    restored = cluster.built(cluster.replicas[ME])
    restored.restore(machine.state())
    state = restored.state()
    assert state["eventgrad_last_of_1"].tolist() == [1.0] * 5 + [0.0] * 15
    assert state["eventgrad_has_of_1"].tolist() == [True] * 5 + [False] * 15


def test_values_of_a_peer_that_resumes_from_an_earlier_iteration_are_taken() -> None:
    cluster = cluster_of([2, 2], bound=5)
    machine = cluster.replicas[ME].machine
    machine.handle(MessageArrived(ONE, variables_message(9, [True, True, True])))
    resumed = cluster.built(cluster.replicas[ME])
    resumed.restore(machine.state())
    resumed.handle(MemberJoined(ONE, 4))
    resumed.handle(MessageArrived(ONE, variables_message(5, [True, False, False], value=2.0)))
    assert resumed.state()["eventgrad_last_of_1"].tolist() == [2.0] * 5 + [1.0] * 15


WHOLE = bytes(encode_whole(np.ones(5, np.float32), ValueCodec.FLOAT32))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x80",
        WHOLE,  # no bitmap: its last byte is one of a float
        WHOLE + b"\x00",
        WHOLE + b"\x90",  # a fourth variable
        WHOLE + b"\x40",  # of another size
        WHOLE[:-1] + b"\x80",
    ],
)
def test_invalid_variables_are_refused_and_not_waited_for(payload: bytes) -> None:
    with pytest.raises(ContractError):
        VariableCodec(LAYOUT, ValueCodec.FLOAT32).decoded(payload)
    cluster = cluster_of([2, 2], bound=0)
    machine = cluster.replicas[ME].machine
    cluster.step(ME)
    machine.handle(MessageArrived(ONE, Message(MessageKind.PROGRESS, 1, 2, 1)))
    assert machine.waiting_for() == {ONE}
    message = Message(MessageKind.WEIGHTS, 1, 2, payload=payload)
    refusal = machine.handle(MessageArrived(ONE, message))[0]
    assert isinstance(refusal, RejectMessage)
    assert not machine.waiting_for()


@given(payload=st.binary(max_size=120))
@settings(max_examples=examples(200), deadline=None)
def test_any_bytes_are_decoded_or_refused(payload: bytes) -> None:
    try:
        chosen_L, values = VariableCodec(LAYOUT, ValueCodec.FLOAT32).decoded(payload)
    except ContractError:
        return
    assert values.size == sum(np.array(LAYOUT.sizes)[chosen_L])


def test_memory_is_bounded_for_any_messages_of_a_neighbour() -> None:
    cluster = cluster_of([2, 2], bound=0)
    machine = cluster.replicas[ME].machine
    for iteration in range(1, 50):
        machine.handle(MessageArrived(ONE, variables_message(iteration, [True] * 3, iteration)))
    assert len(machine.machine._early) == 2
    assert machine.handle(MessageArrived(ONE, variables_message(3, [True] * 3))) == []
