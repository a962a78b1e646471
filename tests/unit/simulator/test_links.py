"""Tests of a virtual link: order, lanes, superseded messages and counters."""

from __future__ import annotations

import pytest

from dlion_api.names import Rank
from dlion_api.protocol.measurements import SentBytes
from dlion_core.links.link_budget import QueueRule
from dlion_core.policies.interface import Message, MessageKind
from dlion_environments.plan import MESSAGE_OVERHEAD_BYTES, Conditions, Pipe, WorkerConditions
from dlion_simulator.clock import VirtualClock
from dlion_simulator.links import MAX_QUEUED_MESSAGES, VirtualLink
from dlion_simulator.network import WIRE_EFFICIENCY, VirtualNetwork

RATE = 1e6


class Setting:
    """One link of a megabyte a second, and its deliveries."""

    def __init__(self, rule: QueueRule = QueueRule.KEEP, latency_s: float = 0.0) -> None:
        self.clock = VirtualClock()
        pipe = Pipe(frozenset({Rank(1)}), RATE / WIRE_EFFICIENCY)
        self.pipe = pipe
        self.network = VirtualNetwork(self.clock, self.conditions(latency_s))
        self.delivered: list[tuple[int, float]] = []
        self.given_up: list[str] = []
        self.link = VirtualLink(
            self.clock,
            self.network,
            sender=Rank(0),
            receiver=Rank(1),
            overhead_bytes=MESSAGE_OVERHEAD_BYTES,
            rule=rule,
            deliver=lambda m: self.delivered.append((m.iteration, self.clock.now_s)),
            give_up=self.give_up,
        )
        self.link.open()

    def conditions(self, latency_s: float) -> Conditions:
        first = WorkerConditions(Rank(0), uplink=(self.pipe,), latency_s={Rank(1): latency_s})
        return Conditions((first, WorkerConditions(Rank(1))))

    def give_up(self, reason: str) -> None:
        self.given_up.append(reason)
        self.link.close()

    def run_until(self, seconds: float) -> None:
        done = []
        self.clock.after(seconds - self.clock.now_s, lambda: done.append(True))
        while not done:
            self.clock.advance()


def gradient(iteration: int, size: int) -> Message:
    return Message(MessageKind.GRADIENT, iteration, payload=bytes(size - MESSAGE_OVERHEAD_BYTES))


def test_messages_keep_their_order_and_a_latency_does_not_hold_the_link() -> None:
    it = Setting(latency_s=0.5)
    it.link.push(gradient(1, 1_000_000))
    it.link.push(gradient(2, 1_000_000))
    it.run_until(9.0)
    assert dict(it.delivered) == pytest.approx({1: 1.5, 2: 2.5})
    assert [iteration for iteration, _ in it.delivered] == [1, 2]


def test_weights_travel_beside_gradients() -> None:
    it = Setting()
    it.link.push(Message(MessageKind.WEIGHTS, 1, payload=bytes(1_000_000 - MESSAGE_OVERHEAD_BYTES)))
    it.link.push(gradient(2, 500_000))
    it.run_until(9.0)
    assert dict(it.delivered) == pytest.approx({2: 1.0, 1: 1.5})


def test_a_newer_gradient_supersedes_one_that_has_not_begun() -> None:
    it = Setting(QueueRule.NEWEST)
    for iteration in (1, 2, 3):
        it.link.push(gradient(iteration, 1_000_000))
    assert it.link.state().dropped_messages == 1
    it.run_until(9.0)
    assert [iteration for iteration, _ in it.delivered] == [1, 3]


def test_a_delivery_has_the_bytes_and_the_busy_time_of_the_link() -> None:
    it = Setting()
    it.link.push(gradient(1, 1_000_000))
    it.run_until(0.25)
    first = it.link.take_delivery()
    assert first.acknowledged_bytes == first.busy_bytes == pytest.approx(250_000, abs=150)
    assert first.receiver_busy_s == pytest.approx(0.25)
    assert first.unacknowledged_bytes == pytest.approx(750_000, abs=150)
    it.run_until(5.0)
    second = it.link.take_delivery()
    assert second.acknowledged_bytes == pytest.approx(750_000, abs=150)
    assert second.receiver_busy_s == pytest.approx(0.75)  # later idle time is not counted


def test_room_is_a_budget_less_the_bytes_held_above_half_of_one() -> None:
    it = Setting()
    assert it.link.sendable_bytes() is None
    it.link.set_budget(1_000_000)
    assert it.link.sendable_bytes() == 1_000_000
    it.link.push(gradient(1, 1_000_000))
    assert it.link.sendable_bytes() == pytest.approx(500_000, abs=150)
    it.run_until(0.75)
    assert it.link.sendable_bytes() == 1_000_000


