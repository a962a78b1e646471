"""Tests of connections: lost workers, cuts, closed links, and the notifications of each worker with
their times.

Links and network are real, under the virtual clock. A worker is a list of its notifications.
"""

from __future__ import annotations

import pytest

from dlion_api.names import Rank
from dlion_core.links.events import LinkDown, LinkUp
from dlion_core.links.link_budget import QueueRule
from dlion_environments.plan import Conditions, WorkerConditions
from dlion_simulator.clock import VirtualClock
from dlion_simulator.connections import (
    HANDSHAKE_ROUND_TRIPS,
    RECONNECT_WAIT_S,
    REDIAL_S,
    SILENCE_S,
    VirtualConnections,
)
from dlion_simulator.links import VirtualLink
from dlion_simulator.network import VirtualNetwork

ZERO, ONE, TWO = RANKS = (Rank(0), Rank(1), Rank(2))
LATENCY_S = 0.02
HANDSHAKE_S = HANDSHAKE_ROUND_TRIPS * 2 * LATENCY_S


def conditions(*cut: Rank) -> Conditions:
    """Three workers with latency between all of them; the named ones are cut off."""
    return Conditions(
        tuple(
            WorkerConditions(
                rank,
                latency_s={peer: LATENCY_S for peer in RANKS if peer != rank},
                cut_peers=frozenset(
                    peer for peer in RANKS if peer != rank and (peer in cut or rank in cut)
                ),
            )
            for rank in RANKS
        )
    )


