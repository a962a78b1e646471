"""Workers that pause without a quorum: each decides by its links alone, all of a side equally.

After any breaks and returns of links, workers that reach each other count the same sites as a naive
search through the graph. In every mode, with links that break and return at different times, a side
below its quorum makes no step, and the others continue.

Afterwards each of its workers takes the state of one of them before its next step; none takes its
own, whatever it trained before it noticed. No worker blocks after two such sides, a second cut in
the middle, a donor that dies, or a lost worker that restarts. If all were paused, all continue and
fold. In lock step replicas are equal to the bit afterwards. A link that breaks between two of three
sites blocks no worker. Invalid link states are refused.

Left out: reports to users (tests/unit/core/lifecycle/test_quorum_gate.py), whole jobs
(tests/simulated/test_quorum.py).
"""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import ContractError
from dlion_api.names import Rank, SiteName
from dlion_core.policies.interface import (
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    SendMessage,
)
from dlion_core.policies.partitions.quorum import (
    LinkStateAdvertisement,
    SiteQuorum,
    decode_link_states,
    encode_link_states,
)
from example_counts import examples
from quorum_cluster import QuorumCluster

SEEDS = st.integers(0, 2**32)


# ---- reachable sites -----------------------------------------------------------------------------


class Graph:
    """Quorum gates of several workers, two to a site, linked as the test requires."""

    def __init__(self, count: int, min_sites: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.ranks = [Rank(rank) for rank in range(count)]
        self.quora = {
            rank: SiteQuorum(rank, 1, min_sites=min_sites, site_of=self.site_of)
            for rank in self.ranks
        }
        self.up: set[frozenset[Rank]] = set()
        self.in_transit: dict[tuple[Rank, Rank], list[Message]] = {}

    def site_of(self, rank: Rank) -> SiteName:
        if rank not in self.ranks:
            raise LookupError(f"rank {rank}")
        return SiteName(f"site-{rank // 2}")

    def change(self, a: Rank, b: Rank) -> None:
        """Mend that link, or break it; its ends learn of it at different times."""
        link = frozenset((a, b))
        is_new = link not in self.up
        (self.up.add if is_new else self.up.discard)(link)
        for one, other in ((a, b), (b, a)):
            self.in_transit[one, other] = []
        for one, other in ((a, b), (b, a)):
            self.hear(one, MemberJoined(other) if is_new else MemberLeft(other))
            self.deliver(int(self.rng.integers(3)))

    def hear(self, rank: Rank, event: MemberJoined | MemberLeft | MessageArrived) -> None:
        quorum = self.quora[rank]
        assert not quorum.handle(event)
        quorum.is_halted = quorum.is_halted or not quorum.is_met()
        for send in quorum.pending_messages():
            assert frozenset((rank, send.peer)) in self.up or send.peer in quorum._linked
            if frozenset((rank, send.peer)) in self.up:
                self.in_transit[rank, send.peer].append(send.message)

    def deliver(self, most: int) -> None:
        while most and (busy := [link for link, queue in self.in_transit.items() if queue]):
            source, target = busy[self.rng.integers(len(busy))]
            self.hear(target, MessageArrived(source, self.in_transit[source, target].pop(0)))
            most -= 1

    def reached(self, rank: Rank) -> set[Rank]:
        """The definition: all workers to which a path of links leads."""
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
@settings(max_examples=examples(150), deadline=None)
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
        assert quorum.reachable_workers() == reached
        assert quorum.sites() == {graph.site_of(peer) for peer in reached}
        assert quorum.is_met() == (len(quorum.sites()) >= least)


def test_in_a_full_mesh_each_link_carries_each_state_once() -> None:
    quora = [
        SiteQuorum(Rank(rank), 1, min_sites=2, site_of=lambda r: SiteName(f"site-{r}"))
        for rank in range(4)
    ]
    sends: list[tuple[int, SendMessage]] = []
    for rank, quorum in enumerate(quora):
        for peer in range(4):
            if peer != rank:
                quorum.handle(MemberJoined(Rank(peer)))
        sends += [(rank, send) for send in quorum.pending_messages()]
    assert len(sends) == 12
    for rank, send in sends:
        quora[send.peer].handle(MessageArrived(Rank(rank), send.message))
    assert not [send for quorum in quora for send in quorum.pending_messages()]


# ---- pauses and returns --------------------------------------------------------------------------

MODES = st.sampled_from(["synchronous", "backup", "bounded", "asynchronous"])
UNNOTICED_S = st.sampled_from([0.0, 6.0])
"""How long sites train unnoticed before their links break: not at all, or over ten iterations."""


def split(cluster: QuorumCluster, mode: str, *groups: list[Rank], unnoticed_s: float = 0.0) -> None:
    """Split the cluster. In lock step no message is in transit when the links break, so that equal
    replicas stay equal."""
    if unnoticed_s or mode != "synchronous":
        cluster.split(*groups, silent_s=unnoticed_s)
        return
    cluster.pause()
    cluster.split(*groups)
    cluster.resume()


def kill(cluster: QuorumCluster, mode: str, rank: Rank) -> None:
    if mode != "synchronous":
        cluster.kill(rank)
        return
    cluster.pause()
    cluster.kill(rank)
    cluster.run(1.0)
    cluster.resume()


def assert_paused(cluster: QuorumCluster, ranks: list[Rank], seconds: float = 6.0) -> None:
    from_s = cluster.clock.now_s
    cluster.run(seconds)
    assert not any(cluster.steps(ranks, from_s).values())


def assert_equal(cluster: QuorumCluster, mode: str) -> None:
    """In lock step the recent weights are equal to the bit."""
    if mode == "synchronous":
        done = min(node.progress.iteration for node in cluster.nodes.values())
        assert not cluster.differing(done - 10)


@given(seed=SEEDS, mode=MODES, unnoticed_s=UNNOTICED_S)
@settings(max_examples=examples(25), deadline=None)
def test_a_side_below_its_quorum_takes_the_others_state_and_gives_none(
    seed: int, mode: str, unnoticed_s: float
) -> None:
    cluster = QuorumCluster([2, 1, 2], 2, seed=seed, mode=mode)
    cluster.run(3)
    alone = cluster.of_sites(seed % 3)
    others = [rank for rank in cluster.ranks if rank not in alone]
    split(cluster, mode, alone, others, unnoticed_s=unnoticed_s)
    from_s = cluster.clock.now_s
    assert_paused(cluster, alone)
    assert min(cluster.steps(others, from_s).values()) > 10
    cluster.heal()
    cluster.run(15)
    cluster.all_continue()
    assert not any(was_still for _, _, was_still in cluster.donors)
    assert all(bool(cluster.nodes[rank].replica.taken) == (rank in alone) for rank in cluster.ranks)
    assert not cluster.folds()
    if not unnoticed_s:
        assert_equal(cluster, mode)


@given(seed=SEEDS, mode=MODES)
@settings(max_examples=examples(15), deadline=None)
def test_two_paused_sides_return_to_the_one_that_trained(seed: int, mode: str) -> None:
    cluster = QuorumCluster([1, 1, 2, 1, 1], 3, seed=seed, mode=mode)
    cluster.run(3)
    split(cluster, mode, cluster.of_sites(0, 1, 4), cluster.of_sites(2), cluster.of_sites(3))
    assert_paused(cluster, cluster.of_sites(2, 3))
    cluster.heal()
    cluster.run(15)
    cluster.all_continue()
    assert not cluster.folds()
    assert_equal(cluster, mode)


@given(seed=SEEDS, mode=MODES)
@settings(max_examples=examples(20), deadline=None)
def test_a_second_cut_during_the_return(seed: int, mode: str) -> None:
    cluster = QuorumCluster([2, 1, 2], 2, seed=seed, mode=mode)
    cluster.run(3)
    alone = cluster.of_sites(seed % 3)
    others = [rank for rank in cluster.ranks if rank not in alone]
    for back_s in (4 * float(cluster.rng.random()), 15):
        split(cluster, mode, alone, others)
        cluster.run(6)
        cluster.heal()
        cluster.run(back_s)
    cluster.all_continue()


@given(seed=SEEDS, mode=MODES)
@settings(max_examples=examples(15), deadline=None)
def test_a_donor_that_dies_during_the_return(seed: int, mode: str) -> None:
    cluster = QuorumCluster([2, 1, 2], 2, seed=seed, mode=mode)
    cluster.run(3)
    split(cluster, mode, cluster.of_sites(0), cluster.of_sites(1, 2))
    cluster.run(6)
    cluster.heal()
    while not cluster.donors:
        cluster.clock.advance()
    _, donor, _ = cluster.donors[0]
    kill(cluster, mode, donor)
    cluster.run(10 * float(cluster.rng.random()))
    cluster.restart(donor)
    cluster.run(15)
    cluster.all_continue()


@given(seed=SEEDS, mode=MODES)
@settings(max_examples=examples(20), deadline=None)
def test_a_restarted_worker_frees_the_paused_ones(seed: int, mode: str) -> None:
    cluster = QuorumCluster([2, 1], 2, seed=seed, mode=mode)
    cluster.run(3)
    here, (lost,) = cluster.of_sites(0), cluster.of_sites(1)
    kill(cluster, mode, lost)
    cluster.run(1)
    assert_paused(cluster, here)
    cluster.restart(lost)
    cluster.run(5)
    cluster.all_continue()
    assert cluster.nodes[lost].replica.taken
    assert_equal(cluster, mode)


@given(seed=SEEDS, mode=MODES, unnoticed_s=UNNOTICED_S)
@settings(max_examples=examples(20), deadline=None)
def test_if_all_were_paused_all_continue(seed: int, mode: str, unnoticed_s: float) -> None:
    cluster = QuorumCluster([2, 1, 1], 3, seed=seed, mode=mode)
    cluster.run(3)
    sites = [cluster.of_sites(number) for number in range(3)]
    split(cluster, mode, *sites, unnoticed_s=unnoticed_s)
    assert_paused(cluster, cluster.ranks)
    cluster.heal()
    cluster.run(10)
    cluster.all_continue()
    if unnoticed_s and mode == "asynchronous":  # the training of each meanwhile counts
        assert cluster.folds()


def test_a_link_that_breaks_between_two_of_three_sites_blocks_no_worker() -> None:
    cluster = QuorumCluster([1, 1, 1], 3, seed=0)
    cluster.break_link(Rank(0), Rank(1))
    cluster.all_continue()
    cluster.break_link(Rank(0), Rank(2))
    cluster.run(2)
    assert_paused(cluster, cluster.ranks)


# ---- invalid link states -------------------------------------------------------------------------

STATE = LinkStateAdvertisement(Rank(1), 3, 7, is_halted=True, linked=frozenset({Rank(0), Rank(2)}))


def known(rank: int) -> Rank:
    if rank > 2:
        raise LookupError(f"rank {rank}; allowed: 0 to 2")
    return Rank(rank)


def test_a_link_state_is_decoded_as_encoded() -> None:
    other = LinkStateAdvertisement(Rank(0), 1, 0, is_halted=False, linked=frozenset())
    assert decode_link_states(encode_link_states([STATE, other]), known) == [STATE, other]
    assert decode_link_states(b"", known) == []


@pytest.mark.parametrize(
    "payload",
    [
        encode_link_states([STATE])[:-1],
        encode_link_states([STATE])[:-4],
        encode_link_states([STATE]) + b"x",
        encode_link_states([STATE, STATE]),
        encode_link_states([replace(STATE, origin=Rank(9))]),
        encode_link_states([replace(STATE, linked=frozenset({Rank(9)}))]),
        struct.pack("<IQQBIII", 1, 3, 7, 0, 2, 0, 0),
        struct.pack("<IQQBI", 1, 3, 7, 0, 2**32 - 1),
        struct.pack("<IQQBIII", 1, 3, 7, 0, 2, 2, 0),
        encode_link_states([replace(STATE, version=2**53 + 1)]),
        encode_link_states([replace(STATE, incarnation=2**64 - 1)]),
    ],
)
def test_an_invalid_link_state_is_refused(payload: bytes) -> None:
    with pytest.raises(ContractError, match="REACH"):
        decode_link_states(payload, known)
    quorum = SiteQuorum(Rank(0), 1, min_sites=2, site_of=lambda rank: SiteName(f"s{known(rank)}"))
    quorum.handle(MemberJoined(Rank(1)))
    (refused,) = quorum.handle(
        MessageArrived(Rank(1), Message(MessageKind.REACH, 0, payload=payload))
    )
    assert isinstance(refused, RejectMessage)
    assert quorum.reachable_workers() == {Rank(0), Rank(1)}


@given(st.binary(max_size=60))
def test_any_bytes_are_decoded_or_refused(payload: bytes) -> None:
    quorum = SiteQuorum(Rank(0), 1, min_sites=2, site_of=lambda rank: SiteName(f"s{known(rank)}"))
    quorum.handle(MessageArrived(Rank(1), Message(MessageKind.REACH, 0, payload=payload)))
    assert quorum.reachable_workers() == {Rank(0)}  # an unlinked worker does not count
