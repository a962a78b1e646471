"""Tests of the inbox.

Before the start, links are counted, steps are kept, and questions of peers are answered. At the
start, members and early messages become events, except steps that the weights already include.
Later, links that open and close are events. A barrier waits a moment for a peer that is ending,
unless the manifest no longer has it. Stopped and saved peers are known per link. Invalid messages
are kept as refusals.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_core.lifecycle import join_barrier
from dlion_core.lifecycle.catch_up import CatchUp, CatchUpOutcome
from dlion_core.lifecycle.inbox import (
    DEPARTURE_S,
    EventInbox,
    JoinQuestion,
    StopKind,
    stop_message,
)
from dlion_core.lifecycle.join_barrier import JoinAnswer, JoinRole
from dlion_core.lifecycle.stop_claims import CONFIRM_WITHIN_S
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.links.events import LinkDown, LinkUp
from dlion_core.policies.interface import (
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    TopologyChanged,
)
from dlion_worker.trainer.waiting_inbox import WaitingInbox

A, B = Rank(1), Rank(2)


@pytest.fixture
def sent() -> list[tuple[Rank, Message]]:
    return []


@pytest.fixture
def inbox(sent: list[tuple[Rank, Message]]) -> WaitingInbox:
    return WaitingInbox(lambda peer, message, epoch: sent.append((peer, message)))


def gradient(sender: Rank, iteration: int) -> MessageArrived:
    return MessageArrived(sender, Message(MessageKind.GRADIENT, iteration, 8, payload=b"x"))


def arrive(inbox: EventInbox, *arrivals: object) -> list[object]:
    for arrival in arrivals:
        inbox.put(arrival)  # type: ignore[arg-type]
    return list(inbox.drain())


def test_the_first_message_on_a_new_link_asks_whether_the_peer_trains(
    inbox: WaitingInbox, sent: list
) -> None:
    question = MessageArrived(A, join_barrier.join_request(5))
    inbox.iteration = 3
    assert arrive(inbox, LinkUp(A, 1, 0), question) == []
    assert sent == [
        (A, join_barrier.join_request()),
        (A, join_barrier.join_answer(5, done=3, role=JoinRole.OUT)),
    ]


def test_early_messages_are_handed_over_at_the_start(inbox: WaitingInbox) -> None:
    early_messages = [gradient(A, 7), gradient(A, 8)]
    assert arrive(inbox, LinkUp(A, 1, 6), *early_messages) == []
    assert inbox.start(7) == [MemberJoined(A, 7), early_messages[1]]
    assert inbox.start(7) == [MemberJoined(A, 7)], "handed over once"


def test_another_latecomers_iteration_is_known_at_the_start(inbox: WaitingInbox) -> None:
    arrive(inbox, LinkUp(A, 1, 0), MessageArrived(A, join_barrier.join_request(12)))
    progress = MessageArrived(A, Message(MessageKind.PROGRESS, 11))
    assert inbox.start(4) == [MemberJoined(A, 4), progress]


def test_after_the_start_links_and_questions_are_events(inbox: WaitingInbox, sent: list) -> None:
    inbox.start(0)
    question = MessageArrived(A, join_barrier.join_request(5))
    arrived = [LinkUp(A, 1, 4), question, gradient(A, 5), LinkDown(A, 1, "gone")]
    asked = JoinQuestion(A, question.message, 1)
    assert arrive(inbox, *arrived) == [
        MemberJoined(A, 4), asked, gradient(A, 5), MemberLeft(A),
    ]  # fmt: skip
    assert sent == []


def test_a_lost_link_discards_the_state_of_its_peer(inbox: WaitingInbox) -> None:
    answer = MessageArrived(A, join_barrier.join_answer(0, done=9, role=JoinRole.IN))
    arrive(inbox, LinkUp(A, 1, 0), answer, gradient(A, 3), gradient(B, 3))
    assert inbox.answers == {A: JoinAnswer(0, 9, JoinRole.IN)}
    first = inbox.link_epochs[A]
    arrive(inbox, LinkDown(A, 1, "gone"))
    assert (inbox.answers, inbox.linked) == ({}, set())
    assert [message.sender for message in inbox.early_messages] == [B]
    arrive(inbox, LinkUp(A, 2, 0))
    assert inbox.link_epochs[A] != first


def test_only_a_step_of_the_peer_itself_counts(inbox: WaitingInbox) -> None:
    greeting = MessageArrived(B, Message(MessageKind.PROGRESS, 6))
    arrive(inbox, LinkUp(A, 1, 0), LinkUp(B, 1, 0), gradient(A, 6), greeting)
    assert inbox.peers_with_step(6) == {A}


def test_the_first_stop_gives_the_reason_and_the_iteration(inbox: WaitingInbox) -> None:
    stop = stop_message("maxSteps 9 reached", 9)
    arrive(inbox, LinkUp(A, 1, 0), LinkUp(B, 1, 0))
    assert (
        arrive(
            inbox, MessageArrived(A, stop), MessageArrived(B, stop_message("x", 8, StopKind.SAVED))
        )
        == []
    )
    assert (inbox.stop_reason, inbox.stop_iteration) == ("worker 1: maxSteps 9 reached", 9)
    assert (inbox.stopped, inbox.saved) == ({A, B}, {B})
    arrive(inbox, LinkDown(B, 1, "gone"))
    assert (inbox.stopped, inbox.saved) == ({A}, {B}), "a saved model stays saved"


def test_a_barrier_waits_a_moment_for_a_peer_that_announced_its_end() -> None:
    now_s = 100.0
    inbox = EventInbox(lambda peer, message, epoch: None, clock_s=lambda: now_s)
    arrive(inbox, LinkUp(A, 1, 0), LinkUp(B, 1, 0))
    inbox.start(0)
    leaving = MessageArrived(A, stop_message("SIGTERM", 3, StopKind.LEAVING))
    assert arrive(inbox, leaving, LinkDown(A, 1, "closing"), LinkDown(B, 1, "died")) == [
        MemberLeft(B)
    ]
    assert inbox.stop_reason is None
    now_s += DEPARTURE_S
    assert inbox.drain() == [MemberLeft(A)]
    assert inbox.drain() == []


@pytest.mark.parametrize(
    ("expected_count", "state_of_a", "is_gone"),
    [
        (3, MemberState.READY, False),  # all may be ending
        (3, MemberState.LOST, False),
        (2, MemberState.READY, True),  # the case of a group that has shrunk
        (2, MemberState.FINISHED, True),
    ],
)
def test_a_barrier_does_not_wait_for_a_peer_that_is_no_longer_in_the_manifest(
    expected_count: int, state_of_a: MemberState, is_gone: bool
) -> None:
    states = {Rank(0): MemberState.READY, A: state_of_a, B: MemberState.READY}
    members = tuple(
        Member(WorkerIdentity(rank, SiteName("plant-a"), "g", rank), 1, state, "")
        for rank, state in states.items()
    )
    membership = Membership(7, JobKey("default", "test", "r1"), expected_count, members)
    inbox = WaitingInbox(lambda peer, message, epoch: None, lambda: membership)
    arrive(inbox, LinkUp(A, 1, 0), LinkUp(B, 1, 0))
    inbox.start(0)
    leaving = MessageArrived(A, stop_message("SIGTERM", 3, StopKind.LEAVING))
    left = [MemberLeft(A)] if is_gone else []
    assert arrive(inbox, leaving, LinkDown(A, 1, "closing")) == left


def test_a_peer_that_leaves_and_returns_at_once_is_a_new_member(inbox: WaitingInbox) -> None:
    arrive(inbox, LinkUp(A, 1, 0))
    inbox.start(0)
    leaving = MessageArrived(A, stop_message("SIGTERM", 3, StopKind.LEAVING))
    arrive(inbox, leaving, LinkDown(A, 1, "closing"))
    assert arrive(inbox, LinkUp(A, 2, 0)) == [MemberLeft(A), MemberJoined(A, 0)]


def test_a_peer_that_left_before_the_start_may_crash_later(inbox: WaitingInbox) -> None:
    leaving = MessageArrived(A, stop_message("SIGTERM", 3, StopKind.LEAVING))
    arrive(inbox, LinkUp(A, 1, 0), leaving, LinkDown(A, 0, "closed"), LinkUp(A, 2, 0))
    inbox.start(0)
    assert arrive(inbox, LinkDown(A, 0, "reset")) == [MemberLeft(A)]


def test_a_peer_that_returns_before_the_start_is_believed_again() -> None:
    """Its earlier process claimed that the run was over, which was not confirmed."""
    now = [0.0]
    inbox = EventInbox(lambda *_: None, clock_s=lambda: now[0])
    inbox.doubt = lambda _claim, **_peers: "it is not confirmed"
    arrive(inbox, LinkUp(A, 1, 0), MessageArrived(A, stop_message("deadline", 3)))
    now[0] += CONFIRM_WITHIN_S
    inbox.drain()
    assert [refused.peer for refused in inbox.take_refusals()] == [A]
    arrive(inbox, LinkDown(A, 1, "closed"), LinkUp(A, 2, 0))
    inbox.start(0)
    assert arrive(inbox, gradient(A, 1)) == [gradient(A, 1)]
    assert arrive(inbox, LinkDown(A, 0, "reset")) == [MemberLeft(A)]


def test_a_peer_that_is_not_believed_before_the_start_is_no_member() -> None:
    now = [0.0]
    inbox = EventInbox(lambda *_: None, clock_s=lambda: now[0])
    inbox.doubt = lambda _claim, **_peers: "it is not confirmed"
    stop = MessageArrived(A, stop_message("deadline", 3))
    arrive(inbox, LinkUp(A, 1, 0), LinkUp(B, 2, 0), gradient(A, 3), stop)
    now[0] += CONFIRM_WITHIN_S
    assert inbox.start(0) == [MemberJoined(B, 0)]
    assert inbox.members == {B}
    assert arrive(inbox, LinkDown(A, 1, "closed")) == []


def test_a_catch_up_with_a_peer_that_is_not_believed_fails_at_once() -> None:
    """Its steps are ignored, so the worker would wait for them without end."""
    now = [0.0]
    inbox = EventInbox(lambda *_: None, clock_s=lambda: now[0])
    inbox.doubt = lambda _claim, **_peers: "it is not confirmed"
    stop = MessageArrived(A, stop_message("deadline", 3))
    arrive(inbox, LinkUp(A, 1, 0), LinkUp(B, 2, 0), stop)
    now[0] += CONFIRM_WITHIN_S
    inbox.peers_ahead = dict(inbox.link_epochs)
    # It fails before it passes any event or iteration on.
    dispatcher: Any = SimpleNamespace(
        progress=JobProgress(), parts=SimpleNamespace(machine=None), is_training=True,
        handle=lambda _events: None,
    )  # fmt: skip
    catch_up = CatchUp(
        inbox,
        dispatcher=dispatcher,
        send=lambda *_: None,
        before_pass=lambda _iteration: None,
        after_pass=lambda: None,
    )
    catch_up.begin()
    assert catch_up.advance() is CatchUpOutcome.FAILED


def test_a_peer_that_arrives_after_the_end_is_informed_at_once(
    inbox: WaitingInbox, sent: list
) -> None:
    inbox.stop_message = stop_message("over", 9)
    arrive(inbox, LinkUp(A, 1, 0))
    assert sent == [(A, inbox.stop_message)]


def test_an_invalid_message_is_kept_as_a_refusal(inbox: WaitingInbox) -> None:
    nonsense = MessageArrived(A, Message(MessageKind.MEET, 1, payload=b"what"))
    assert arrive(inbox, nonsense) == []
    assert [refused.peer for refused in inbox.take_refusals()] == [A]
    assert inbox.take_refusals() == []


def test_the_last_grouping_before_the_start_is_the_first_event_and_later_ones_follow(
    inbox: WaitingInbox,
) -> None:
    first, second, third = (TopologyChanged({A: frozenset({Rank(peer)})}) for peer in (2, 3, 4))
    assert arrive(inbox, first, LinkUp(A, 1, 6), second) == []
    assert inbox.start(7) == [second, MemberJoined(A, 7)]
    assert arrive(inbox, third, LinkDown(A, 1, "no neighbour any more")) == [third, MemberLeft(A)]


def test_an_answer_uses_the_link_of_its_question() -> None:
    """A promise to a worker that has been replaced must not reach its successor."""
    answers: list[tuple[Rank, Message, int]] = []
    inbox = WaitingInbox(lambda *sent: answers.append(sent))
    question_event = MessageArrived(A, join_barrier.join_request(13))
    arrive(inbox, LinkUp(A, 4, 0))
    inbox.start(3)
    # In one step of this worker, the peer asks, is lost, returns and asks again.
    events = arrive(
        inbox, question_event, LinkDown(A, 4, "killed"), LinkUp(A, 5, 0), question_event
    )
    questions = [event for event in events if isinstance(event, JoinQuestion)]
    for question in questions:
        inbox.answer(question, JoinRole.IN, done=11)
    promise = join_barrier.join_answer(13, done=11, role=JoinRole.IN)
    assert answers[1:] == [(A, promise, 4), (A, promise, 5)]
