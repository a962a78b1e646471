"""Policy `d2` against the paper's recursion in plain NumPy, under random schedules.

It is w+ = W (2w - w_prev - eta g + eta g_prev). With identical gradients that is plain gossip; on a
quadratic with skewed data it ends lower than plain gossip. W is symmetric, and none of its
eigenvalues is at or below -1/3, also with missing workers. No worker waits for one that is not its
neighbour. None blocks, also if members leave, links are replaced, or two cannot reach each other. A
float16 codec does not move the mean. Invalid messages are refused.

Left out: restarts (test_d2_restarts.py); learning on real data (the report of the simulator).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import SpecError
from dlion_api.names import Rank
from dlion_core.policies.interface import (
    Layout,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
)
from dlion_core.policies.weights.d2 import mixing_row
from example_counts import examples
from policy_cluster import linear_gradient
from weights_cluster import (
    WeightsCluster,
    run_at_random,
    weights_spec,
)

seeds = st.integers(0, 2**32)
mixings = st.sampled_from(["complete", "ring"])
sizes_of = st.lists(st.integers(1, 6), min_size=1, max_size=5)
self_weights = st.floats(0.34, 1.0)


def cluster_of(
    sizes: list[int], seed: int = 0, *, codec: str = "float32", **values: object
) -> WeightsCluster:
    return WeightsCluster(weights_spec("d2", codec=codec, **values), sizes, seed=seed % 1000)


def matrix(workers: int, mixing: str, self_weight: float) -> np.ndarray:
    """W written independently: the mean, or a lazy walk on the ring."""
    if mixing == "complete" or workers == 1:
        return np.full((workers, workers), 1 / workers)
    w = self_weight * np.eye(workers)
    for place in range(workers):
        for step in (-1, 1):
            w[place, (place + step) % workers] += (1 - self_weight) / 2
    return w


@given(workers=st.integers(1, 12), mixing=mixings, self_weight=self_weights)
@settings(max_examples=examples(100), deadline=None)
def test_the_rows_make_a_symmetric_matrix_without_an_eigenvalue_near_minus_a_third(
    workers: int, mixing: str, self_weight: float
) -> None:
    ranks = [Rank(2 * place + 1) for place in range(workers)]
    w = np.zeros((workers, workers))
    for place, rank in enumerate(ranks):
        for peer, weight in mixing_row(ranks, rank, mixing, self_weight).items():
            w[place, ranks.index(peer)] = weight
    np.testing.assert_allclose(w, matrix(workers, mixing, self_weight), atol=1e-12)
    np.testing.assert_allclose(w, w.T)
    np.testing.assert_allclose(w.sum(axis=1), 1)
    assert np.linalg.eigvalsh(w).min() > -1 / 3


def test_a_self_weight_that_allows_such_an_eigenvalue_is_refused() -> None:
    with pytest.raises(SpecError, match="selfWeight"):
        cluster_of([1, 1], mixing="ring", selfWeight=1 / 3)


@given(sizes=sizes_of, seed=seeds, mixing=mixings, self_weight=self_weights)
@settings(max_examples=examples(40), deadline=None)
def test_it_is_the_recursion_of_the_paper(
    sizes: list[int], seed: int, mixing: str, self_weight: float
) -> None:
    cluster, naive = (
        cluster_of(sizes, seed, mixing=mixing, selfWeight=self_weight) for _ in range(2)
    )
    w_matrix = matrix(len(sizes), mixing, self_weight)
    run_at_random(cluster, seed, steps=9)
    now = naive.weights().astype(np.float64)
    before, gradient_before = now, np.zeros_like(now)
    for _ in range(9):
        gradient = np.array(
            [
                linear_gradient(row_D.astype(np.float32), *naive.batch(rank))[0]
                for rank, row_D in zip(naive.ranks, now, strict=True)
            ],
            np.float64,
        )
        half = 2 * now - before - float(naive.rate) * (gradient - gradient_before)
        now, before, gradient_before = w_matrix @ half, now, gradient
    np.testing.assert_allclose(cluster.weights(), now, rtol=1e-3, atol=1e-3)


@given(workers=st.integers(1, 5), seed=seeds, mixing=mixings)
@settings(max_examples=examples(20), deadline=None)
def test_with_identical_gradients_it_is_plain_gossip(workers: int, seed: int, mixing: str) -> None:
    cluster = cluster_of([2] * workers, seed, mixing=mixing)
    w_matrix, rng = matrix(workers, mixing, 0.5), np.random.default_rng(seed)
    gossip = cluster.weights().astype(np.float64)
    for _ in range(8):
        gradient_D = rng.standard_normal(20).astype(np.float32)
        for rank in cluster.ranks:
            cluster.step(rank, gradient_D.copy())
        cluster.deliver_all()
        gossip = w_matrix @ (gossip - cluster.rate * gradient_D)
        np.testing.assert_allclose(cluster.weights(), gossip, atol=1e-5)


@pytest.mark.parametrize("codec", ["float32", "float16"])
@given(seed=seeds, workers=st.integers(3, 5))
@settings(max_examples=examples(4), deadline=None)
def test_on_a_skewed_quadratic_it_ends_lower_than_plain_gossip(
    codec: str, seed: int, workers: int
) -> None:
    """Worker k has the loss (c_k / 2) |w - b_k|^2, with its own curvature and optimum."""
    rng = np.random.default_rng(seed)
    optima = 3 * rng.standard_normal((workers, 20))
    curvature_P = rng.uniform(0.5, 1.5, workers)[:, None]
    best_D = (curvature_P * optima).sum(axis=0) / curvature_P.sum()
    job = weights_spec("d2", codec=codec, mixing="ring")
    cluster = WeightsCluster(job, [2] * workers, seed=seed % 1000, rate=0.2)
    w_matrix = matrix(workers, "ring", 0.5)
    gossip = cluster.weights().astype(np.float64)
    for _ in range(80):
        gradient = curvature_P * (cluster.weights() - optima)
        for rank in cluster.ranks:
            cluster.step(rank, gradient[rank].astype(np.float32))
        cluster.deliver_all()
        gossip = w_matrix @ (gossip - 0.2 * curvature_P * (gossip - optima))

    def excess(weights: np.ndarray) -> float:
        """The mean loss at each replica above the minimum, times two and over the curvature."""
        return float(((weights - best_D) ** 2).sum(axis=1).mean())

    assert excess(cluster.weights()) < 0.05 * excess(gossip)


def test_no_worker_waits_for_one_that_is_not_its_neighbour() -> None:
    cluster = cluster_of([2] * 5, mixing="ring")
    cluster.step(Rank(0))
    assert cluster.replicas[Rank(0)].machine.waiting_for() == {1, 4}
    for peer in (Rank(1), Rank(4)):
        cluster.step(peer)
        while cluster.deliver(peer, Rank(0)):
            pass
    assert cluster.may_step(Rank(0))


@given(seed=seeds, mixing=mixings)
@settings(max_examples=examples(60), deadline=None)
def test_no_worker_blocks_when_members_leave_or_links_are_replaced(seed: int, mixing: str) -> None:
    cluster = cluster_of([2, 3, 4, 1], seed, mixing=mixing)
    rng = np.random.default_rng(seed)
    run_at_random(cluster, seed, steps=3)
    for _ in range(int(rng.integers(8))):
        rank = cluster.ranks[int(rng.integers(4))]
        if cluster.may_step(rank):
            cluster.step(rank)
        links = [link for link, queue in cluster.links.items() if queue]
        if links:
            cluster.deliver(*links[int(rng.integers(len(links)))])
    cluster.cut(Rank(0), Rank(1))
    cluster.link(Rank(0), Rank(1))
    run_at_random(cluster, seed, steps=14)
    for _ in range(int(rng.integers(3))):
        rank = cluster.ranks[int(rng.integers(4))]
        if cluster.may_step(rank):
            cluster.step(rank)
    cluster.leave(Rank(2))
    run_at_random(cluster, seed, steps=24, alive=[Rank(0), Rank(1), Rank(3)])


@pytest.mark.parametrize("mixing", ["complete", "ring"])
@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (0, 3), (0, 2)])
def test_two_workers_without_a_link_block_no_other(mixing: str, pair: tuple[int, int]) -> None:
    """Each of the two has lost only the other; the rest have lost none."""
    cluster = cluster_of([2] * 4, mixing=mixing)
    run_at_random(cluster, 0, steps=3)
    one, other = map(Rank, pair)
    cluster.cut(one, other)
    run_at_random(cluster, 1, steps=12)
    cluster.link(one, other)
    run_at_random(cluster, 2, steps=20)


@pytest.mark.parametrize(
    ("mixing", "row"), [("ring", [0.3, 0.7, 0, 0, 0]), ("complete", [0.2, 0.4, 0, 0.2, 0.2])]
)
def test_the_part_of_an_absent_worker_is_the_workers_own(mixing: str, row: list[float]) -> None:
    cluster = cluster_of([2] * 5, mixing=mixing, selfWeight=0.4)
    before = np.random.default_rng(1).standard_normal((5, 20)).astype(np.float32)
    for rank in cluster.ranks:
        cluster.replicas[rank].weights_D[:] = before[rank]
    cluster.leave(Rank(2))
    for rank in (0, 1, 3, 4):
        cluster.step(Rank(rank), np.zeros(20, np.float32))
    cluster.deliver_all()
    np.testing.assert_allclose(cluster.weights()[1], row @ before.astype(np.float64), atol=1e-6)


@given(workers=st.integers(2, 9), mixing=mixings, self_weight=self_weights, seed=seeds)
@settings(max_examples=examples(60), deadline=None)
def test_without_any_links_the_matrix_is_still_symmetric_and_fit_for_the_correction(
    workers: int, mixing: str, self_weight: float, seed: int
) -> None:
    """W as the machines apply it, read from weights that are unit vectors."""
    rng = np.random.default_rng(seed)
    cluster = WeightsCluster(
        weights_spec("d2", mixing=mixing, selfWeight=self_weight),
        [2] * workers,
        layout=Layout(("w",), (workers,)),
    )
    for rank in cluster.ranks:
        cluster.replicas[rank].weights_D[:] = np.eye(workers, dtype=np.float32)[rank]
        for peer in cluster.ranks[:rank]:
            if rng.random() < 0.4:
                cluster.cut(rank, peer)
    for rank in cluster.ranks:
        cluster.step(rank, np.zeros(workers, np.float32))
    cluster.deliver_all()
    w = cluster.weights().astype(np.float64)
    np.testing.assert_allclose(w, w.T, atol=1e-6)
    np.testing.assert_allclose(w.sum(axis=1), 1, atol=1e-6)
    assert np.linalg.eigvalsh(w).min() > -1 / 3


@pytest.mark.parametrize("mixing", ["complete", "ring"])
def test_a_lossy_codec_does_not_move_the_mean(mixing: str) -> None:
    cluster = cluster_of([2] * 4, codec="float16", mixing=mixing)
    before_D = cluster.weights().astype(np.float64).mean(axis=0)
    rng = np.random.default_rng(0)
    for _ in range(300):
        for rank in cluster.ranks:
            cluster.step(rank, rng.standard_normal(20).astype(np.float32))
        cluster.deliver_all()
    updates = [
        np.sum(np.array(applied, np.float64), axis=0) for applied in cluster.updates.values()
    ]
    after_D = cluster.weights().astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(after_D, before_D + np.mean(updates, axis=0), atol=1e-4)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message(MessageKind.WEIGHTS, 1, 2, payload=b"nonsense"), "8 bytes"),
        (Message(MessageKind.WEIGHTS, 1, 2, 2, b""), "restart in 2 iterations; allowed: 0 to 1"),
        (Message(MessageKind.WEIGHTS, 1, 2, -1, b""), "restart in -1 iterations"),
        (Message(MessageKind.GRADIENT, 1, 2, payload=b""), "GRADIENT under policy d2"),
        (Message(MessageKind.PROGRESS, 0, 2), "iteration 0"),
    ],
)
def test_an_invalid_message_is_refused_and_its_part_is_not_waited_for(
    message: Message, reason: str
) -> None:
    cluster = WeightsCluster(weights_spec("d2"), [2, 2], layout=Layout(("w",), (4,)))
    cluster.step(Rank(0), np.zeros(4, np.float32))
    machine = cluster.replicas[Rank(0)].machine
    refusal, *_ = machine.handle(MessageArrived(Rank(1), message))
    assert isinstance(refusal, RejectMessage)
    assert reason in refusal.reason
    if message.kind is MessageKind.WEIGHTS:
        cluster.handle(Rank(0), MessageArrived(Rank(1), Message(MessageKind.PROGRESS, 1, 2)))
        assert not machine.waiting_for()
