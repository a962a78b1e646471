"""Tests of the effect of `exchange.robustness` on the replicas of a policy.

They use each method under each policy that supports it and makes equal replicas. All workers make
the same bits, with a bad worker among them. So does a worker that joins late. A hundredfold
contribution moves the weights no further than the method allows. `off`, `detect` and, with similar
norms, `clip` give the same weights, bit for bit.

Left out: the arithmetic (tests/property/test_robust_sums.py); the methods allowed for a job
(tests/support/manifest_table.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dlion_api.names import Rank
from policy_cluster import spec
from weighing_cluster import WeighingCluster, lose_for_a_while

BAD = Rank(1)
POLICIES = ("adaptive", "demo", "dgc", "full", "sparseloco", "topk")
METHODS = ("clip", "trimmed", "krum")


def cluster(policy: str, robustness: str) -> WeighingCluster:
    """Four workers of unequal batches."""
    parameters: dict[str, object] = {}
    if policy in ("adaptive", "sparseloco"):
        parameters = {"localSteps": 1}
    exchange = {"policy": policy, "robustness": robustness, "parameters": parameters}
    job = spec(exchange=exchange if policy not in ("demo", "dgc") else {
        **exchange, "parameters": {"momentum": 0},
    })  # fmt: skip
    size = replace(job.batching.global_batch_size, initial=16)
    job = replace(job, batching=replace(job.batching, global_batch_size=size))
    return WeighingCluster(job, [2, 4, 4, 6])


def train(workers: WeighingCluster, steps: int, *, scale: float = 1.0) -> None:
    """Run steps of all workers, of which one worker's gradients are scaled."""
    rng = np.random.default_rng(5)
    for _ in range(steps):
        common_D = rng.standard_normal(workers.layout.size)
        for rank in workers.ranks:
            gradient_D = common_D + 0.1 * rng.standard_normal(workers.layout.size)
            factor = scale if rank == BAD else 1.0
            if not workers.may_step(rank):  # it waits for a worker that returns
                continue
            workers.step(rank, (factor * gradient_D).astype(np.float32))
        workers.deliver_all()


def weights(workers: WeighingCluster) -> list[bytes]:
    return [workers.replicas[rank].weights_D.tobytes() for rank in workers.ranks]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("policy", POLICIES)
def test_all_workers_make_the_same_bits(policy: str, method: str) -> None:
    workers = cluster(policy, method)
    train(workers, 6, scale=-100)
    assert len(set(weights(workers))) == 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("policy", ["adaptive", "full"])
def test_a_hundredfold_contribution_moves_the_weights_little(policy: str, method: str) -> None:
    moved = {}
    for name, robustness, scale in (("mean", "detect", 100), ("robust", method, 100)):
        workers = cluster(policy, robustness)
        start_D = workers.replicas[Rank(0)].weights_D.copy()
        train(workers, 1, scale=scale)
        moved[name] = float(np.linalg.norm(workers.replicas[Rank(0)].weights_D - start_D))
    calm = cluster(policy, "off")
    train(calm, 1)
    usual = float(np.linalg.norm(calm.replicas[Rank(0)].weights_D - start_D))
    assert moved["mean"] > 10 * usual
    assert moved["robust"] < 2 * usual


@pytest.mark.parametrize("policy", POLICIES)
def test_methods_without_effect_change_no_bit(policy: str) -> None:
    found = set()
    for robustness in ("off", "detect", "clip"):
        workers = cluster(policy, robustness)
        train(workers, 3)
        found.add(weights(workers)[0])
    assert len(found) == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_that_was_absent_makes_the_same_bits(method: str) -> None:
    workers = cluster("adaptive", method)
    train(workers, 2)
    lose_for_a_while(workers, Rank(2), steps=4)
    train(workers, 6, scale=100)
    assert len(set(weights(workers))) == 1
