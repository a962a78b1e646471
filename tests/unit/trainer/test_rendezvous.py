"""Facts: a latecomer names an iteration ahead of all who train, a later one when somebody was
faster, asks each link's life once, and has agreed only when every linked peer said that it is
before that iteration; peers that do not train yet hold nobody up; nonsense is refused; weights held
at that iteration may be older than of the one before, but no newer.

Left out: that equal weights follow from it (`test_loop_cluster.py`).
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_worker.policies.interface import Message, MessageKind
from dlion_worker.trainer import rendezvous
from dlion_worker.trainer.rendezvous import FIRST_MARGIN, Answer, Meeting, Role

A, B = Rank(0), Rank(1)
LIVES = {A: 1, B: 2}


def inside(done: int, *, asked: int = 0) -> Answer:
    return Answer(asked, done, Role.IN)


def test_an_iteration_ahead_of_all_is_named_to_all() -> None:
    meeting = Meeting()
    assert meeting.to_ask(LIVES, {A: inside(7), B: inside(9)}) == (A, B)
    assert meeting.iteration == 9 + FIRST_MARGIN


def test_nobody_is_asked_twice_for_the_same_iteration() -> None:
    meeting, answers = Meeting(), {A: inside(7), B: inside(7)}
    meeting.to_ask(LIVES, answers)
    assert meeting.to_ask(LIVES, answers) == ()


def test_a_peer_whose_link_was_down_meanwhile_is_asked_again() -> None:
    meeting, answers = Meeting(), {A: inside(7), B: inside(7)}
    meeting.to_ask(LIVES, answers)
    assert meeting.to_ask({A: 1, B: 3}, answers) == (B,)


def test_all_agree_when_all_are_before_the_iteration() -> None:
    meeting = Meeting()
    meeting.to_ask(LIVES, {A: inside(7), B: inside(7)})
    named = meeting.iteration
    answers = {A: inside(8, asked=named), B: inside(7)}
    assert not meeting.agreed(LIVES, answers)
    answers[B] = inside(named - 1, asked=named)
    assert meeting.agreed(LIVES, answers)


def test_a_peer_that_was_past_it_is_met_later_and_by_a_larger_margin() -> None:
    meeting = Meeting()
    meeting.to_ask(LIVES, {A: inside(7), B: inside(7)})
    named = meeting.iteration
    answers = {A: inside(named, asked=named), B: inside(7, asked=named)}
    assert not meeting.agreed(LIVES, answers)
    assert meeting.to_ask(LIVES, answers) == (A, B)
    assert meeting.iteration == named + 2 * FIRST_MARGIN


def test_another_latecomer_holds_nobody_up_once_it_has_heard() -> None:
    meeting = Meeting()
    meeting.to_ask(LIVES, {A: inside(7), B: Answer(0, 0, Role.OUT)})
    named = meeting.iteration
    answers = {A: inside(7, asked=named), B: Answer(0, 0, Role.OUT)}
    assert not meeting.agreed(LIVES, answers), "it has not heard of that iteration yet"
    answers[B] = Answer(named, 100, Role.OUT)
    assert meeting.agreed(LIVES, answers)


def test_weights_held_before_the_iteration_will_do_however_old_their_last_update() -> None:
    meeting = Meeting()
    meeting.to_ask({A: 1}, {A: inside(7)})
    assert meeting.holds(meeting.iteration - 1)
    assert meeting.holds(3)
    assert not meeting.holds(meeting.iteration)


@given(
    st.integers(0, 2**40), st.integers(0, 2**40), st.sampled_from([Role.OUT, Role.IN, Role.STILL])
)
def test_what_is_said_is_what_is_read(asked: int, done: int, role: Role) -> None:
    assert rendezvous.read(rendezvous.ask(asked)) == asked
    answer = rendezvous.answer(asked, done=done, role=role)
    assert rendezvous.read(answer) == Answer(asked, done, role)


@pytest.mark.parametrize("payload", [b"", b"\x04", b"\xff", b"\x00\x00"])
def test_nonsense_is_refused(payload: bytes) -> None:
    with pytest.raises(ContractError, match="MEET"):
        rendezvous.read(Message(MessageKind.MEET, 3, payload=payload))


def test_a_question_without_an_iteration_says_nothing_to_the_policies() -> None:
    assert rendezvous.as_progress(0) is None
    assert rendezvous.as_progress(1) is None
    assert rendezvous.as_progress(9) == Message(MessageKind.PROGRESS, 8)
    assert len(Role) == 4
