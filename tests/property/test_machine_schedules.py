"""Several machines under random schedules of steps, deliveries, deaths and returns.

Full synchronous exchange keeps replicas bit-identical and equals training on the joint batch.
Backup without spares does the same. Staleness never exceeds its bound. No worker blocks. Every
gradient counts once in the modes that drop nothing. A restored machine continues identically.

Left out: real processes and links (tests/local).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_core.policies.factory import build
from dlion_core.policies.interface import (
    ApplyGradient,
    AverageWeights,
    BudgetsChanged,
    Event,
    Instruction,
    LocalStepDone,
    MemberJoined,
    MessageArrived,
    SendMessage,
)
from example_counts import examples
from policy_cluster import LEARNING_RATE, Cluster, linear_gradient, spec

FULL: dict[str, object] = {"policy": "full", "codec": "float32"}
batch_sizes = st.lists(st.integers(1, 6), min_size=2, max_size=4)
seeds = st.integers(0, 2**32)

Value = np.ndarray[tuple[int, ...], np.dtype[np.generic]] | int | float | str
OnStep = Callable[[Cluster, Rank], None]


def run_at_random(
    cluster: Cluster,
    seed: int,
    *,
    steps: int,
    before_step: OnStep = lambda _c, _r: None,
    stuck: int = 0,
) -> None:
    """Steps and deliveries in random order, until every worker has done `steps`, except the last
    `stuck` ones, which do none."""
    rng = np.random.default_rng(seed)
    alive = cluster.ranks[: len(cluster.ranks) - stuck]
    while True:
        steppers = [
            rank
            for rank in alive
            if cluster.replicas[rank].iteration < steps and cluster.may_step(rank)
        ]
        links = [link for link, queue in cluster.links.items() if queue]
        choices = len(steppers) + len(links)
        if choices == 0:
            break
        choice = int(rng.integers(choices))
        if choice < len(steppers):
            before_step(cluster, steppers[choice])
            cluster.step(steppers[choice])
        else:
            cluster.deliver(*links[choice - len(steppers)])
    assert all(cluster.replicas[rank].iteration >= steps for rank in alive), "blocked"


@pytest.mark.parametrize("codec", ["float32", "float16"])
@given(sizes=batch_sizes, seed=seeds)
@settings(max_examples=examples(20), deadline=None)
def test_full_synchronous_exchange_keeps_replicas_bit_identical(
    codec: str, sizes: list[int], seed: int
) -> None:
    job = spec(exchange={**FULL, "codec": codec}, synchronization={"mode": "synchronous"})
    cluster = Cluster(job, sizes, seed=seed % 1000)
    run_at_random(cluster, seed, steps=6)
    first, *others = cluster.replicas.values()
    assert len(first.descents()) == 6
    for other in others:
        np.testing.assert_array_equal(
            first.weights_D.view(np.uint32), other.weights_D.view(np.uint32)
        )


@given(sizes=batch_sizes, seed=seeds)
@settings(max_examples=examples(20), deadline=None)
def test_full_synchronous_exchange_equals_training_on_the_joint_batch(
    sizes: list[int], seed: int
) -> None:
    job = spec(exchange=FULL, synchronization={"mode": "synchronous"})
    cluster, joint = (Cluster(job, sizes, seed=seed % 1000) for _ in range(2))
    weights_D = joint.replicas[Rank(0)].weights_D.copy()
    run_at_random(cluster, seed, steps=20)
    for step in range(20):
        batches = [joint.batch(rank) for rank in joint.ranks]
        x_BD = np.concatenate([x for x, _ in batches])
        y_B = np.concatenate([y for _, y in batches])
        gradient_D, _ = linear_gradient(weights_D, x_BD, y_B)
        if step == 0:
            ours_D = cluster.replicas[Rank(0)].descents()[0].gradient_D
            error = np.linalg.norm(ours_D - gradient_D) / np.linalg.norm(gradient_D)
            assert error <= 1e-5
        weights_D -= LEARNING_RATE * gradient_D
    ours_D = cluster.replicas[Rank(0)].weights_D
    assert np.linalg.norm(ours_D - weights_D) <= 5e-3 * np.linalg.norm(weights_D)


@given(sizes=batch_sizes, seed=seeds, staleness=st.integers(0, 4))
@settings(max_examples=examples(30), deadline=None)
def test_staleness_never_passes_its_bound(sizes: list[int], seed: int, staleness: int) -> None:
    job = spec(
        exchange={"policy": "dlion"},
        synchronization={"mode": "bounded", "maxStaleness": staleness},
    )

    def check(cluster: Cluster, rank: Rank) -> None:
        """Iteration t + 1 begins only when all have finished t - s."""
        last = cluster.replicas[rank].iteration
        slowest = min(replica.iteration for replica in cluster.replicas.values())
        assert slowest >= last - staleness

    run_at_random(Cluster(job, sizes), seed, steps=12, before_step=check)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=3, max_size=4),
    seed=seeds,
    spare=st.integers(1, 2),
    data=st.data(),
)
@settings(max_examples=examples(30), deadline=None)
def test_backup_continues_without_the_spare_workers_and_with_no_fewer(
    sizes: list[int], seed: int, spare: int, data: st.DataObject
) -> None:
    job = spec(exchange=FULL, synchronization={"mode": "backup", "backupWorkers": spare})

    def check(cluster: Cluster, rank: Rank) -> None:
        last = cluster.replicas[rank].iteration
        behind = [one for one in cluster.replicas.values() if one.iteration < last]
        assert len(behind) <= spare

    stuck = data.draw(st.integers(0, spare))
    run_at_random(Cluster(job, sizes), seed, steps=8, before_step=check, stuck=stuck)


@pytest.mark.parametrize("mode", ["bounded", "backup", "asynchronous"])
@given(seed=seeds, workers=st.integers(2, 4))
@settings(max_examples=examples(15), deadline=None)
def test_every_gradient_counts_once(mode: str, seed: int, workers: int) -> None:
    """With equal batches each update is a mean, so n times the applied update is the sent one."""
    synchronization: dict[str, object] = {"mode": mode}
    if mode == "backup":
        synchronization["backupWorkers"] = 1
    cluster = Cluster(spec(exchange=FULL, synchronization=synchronization), [4] * workers)
    sent_D = np.zeros(cluster.layout.size)
    rng = np.random.default_rng(seed)

    def steps(rank: Rank, gradient_D: np.ndarray[tuple[int], np.dtype[np.float32]]) -> None:
        nonlocal sent_D
        sent_D = sent_D + gradient_D
        cluster.step(rank, gradient_D)

    for _ in range(200):
        rank = cluster.ranks[int(rng.integers(workers))]
        if cluster.may_step(rank):
            steps(rank, rng.standard_normal(cluster.layout.size).astype(np.float32))
        else:
            cluster.deliver_all()
    cluster.deliver_all()
    most = max(replica.iteration for replica in cluster.replicas.values()) + 1
    while any(replica.iteration < most for replica in cluster.replicas.values()):
        for rank in cluster.ranks:  # zeros, until all that arrived has been applied
            if cluster.replicas[rank].iteration < most and cluster.may_step(rank):
                cluster.step(rank, np.zeros(cluster.layout.size, np.float32))
        cluster.deliver_all()
    for rank in cluster.ranks:
        if cluster.may_step(rank):
            cluster.step(rank, np.zeros(cluster.layout.size, np.float32))
    cluster.deliver_all()
    for replica in cluster.replicas.values():
        applied_D = sum((one.gradient_D.astype(np.float64) for one in replica.descents()), 0.0)
        np.testing.assert_allclose(workers * applied_D, sent_D, atol=1e-3)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=3, max_size=4),
    seed=seeds,
    mode=st.sampled_from(["synchronous", "bounded", "backup"]),
    catches_up=st.booleans(),
)
@settings(max_examples=examples(25), deadline=None)
def test_deaths_and_returns_block_no_worker(
    sizes: list[int], seed: int, mode: str, *, catches_up: bool
) -> None:
    synchronization: dict[str, object] = {"mode": mode, "maxStaleness": 1}
    if mode == "backup":
        synchronization["backupWorkers"] = 1
    job = spec(
        exchange=FULL,
        synchronization=synchronization,
        knowledge_transfer={"policy": "best2all", "everySteps": 3},
    )
    cluster = Cluster(job, sizes, catches_up=catches_up)
    disturb(cluster, seed, rounds=150)
    before = {rank: replica.iteration for rank, replica in cluster.replicas.items()}
    for _ in range(60):
        cluster.deliver_all()
        for rank in cluster.ranks:
            if cluster.may_step(rank):
                cluster.step(rank)
    assert all(cluster.replicas[rank].iteration >= before[rank] + 20 for rank in cluster.ranks)


def disturb(cluster: Cluster, seed: int, *, rounds: int) -> None:
    """Random steps and deliveries, with one worker at a time dying and returning."""
    rng = np.random.default_rng(seed)
    gone: Rank | None = None
    checkpoint = cluster.replicas[Rank(0)].machine.state()
    for _ in range(rounds):
        if rng.random() < 0.04:
            if gone is not None:
                return_worker(cluster, gone, checkpoint)
                gone = None
                continue
            gone = cluster.ranks[int(rng.integers(len(cluster.ranks)))]
            if rng.random() < 0.5:
                checkpoint = cluster.replicas[gone].machine.state()
            cluster.leave(gone)
        rank = cluster.ranks[int(rng.integers(len(cluster.ranks)))]
        if rank == gone:
            continue
        if cluster.may_step(rank) and rng.random() < 0.5:
            cluster.step(rank)
        else:
            for source in set(cluster.ranks) - {rank, gone}:
                cluster.deliver(source, rank)
    if gone is not None:
        return_worker(cluster, gone, checkpoint)


def return_worker(cluster: Cluster, rank: Rank, state: dict[str, Value]) -> None:
    """A new incarnation of a worker, with the state of a recent or old checkpoint."""
    replica = cluster.replicas[rank]
    replica.machine = build(cluster.job_spec, rank, cluster.layout, cluster.ranks)
    replica.machine.restore(state)
    replica.iteration = replica.machine.next_iteration() - 1
    for peer in cluster.ranks:
        if peer != rank:
            cluster.handle(rank, MemberJoined(peer))
            cluster.handle(peer, MemberJoined(rank))


@pytest.mark.parametrize("mode", ["synchronous", "bounded", "asynchronous"])
@pytest.mark.parametrize("policy", ["full", "dlion", "dlion-published"])
@given(seed=seeds)
@settings(max_examples=examples(10), deadline=None)
def test_a_restored_machine_continues_identically(mode: str, policy: str, seed: int) -> None:
    weighting = "dlion_ratio" if policy == "dlion-published" else "sample_mean"
    job = spec(
        exchange={"policy": policy, "weighting": weighting},
        synchronization={"mode": mode},
        knowledge_transfer={"policy": "best2all", "everySteps": 4, "lossWindow": 3},
    )
    cluster = Cluster(job, [3, 5])
    me, peer = cluster.ranks
    for rank, other in ((me, peer), (peer, me)):
        cluster.budgets(rank, {other: 40})
    run_at_random(cluster, seed, steps=6)
    original = cluster.replicas[me]
    copy = build(job, me, cluster.layout, cluster.ranks)
    copy.restore(original.machine.state())
    copy.handle(MemberJoined(peer, 6))
    copy.handle(BudgetsChanged({peer: 40}))
    rng = np.random.default_rng(seed)
    for iteration in range(7, 14):
        cluster.step(peer)  # the peer's messages go to both
        events: list[Event] = [MessageArrived(peer, message) for message in cluster.links[peer, me]]
        cluster.links[peer, me].clear()
        gradient_D = rng.standard_normal(cluster.layout.size).astype(np.float32)
        events.insert(
            int(rng.integers(len(events) + 1)), LocalStepDone(iteration, gradient_D, 3, 0.1)
        )
        for event in events:
            assert comparable(copy.handle(event)) == comparable(cluster.handle(me, event))
        assert copy.waiting_for() == original.machine.waiting_for()
        cluster.deliver_all()


def comparable(instructions: list[Instruction]) -> list[object]:
    """Instructions in a form that can be compared."""
    return [
        (one.gradient_D.tobytes(), one.samples)
        if isinstance(one, ApplyGradient)
        else (one.weights_D.tobytes(), one.sender)
        if isinstance(one, AverageWeights)
        else (one.peer, one.message.kind, one.message.iteration, bytes(one.message.payload))
        if isinstance(one, SendMessage)
        else one
        for one in instructions
    ]
