"""Policy `d2` with changing members, links and checkpoints, on quadratics with skewed data.

After any change the remaining workers reach their joint optimum, and soon afterwards their
corrections sum to 0. All workers restart together. A restored worker continues identically until
the restart that it announces. No false announcement of a peer can block a worker or prevent a real
restart.

Left out: the recursion itself and the waiting (test_d2.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_core.policies.interface import (
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    SendMessage,
)
from example_counts import examples
from skewed_cluster import KINDS, WORKERS, Skewed
from weights_cluster import check_a_restored_worker_continues_identically, run_at_random

seeds = st.integers(0, 2**32)
kinds = pytest.mark.parametrize("kind", KINDS)


# ---- changes -------------------------------------------------------------------------------------


def one_leaves(cluster: Skewed) -> None:
    cluster.die(Rank(5))


def its_last_part_reaches_only_some(cluster: Skewed) -> None:
    cluster.all_step()
    for rank in (3, 4):
        cluster.links[Rank(5), Rank(rank)].clear()
    cluster.deliver_to(range(5))
    cluster.die(Rank(5))
    cluster.deliver_all()


def a_link_is_down_for_a_while(cluster: Skewed) -> None:
    peer = min(cluster.graph[Rank(0)])
    cluster.cut(Rank(0), peer)
    cluster.run_lockstep(3)
    cluster.link(Rank(0), peer)
    cluster.deliver_all()


def a_link_breaks_while_parts_are_under_way(cluster: Skewed) -> None:
    cluster.all_step()
    cluster.deliver_to([0])
    cluster.cut(Rank(0), Rank(1))
    cluster.deliver_all()


def one_is_isolated_for_a_while(cluster: Skewed) -> None:
    others = [rank for rank in cluster.ranks if rank != 2]
    for peer in others:
        cluster.cut(Rank(2), peer)
    cluster.run_lockstep(4)
    for peer in others:
        cluster.link(Rank(2), peer)
    cluster.deliver_all()


def one_is_replaced_at_once(cluster: Skewed) -> None:
    """Without a step of another worker between: its neighbours mix with it as before."""
    cluster.die(Rank(2))
    cluster.take_over(Rank(2), donor=Rank(3))
    cluster.deliver_all()


def one_is_replaced_later(cluster: Skewed) -> None:
    cluster.die(Rank(2))
    cluster.run_lockstep(5)
    cluster.take_over(Rank(2), donor=Rank(3))
    cluster.deliver_all()


def all_resume_and_one_had_mixed(cluster: Skewed) -> None:
    cluster.all_step()
    cluster.deliver_to([0])
    cluster.resume(cluster.saved())


def all_resume_from_different_iterations(cluster: Skewed) -> None:
    early = cluster.saved()
    cluster.run_lockstep(3)
    late = cluster.saved()
    cluster.resume({rank: (early if rank % 2 else late)[rank] for rank in cluster.ranks})


def several_at_once(cluster: Skewed) -> None:
    cluster.cut(Rank(0), Rank(1))
    cluster.run_lockstep(2)
    cluster.die(Rank(4))
    cluster.run_lockstep(1)
    cluster.link(Rank(0), Rank(1))
    cluster.deliver_all()


CHANGES = [
    one_leaves,
    its_last_part_reaches_only_some,
    a_link_is_down_for_a_while,
    a_link_breaks_while_parts_are_under_way,
    one_is_isolated_for_a_while,
    one_is_replaced_at_once,
    one_is_replaced_later,
    all_resume_and_one_had_mixed,
    all_resume_from_different_iterations,
    several_at_once,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("kind", "settled"),
    [
        *((kind, 40) for kind in KINDS),
        ("graph", 4),
        *(pytest.param(kind, 4, marks=pytest.mark.slow) for kind in KINDS if kind != "graph"),
    ],
)
def test_after_any_change_the_remaining_workers_reach_their_optimum(
    kind: str, change: Callable[[Skewed], None], settled: int
) -> None:
    cluster = Skewed(kind)
    cluster.run_lockstep(settled)
    assert (cluster.distance() < 1e-3) == (settled > 4)
    change(cluster)
    assert cluster.converges()


@given(
    kind=st.sampled_from(sorted(KINDS)),
    workers=st.integers(2, 6),
    seed=seeds,
    first=st.integers(0, 8),
)
@settings(max_examples=examples(120), deadline=None)
def test_soon_after_the_last_change_the_corrections_sum_to_zero(
    kind: str, workers: int, seed: int, first: int
) -> None:
    """Also if links stay down, or the remaining workers are in several parts."""
    kind = "complete" if workers < 4 or (kind == "graph" and workers % 2) else kind
    cluster, rng = Skewed(kind, workers, seed), np.random.default_rng(seed)
    done = first
    run_at_random(cluster, seed, steps=done)
    for _ in range(int(rng.integers(1, 5))):
        move_at_random(cluster, rng)
        change_at_random(cluster, rng)
        done = max(cluster.replicas[rank].iteration for rank in cluster.alive)
        done += int(rng.integers(1 + workers))
        run_at_random(cluster, seed, steps=done, alive=cluster.alive)
    for more in (2, 0, 2 * workers + 2, 0):  # until all are at the same iteration, and beyond
        done = more + max(cluster.replicas[rank].iteration for rank in cluster.alive)
        run_at_random(cluster, seed, steps=done, alive=cluster.alive)
    assert not any(cluster.replicas[rank].machine.waiting_for() for rank in cluster.alive)
    np.testing.assert_allclose(cluster.correction_sum_D(), 0, atol=1e-9)


def move_at_random(cluster: Skewed, rng: np.random.Generator) -> None:
    """Some steps and deliveries, so that the next change finds workers at different iterations."""
    for _ in range(int(rng.integers(12))):
        rank = cluster.alive[int(rng.integers(len(cluster.alive)))]
        if cluster.may_step(rank):
            cluster.step(rank)
        links = [link for link, queue in cluster.links.items() if queue]
        if links:
            cluster.deliver(*links[int(rng.integers(len(links)))])


def change_at_random(cluster: Skewed, rng: np.random.Generator) -> None:
    one, other = (Rank(int(rank)) for rank in rng.permutation(cluster.ranks)[:2])
    what = int(rng.integers(4))
    if what == 0 and one in cluster.alive and len(cluster.alive) > 2:
        cluster.die(one)
    elif what == 1 and one not in cluster.alive and other in cluster.alive:
        cluster.take_over(one, donor=other)
    elif what == 2 and {one, other} <= set(cluster.alive):
        cluster.cut(one, other)
        if rng.random() < 0.7:
            cluster.link(one, other)
    elif what == 3 and one in cluster.alive:
        cluster.restart_from_checkpoint(one)


@kinds
def test_all_restart_in_one_iteration_n_after_the_change(kind: str) -> None:
    cluster = Skewed(kind)
    cluster.run_lockstep(10)
    cluster.die(Rank(5))
    void = {}
    for iteration in range(11, 30):
        cluster.all_step()
        if iteration > 11:
            void[iteration] = set(cluster.alive) - set(cluster.corrections())
        cluster.deliver_all()
    # Iteration 11 is the first without worker 5.
    assert {at: ranks for at, ranks in void.items() if ranks} == {11 + WORKERS: {0, 1, 2, 3, 4}}


@pytest.mark.parametrize("kind", ["complete", "ring"])
@given(seed=seeds)
@settings(max_examples=examples(5), deadline=None)
def test_a_restored_worker_continues_identically_until_its_restart(kind: str, seed: int) -> None:
    cluster = Skewed(kind, seed=seed)
    run_at_random(cluster, seed, steps=5)
    last = 6 + WORKERS - 1  # its first mixing is that of iteration 6
    check_a_restored_worker_continues_identically(
        cluster, Rank(1), seed, steps=last, with_versions=False
    )


def test_a_state_saved_while_waiting_skips_the_mixing() -> None:
    cluster = Skewed("complete", 2)
    cluster.run_lockstep(3)
    cluster.step(Rank(0))
    machine = cluster.replicas[Rank(0)].machine
    assert machine.waiting_for()
    again = cluster.built(cluster.replicas[Rank(0)])
    again.restore(machine.state())
    assert not again.waiting_for()
    assert again.next_iteration() == 5


# ---- announced restarts --------------------------------------------------------------------------


def announced_by(cluster: Skewed, rank: Rank) -> list[int]:
    """The iterations until the next restart, from each of that worker's parts."""
    instructions = cluster.replicas[rank].instructions
    sends = [one.message for one in instructions if isinstance(one, SendMessage)]
    return [one.weights_version for one in sends if one.kind is MessageKind.WEIGHTS]


