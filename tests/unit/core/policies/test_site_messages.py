"""What `hierarchical` keeps of what it hears, and that a look-up costs the same always."""

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


def told(what: int, iteration: int, samples: int = 1) -> SiteMessage:
    return SiteMessage(
        Message(MessageKind.PROGRESS, iteration, samples, what), Contribution(samples, None)
    )


def heard_from(workers: int) -> ReceivedContributions:
    heard = ReceivedContributions()
    for rank in range(1, workers):
        heard.add(Rank(rank), told(PART, 5))
    return heard


def look_up_s(workers: int) -> float:
    heard = heard_from(workers)
    return min(timeit.repeat(lambda: heard.known(workers - 1, 5), number=20, repeat=10))


def test_a_look_up_does_not_go_through_all_that_was_said() -> None:
    assert look_up_s(4000) < 20 * look_up_s(4)


def test_the_first_word_of_the_lowest_rank_counts() -> None:
    heard = ReceivedContributions()
    for sender, samples in ((2, 7), (1, 8), (1, 9)):
        heard.add(Rank(sender), told(MEAN + 3, 5, samples))
    known = heard.known(mean_source(3), 5)
    assert known is not None
    assert known.share.samples == 8
    assert [(sender, one.share.samples) for sender, one in heard.means(5)] == [(1, 8), (2, 7)]
    assert heard.known(mean_source(3), 6) is None


def test_of_each_sender_the_last_iterations_are_kept_and_no_more() -> None:
    heard = ReceivedContributions()
    for iteration in range(1, 100):
        heard.add(Rank(1), told(PART, iteration))
    assert [at for at in range(1, 100) if heard.known(1, at)] == [98, 99]
    heard.forget_before(99)
    assert [at for at in range(1, 100) if heard.known(1, at)] == [99]
    heard.forget_before(100)
    assert heard.known(1, 99) is None
