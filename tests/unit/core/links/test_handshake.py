"""Tests of the handshake: timelines of two workers that open, lose and reopen their link.

Both sides are real. Only the network between them is the test's, so that events are observed in
every order.

Left out: streams and the content of frames.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.links.events import LinkDown, LinkUp
from dlion_core.links.handshake import (
    TRANSITIONS,
    Handshake,
    HandshakeAction,
    HandshakeActions,
    LinkInput,
    LinkState,
)


def up(epoch: int = 1, iteration: int = 0) -> LinkUp:
    return LinkUp(Rank(1), epoch, iteration)


def test_the_link_is_up_once_both_streams_are_open_in_either_order() -> None:
    link = Handshake(Rank(1))
    assert link.outbound_opened(1) == []
    assert link.hello_received(1, 5, new_stream=True) == [
        HandshakeAction.SEND_HELLO,
        up(iteration=5),
    ]
    link = Handshake(Rank(1))
    assert link.hello_received(1, 5, new_stream=True) == [HandshakeAction.SEND_HELLO]
    assert link.outbound_opened(1) == [up(iteration=5)]


@pytest.mark.parametrize("side", ["outbound", "inbound"])
def test_a_break_in_either_direction_ends_the_link(side: str) -> None:
    link = Handshake(Rank(1))
    link.outbound_opened(1)
    link.hello_received(1, 0, new_stream=True)
    broken = link.outbound_closed("reset") if side == "outbound" else link.inbound_closed("reset")
    assert broken == [HandshakeAction.CLEAR_QUEUE, LinkDown(Rank(1), 1, "reset")]
    assert link.outbound_closed("again") == []


def test_a_restarted_peer_replaces_its_earlier_incarnation() -> None:
    # 1. up with incarnation 1
    # 2. incarnation 2 sends a hello before the worker notices that 1 died
    # 3. the worker's stream still leads to 1: dial again
    # 4. the worker's new stream reaches 2: up
    # 5. a late stream of 1 sends a hello: refused
    link = Handshake(Rank(1))
    link.outbound_opened(1)
    link.hello_received(1, 40, new_stream=True)
    assert link.hello_received(2, 30, new_stream=True) == [
        HandshakeAction.CLEAR_QUEUE,
        LinkDown(Rank(1), 1, "replaced by incarnation 2"),
        HandshakeAction.RECONNECT,
        HandshakeAction.SEND_HELLO,
    ]
    assert link.outbound_closed("redialled") == []
    assert link.outbound_opened(2) == []
    assert link.hello_received(2, 31, new_stream=False) == [up(2, 31)]
    with pytest.raises(ContractError, match="replaced by 2"):
        link.hello_received(1, 41, new_stream=True)
    assert link.is_up
    assert link.newest == 2


def test_a_stream_to_an_earlier_incarnation_is_dialled_again() -> None:
    link = Handshake(Rank(1))
    assert link.learn_incarnation(3) == []
    assert link.outbound_opened(2) == [HandshakeAction.RECONNECT]
    assert not link.is_up


def test_a_hello_on_an_open_link_reopens_it_only_after_messages() -> None:
    link = Handshake(Rank(1))
    link.outbound_opened(1)
    link.hello_received(1, 1, new_stream=True)
    assert link.hello_received(1, 2, new_stream=False, has_messages=False) == []
    assert link.hello_received(1, 3, new_stream=False, has_messages=True) == [
        LinkDown(Rank(1), 1, "the peer opened the link again"),
        up(2, 3),
    ]


@dataclass
class Side:
    """One worker, its streams, and the state of its link for its trainer."""

    link: Handshake
    dialled: int = 0  # the number of its outgoing stream; 0: none
    accepted: int = 0  # the number of the peer's stream that it holds
    up: bool = False


class Pair:
    """Two workers and a network that the test moves by hand.

    Hellos and first acknowledgements travel per stream. News of a broken stream reaches the two
    ends at different times. Within one stream and direction the order is kept.
    """

    def __init__(self) -> None:
        self.sides = (Side(Handshake(Rank(1))), Side(Handshake(Rank(0))))
        self.streams = 0
        self.travelling: dict[tuple[int, int, str], deque[tuple[str, bool]]] = {}

    def apply(self, who: int, outcome: HandshakeActions) -> None:
        side = self.sides[who]
        for item in outcome:
            if isinstance(item, LinkUp):
                assert not side.up, "up twice"
                side.up = True
            elif isinstance(item, LinkDown):
                assert side.up, "down twice"
                side.up = False
            elif item is HandshakeAction.SEND_HELLO and side.dialled:
                self.post(who, side.dialled, "forward", "hello", False)
            elif item is HandshakeAction.RECONNECT and side.dialled:
                self.break_stream(who, side.dialled)
                self.lose(who, side.dialled)

    def post(self, sender: int, stream: int, way: str, what: str, new: bool) -> None:
        self.travelling.setdefault((sender, stream, way), deque()).append((what, new))

    def dial(self, who: int) -> None:
        side = self.sides[who]
        if not side.dialled:
            self.streams += 1
            side.dialled = self.streams
            self.post(who, side.dialled, "forward", "hello", True)

    def break_stream(self, dialler: int, stream: int) -> None:
        """Stop all traffic on the stream; each end has yet to notice."""
        self.travelling.pop((dialler, stream, "forward"), None)
        self.travelling.pop((1 - dialler, stream, "back"), None)
        self.post(dialler, stream, "forward", "broken", False)
        self.post(1 - dialler, stream, "back", "broken", False)

    def lose(self, dialler: int, stream: int) -> None:
        """Let the dialler's end notice that the stream is gone."""
        side = self.sides[dialler]
        if side.dialled == stream:
            side.dialled = 0
            self.apply(dialler, side.link.outbound_closed("broke"))

    def move(self, key: tuple[int, int, str]) -> None:
        sender, stream, way = key
        what, new = self.travelling[key].popleft()
        if not self.travelling[key]:
            del self.travelling[key]
        receiver = 1 - sender
        side = self.sides[receiver]
        if way == "back":
            if what == "broken":
                self.lose(receiver, stream)
            elif side.dialled == stream and not side.link.is_outbound_open:
                self.apply(receiver, side.link.outbound_opened(1))
        elif what == "broken":
            if side.accepted == stream:
                side.accepted = 0
                self.apply(receiver, side.link.inbound_closed("broke"))
        elif new:
            older, side.accepted = side.accepted, stream
            if older:
                self.break_stream(sender, older)
            self.post(receiver, stream, "back", "acknowledgement", False)
            self.apply(receiver, side.link.hello_received(1, 0, new_stream=True))
        elif side.accepted == stream:
            self.apply(receiver, side.link.hello_received(1, 0, new_stream=False))

    def settle(self) -> None:
        """Deliver everything, and let each side dial whenever it has no stream."""
        for _ in range(200):
            for who in (0, 1):
                self.dial(who)
            if not self.travelling:
                return
            self.move(next(iter(self.travelling)))
        raise AssertionError("the two sides never settle")