def test_a_closed_link_loses_its_messages_and_reports_this() -> None:
    it = Setting(latency_s=0.5)
    for iteration in (1, 2, 3):
        it.link.push(gradient(iteration, 1_000_000))
    it.run_until(1.25)  # the first is sent but has not arrived, the second is being sent
    it.link.close()
    assert it.link.state().dropped_messages == 2
    assert not it.link.state().connected
    arrived = it.link.state().acknowledged_total
    assert arrived == pytest.approx(1_250_000, abs=400)
    it.link.push(gradient(4, 1000))
    it.run_until(9.0)
    assert it.delivered == []
    assert it.link.state().queued_bytes == it.link.state().unacknowledged_bytes == 0
    it.link.open()
    it.link.push(gradient(5, 1_000_000))
    it.run_until(20.0)
    assert [iteration for iteration, _ in it.delivered] == [5]
    assert it.link.state().acknowledged_total == pytest.approx(arrived + 1_000_000, abs=400)


def test_a_queue_at_its_bound_closes_the_link_if_nothing_can_be_superseded() -> None:
    it = Setting()
    it.link.set_budget(200_000)  # a window of four messages
    for iteration in range(MAX_QUEUED_MESSAGES + 4):
        it.link.push(gradient(iteration, 100_000))
    assert it.given_up == []
    it.link.push(gradient(99, 100_000))
    assert len(it.given_up) == 1
    assert f"allowed: {MAX_QUEUED_MESSAGES}" in it.given_up[0]
    newest = Setting(QueueRule.NEWEST)
    for iteration in range(3 * MAX_QUEUED_MESSAGES):
        newest.link.push(gradient(iteration, 1_000_000))
    assert newest.given_up == []


def test_a_state_travels_beside_messages_and_is_counted_separately() -> None:
    it = Setting(latency_s=0.25)
    taken: list[float] = []
    it.link.pull(1_000_000 - MESSAGE_OVERHEAD_BYTES, lambda: taken.append(it.clock.now_s))
    it.link.push(gradient(1, 500_000))
    it.run_until(9.0)
    assert dict(it.delivered) == pytest.approx({1: 1.25})
    assert taken == [pytest.approx(1.75)]
    it.link.count_probe(1000)
    sent = it.link.state().by_kind
    assert sent == SentBytes(
        gradient_bytes=500_000 - MESSAGE_OVERHEAD_BYTES, header_bytes=MESSAGE_OVERHEAD_BYTES,
        state_bytes=1_000_000, probe_bytes=1000,
    )  # fmt: skip
    assert it.link.state().sent_total == pytest.approx(sent.gradient_bytes, abs=400)
    assert it.link.take_delivery().acknowledged_bytes == pytest.approx(500_000, abs=400)
    it.link.pull(1_000_000, lambda: taken.append(-1.0))
    it.link.close()
    it.run_until(20.0)
    assert len(taken) == 1


def test_with_falling_latency_no_message_overtakes_another() -> None:
    it = Setting(latency_s=2.0)
    it.link.push(gradient(1, 1_000_000))
    it.run_until(1.5)
    it.network.set_conditions(it.conditions(0.1))
    it.link.push(gradient(2, 100_000))
    it.run_until(9.0)
    assert it.delivered == [(1, pytest.approx(3.0)), (2, pytest.approx(3.0))]


def test_a_message_sent_before_a_break_does_not_arrive_after_it() -> None:
    """The link is up again before the message of the earlier connection would arrive."""
    it = Setting(latency_s=2.0)
    it.link.push(gradient(1, 1_000_000))
    it.run_until(1.5)  # its last byte is sent
    it.link.close()
    it.link.open()
    it.link.push(gradient(2, 1_000_000))
    it.run_until(9.0)
    assert [iteration for iteration, _ in it.delivered] == [2]


def test_a_superseded_gradient_is_no_longer_queued() -> None:
    it = Setting(QueueRule.NEWEST)
    for iteration in (1, 2, 3):
        it.link.push(gradient(iteration, 1_000_000))
    payload = 1_000_000 - MESSAGE_OVERHEAD_BYTES
    state = it.link.state()
    assert (state.queued_bytes, state.unacknowledged_bytes) == (payload, payload)
    it.run_until(9.0)
    state = it.link.state()
    assert (state.queued_bytes, state.sent_total, state.acknowledged_total) == (
        0, 2 * payload, 2 * payload,
    )  # fmt: skip
