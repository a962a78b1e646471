"""What people are told of a worker that holds still, and that nobody is told where it never does.

Proves: a link that breaks for a moment holds the worker and is no news; one that stays away as long
as a silence may is told once, and so is its end; without a quorum of two sites nothing is sent and
nothing held; while it holds still its policy hears nothing of who comes, and all of it afterwards.
Left out: who counts, and coming back (tests/property/test_quorum.py).
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


class One:
    """One worker's standstill, and what it did."""

    def __init__(self, workers: list[int], least_sites: int) -> None:
        self.now_s = 0.0
        self.told: list[tuple[float, EventReason]] = []
        self.done: list[Instruction] = []
        reporter: Any = SimpleNamespace(
            rank=A, incarnation=1, now_s=lambda: self.now_s,
            event=lambda reason, words, **_: self.told.append((self.now_s, reason)),
        )  # fmt: skip
        parts = SimpleNamespace(job=job(workers, least_sites), reporter=reporter)
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


def test_a_link_that_breaks_for_a_moment_holds_and_is_no_news() -> None:
    cluster = QuorumCluster([1, 1], 2, seed=0)
    for moment_s in (0.1, REPORT_AFTER_S - 3):
        cluster.split([A], [B])
        assert all(node.quorum_gate.is_closed for node in cluster.nodes.values())
        cluster.run(moment_s)
        cluster.heal()
        cluster.all_continue(5.0, at_least=1)
    assert not cluster.events


def test_a_loss_that_lasts_is_told_once_and_so_is_its_end() -> None:
    one = One([1, 1], 2)
    one.hear(MemberJoined(B))
    one.now_s = 1.0
    one.hear(MemberLeft(B))
    for now_s in (1.0 + REPORT_AFTER_S, 10.0, 100.0):
        one.now_s = now_s
        one.quorum_gate.update()
    assert one.told == [(1.0 + REPORT_AFTER_S, EventReason.QUORUM_LOST)]
    one.hear(MemberJoined(B))
    assert one.quorum_gate.is_closed, "before its peer has spoken"
    one.hear(reach(B, 1, A, is_halted=True))
    one.hear(reach(B, 2, A, is_halted=False))
    assert one.told[1:] == [(100.0, EventReason.QUORUM_BACK)]
    assert one.quorum_gate.may_step()


def test_where_the_other_trained_it_is_behind_and_says_so_once_it_has_come_in() -> None:
    one = One([1, 1], 2)
    one.hear(MemberJoined(B))
    one.hear(MemberLeft(B))
    one.now_s = REPORT_AFTER_S
    one.quorum_gate.update()
    one.hear(MemberJoined(B))
    one.hear(reach(B, 1, A, is_halted=False))
    assert one.quorum_gate.is_behind
    assert not one.quorum_gate.may_step()
    one.quorum_gate.reset()
    assert [reason for _, reason in one.told] == [EventReason.QUORUM_LOST]
    one.hear(MemberJoined(B))
    assert one.quorum_gate.may_step()
    assert [reason for _, reason in one.told] == [EventReason.QUORUM_LOST, EventReason.QUORUM_BACK]


def test_the_policy_hears_of_who_comes_only_when_this_worker_goes_on() -> None:
    one = One([1, 1, 1], 3)
    for peer in (B, C):
        one.hear(MemberJoined(peer))
    one.hear(MemberLeft(B))
    one.hear(MemberLeft(C))
    held, ask = (Message(kind, 0, payload=b"\0") for kind in (MessageKind.HELD, MessageKind.MEET))
    comes = [MemberJoined(B), MessageArrived(B, held), MessageArrived(B, ask)]
    assert all(one.hear(event) for event in comes)
    goes = [MemberJoined(C), MessageArrived(C, held)]
    assert all(one.hear(event) for event in [*goes, MemberLeft(C), MemberJoined(C)])
    assert not one.quorum_gate.released()
    one.hear(reach(C, 1, A, is_halted=True))
    assert one.quorum_gate.released() == [*comes, MemberJoined(C)]
    assert not one.hear(MessageArrived(C, held))


def test_with_a_quorum_of_one_nothing_is_sent_and_nothing_held() -> None:
    one = One([1, 1], 1)
    assert not one.hear(MemberJoined(B))
    assert not one.hear(MemberLeft(B))
    assert one.quorum_gate.may_step()
    assert not one.done
    assert one.hear(reach(B, 1, is_halted=False))
    (refused,) = one.done
    assert isinstance(refused, RejectMessage)
    assert "minSites is 1" in refused.reason


def test_what_it_decides_from_it_tells_before_it_goes_on() -> None:
    """So peers of its side that hear of both decide alike."""
    one = One([1, 1, 1], 2)
    one.hear(MemberJoined(B))
    one.hear(MemberLeft(B))
    one.hear(MemberJoined(C))
    one.done.clear()
    one.hear(reach(C, 1, A, is_halted=True))
    told = [send for send in one.done if isinstance(send, SendMessage)]
    flags = [bytes(send.message.payload)[20] for send in told]
    assert flags == [1, 0]
