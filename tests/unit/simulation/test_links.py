"""A virtual link: order, lanes, what gives way, and what its counters say."""

from __future__ import annotations

import pytest

from dlion_api.names import Rank
from dlion_worker.environments.plan import Conditions, Pipe, WorkerConditions
from dlion_worker.exchange import QueueRule
from dlion_worker.policies.interface import Message, MessageKind
from dlion_worker.simulation.clock import VirtualClock
from dlion_worker.simulation.links import HEADER_BYTES, VirtualLink
from dlion_worker.simulation.network import WIRE_EFFICIENCY, Network

RATE = 1e6


class Setting:
    """One link of a megabyte a second, and what it has delivered."""

    def __init__(self, rule: QueueRule = QueueRule.KEEP, latency_s: float = 0.0) -> None:
        self.clock = VirtualClock()
        pipe = Pipe(frozenset({Rank(1)}), RATE / WIRE_EFFICIENCY)
        plan = Conditions((WorkerConditions(Rank(0), uplink=(pipe,)), WorkerConditions(Rank(1))))
        self.delivered: list[tuple[int, float]] = []
        self.link = VirtualLink(
            self.clock,
            Network(self.clock, plan),
            sender=Rank(0),
            receiver=Rank(1),
            latency_s=latency_s,
            rule=rule,
            deliver=lambda m: self.delivered.append((m.iteration, self.clock.now_s)),
        )

    def run_until(self, seconds: float) -> None:
        done = []
        self.clock.after(seconds - self.clock.now_s, lambda: done.append(True))
        while not done:
            self.clock.advance()


def gradient(iteration: int, size: int) -> Message:
    return Message(MessageKind.GRADIENT, iteration, payload=bytes(size - HEADER_BYTES))


def test_messages_keep_their_order_and_a_latency_does_not_hold_the_link() -> None:
    it = Setting(latency_s=0.5)
    it.link.push(gradient(1, 1_000_000))
    it.link.push(gradient(2, 1_000_000))
    it.run_until(9.0)
    assert dict(it.delivered) == pytest.approx({1: 1.5, 2: 2.5})
    assert [iteration for iteration, _ in it.delivered] == [1, 2]


def test_weights_travel_beside_gradients() -> None:
    it = Setting()
    it.link.push(Message(MessageKind.WEIGHTS, 1, payload=bytes(1_000_000 - HEADER_BYTES)))
    it.link.push(gradient(2, 500_000))
    it.run_until(9.0)
    assert dict(it.delivered) == pytest.approx({2: 1.0, 1: 1.5})


def test_a_gradient_that_has_not_begun_gives_way_to_a_newer_one() -> None:
    it = Setting(QueueRule.NEWEST)
    for iteration in (1, 2, 3):
        it.link.push(gradient(iteration, 1_000_000))
    assert it.link.state().dropped_messages == 1
    it.run_until(9.0)
    assert [iteration for iteration, _ in it.delivered] == [1, 3]


def test_a_delivery_tells_bytes_and_the_time_the_link_was_busy() -> None:
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
    assert second.receiver_busy_s == pytest.approx(0.75)  # idle time since is not counted


def test_room_is_a_budget_less_what_is_held_above_half_of_one() -> None:
    it = Setting()
    assert it.link.room_bytes() is None
    it.link.set_budget(1_000_000)
    assert it.link.room_bytes() == 1_000_000
    it.link.push(gradient(1, 1_000_000))
    assert it.link.room_bytes() == pytest.approx(500_000, abs=150)
    it.run_until(0.75)
    assert it.link.room_bytes() == 1_000_000
