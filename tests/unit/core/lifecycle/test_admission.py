"""Facts: a latecomer to whom another one has named an iteration, when the only peer that trained
vanishes and starts anew with them, waits for that other from the first iteration on; it does not
begin anew beside one that has come in with the vanished one's state. One that begins while another
comes late to a peer that has just begun keeps to what that one has named.

Left out: real loops, whoever vanishes and comes (`test_loop_cluster.py`).
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from dlion_api.names import Rank
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_core.lifecycle import join_barrier
from dlion_core.lifecycle.admission import Admission
from dlion_core.lifecycle.join_barrier import JoinRole
from dlion_core.links.events import LinkDown, LinkUp
from dlion_core.policies.interface import MemberJoined, Message, MessageArrived, MessageKind
from dlion_worker.trainer.admission import join_run
from dlion_worker.trainer.signal_handler import Interrupted
from dlion_worker.trainer.waiting_inbox import WaitingInbox
from loop_cluster import synchronous_job

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlion_core.links.events import StateSnapshot

ONLY, OWN, OTHER = Rank(0), Rank(1), Rank(2)


def out(peer: Rank) -> MessageArrived:
    return MessageArrived(peer, join_barrier.join_answer(0, done=0, role=JoinRole.OUT))


def told(
    inbox: WaitingInbox, to_come: list[list[Any]], membership: Membership | None = None
) -> tuple[Callable[[], StateSnapshot | None], list[tuple[Rank, Message]]]:
    """One of three on its way in, to whom that comes, a part at a time; what it sends."""
    sent: list[tuple[Rank, Message]] = []

    def arrive() -> str | None:
        for arrival in to_come.pop(0) if to_come else ():
            inbox.put(arrival)
        return None if to_come else "nothing more comes"

    admission = Admission(
        synchronous_job(3, 100),
        OWN,
        inbox,
        membership=lambda: membership,
        now_s=time.monotonic(),
        state_bytes=2**40,  # more than may come while it is on its way
    )
    exchange = cast("Any", SimpleNamespace(send=lambda *message: sent.append(message)))
    return lambda: join_run(admission, exchange, inbox, stopped=arrive), sent


VANISHES = [
    [
        LinkUp(ONLY, 1, 7),
        MessageArrived(ONLY, join_barrier.join_answer(0, done=7, role=JoinRole.IN)),
    ],
    [LinkUp(OTHER, 1, 0), out(OTHER)],
    [MessageArrived(OTHER, join_barrier.join_request(12))],
    [LinkDown(ONLY, 1, "killed")],
    [LinkUp(ONLY, 2, 0), out(ONLY)],
]


def test_what_was_agreed_where_somebody_trained_binds_nobody_once_all_begin_anew() -> None:
    inbox = WaitingInbox(lambda peer, message, epoch: None)
    entrance, _ = told(inbox, [*VANISHES, [out(ONLY), out(OTHER)], []])
    assert entrance() is None
    assert inbox.start(0) == [MemberJoined(ONLY, 0), MemberJoined(OTHER, 0)]


def test_what_a_latecomer_agrees_with_one_that_has_just_begun_stands() -> None:
    """That one's answer was from before: this worker begins with it, and waits for nobody else."""
    inbox, named = (
        WaitingInbox(lambda peer, message, epoch: None),
        MessageArrived(OTHER, join_barrier.join_request(12)),
    )
    begun = [[LinkUp(ONLY, 1, 0), out(ONLY)], [LinkUp(OTHER, 2, 0), named, out(OTHER)], []]
    entrance, _ = told(inbox, begun)
    assert entrance() is None
    promise = MessageArrived(OTHER, Message(MessageKind.PROGRESS, 11))
    assert inbox.start(0) == [MemberJoined(ONLY, 0), MemberJoined(OTHER, 0), promise]


def test_who_came_in_with_the_state_of_the_one_that_vanished_is_met() -> None:
    """It had answered that it was out, and has the state since."""
    is_training = MessageArrived(OTHER, join_barrier.join_answer(0, done=12, role=JoinRole.IN))
    entrance, sent = told(
        WaitingInbox(lambda peer, message, epoch: None), [*VANISHES, [is_training], [], []]
    )
    with pytest.raises(Interrupted):
        entrance()
    assert sent[-1] == (OTHER, join_barrier.join_request(12 + join_barrier.FIRST_MARGIN))


def trains(peer: Rank) -> MessageArrived:
    return MessageArrived(peer, join_barrier.join_answer(0, done=7, role=JoinRole.IN))


@pytest.mark.parametrize("state", [MemberState.READY, MemberState.LOST])
def test_no_iteration_is_named_before_the_links_with_all_who_are_there(state: MemberState) -> None:
    """Who is not linked yet would pass it, and all would wait for another one as well."""
    job = synchronous_job(3, 100)
    states = {ONLY: MemberState.READY, OTHER: state}
    members = tuple(Member(job.worker(rank), 1, has, "a:1") for rank, has in states.items())
    membership = Membership(1, job.key, 3, members)
    one, both = [LinkUp(ONLY, 1, 7), trains(ONLY)], [LinkUp(OTHER, 1, 7), trains(OTHER)]
    named = join_barrier.join_request(7 + join_barrier.FIRST_MARGIN)
    for to_come, expected in (
        ([one, [], []], [] if state is MemberState.READY else [(ONLY, named)]),
        ([[*one, *both], [], []], [(ONLY, named), (OTHER, named)]),
    ):
        entrance, sent = told(WaitingInbox(lambda peer, message, epoch: None), to_come, membership)
        with pytest.raises(Interrupted):
            entrance()
        assert sent == expected
