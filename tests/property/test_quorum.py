"""Workers that hold still without a quorum: each by its links alone, all of a side alike.

Proved, under any order of messages, with messages that come twice: after any breaking and mending
of links workers that reach each other count the same sites, those of a naive search through the
graph; a side below its quorum begins no step; mended link by link, also with a second cut in the
middle, each of its workers takes the others' weights, bit for bit, before its next step, and
nobody takes theirs (m = 0), whatever they trained before they noticed; where all held still
nobody's weights move and all go on; a link that breaks between two of three sites holds nobody;
what is no link state is refused. Left out: time (tests/unit/trainer/test_standstill.py), whole
jobs (tests/local/test_simulated_quorum.py).
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import ContractError
from dlion_api.names import Rank, SiteName
from dlion_worker.policies.interface import (
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    Refuse,
    Send,
)
from dlion_worker.policies.quorum import LinkState, Quorum, decode, encode
from quorum_cluster import QuorumCluster

if TYPE_CHECKING:
    from collections.abc import Collection

SEEDS = st.integers(0, 2**32)


# ---- which sites are joined ---------------------------------------------------------------------


class Graph:
    """Quora of several workers, two to a site, linked as the test says."""

    def __init__(self, count: int, least_sites: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.ranks = [Rank(rank) for rank in range(count)]
        self.quora = {
            rank: Quorum(rank, 1, least_sites=least_sites, site_of=self.site_of)
            for rank in self.ranks
        }
        self.up: set[frozenset[Rank]] = set()
        self.under_way: dict[tuple[Rank, Rank], list[Message]] = {}

    def site_of(self, rank: Rank) -> SiteName:
        if rank not in self.ranks:
            raise LookupError(f"rank {rank}")
        return SiteName(f"site-{rank // 2}")

    def change(self, a: Rank, b: Rank) -> None:
        """Mends that link, or breaks it: its ends hear of it at different times."""
        link = frozenset((a, b))
        is_new = link not in self.up
        (self.up.add if is_new else self.up.discard)(link)
        for one, other in ((a, b), (b, a)):
            self.under_way[one, other] = []
        for one, other in ((a, b), (b, a)):
            self.hear(one, MemberJoined(other) if is_new else MemberLeft(other))
            self.deliver(int(self.rng.integers(3)))

    def hear(self, rank: Rank, event: MemberJoined | MemberLeft | MessageArrived) -> None:
        quorum = self.quora[rank]
        assert not quorum.handle(event)
        quorum.is_still = quorum.is_still or not quorum.is_met()
        for send in quorum.news():
            assert frozenset((rank, send.peer)) in self.up or send.peer in quorum._linked
            if frozenset((rank, send.peer)) in self.up:
                self.under_way[rank, send.peer].append(send.message)

    def deliver(self, most: int) -> None:
        while most and (busy := [link for link, queue in self.under_way.items() if queue]):
            source, target = busy[self.rng.integers(len(busy))]
            self.hear(target, MessageArrived(source, self.under_way[source, target].pop(0)))
            most -= 1

    def reached(self, rank: Rank) -> set[Rank]:
        """The definition: all that a path of links leads to."""
        found = {rank}
        while grown := {b for link in self.up if link & found for b in link} - found:
            found |= grown
        return found


@given(
    count=st.integers(2, 8),
    seed=SEEDS,
    changes=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=40),
    least=st.integers(2, 4),
)
@settings(max_examples=150, deadline=None)
def test_all_that_reach_each_other_count_the_same_sites(
    count: int, seed: int, changes: list[tuple[int, int]], least: int
) -> None:
    graph = Graph(count, least, seed)
    for one, other in changes:
        if one % count != other % count:
            graph.change(Rank(one % count), Rank(other % count))
    graph.deliver(100_000)
    for rank, quorum in graph.quora.items():
        reached = graph.reached(rank)
        assert quorum.side() == reached
        assert quorum.sites() == {graph.site_of(peer) for peer in reached}
        assert quorum.is_met() == (len(quorum.sites()) >= least)


def test_in_a_full_mesh_each_link_carries_each_state_once() -> None:
    quora = [
        Quorum(Rank(rank), 1, least_sites=2, site_of=lambda r: SiteName(f"site-{r}"))
        for rank in range(4)
    ]
    sends: list[tuple[int, Send]] = []
    for rank, quorum in enumerate(quora):
        for peer in range(4):
            if peer != rank:
                quorum.handle(MemberJoined(Rank(peer)))
        sends += [(rank, send) for send in quorum.news()]
    assert len(sends) == 12
    for rank, send in sends:
        quora[send.peer].handle(MessageArrived(Rank(rank), send.message))
    assert not [send for quorum in quora for send in quorum.news()]


# ---- holding still, and after -------------------------------------------------------------------


def settle(cluster: QuorumCluster, others_D: np.ndarray, still: Collection[Rank]) -> None:
    """Messages and steps at random until nothing happens; who held still steps from those weights
    alone."""
    for _ in range(8):
        for rank in cluster.rng.permutation(cluster.ranks):
            if cluster.may_step(rank):
                if rank in still:
                    np.testing.assert_array_equal(cluster.replicas[rank].weights_D, others_D)
                cluster.step(rank)
            cluster.deliver_at_random(int(cluster.rng.integers(8)))
    cluster.deliver_at_random()


def all_go_on(cluster: QuorumCluster) -> None:
    """Nobody holds still, or waits for more than messages that are under way."""
    before = {rank: replica.iteration for rank, replica in cluster.replicas.items()}
    for _ in range(8):
        for rank in cluster.ranks:
            if cluster.may_step(rank):
                cluster.step(rank)
        cluster.deliver_at_random()
    assert all(replica.iteration > before[rank] for rank, replica in cluster.replicas.items())
    assert not any(standstill.holds for standstill in cluster.standstills.values())


def trains_unheard(cluster: QuorumCluster, alone: Collection[Rank], steps: int) -> None:
    """Before it notices that nobody hears it; to weights that nobody else has."""
    for _ in range(steps):
        for rank in alone:
            if cluster.may_step(rank):
                cluster.step(rank)
        cluster.lose_across(alone)
        cluster.deliver_all()
    for rank in alone:
        cluster.replicas[rank].weights_D[:] = cluster.rng.standard_normal(cluster.layout.size)


@given(
    workers=st.lists(st.integers(1, 2), min_size=3, max_size=4),
    seed=SEEDS,
    steps=st.tuples(st.integers(0, 3), st.integers(0, 40)),
    mode=st.sampled_from(["asynchronous", "bounded"]),
    second_cut=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_a_side_below_its_quorum_takes_the_others_weights_and_gives_none(
    workers: list[int], seed: int, steps: tuple[int, int], mode: str, second_cut: bool
) -> None:
    cluster = QuorumCluster(workers, len(workers) - 1, seed=seed, mode=mode)
    cluster.lockstep(2)
    alone = cluster.of_sites([seed % len(workers)])
    others = [rank for rank in cluster.ranks if rank not in alone]
    trains_unheard(cluster, alone, steps[0])
    for pair in cluster.across(alone):
        cluster.break_link(*pair)
        cluster.deliver_at_random(2)
    cluster.deliver_at_random()
    assert not any(cluster.may_step(rank) for rank in alone)
    assert all(cluster.standstills[rank].holds for rank in alone)
    # What ten iterations of all would bring, at least: less moves no weights.
    cluster.train(others, 11 * len(cluster.ranks) // len(others) + steps[1])
    others_D = cluster.replicas[others[0]].weights_D.copy()
    for pair in cluster.across(alone):
        cluster.mend_link(*pair)
        cluster.deliver_at_random(int(cluster.rng.integers(12)))
        for rank in alone:
            if cluster.may_step(rank):
                np.testing.assert_array_equal(cluster.replicas[rank].weights_D, others_D)
    if second_cut:
        for pair in cluster.across(alone):
            cluster.break_link(*pair)
        cluster.deliver_at_random()
        for pair in cluster.across(alone):
            cluster.mend_link(*pair)
    settle(cluster, others_D, alone)
    for weights_D in cluster.weights():
        np.testing.assert_array_equal(weights_D, others_D)
    assert not cluster.folds()
    all_go_on(cluster)


@given(workers=st.lists(st.integers(1, 2), min_size=2, max_size=4), seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_where_all_held_still_all_go_on(workers: list[int], seed: int) -> None:
    cluster = QuorumCluster(workers, len(workers), seed=seed)
    cluster.lockstep(2)
    pairs = [pair for number in range(len(workers)) for pair in cluster.across(
        cluster.of_sites([number])) if pair[0] < pair[1]]  # fmt: skip
    for pair in pairs:
        cluster.break_link(*pair)
        cluster.deliver_at_random(3)
    cluster.deliver_at_random()
    assert not any(cluster.may_step(rank) for rank in cluster.ranks)
    before_D = cluster.weights()
    for at in cluster.rng.permutation(len(pairs)):
        cluster.mend_link(*pairs[at])
        cluster.deliver_at_random(int(cluster.rng.integers(6)))
    all_go_on(cluster)
    np.testing.assert_array_equal(cluster.weights(), before_D)


def test_a_link_that_breaks_between_two_of_three_sites_holds_nobody() -> None:
    cluster = QuorumCluster([1, 1, 1], 3, seed=0)
    cluster.lockstep(1)
    cluster.break_link(Rank(0), Rank(1))
    assert all(cluster.may_step(rank) for rank in cluster.ranks)
    cluster.break_link(Rank(0), Rank(2))
    cluster.deliver_all()
    assert not any(cluster.may_step(rank) for rank in cluster.ranks)


# ---- what is no link state ----------------------------------------------------------------------

STATE = LinkState(Rank(1), 3, 7, is_still=True, linked=frozenset({Rank(0), Rank(2)}))


def known(rank: int) -> Rank:
    if rank > 2:
        raise LookupError(f"rank {rank}; allowed: 0 to 2")
    return Rank(rank)


def test_a_link_state_is_read_as_it_was_written() -> None:
    other = LinkState(Rank(0), 1, 0, is_still=False, linked=frozenset())
    assert decode(encode([STATE, other]), known) == [STATE, other]
    assert decode(b"", known) == []


@pytest.mark.parametrize(
    "payload",
    [
        encode([STATE])[:-1],
        encode([STATE])[:-4],
        encode([STATE]) + b"x",
        encode([STATE, STATE]),
        encode([replace(STATE, origin=Rank(9))]),
        encode([replace(STATE, linked=frozenset({Rank(9)}))]),
        struct.pack("<IQQBIII", 1, 3, 7, 0, 2, 0, 0),
        struct.pack("<IQQBI", 1, 3, 7, 0, 2**32 - 1),
    ],
)
def test_nonsense_is_refused(payload: bytes) -> None:
    with pytest.raises(ContractError, match="REACH"):
        decode(payload, known)
    quorum = Quorum(Rank(0), 1, least_sites=2, site_of=lambda rank: SiteName(f"s{known(rank)}"))
    quorum.handle(MemberJoined(Rank(1)))
    (refused,) = quorum.handle(
        MessageArrived(Rank(1), Message(MessageKind.REACH, 0, payload=payload))
    )
    assert isinstance(refused, Refuse)
    assert quorum.side() == {Rank(0), Rank(1)}


@given(st.binary(max_size=60))
def test_no_bytes_break_it(payload: bytes) -> None:
    quorum = Quorum(Rank(0), 1, least_sites=2, site_of=lambda rank: SiteName(f"s{known(rank)}"))
    quorum.handle(MessageArrived(Rank(1), Message(MessageKind.REACH, 0, payload=payload)))
    assert quorum.side() == {Rank(0)}  # whoever is not linked does not count
