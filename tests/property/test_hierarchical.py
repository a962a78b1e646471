"""Policy `hierarchical` against a naive reference.

Without compression it is the mean by samples over all workers, for any batches and sites, and
replicas agree bit for bit. With compression, sent and kept entries are the reference's, and so is
the mean, median or trimmed mean of the sites. One site cannot shift a robust mean far. Between
sites one mean travels for each pair, with as many bytes as are trained. A worker that leaves or
returns blocks no other and has equal weights again, also a gateway or a whole site. A broken link
blocks no worker either. Invalid messages are refused. A restored machine continues identically.

Left out: real links, accuracy (tests/simulated).
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_core.codecs import ValueCodec, decode_gradient, encode_whole
from dlion_core.policies.aggregation import Contribution
from dlion_core.policies.hierarchical.site_means import combine
from dlion_core.policies.hierarchical.site_messages import MEAN, PART, RESULT
from dlion_core.policies.interface import (
    Layout,
    MemberJoined,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    SendMessage,
)
from example_counts import examples
from policy_cluster import linear_gradient
from sites_cluster import SitesCluster
from weights_cluster import comparable, weights_spec

if TYPE_CHECKING:
    from dlion_api.spec import Spec

seeds = st.integers(0, 2**32)
sites_of = st.lists(st.integers(1, 3), min_size=1, max_size=4)
few_sites = st.lists(st.integers(1, 3), min_size=1, max_size=3)
ME, ONE, TWO = Rank(0), Rank(1), Rank(2)
DENSE = {"betweenShare": 1}


def job(codec: str = "float32", **parameters: object) -> Spec:
    return weights_spec("hierarchical", codec=codec, **parameters)


def cluster_of(sites: list[int], seed: int, **parameters: object) -> SitesCluster:
    sizes = np.random.default_rng(seed).integers(1, 9, sum(sites)).tolist()
    return SitesCluster(job(**parameters), sizes, sites, seed=seed % 999)


def assert_equal_replicas(cluster: SitesCluster) -> None:
    first, *others = (cluster.replicas[rank].weights_D for rank in sorted(cluster.alive))
    for other_D in others:
        np.testing.assert_array_equal(first, other_D)


@given(seed=seeds, sites=sites_of, group_size=st.sampled_from([0, 2]))
@settings(max_examples=examples(40), deadline=None)
def test_uncompressed_it_is_the_flat_mean(seed: int, sites: list[int], group_size: int) -> None:
    cluster = cluster_of(sites, seed, groupSize=group_size, **DENSE)
    naive = cluster_of(sites, seed, **DENSE)
    cluster.run(seed, steps=4)
    weights_D = naive.replicas[ME].weights_D.astype(np.float64)
    total = sum(replica.local_batch_size for replica in naive.replicas.values())
    for _ in range(4):
        step_D = np.zeros_like(weights_D)
        for rank, replica in naive.replicas.items():
            gradient_D, _ = linear_gradient(weights_D.astype(np.float32), *naive.batch(rank))
            step_D += gradient_D * (replica.local_batch_size / total)
        weights_D -= 0.05 * step_D
    assert_equal_replicas(cluster)
    np.testing.assert_allclose(cluster.replicas[ME].weights_D, weights_D, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("codec", list(ValueCodec))
@pytest.mark.parametrize("combine", ["mean", "median"])
def test_replicas_are_equal_for_any_codec(codec: ValueCodec, combine: str) -> None:
    parameters = {"insideShare": 0.5, "betweenShare": 0.4, "combine": combine}
    cluster = SitesCluster(job(codec.value, **parameters), [3, 2, 5, 1, 2], [2, 2, 1])
    start_D = cluster.weights()[0]
    cluster.run(5, steps=6)
    assert (cluster.weights()[0] != start_D).any()
    assert_equal_replicas(cluster)


class Naive:
    """Sites' means, residuals and their combination, entry by entry."""

    def __init__(self, share: float, how: str, trim: int, sites: int, size: int) -> None:
        self.share, self.how, self.trim = share, how, trim
        self.rest_SD = np.zeros((sites, size))

    def send(self, site: int, mean_D: np.ndarray, iteration: int) -> np.ndarray:
        size = mean_D.size
        self.rest_SD[site] += mean_D
        rest_D = self.rest_SD[site].astype(np.float32)
        if self.how == "mean":
            kept = sorted(range(size), key=lambda i: (-abs(rest_D[i]), i))
            chosen = kept[: max(1, round(self.share * size))]
        else:
            parts = math.ceil(1 / self.share)
            turn = iteration % parts
            chosen = list(range(size * turn // parts, size * (turn + 1) // parts))
        sent_D = np.zeros(size)
        sent_D[chosen] = self.rest_SD[site][chosen]
        self.rest_SD[site] -= sent_D
        return sent_D

    def combined(self, sent_SD: np.ndarray, samples: list[int]) -> np.ndarray:
        if self.how == "mean":
            weighted: np.ndarray = np.average(sent_SD, axis=0, weights=samples)
            return weighted
        if self.how == "median":
            middle: np.ndarray = np.median(sent_SD, axis=0)
            return middle
        cut = min(self.trim, (len(sent_SD) - 1) // 2)
        rows = [sorted(column)[cut : len(column) - cut] for column in sent_SD.T]
        return np.array([sum(row) / len(row) for row in rows])


@given(
    seed=seeds,
    sites=sites_of,
    share=st.sampled_from([0.1, 0.3, 0.55]),
    how=st.sampled_from(["mean", "median", "trimmed"]),
    trim=st.integers(0, 2),
)
@settings(max_examples=examples(60), deadline=None)
def test_means_of_sites_are_sent_kept_and_combined_like_the_references(
    seed: int, sites: list[int], share: float, how: str, trim: int
) -> None:
    parameters = {"betweenShare": share, "combine": how, "trim": trim}
    cluster = cluster_of(sites, seed, **parameters)
    members = [[rank for rank in cluster.ranks if cluster.sites[rank] == name]
               for name in sorted(set(cluster.sites.values()))]  # fmt: skip
    naive = Naive(share, how, trim, len(sites), cluster.layout.size)
    weights_D = cluster.replicas[ME].weights_D.astype(np.float64)
    rng = np.random.default_rng(seed)
    for iteration in range(1, 6):
        sent, samples = [], []
        gradients = {
            rank: rng.standard_normal(weights_D.size).astype(np.float32) for rank in cluster.ranks
        }
        for site, ranks in enumerate(members):
            sizes = [cluster.replicas[rank].local_batch_size for rank in ranks]
            mean_D = np.average([gradients[rank] for rank in ranks], axis=0, weights=sizes)
            sent.append(naive.send(site, mean_D, iteration))
            samples.append(sum(sizes))
        weights_D -= 0.05 * naive.combined(np.array(sent), samples)
        for rank in rng.permutation(cluster.ranks):
            cluster.step(Rank(int(rank)), gradients[Rank(int(rank))])
        cluster.deliver_all()
        assert_equal_replicas(cluster)
        found_D = cluster.replicas[ME].weights_D
        np.testing.assert_allclose(found_D, weights_D, rtol=1e-3, atol=1e-4)


@given(seed=seeds, sites=st.integers(3, 6), size=st.integers(1, 5), how=st.integers(1, 9))
@settings(max_examples=examples(60), deadline=None)
def test_one_site_cannot_shift_a_robust_mean_far(
    seed: int, sites: int, size: int, how: int
) -> None:
    rng = np.random.default_rng(seed)
    honest_SD = rng.standard_normal((sites - 1, size)).astype(np.float32)
    wild_D = (rng.standard_normal(size) * 1e30).astype(np.float32)
    payloads = [encode_whole(row_D, ValueCodec.FLOAT32) for row_D in (*honest_SD, wild_D)]
    shares = [Contribution(10**6 if i == sites - 1 else 1, decode_gradient(payload, size))
              for i, payload in enumerate(payloads)]  # fmt: skip
    found_D = combine(shares, size, trim=how)
    assert (found_D >= honest_SD.min(axis=0)).all()
    assert (found_D <= honest_SD.max(axis=0)).all()
    assert np.abs(combine(shares, size, trim=None)).max() > 1e20


@pytest.mark.parametrize("codec", ["float32", "float16"])
def test_between_sites_one_mean_for_each_pair_travels_and_no_gradient(codec: str) -> None:
    cluster = SitesCluster(job(codec, **DENSE), [2] * 6, [3, 2, 1])
    cluster.run(7, steps=2)
    sizes: dict[tuple[bool, int], list[int]] = {}
    for replica in cluster.replicas.values():
        replica.instructions.clear()
    cluster.run(8, steps=5)
    for rank, replica in cluster.replicas.items():
        for one in replica.instructions:
            if isinstance(one, SendMessage) and one.message.payload:
                is_inside = cluster.sites[rank] == cluster.sites[one.peer]
                what = min(MEAN, one.message.weights_version)
                sizes.setdefault((is_inside, what), []).append(len(one.message.payload))
                assert rank in (0, 3, 5) or what == PART
    assert set(sizes) == {(True, PART), (True, RESULT), (False, MEAN)}
    assert len(sizes[True, PART]) == len(sizes[True, RESULT]) == 3 * (2 + 1)
    assert len(sizes[False, MEAN]) == 3 * 6
    each = 4 if codec == "float32" else 2
    assert set(sizes[False, MEAN]) == {16 + 20 * each}
    assert_equal_replicas(cluster)


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_bytes_fall_with_the_frozen_share(share: float) -> None:
    """Frozen variables are not in the layout: messages carry a share of the trained ones."""
    travelled = {}
    for trained in (4000, 1000):
        layout = Layout(("decoder",), (trained,))
        cluster = SitesCluster(job(betweenShare=share), [1] * 4, [2, 2], layout=layout)
        rng = np.random.default_rng(1)
        for _ in range(3):
            for rank in cluster.ranks:
                cluster.step(rank, rng.standard_normal(trained).astype(np.float32))
            cluster.deliver_all()
        travelled[trained] = sum(
            len(one.message.payload)
            for replica in cluster.replicas.values()
            for one in replica.instructions
            if isinstance(one, SendMessage)
        )
    assert travelled[4000] / travelled[1000] == pytest.approx(4, rel=0.03)


@given(seed=seeds, sites=few_sites, turn=st.integers(0, 150), whole=st.booleans())
@settings(max_examples=examples(150), deadline=None)
def test_a_departing_worker_blocks_no_other(
    seed: int, sites: list[int], turn: int, whole: bool
) -> None:
    cluster = cluster_of(sites, seed)
    rng = np.random.default_rng(seed)
    for _ in range(turn):
        cluster.turn(rng, steps=8)
    gone = Rank(int(rng.integers(len(cluster.ranks))))
    for rank in cluster.ranks:
        if rank == gone or (whole and cluster.sites[rank] == cluster.sites[gone]):
            cluster.leave(rank)
    cluster.run(seed, steps=8)


@given(seed=seeds, sites=few_sites, turn=st.integers(0, 150), away=st.integers(0, 60))
@example(seed=9, sites=[1], turn=0, away=1)  # is skipped, and waited for one iteration later
@example(seed=0, sites=[3, 2, 1], turn=139, away=0)  # another site's gateway lacks its result
@settings(max_examples=examples(100), deadline=None)
def test_a_worker_that_returns_at_any_time_has_equal_weights_again(
    seed: int, sites: list[int], turn: int, away: int
) -> None:
    cluster, gone, _ = lose_and_continue([*sites, 1], seed, turn, away)
    cluster.replace_worker(gone, min(cluster.alive))
    cluster.run(seed, steps=14)
    for _ in range(4):  # links are faster than steps: it does not lag permanently
        cluster.deliver_all()
        for rank in cluster.ranks:
            if cluster.may_step(rank):
                cluster.step(rank)
    cluster.deliver_all()
    total = sum(replica.local_batch_size for replica in cluster.replicas.values())
    for replica in cluster.replicas.values():
        assert replica.descents()[-1].samples == total


@given(seed=seeds, sites=few_sites, turn=st.integers(0, 150), away=st.integers(0, 60))
@settings(max_examples=examples(100), deadline=None)
def test_a_worker_that_joins_at_a_barrier_has_equal_weights(
    seed: int, sites: list[int], turn: int, away: int
) -> None:
    """As the trainer's admission does at a barrier: no worker passes that iteration without it."""
    cluster, gone, rng = lose_and_continue([*sites, 1], seed, turn, away)
    meeting = 2 + max(cluster.replicas[rank].iteration for rank in cluster.alive)
    for rank in sorted(cluster.alive):
        cluster.handle(rank, MemberJoined(gone, 0))
        progress = Message(MessageKind.PROGRESS, meeting - 1)
        cluster.handle(rank, MessageArrived(gone, progress))
    while cluster.turn(rng, steps=meeting):
        pass
    for rank in cluster.alive:
        assert cluster.replicas[rank].iteration == meeting
        assert not cluster.may_step(rank)
    held_D = cluster.weights()[sorted(cluster.alive)]
    replica = cluster.replicas[gone]
    replica.machine = cluster.built(replica)
    replica.weights_D[:] = cluster.replicas[min(cluster.alive)].weights_D
    replica.machine.restore({**replica.machine.state(), "iteration": meeting - 1})
    for rank in sorted(cluster.alive):
        cluster.handle(gone, MemberJoined(rank, meeting - 1))
    cluster.alive.add(gone)
    cluster.run(seed, steps=meeting + 8)
    if (held_D == held_D[0]).all():  # a gateway's death may have separated the others
        assert_equal_replicas(cluster)


@given(
    seed=seeds,
    sites=st.sampled_from([(3,), (2, 1), (3, 1), (2, 2), (2, 1, 1), (1, 1, 1), (2, 2, 2)]),
    turn=st.integers(0, 60),
    between=st.integers(0, 3),
)
@example(
    seed=10_000_001, sites=(1, 1, 1), turn=2, between=0
)  # at the same iteration eight iterations later
@example(seed=6388, sites=(2, 1), turn=43, between=0)  # a gateway that has lost the link to another
@settings(max_examples=examples(40), deadline=None)
def test_a_link_that_breaks_while_its_ends_continue_blocks_no_worker(
    seed: int, sites: tuple[int, ...], turn: int, between: int
) -> None:
    """It separates no replicas, except those of sites whose gateways lose their link.

    Once it is back, all count again within 16 iterations: ends that have continued at their own
    pace first get the messages that were in transit.
    """
    cluster = cluster_of(list(sites), seed)
    rng = np.random.default_rng(seed)
    cluster.run(seed, steps=2)  # all know of all
    for _ in range(turn):
        cluster.turn(rng, steps=9)
    one, other = (Rank(int(rank)) for rank in rng.choice(len(cluster.ranks), 2, replace=False))
    gateways = {min(r for r in cluster.ranks if cluster.sites[r] == s) for s in "abc"[: len(sites)]}
    cluster.cut(one, other, rng, between)
    cluster.run(seed, steps=16)
    if not {one, other} <= gateways:
        assert_equal_replicas(cluster)
    cluster.relink(one, other)
    cluster.run(seed, steps=32)
    if not {one, other} <= gateways:
        assert_equal_replicas(cluster)
    total = sum(replica.local_batch_size for replica in cluster.replicas.values())
    assert {replica.descents()[-1].samples for replica in cluster.replicas.values()} == {total}


def lose_and_continue(
    sites: list[int], seed: int, turn: int, away: int
) -> tuple[SitesCluster, Rank, np.random.Generator]:
    """One worker leaves; the others continue."""
    cluster = cluster_of(sites, seed)
    rng = np.random.default_rng(seed)
    for _ in range(turn):
        cluster.turn(rng, steps=9)
    gone = Rank(int(rng.integers(len(cluster.ranks))))
    cluster.leave(gone)
    for _ in range(away):
        cluster.turn(rng, steps=9)
    return cluster, gone, rng


@given(seed=seeds, turn=st.integers(0, 150))
@settings(max_examples=examples(50), deadline=None)
def test_replicas_stay_equal_if_a_worker_other_than_a_gateway_leaves(seed: int, turn: int) -> None:
    cluster = cluster_of([3, 2], seed)
    rng = np.random.default_rng(seed)
    for _ in range(turn):
        cluster.turn(rng, steps=8)
    cluster.leave(TWO)
    cluster.run(seed, steps=8)
    assert_equal_replicas(cluster)


@given(seed=seeds)
@settings(max_examples=examples(15), deadline=None)
def test_a_restored_machine_continues_identically(seed: int) -> None:
    """Its peers report their iterations again, as on any new link."""
    cluster = cluster_of([2, 2], seed, insideShare=0.4, betweenShare=0.2)
    cluster.run(seed, steps=4)
    twin = copy.deepcopy(cluster)
    replica = twin.replicas[ME]
    state = replica.machine.state()
    replica.machine = twin.built(replica)
    replica.machine.restore(copy.deepcopy(state))
    for peer in cluster.ranks[1:]:
        replica.machine.handle(MemberJoined(peer, 4))
        replica.machine.handle(MessageArrived(peer, Message(MessageKind.PROGRESS, 4, 2)))
    for one in (cluster, twin):
        for each in one.replicas.values():
            each.instructions.clear()
        one.run(seed, steps=9)
    for rank in cluster.ranks:
        assert comparable(cluster.replicas[rank].instructions) == comparable(
            twin.replicas[rank].instructions
        )
    np.testing.assert_array_equal(cluster.weights(), twin.weights())


WHOLE = encode_whole(np.ones(20, np.float32), ValueCodec.FLOAT32)


@pytest.mark.parametrize(
    ("sender", "message", "words"),
    [
        (ONE, Message(MessageKind.GRADIENT, 1, 1, PART, b"xyz"), "3 bytes"),
        (ONE, Message(MessageKind.GRADIENT, 1, 0, PART, WHOLE), "0 samples"),
        (ONE, Message(MessageKind.GRADIENT, 1, 10**9, RESULT, WHOLE), "samples"),
        (ONE, Message(MessageKind.GRADIENT, 0, 1, RESULT, WHOLE), "iteration 0"),
        (ONE, Message(MessageKind.GRADIENT, 1, 1, 0, WHOLE), "GRADIENT"),
        (ONE, Message(MessageKind.GRADIENT, 1, 1, MEAN + 2, WHOLE), "allowed: 0 to 4"),
        (ONE, Message(MessageKind.GRADIENT, 1, 1, MEAN, WHOLE), "mean of site"),
        (TWO, Message(MessageKind.GRADIENT, 1, 1, MEAN, WHOLE), "mean of site"),
        (TWO, Message(MessageKind.GRADIENT, 1, 1, PART, WHOLE), "another site"),
        (ONE, Message(MessageKind.PROGRESS, 1, 1, PART, WHOLE), "payload"),
        (ONE, Message(MessageKind.WEIGHTS, 1, 1, 0, WHOLE), "weights"),
        (ONE, Message(MessageKind.PROGRESS, 1, 1, 0, b"x"), "payload"),
        (Rank(9), Message(MessageKind.GRADIENT, 1, 1, PART, WHOLE), "allowed: [1, 2]"),
    ],
)
def test_an_invalid_message_is_refused_and_not_waited_for(
    sender: Rank, message: Message, words: str
) -> None:
    cluster = SitesCluster(job(**DENSE), [2, 2, 2], [2, 1])
    machine = cluster.replicas[ME].machine
    instructions = machine.handle(MessageArrived(sender, message))
    (refusal,) = [one for one in instructions if isinstance(one, RejectMessage)]
    assert words in refusal.reason


def test_an_invalid_mean_blocks_no_worker() -> None:
    cluster = SitesCluster(job(**DENSE), [2, 2], [1, 1])
    cluster.step(ME)
    machine = cluster.replicas[ME].machine
    assert machine.waiting_for() == {ONE}
    machine.handle(MessageArrived(ONE, Message(MessageKind.PROGRESS, 1, 2)))
    assert machine.waiting_for() == {ONE}
    machine.handle(MessageArrived(ONE, Message(MessageKind.GRADIENT, 1, 2, MEAN + 1, b"?")))
    assert not machine.waiting_for()


def test_a_gradient_that_is_not_finite_is_never_used() -> None:
    cluster = SitesCluster(job(), [2, 2], [1, 1])
    with pytest.raises(ValueError, match="NaN or infinite"):
        cluster.step(ME, np.full(20, np.nan, np.float32))


def test_huge_values_of_a_peer_stay_finite() -> None:
    cluster = SitesCluster(job(**DENSE), [2, 2], [2])
    huge_D = np.full(20, 3.4e38, np.float32)
    for _ in range(3):
        cluster.step(ME, np.ones(20, np.float32))
        cluster.step(ONE, huge_D)
        cluster.deliver_all()
    assert np.isfinite(cluster.weights()).all()