def test_without_changes_no_worker_announces_a_restart() -> None:
    cluster = Skewed("ring")
    run_at_random(cluster, 1, steps=20)
    assert not any(any(announced_by(cluster, rank)) for rank in cluster.ranks)


@pytest.mark.parametrize("ahead", [-1, WORKERS, 2**64 - 1])
def test_a_restart_too_early_to_be_known_is_refused_and_its_part_not_waited_for(
    ahead: int,
) -> None:
    cluster = Skewed("ring")
    cluster.run_lockstep(3)
    cluster.all_step()
    sent = next(one for one in cluster.links[Rank(1), Rank(0)] if one.payload)
    cluster.cut(Rank(0), Rank(5))
    machine = cluster.replicas[Rank(0)].machine
    assert machine.waiting_for() == {1}
    machine.handle(MessageArrived(Rank(1), Message(MessageKind.PROGRESS, 4, 2)))
    refusal, *rest = machine.handle(MessageArrived(Rank(1), replace(sent, weights_version=ahead)))
    assert isinstance(refusal, RejectMessage)
    assert f"restart in {ahead} iterations; allowed: 0 to 5" in refusal.reason
    assert rest
    assert not machine.waiting_for()


def test_a_restart_further_ahead_than_a_neighbour_can_know_of_is_skipped() -> None:
    cluster = Skewed("ring")
    cluster.run_lockstep(10)
    cluster.all_step()
    sent = next(one for one in cluster.links[Rank(1), Rank(0)] if one.payload)
    far = replace(sent, iteration=10 + 2 * WORKERS + 1, weights_version=WORKERS - 1)
    cluster.handle(Rank(0), MessageArrived(Rank(1), far))
    cluster.deliver_all()
    void = set()
    for iteration in range(12, 10 + 4 * WORKERS):
        cluster.all_step()
        void |= set() if 0 in cluster.corrections() else {iteration}
        cluster.deliver_all()
    assert void  # worker 1 is no longer mixed with, by its own fault
    assert 10 + 3 * WORKERS not in void


@kinds
@pytest.mark.parametrize("iteration", [0, 10**5])
def test_false_restarts_block_no_worker_and_prevent_no_real_one(kind: str, iteration: int) -> None:
    """Worker 1 announces one in each of its parts, of its own iteration or of a distant one."""
    cluster, attacker, rng = Skewed(kind), Rank(1), np.random.default_rng(0)
    cluster.run_lockstep(10)
    for _ in range(20):
        cluster.all_step()
        for peer in cluster.graph[attacker]:
            for sent in [one for one in cluster.links[attacker, peer] if one.payload]:
                ahead = int(rng.integers(1, WORKERS))
                false_message = replace(
                    sent, iteration=iteration or sent.iteration, weights_version=ahead
                )
                cluster.links[attacker, peer].append(false_message)
        cluster.deliver_all()
    assert {cluster.replicas[rank].iteration for rank in cluster.ranks} == {30}
    assert all(
        distance < WORKERS for rank in cluster.ranks for distance in announced_by(cluster, rank)
    )
    cluster.die(attacker)
    assert cluster.converges()
