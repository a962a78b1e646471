"""Tests of the messages that `hierarchical` keeps, and of the constant cost of a look-up."""

from __future__ import annotations

import timeit

from dlion_api.names import Rank
from dlion_core.policies.aggregation import Contribution
from dlion_core.policies.hierarchical.site_messages import (
    MEAN,
    PART,
    ReceivedContributions,
    SiteMessage,
    mean_source,
)
from dlion_core.policies.interface import Message, MessageKind


def site_message(what: int, iteration: int, samples: int = 1) -> SiteMessage:
    return SiteMessage(
        Message(MessageKind.PROGRESS, iteration, samples, what), Contribution(samples, None)
    )


def received_from(workers: int) -> ReceivedContributions:
    received = ReceivedContributions()
    for rank in range(1, workers):
        received.add(Rank(rank), site_message(PART, 5))
    return received


def look_up_s(workers: int) -> float:
    received = received_from(workers)
    return min(timeit.repeat(lambda: received.known(workers - 1, 5), number=20, repeat=10))


def test_a_look_up_does_not_scan_all_messages() -> None:
    assert look_up_s(4000) < 20 * look_up_s(4)


def test_the_first_message_of_the_lowest_rank_counts() -> None:
    received = ReceivedContributions()
    for sender, samples in ((2, 7), (1, 8), (1, 9)):
        received.add(Rank(sender), site_message(MEAN + 3, 5, samples))
    known = received.known(mean_source(3), 5)
    assert known is not None
    assert known.share.samples == 8
    assert [(sender, one.share.samples) for sender, one in received.means(5)] == [(1, 8), (2, 7)]
    assert received.known(mean_source(3), 6) is None


def test_only_the_last_iterations_of_each_sender_are_kept() -> None:
    received = ReceivedContributions()
    for iteration in range(1, 100):
        received.add(Rank(1), site_message(PART, iteration))
    assert [at for at in range(1, 100) if received.known(1, at)] == [98, 99]
    received.forget_before(99)
    assert [at for at in range(1, 100) if received.known(1, at)] == [99]
    received.forget_before(100)
    assert received.known(1, 99) is None
