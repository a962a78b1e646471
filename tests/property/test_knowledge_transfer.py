"""Knowledge transfer does not undo training.

Whole gradients keep replicas equal in lock step. They stay so for any requests, answers and merges
between, and for any delay of answers. They equal those without any transfer. The machines are real,
over random schedules of steps and messages, on linear models.

Left out: the choice of the peer (tests/unit/core/policies/test_knowledge_transfer.py), the merge of
replicas that differ (tests/unit/worker/training/test_replica.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_core.policies.interface import AverageWeights
from example_counts import examples
from policy_cluster import spec
from weighing_cluster import WeighingCluster, run_at_random

if TYPE_CHECKING:
    from numpy.typing import NDArray

STEPS = 23
ROUNDING = 1e-5


def trained(
    policy: str, sizes: list[int], seed: int, codec: str
) -> tuple[list[NDArray[np.float32]], int]:
    """The weights of all after the steps, and the number of merges."""
    job = spec(
        exchange={"policy": "full", "codec": codec},
        synchronization={"mode": "synchronous"},
        knowledge_transfer={"policy": policy, "everySteps": 3, "lossWindow": 2},
    )
    cluster = WeighingCluster(job, sizes, seed=seed)
    run_at_random(cluster, seed, steps=STEPS)
    replicas = [cluster.replicas[rank] for rank in cluster.ranks]
    merged = sum(
        isinstance(one, AverageWeights) for replica in replicas for one in replica.instructions
    )
    return [replica.weights_D for replica in replicas], merged


@pytest.mark.parametrize("policy", ["best2all", "best2worst"])
@settings(max_examples=examples(30), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    seed=st.integers(0, 10**6),
    codec=st.sampled_from(["float32", "float16"]),
)
def test_equal_replicas_stay_equal(policy: str, sizes: list[int], seed: int, codec: str) -> None:
    with_transfer, merged = trained(policy, sizes, seed, codec)
    without, never = trained("none", sizes, seed, codec)
    assert merged > 0
    assert never == 0
    for weights_D in with_transfer:
        np.testing.assert_allclose(weights_D, with_transfer[0], rtol=ROUNDING, atol=ROUNDING)
        np.testing.assert_allclose(weights_D, without[0], rtol=ROUNDING, atol=ROUNDING)
