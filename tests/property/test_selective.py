"""Selective propagation of `dlion`: the peers of a gradient, and the pending entries for the
others.

Every pair is served within the bound, for any budgets, gradients, joins and departures. A step has
no more peers than requested if that keeps the bound. Bytes per worker stay constant from 6 over 24
to 96 machines. With a residual per link, sent + pending is the sum of all gradients; without one, a
whole gradient is exactly the sum since the last time. Information and bandwidth decide the order. A
restored worker continues identically. The oracle is a plain account of each peer in NumPy.

Left out: which entries a budget takes (test_selection.py), accuracy (simulations).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_core.codecs import ValueCodec, decode_gradient
from dlion_core.policies.gradient.selective_propagation import SelectiveMaxN
from dlion_core.policies.interface import Layout, MessageKind, SendMessage
from example_counts import examples
from policy_cluster import Cluster, spec

LAYOUT = Layout(("a", "b"), (30, 10))
SIZE = LAYOUT.size


def selective(
    *, max_peers: int = 2, max_wait_steps: int = 4, keeps_rest: bool = False, own: int = 0,
    floor_percent: float | None = 0.85,
) -> SelectiveMaxN:  # fmt: skip
    return SelectiveMaxN(
        LAYOUT, ValueCodec.FLOAT32, floor_percent, own=Rank(own), max_peers=max_peers,
        max_wait_steps=max_wait_steps, keeps_rest=keeps_rest,
    )  # fmt: skip


def gradient(rng: np.random.Generator, scale: float = 1.0) -> np.ndarray:
    return (scale * rng.standard_normal(SIZE)).astype(np.float32)


def decoded(payload: Any) -> np.ndarray:
    return decode_gradient(payload, SIZE).weighted(np.float32(1))


@settings(deadline=None, max_examples=examples(80))
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 9), st.integers(1, 14),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_every_peer_is_served_within_the_bound(
    seed: int,
    max_peers: int,
    max_wait_steps: int,
    count: int,
    keeps_rest: bool,
    members_change: bool,
) -> None:
    rng = np.random.default_rng(seed)
    sending = selective(max_peers=max_peers, max_wait_steps=max_wait_steps, keeps_rest=keeps_rest)
    peers = {Rank(rank) for rank in range(1, count + 1)}
    served_at = dict.fromkeys(peers, 0)
    max_a_step = max(max_peers, -(-count // max_wait_steps))
    budgets = {rank: int(rng.integers(60, 400)) for rank in map(Rank, range(1, count + 4))}
    for step in range(1, 5 * max_wait_steps + 6):
        if members_change and rng.random() < 0.3:
            rank = Rank(int(rng.integers(1, count + 4)))
            if rank in peers:
                peers.discard(rank)
                sending.forget(rank)
            else:
                peers.add(rank)
                served_at[rank] = step - 1
        prepared = sending.prepare(gradient(rng), sorted(peers), budgets)
        served_at.update(dict.fromkeys(prepared.payloads, step))
        assert all(step - served_at[rank] < max_wait_steps for rank in peers), (step, served_at)
        assert set(prepared.payloads) <= peers
        if not members_change:
            assert len(prepared.payloads) <= max_a_step


@settings(deadline=None, max_examples=examples(40))
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.booleans())
def test_nothing_is_lost_with_a_residual_for_each_link(
    seed: int, max_peers: int, floor: bool
) -> None:
    rng = np.random.default_rng(seed)
    sending = selective(
        max_peers=max_peers, max_wait_steps=6, keeps_rest=True, floor_percent=0.85 if floor else 50
    )
    peers = [Rank(rank) for rank in range(1, 6)]
    total_D = np.zeros(SIZE)
    sent: dict[Rank, np.ndarray] = defaultdict(lambda: np.zeros(SIZE))
    saved: Counter[Rank] = Counter()
    for _ in range(40):
        gradient_D = gradient(rng)
        total_D += gradient_D
        budgets = {rank: int(rng.integers(0, 200)) for rank in peers}
        for rank in peers:
            saved[rank] += budgets[rank]
        prepared = sending.prepare(gradient_D, peers, budgets)
        np.testing.assert_array_equal(prepared.own.weighted(np.float32(1)), gradient_D)
        for rank, payload in prepared.payloads.items():
            assert len(payload) <= saved[rank], "more than the saved budget of its link"
            saved[rank] -= len(payload)
            sent[rank] += decoded(payload)
    pending = {
        Rank(int(name.rsplit("_", 1)[1])): value
        for name, value in sending.state().items()
        if name.startswith("selective_pending_D_")
    }
    assert set(pending) == set(peers)
    for rank in peers:
        np.testing.assert_allclose(sent[rank] + pending[rank], total_D, atol=1e-4)


def test_a_whole_gradient_is_the_sum_since_the_last_time() -> None:
    rng = np.random.default_rng(1)
    sending = selective(floor_percent=None, max_wait_steps=8)
    peers = [Rank(rank) for rank in (1, 2, 3, 4, 5)]
    waiting = {rank: np.zeros(SIZE, np.float32) for rank in peers}
    for _ in range(30):
        gradient_D = gradient(rng)
        for rank in peers:
            waiting[rank] += gradient_D
        prepared = sending.prepare(gradient_D, peers, dict.fromkeys(peers, 50))
        assert len(prepared.payloads) == 2
        for rank, payload in prepared.payloads.items():
            np.testing.assert_allclose(decoded(payload), waiting[rank], rtol=1e-5, atol=1e-5)
            waiting[rank][:] = 0


def shares(budgets: dict[Rank, int], steps: int = 400) -> Counter[Rank]:
    rng = np.random.default_rng(2)
    sending = selective(max_peers=1, max_wait_steps=10)
    peers = [Rank(rank) for rank in (1, 2, 3)]
    served: Counter[Rank] = Counter()
    for _ in range(steps):
        served.update(sending.prepare(gradient(rng), peers, budgets).payloads.keys())
    return served


def test_a_faster_link_is_served_more_often_and_equal_ones_equally() -> None:
    equal = shares({Rank(1): 100, Rank(2): 100, Rank(3): 100})
    assert max(equal.values()) - min(equal.values()) <= 0.1 * 400
    unequal = shares({Rank(1): 150, Rank(2): 60, Rank(3): 60})
    assert unequal[Rank(1)] > 1.5 * unequal[Rank(2)]
    assert unequal[Rank(2)] >= 400 // 10


def test_the_peer_that_lacks_most_information_is_first() -> None:
    rng = np.random.default_rng(3)
    sending = selective(max_peers=1, max_wait_steps=100)
    first = sending.prepare(gradient(rng), [Rank(1), Rank(2)], {})
    (earlier,) = first.payloads
    other = Rank(3 - earlier)
    assert set(sending.prepare(gradient(rng, 0.01), [Rank(1), Rank(2)], {}).payloads) == {other}


def test_memory_is_a_gradient_for_each_step_of_the_bound_not_for_each_peer() -> None:
    rng = np.random.default_rng(4)
    sending = selective(max_peers=4, max_wait_steps=8)
    peers = [Rank(rank) for rank in range(1, 33)]
    for _ in range(40):
        sending.prepare(gradient(rng), peers, dict.fromkeys(peers, 100))
        kept = [name for name in sending.state() if name.startswith("selective_pending_D_")]
        assert len(kept) <= 8


@pytest.mark.parametrize("keeps_rest", [False, True])
def test_a_restored_worker_continues_identically(keeps_rest: bool) -> None:
    rng = np.random.default_rng(5)
    peers = [Rank(rank) for rank in range(6) if rank != 2]
    budgets = {rank: 70 + 20 * rank for rank in peers}
    before, after = (selective(own=2, keeps_rest=keeps_rest) for _ in range(2))
    for _ in range(7):
        before.prepare(gradient(rng), peers, budgets)
    after.restore(before.state())
    for _ in range(12):
        gradient_D = gradient(rng)
        payloads = [
            one.prepare(gradient_D.copy(), peers, budgets).payloads for one in (before, after)
        ]
        assert {r: bytes(p) for r, p in payloads[0].items()} == {
            r: bytes(p) for r, p in payloads[1].items()
        }


def test_a_gradient_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(ValueError, match="gradient"):
        selective().prepare(np.full(SIZE, np.nan, np.float32), [Rank(1)], {})


# ---- many machines ------------------------------------------------------------------------------


def exchange(**values: object) -> Any:
    made = spec(exchange={"codec": "float32"}, synchronization={"mode": "asynchronous"})
    return replace(made, exchange=replace(made.exchange, **values))


def bytes_per_worker_step(
    count: int, steps: int, budget_bytes: int | None = None, **values: object
) -> float:
    """Bytes of gradients, and 128 more for each of them; no worker waits, and nothing has to
    arrive."""
    cluster = Cluster(exchange(**values), [4] * count, layout=LAYOUT)
    if budget_bytes is not None:
        for rank in cluster.ranks:
            cluster.budgets(rank, {p: budget_bytes for p in cluster.ranks if p != rank})
    served: dict[tuple[Rank, Rank], int] = {}
    sent = 0
    for step in range(1, steps + 1):
        for rank in cluster.ranks:
            cluster.step(rank)
            replica = cluster.replicas[rank]
            for instruction in replica.instructions:
                if (
                    isinstance(instruction, SendMessage)
                    and instruction.message.kind is MessageKind.GRADIENT
                ):
                    sent += instruction.message.size_bytes + 128
                    served[rank, instruction.peer] = step
            replica.instructions.clear()
        for queue in cluster.links.values():
            queue.clear()
        late = [pair for pair in cluster.links if step - served.get(pair, 0) >= 32]
        assert not late
    return sent / count / steps


@pytest.mark.timeout(200)
@pytest.mark.parametrize("most", [48, pytest.param(96, marks=pytest.mark.slow)])
def test_bytes_per_worker_stay_constant_as_workers_are_added(most: int) -> None:
    found = {
        count: bytes_per_worker_step(count, 34, 90, propagation="selective") for count in (6, most)
    }
    assert max(found.values()) <= 1.3 * min(found.values()), found
    to_all = {count: bytes_per_worker_step(count, 4, 90) for count in (6, 24)}
    assert to_all[24] > 4 * to_all[6]  # what it is that stays constant


def test_all_machines_train_and_come_near_each_other() -> None:
    few = Cluster(exchange(propagation="selective", propagation_peers=2), [8] * 8, seed=3)
    few.lockstep(120)
    for replica in few.replicas.values():
        error = np.linalg.norm(replica.weights_D - few.truth_D) / np.linalg.norm(few.truth_D)
        assert error < 0.05
