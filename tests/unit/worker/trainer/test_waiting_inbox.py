"""Tests of the inbox of a real worker before its start.

What one link brings is bounded. Another link of the same peer, other peers and a started worker are
not concerned, and a few messages of any size may arrive.

Left out: that the link is opened again (tests/local/test_links); the inbox's rules
(tests/unit/core/lifecycle/test_inbox).
"""

from __future__ import annotations

import pytest

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank
from dlion_core.links.events import LinkDown, LinkUp
from dlion_core.policies.interface import Message, MessageArrived, MessageKind
from dlion_worker.trainer import waiting_inbox
from dlion_worker.trainer.waiting_inbox import MIN_EARLY_MESSAGES, WaitingInbox

A, B = Rank(1), Rank(2)


@pytest.fixture
def inbox(monkeypatch: pytest.MonkeyPatch) -> WaitingInbox:
    monkeypatch.setattr(waiting_inbox, "MAX_EARLY_BYTES", 100_000)
    made = WaitingInbox(lambda _peer, _message, _epoch: None)
    made.put(LinkUp(A, 1, 0))
    made.put(LinkUp(B, 1, 0))
    return made


def put(inbox: WaitingInbox, sender: Rank, count: int, size_bytes: int) -> None:
    for iteration in range(count):
        step = Message(MessageKind.GRADIENT, iteration, 8, payload=bytes(size_bytes))
        inbox.put(MessageArrived(sender, step))


def test_what_a_link_brings_before_the_start_is_bounded(inbox: WaitingInbox) -> None:
    put(inbox, A, 20, 5_000)
    with pytest.raises(UnavailableError, match="105,000 bytes have arrived before"):
        put(inbox, A, 1, 5_000)
    put(inbox, B, 1, 5_000)
    inbox.drain()
    assert sum(each.message.size_bytes for each in inbox.early_messages) == 105_000
    inbox.put(LinkDown(A, 1, "too much"))
    inbox.put(LinkUp(A, 2, 0))
    put(inbox, A, 20, 5_000)
    inbox.start(0)
    put(inbox, A, 1, 5_000)


def test_empty_messages_take_memory_too(inbox: WaitingInbox) -> None:
    with pytest.raises(UnavailableError):
        put(inbox, A, 100, 0)


def test_some_messages_of_any_size_may_arrive(inbox: WaitingInbox) -> None:
    put(inbox, A, MIN_EARLY_MESSAGES, 50_000)
    with pytest.raises(UnavailableError):
        put(inbox, A, 1, 50_000)
