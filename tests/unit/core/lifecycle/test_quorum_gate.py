"""Tests of the quorum gate and of its events.

A short break of a link halts the worker and makes no event. A break as long as the allowed silence
makes one event, and its end another. Without a quorum of two sites nothing is sent, and no worker
halts. While the worker is halted, its policy receives no events of members. It receives all of them
afterwards.

Left out: membership of a quorum, and return (tests/property/test_quorum.py).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_core.lifecycle.quorum_gate import REPORT_AFTER_S, QuorumGate
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.policies.interface import (
    Event,
    Instruction,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    SendMessage,
)
from dlion_core.policies.partitions.quorum import LinkStateAdvertisement, encode_link_states
from quorum_cluster import QuorumCluster
from quorum_parts import job

A, B, C = Rank(0), Rank(1), Rank(2)


class HaltedWorker:
    """The quorum gate of one worker, and its instructions."""

    def __init__(self, workers: list[int], min_sites: int) -> None:
        self.now_s = 0.0
        self.events: list[tuple[float, EventReason]] = []
        self.done: list[Instruction] = []
        reporter: Any = SimpleNamespace(
            rank=A, incarnation=1, now_s=lambda: self.now_s,
            event=lambda reason, words, **_: self.events.append((self.now_s, reason)),
        )  # fmt: skip
        parts = SimpleNamespace(job=job(workers, min_sites), reporter=reporter)
        instructions: Any = SimpleNamespace(
            parts=parts, progress=JobProgress(), carry_out=self.done.extend
        )
        self.quorum_gate = QuorumGate(instructions)

    def hear(self, event: Event) -> bool:
        is_kept = self.quorum_gate.take(event)
        self.quorum_gate.update()
        return is_kept


def reach(of: Rank, version: int, *linked: Rank, is_halted: bool) -> MessageArrived:
    state = LinkStateAdvertisement(of, 1, version, is_halted, frozenset(linked))
    return MessageArrived(of, Message(MessageKind.REACH, 0, payload=encode_link_states([state])))


def test_a_short_break_of_a_link_halts_the_worker_without_an_event() -> None:
    cluster = QuorumCluster([1, 1], 2, seed=0)
    for moment_s in (0.1, REPORT_AFTER_S - 3):
        cluster.split([A], [B])
        assert all(node.quorum_gate.is_closed for node in cluster.nodes.values())
        cluster.run(moment_s)
        cluster.heal()
        cluster.all_continue(5.0, at_least=1)
    assert not cluster.events


def test_a_long_loss_makes_one_event_and_its_end_another() -> None:
    worker = HaltedWorker([1, 1], 2)
    worker.hear(MemberJoined(B))
    worker.now_s = 1.0
    worker.hear(MemberLeft(B))
    for now_s in (1.0 + REPORT_AFTER_S, 10.0, 100.0):
        worker.now_s = now_s
        worker.quorum_gate.update()
    assert worker.events == [(1.0 + REPORT_AFTER_S, EventReason.QUORUM_LOST)]
    worker.hear(MemberJoined(B))
    assert worker.quorum_gate.is_closed, "its peer has sent no state yet"
    worker.hear(reach(B, 1, A, is_halted=True))
    worker.hear(reach(B, 2, A, is_halted=False))
    assert worker.events[1:] == [(100.0, EventReason.QUORUM_BACK)]
    assert worker.quorum_gate.may_step()


def test_a_worker_behind_its_peer_reports_the_quorum_once_it_has_joined() -> None:
    worker = HaltedWorker([1, 1], 2)
    worker.hear(MemberJoined(B))
    worker.hear(MemberLeft(B))
    worker.now_s = REPORT_AFTER_S
    worker.quorum_gate.update()
    worker.hear(MemberJoined(B))
    worker.hear(reach(B, 1, A, is_halted=False))
    assert worker.quorum_gate.is_behind
    assert not worker.quorum_gate.may_step()
    worker.quorum_gate.reset()
    assert [reason for _, reason in worker.events] == [EventReason.QUORUM_LOST]
    worker.hear(MemberJoined(B))
    assert worker.quorum_gate.may_step()
    assert [reason for _, reason in worker.events] == [
        EventReason.QUORUM_LOST,
        EventReason.QUORUM_BACK,
    ]


def test_the_policy_receives_joins_only_when_the_worker_continues() -> None:
    worker = HaltedWorker([1, 1, 1], 3)
    for peer in (B, C):
        worker.hear(MemberJoined(peer))
    worker.hear(MemberLeft(B))
    worker.hear(MemberLeft(C))
    held, ask = (Message(kind, 0, payload=b"\0") for kind in (MessageKind.HELD, MessageKind.MEET))
    joining = [MemberJoined(B), MessageArrived(B, held), MessageArrived(B, ask)]
    assert all(worker.hear(event) for event in joining)
    leaving = [MemberJoined(C), MessageArrived(C, held)]
    assert all(worker.hear(event) for event in [*leaving, MemberLeft(C), MemberJoined(C)])
    assert not worker.quorum_gate.released()
    worker.hear(reach(C, 1, A, is_halted=True))
    assert worker.quorum_gate.released() == [*joining, MemberJoined(C)]
    assert not worker.hear(MessageArrived(C, held))


def test_with_a_quorum_of_one_nothing_is_sent_and_no_worker_halts() -> None:
    worker = HaltedWorker([1, 1], 1)
    assert not worker.hear(MemberJoined(B))
    assert not worker.hear(MemberLeft(B))
    assert worker.quorum_gate.may_step()
    assert not worker.done
    assert worker.hear(reach(B, 1, is_halted=False))
    (refused,) = worker.done
    assert isinstance(refused, RejectMessage)
    assert "minSites is 1" in refused.reason


def test_a_worker_sends_the_state_behind_its_decision_before_it_continues() -> None:
    """Peers of its side that receive both states therefore make the same decision."""
    worker = HaltedWorker([1, 1, 1], 2)
    worker.hear(MemberJoined(B))
    worker.hear(MemberLeft(B))
    worker.hear(MemberJoined(C))
    worker.done.clear()
    worker.hear(reach(C, 1, A, is_halted=True))
    states = [send for send in worker.done if isinstance(send, SendMessage)]
    flags = [bytes(send.message.payload)[20] for send in states]
    assert flags == [1, 0]