class Setting:
    """Three workers, linked at the start; the notifications of each about a peer, with times."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.network = VirtualNetwork(self.clock, conditions())
        self.notified: list[tuple[Rank, str, Rank, float]] = []
        self.links = {
            (sender, receiver): VirtualLink(
                self.clock, self.network, sender=sender, receiver=receiver, rule=QueueRule.KEEP,
                overhead_bytes=0, deliver=lambda _message: None, give_up=lambda _reason: None,
            )
            for sender in RANKS for receiver in RANKS if sender != receiver
        }  # fmt: skip
        self.connections = VirtualConnections(
            self.clock,
            self.network,
            conditions(),
            {rank: frozenset(RANKS) - {rank} for rank in RANKS},
            link=lambda sender, receiver: self.links[sender, receiver],
            notify=self.notify,
            iteration_of=lambda rank: 10 + rank,
        )
        self.connections.begin(RANKS)

    def notify(self, rank: Rank, event: LinkUp | LinkDown) -> None:
        word = f"up {event.iteration}" if isinstance(event, LinkUp) else "down"
        self.notified.append((rank, word, event.peer, self.clock.now_s))

    def cut(self, *ranks: Rank) -> None:
        self.network.set_conditions(conditions(*ranks))
        self.connections.change(conditions(*ranks))

    def run(self) -> list[tuple[Rank, str, Rank, float]]:
        """Run to the end; return the notifications since the last call."""
        while self.clock.advance():
            pass
        notified, self.notified = self.notified, []
        return [(rank, word, peer, pytest.approx(at_s)) for rank, word, peer, at_s in notified]


def test_a_loss_is_noticed_after_the_latency_and_a_new_process_is_linked_with_all() -> None:
    it = Setting()
    it.connections.process_ended(ONE, "killed")
    assert it.connections.linked(ZERO) == [TWO]
    assert not it.links[ZERO, ONE].is_up
    assert it.run() == [(ZERO, "down", ONE, LATENCY_S), (TWO, "down", ONE, LATENCY_S)]
    began_s = it.clock.now_s
    it.connections.process_started(ONE)
    up_s = began_s + HANDSHAKE_S
    assert it.run() == [
        (ZERO, "up 11", ONE, up_s), (ONE, "up 10", ZERO, up_s),
        (ONE, "up 12", TWO, up_s), (TWO, "up 11", ONE, up_s),
    ]  # fmt: skip
    assert it.connections.linked(ONE) == [ZERO, TWO]


def test_a_short_cut_goes_unnoticed_and_a_long_one_ends_the_links() -> None:
    it = Setting()
    it.cut(TWO)
    it.clock.after(SILENCE_S - 0.1, it.cut)
    assert it.run() == []
    assert it.connections.linked(TWO) == [ZERO, ONE]
    began_s = it.clock.now_s
    it.cut(TWO)
    it.clock.after(SILENCE_S + 5.0, it.cut)
    gone_s = began_s + SILENCE_S
    back_s = gone_s + 5.0 + REDIAL_S + HANDSHAKE_S
    assert it.run() == [
        (ZERO, "down", TWO, gone_s), (TWO, "down", ZERO, gone_s),
        (ONE, "down", TWO, gone_s), (TWO, "down", ONE, gone_s),
        (ZERO, "up 12", TWO, back_s), (TWO, "up 10", ZERO, back_s),
        (ONE, "up 12", TWO, back_s), (TWO, "up 11", ONE, back_s),
    ]  # fmt: skip


def test_a_closed_link_is_dialled_at_once_and_both_ends_start_again() -> None:
    it = Setting()
    it.connections.disconnect(ONE, ZERO, "full")
    assert not it.links[ZERO, ONE].is_up
    back_s = RECONNECT_WAIT_S + HANDSHAKE_S
    assert it.run() == [
        (ONE, "down", ZERO, 0.0), (ZERO, "down", ONE, LATENCY_S),
        (ZERO, "up 11", ONE, back_s), (ONE, "up 10", ZERO, back_s),
    ]  # fmt: skip
    assert it.links[ZERO, ONE].is_up


def test_a_loss_behind_a_cut_is_noticed_by_silence_and_a_new_process_after_it() -> None:
    it = Setting()
    it.cut(TWO)
    it.clock.after(1.0, lambda: it.connections.process_ended(TWO, "killed"))
    it.clock.after(2.0, lambda: it.connections.process_started(TWO))
    assert it.run() == [(ZERO, "down", TWO, SILENCE_S), (ONE, "down", TWO, SILENCE_S)]
    assert it.connections.linked(TWO) == []
    began_s = it.clock.now_s
    it.cut()
    up_s = began_s + REDIAL_S + HANDSHAKE_S
    assert sorted(it.run()[:2]) == [(ZERO, "up 12", TWO, up_s), (TWO, "up 10", ZERO, up_s)]


def test_a_worker_back_before_its_loss_is_noticed_is_first_reported_lost() -> None:
    it = Setting()
    it.cut(TWO)
    it.clock.after(1.0, lambda: it.connections.process_ended(TWO, "killed"))
    it.clock.after(2.0, it.cut)
    it.clock.after(2.0, lambda: it.connections.process_started(TWO))
    up_s = 2.0 + HANDSHAKE_S
    assert it.run() == [
        (ZERO, "down", TWO, up_s), (ZERO, "up 12", TWO, up_s), (TWO, "up 10", ZERO, up_s),
        (ONE, "down", TWO, up_s), (ONE, "up 12", TWO, up_s), (TWO, "up 11", ONE, up_s),
    ]  # fmt: skip


def test_regrouped_workers_are_linked_if_both_request_it() -> None:
    setting = Setting()
    setting.connections.set_neighbours(ZERO, frozenset({ONE}))
    assert not setting.links[ZERO, TWO].is_up
    assert not setting.links[TWO, ZERO].is_up
    notified = setting.run()
    assert notified == [(ZERO, "down", TWO, 0.0), (TWO, "down", ZERO, pytest.approx(LATENCY_S))]
    setting.connections.set_neighbours(ZERO, frozenset({ONE, TWO}))
    setting.connections.set_neighbours(TWO, frozenset({ONE}))  # before the handshake ends
    assert setting.run() == []
    began_s = setting.clock.now_s
    setting.connections.set_neighbours(TWO, frozenset({ZERO, ONE}))
    assert [(rank, word, peer) for rank, word, peer, _ in setting.run()] == [
        (ZERO, "up 12", TWO),
        (TWO, "up 10", ZERO),
    ]
    assert setting.clock.now_s == pytest.approx(began_s + HANDSHAKE_S)
    assert setting.links[ZERO, TWO].is_up


def test_a_worker_that_returns_is_linked_with_its_present_neighbours() -> None:
    setting = Setting()
    setting.connections.process_ended(TWO, "gone")
    setting.run()
    setting.connections.set_neighbours(ZERO, frozenset({ONE}))
    setting.connections.set_neighbours(TWO, frozenset({ONE}))
    setting.connections.process_started(TWO)
    assert {(rank, peer) for rank, word, peer, _ in setting.run() if word != "down"} == {
        (ONE, TWO),
        (TWO, ONE),
    }
