"""Policy `adacomp` against a naive reference.

The largest entries of each variable are kept, ties and zeros included. Each entry is divided by the
number of updates that touched it since its sender read. This holds peer to peer and with a server,
under random schedules. Without delay the divisor is 1. A departing worker blocks no other. A
restored machine continues identically.

Left out: real links (tests/local), accuracy (tests/simulated).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import SpecError
from dlion_api.names import Rank
from dlion_core.codecs import ValueCodec, decode_gradient
from dlion_core.policies.gradient.adacomp import TouchCounters
from dlion_core.policies.interface import (
    ApplyGradient,
    BudgetsChanged,
    Event,
    Instruction,
    Layout,
    LocalStepDone,
    MemberJoined,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    UpdateApplied,
)
from example_counts import examples
from policy_cluster import spec
from weighing_cluster import WeighingCluster, comparable, own_step, run_at_random

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlion_api.spec import Spec

seeds = st.integers(0, 2**32)
ME, ONE, TWO = Rank(0), Rank(1), Rank(2)


def job(**parameters: object) -> Spec:
    exchange = {"policy": "adacomp", "codec": "float32", "parameters": parameters}
    return spec(exchange=exchange)


def naive_kept(gradient_D: np.ndarray, sizes: Iterable[int], share: float) -> np.ndarray:
    """The largest magnitudes of each variable, one by one; ties to the lower index."""
    kept_D, start = np.zeros_like(gradient_D), 0
    for size in sizes:
        count = max(1, int(np.floor(share * size + 1e-9)))
        order = sorted(range(size), key=lambda i: (-abs(gradient_D[start + i]), i))
        for i in order[:count]:
            kept_D[start + i] = gradient_D[start + i]
        start += size
    return kept_D


@given(
    values=st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, -3.0, 0.5]), min_size=12, max_size=12),
    share=st.sampled_from([0.01, 0.1, 0.29, 0.3, 0.5, 1.0]),
)
@settings(max_examples=examples(100), deadline=None)
def test_the_largest_share_of_each_variable_is_sent(values: list[float], share: float) -> None:
    layout = Layout(("a", "b", "c"), (1, 7, 4))
    gradient_D = np.array(values, np.float32)
    expected_D = naive_kept(gradient_D, layout.sizes, share)
    touches = TouchCounters(layout, share, ValueCodec.FLOAT32)
    outgoing = touches.prepare(gradient_D, [Rank(1)], BudgetsChanged({}))
    payload = outgoing.payloads.get(Rank(1))
    np.testing.assert_array_equal(outgoing.own.weighted(np.float32(1)), expected_D)
    if payload is None:
        assert not expected_D.any()
    else:
        sent_D = decode_gradient(payload, layout.size).weighted(np.float32(1))
        np.testing.assert_array_equal(sent_D, expected_D)


class Watched(WeighingCluster):
    """A naive machine with the same input beside each machine.

    It counts the touches of each entry, and keeps for each sender the counts at the time when its
    last gradient was in the weights.
    """

    def __init__(self, parameters: dict[str, object], sizes: list[int], seed: int) -> None:
        self.share = float(str(parameters["share"]))
        self.server = parameters.get("server")
        count = len(sizes)
        entries = 20
        self.touched = np.zeros((count, entries), int)
        self.read = np.zeros((count, count, entries), int)
        self.last = np.zeros((count, count), int)
        self.gone: set[Rank] = set()
        self.divided = 0
        super().__init__(job(step="whole", **parameters), sizes, seed=seed)

    def leave(self, gone: Rank) -> None:
        self.gone.add(gone)
        super().leave(gone)

    def handle(self, rank: Rank, event: Event) -> list[Instruction]:
        expected_D = None
        if isinstance(event, LocalStepDone):
            alone = self.server is not None and self.server in self.gone
            if self.server in (None, rank) or alone:
                kept_D = naive_kept(event.gradient_D, self.layout.sizes, self.share)
                since_D = self.touched[rank] - self.read[rank, rank]
                expected_D = kept_D.copy()
                if self.server is None:  # its own, as its peers do
                    expected_D /= np.maximum(1, since_D).astype(np.float32)
                self.touched[rank] += kept_D != 0
                self.read[rank, rank] = self.touched[rank]
        if isinstance(event, MessageArrived) and event.message.kind is MessageKind.GRADIENT:
            sender = event.sender
            sent_D = decode_gradient(event.message.payload, self.layout.size)
            gradient_D = sent_D.weighted(np.float32(1))
            since_D = self.touched[rank] - self.read[rank, sender]
            self.divided += int((since_D[gradient_D != 0] > 1).any())
            expected_D = gradient_D / np.maximum(1, since_D).astype(np.float32)
            self.touched[rank] += gradient_D != 0
            self.read[rank, sender] = self.touched[rank]
        instructions = super().handle(rank, event)
        found = [one.gradient_D for one in instructions if isinstance(one, ApplyGradient)]
        if expected_D is None:
            assert not found
        else:
            (found_D,) = found
            np.testing.assert_array_equal(found_D, expected_D)
        return instructions


@pytest.mark.parametrize("server", [None, 1])
@given(seed=seeds, workers=st.integers(2, 4), leaves=st.none() | st.integers(2, 40))
@settings(max_examples=examples(25), deadline=None)
def test_each_entry_is_divided_by_its_touches_since_its_sender_read(
    server: int | None, seed: int, workers: int, leaves: int | None
) -> None:
    parameters: dict[str, object] = {"share": 0.3, "bound": 3}
    if server is not None:
        parameters["server"] = server
    cluster = Watched(parameters, [2] * workers, seed % 1000)
    gone = None if leaves is None else (leaves, Rank(seed % workers))
    run_at_random(cluster, seed, steps=8, leaves=gone)


def test_in_lock_step_the_touches_of_all_others_divide() -> None:
    cluster = Watched({"share": 1.0}, [2, 2, 2], 0)
    cluster.lockstep(3)
    assert cluster.divided


def test_without_delay_nothing_is_divided() -> None:
    cluster = Watched({"share": 1.0, "server": 0}, [2, 2], 0)
    for _ in range(5):
        cluster.step(ONE)
        cluster.deliver_all()
    assert cluster.divided == 0
    np.testing.assert_array_equal(cluster.replicas[ME].weights_D, cluster.replicas[ONE].weights_D)


def test_a_gradient_of_zeros_touches_and_requests_nothing() -> None:
    cluster = WeighingCluster(job(server=0), [2, 2])
    cluster.step(ONE, np.zeros(20, np.float32))
    assert cluster.may_step(ONE)
    assert [one.kind for one in cluster.links[ONE, ME]] == [MessageKind.PROGRESS]


@pytest.mark.parametrize("server", [None, 0])
@given(seed=seeds)
@settings(max_examples=examples(10), deadline=None)
def test_a_restored_machine_continues_identically(server: int | None, seed: int) -> None:
    parameters = {"share": 0.3} | ({} if server is None else {"server": server})
    cluster = WeighingCluster(job(**parameters), [3, 5, 4])
    run_at_random(cluster, seed, steps=5)
    original = cluster.replicas[ME]
    weights_D = original.weights_D.copy()
    copy = cluster.machine(ME, weights_D)
    copy.restore(original.machine.state())
    for peer in (ONE, TWO):
        copy.handle(MemberJoined(peer, 5))
    rng = np.random.default_rng(seed)
    for iteration in range(6, 10):
        for event in (
            own_step(iteration, rng.standard_normal(20).astype(np.float32), 3),
            *(MessageArrived(peer, gradient_of(cluster, rng, iteration)) for peer in (ONE, TWO)),
        ):
            instructions = original.machine.handle(event)
            assert comparable(copy.handle(event)) == comparable(instructions)
            if any(isinstance(one, ApplyGradient) for one in instructions):
                instructions = original.machine.handle(UpdateApplied())
                assert comparable(copy.handle(UpdateApplied())) == comparable(instructions)
    assert str(copy.state()) == str(original.machine.state())


def gradient_of(cluster: WeighingCluster, rng: np.random.Generator, iteration: int) -> Message:
    touches = TouchCounters(cluster.layout, 0.3, ValueCodec.FLOAT32)
    gradient_D = rng.standard_normal(20).astype(np.float32)
    payload = touches.prepare(gradient_D, [Rank(1)], BudgetsChanged({})).payloads[Rank(1)]
    return Message(MessageKind.GRADIENT, iteration, local_batch_size=4, payload=payload)


def test_a_manifest_with_an_unknown_server_is_refused() -> None:
    with pytest.raises(SpecError, match="server"):
        WeighingCluster(job(server=7), [2, 2])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Message(MessageKind.GRADIENT, 1, local_batch_size=10, payload=b"xyz"), "3 bytes"),
        (Message(MessageKind.GRADIENT, 1, local_batch_size=0, payload=b"xyz"), "batch of 0"),
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
    (unknown,) = machine.handle(MessageArrived(Rank(9), message))
    assert isinstance(unknown, RejectMessage)