@given(st.lists(st.integers(0, 1000), max_size=120))
def test_after_any_breaks_in_any_order_the_link_opens_again_on_both_sides(
    choices: list[int],
) -> None:
    pair = Pair()
    for choice in choices:
        moves = sorted(pair.travelling)
        breaks = [(w, s.dialled) for w, s in enumerate(pair.sides) if s.dialled]
        dials = [w for w, s in enumerate(pair.sides) if not s.dialled]
        kind = choice % 5
        if kind == 0 and breaks:
            pair.break_stream(*breaks[choice // 5 % len(breaks)])
        elif kind == 1 and dials:
            pair.dial(dials[choice // 5 % len(dials)])
        elif moves:
            pair.move(moves[choice // 5 % len(moves)])
    pair.settle()
    assert [side.up for side in pair.sides] == [True, True]


def test_the_table_has_every_input_in_every_state() -> None:
    assert set(TRANSITIONS) == set(LinkState)
    assert all(set(inputs) == set(LinkInput) for inputs in TRANSITIONS.values())


@pytest.mark.parametrize("state", LinkState)
def test_a_newer_incarnation_of_the_peer_and_a_broken_stream_start_again(
    state: LinkState,
) -> None:
    for take in (Handshake.learn_incarnation, lambda link, _: link.outbound_closed("broke")):
        link = Handshake(Rank(1), state, newest=1)
        take(link, 2)
        assert link.state is LinkState.DOWN
