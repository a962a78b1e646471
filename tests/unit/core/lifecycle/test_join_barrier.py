"""Tests of the join barrier.

A latecomer names an iteration ahead of all training peers, and a later one if a peer was faster. It
asks once per life of a link. It has agreement only when each linked peer confirms that it is before
that iteration. Peers that do not train yet delay no one. Invalid messages are refused, and
impossible steps ignored. Weights held at that iteration may be older than those of the iteration
before, but not newer.

Left out: the equal weights that result (`test_loop_cluster.py`).
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.lifecycle import join_barrier
from dlion_core.lifecycle.join_barrier import FIRST_MARGIN, JoinAnswer, JoinBarrier, JoinRole
from dlion_core.links.framing import check_outgoing
from dlion_core.policies.interface import Message, MessageKind
from dlion_core.policies.iteration_guard import MAX_ITERATION, MAX_LEAD

A, B = Rank(0), Rank(1)
LIVES = {A: 1, B: 2}


def inside(done: int, *, asked: int = 0) -> JoinAnswer:
    return JoinAnswer(asked, done, JoinRole.IN)


def test_an_iteration_ahead_of_all_peers_is_named_to_all() -> None:
    meeting = JoinBarrier()
    assert meeting.peers_to_ask(LIVES, {A: inside(7), B: inside(9)}) == (A, B)
    assert meeting.iteration == 9 + FIRST_MARGIN


def test_a_peer_is_asked_once_for_an_iteration() -> None:
    meeting, answers = JoinBarrier(), {A: inside(7), B: inside(7)}
    meeting.peers_to_ask(LIVES, answers)
    assert meeting.peers_to_ask(LIVES, answers) == ()


def test_a_peer_whose_link_was_down_meanwhile_is_asked_again() -> None:
    meeting, answers = JoinBarrier(), {A: inside(7), B: inside(7)}
    meeting.peers_to_ask(LIVES, answers)
    assert meeting.peers_to_ask({A: 1, B: 3}, answers) == (B,)


def test_all_agree_when_all_are_before_the_iteration() -> None:
    meeting = JoinBarrier()
    meeting.peers_to_ask(LIVES, {A: inside(7), B: inside(7)})
    named = meeting.iteration
    answers = {A: inside(8, asked=named), B: inside(7)}
    assert not meeting.is_agreed(LIVES, answers)
    answers[B] = inside(named - 1, asked=named)
    assert meeting.is_agreed(LIVES, answers)


def test_for_a_peer_past_the_iteration_a_later_one_is_named_with_a_larger_margin() -> None:
    meeting = JoinBarrier()
    meeting.peers_to_ask(LIVES, {A: inside(7), B: inside(7)})
    named = meeting.iteration
    answers = {A: inside(named, asked=named), B: inside(7, asked=named)}
    assert not meeting.is_agreed(LIVES, answers)
    assert meeting.peers_to_ask(LIVES, answers) == (A, B)
    assert meeting.iteration == named + 2 * FIRST_MARGIN


def test_another_latecomer_delays_no_peer_once_it_knows_the_iteration() -> None:
    meeting = JoinBarrier()
    meeting.peers_to_ask(LIVES, {A: inside(7), B: JoinAnswer(0, 0, JoinRole.OUT)})
    named = meeting.iteration
    answers = {A: inside(7, asked=named), B: JoinAnswer(0, 0, JoinRole.OUT)}
    assert not meeting.is_agreed(LIVES, answers), "it does not know that iteration yet"
    answers[B] = JoinAnswer(named, 100, JoinRole.OUT)
    assert meeting.is_agreed(LIVES, answers)


@pytest.mark.parametrize("claimed", [7 + MAX_LEAD + 1, MAX_ITERATION, 2**53])
def test_an_impossible_step_of_one_peer_does_not_set_the_iteration(claimed: int) -> None:
    """Peers would refuse what a latecomer sends of an iteration so far ahead, and exclude it."""
    meeting, answers = JoinBarrier(), {A: inside(7), B: inside(claimed)}
    assert meeting.peers_to_ask(LIVES, answers) == (A, B)
    assert meeting.iteration == 7 + FIRST_MARGIN
    answers[B] = inside(claimed, asked=meeting.iteration)
    assert meeting.peers_to_ask(LIVES, answers) == ()
    assert not meeting.is_agreed(LIVES, answers)
    assert meeting.is_agreed({A: 1}, {A: inside(8, asked=meeting.iteration)})


def test_an_impossible_step_of_the_only_peer_does_not_end_the_latecomer() -> None:
    meeting = JoinBarrier()
    meeting.peers_to_ask({A: 1}, {A: inside(2**53)})
    check_outgoing(join_barrier.join_request(meeting.iteration), 2**20)


def test_weights_held_before_the_iteration_may_have_an_old_last_update() -> None:
    meeting = JoinBarrier()
    meeting.peers_to_ask({A: 1}, {A: inside(7)})
    assert meeting.accepts(meeting.iteration - 1)
    assert meeting.accepts(3)
    assert not meeting.accepts(meeting.iteration)


@given(
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.sampled_from([JoinRole.OUT, JoinRole.IN, JoinRole.NO_QUORUM]),
)
def test_an_encoded_answer_is_decoded_unchanged(asked: int, done: int, role: JoinRole) -> None:
    assert join_barrier.parse_message(join_barrier.join_request(asked)) == asked
    answer = join_barrier.join_answer(asked, done=done, role=role)
    assert join_barrier.parse_message(answer) == JoinAnswer(asked, done, role)


@pytest.mark.parametrize("payload", [b"", b"\x04", b"\xff", b"\x00\x00"])
def test_an_invalid_message_is_refused(payload: bytes) -> None:
    with pytest.raises(ContractError, match="MEET"):
        join_barrier.parse_message(Message(MessageKind.MEET, 3, payload=payload))


def test_a_question_without_an_iteration_does_not_reach_the_policies() -> None:
    assert join_barrier.as_progress(0) is None
    assert join_barrier.as_progress(1) is None
    assert join_barrier.as_progress(9) == Message(MessageKind.PROGRESS, 8)
    assert len(JoinRole) == 4
