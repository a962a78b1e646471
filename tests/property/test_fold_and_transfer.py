"""Sides that fold during knowledge transfer: all reach the mean by samples.

The machines are those of `build`. One of a side folds several steps after its neighbour, while
periods of knowledge transfer end. No worker merges weights from before its fold with weights from
after one. The delay of the folding weights does not change the result. Without the notice that a
fold is pending, a worker would merge the same weights once more.

Left out: folding and transfer alone (test_partition_merge.py, test_knowledge_transfer.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_core.codecs import encode_weights
from dlion_core.policies.interface import (
    AverageWeights,
    Instruction,
    LocalStepDone,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    SendWeights,
)
from dlion_core.policies.knowledge_transfer import SETTLING_STEPS
from example_counts import examples
from policy_cluster import Replica, spec, with_small_merges
from weights_cluster import WeightsCluster

if TYPE_CHECKING:
    from dlion_api.spec import Spec

SAMPLES = 8
PERIOD = 12
"""Iterations: the link breaks at 2 and returns at 11."""
TOGETHER, APART = 2, 9
HERE, THERE = 0.0, 3.0
"""The trained weights of the two sides."""
ALONE = Rank(2)
ACROSS = [(Rank(0), ALONE), (Rank(1), ALONE)]


def job(mode: str, policy: str) -> Spec:
    made = spec(
        exchange={"policy": "full", "codec": "float32"},
        synchronization={"mode": mode},
        knowledge_transfer={"policy": policy, "everySteps": PERIOD, "lossWindow": 2},
    )
    return with_small_merges(made)


class Sides(WeightsCluster):
    """Two workers on one side, one on the other; gradients are zero."""

    def __init__(self, job_spec: Spec, losses: tuple[float, ...]) -> None:
        super().__init__(job_spec, [SAMPLES] * len(losses), rate=0)
        self.losses = losses
        self.late: set[Rank] = set()
        self.mixes = 0

    def _carry_out(self, replica: Replica, instruction: Instruction) -> None:
        match instruction:
            case AverageWeights(weights_D=weights_D, fraction=fraction, since_D=since_D):
                assert since_D is not None
                self.mixes += 1
                replica.weights_D += np.float32(fraction) * (weights_D - since_D)
            case SendWeights(peer=peer, iteration=iteration, weights_D=weights_D):
                payload = encode_weights(
                    replica.weights_D if weights_D is None else weights_D, "float32"
                )
                self.links[replica.rank, peer].append(
                    Message(MessageKind.WEIGHTS, iteration, payload=payload)
                )
            case _:
                super()._carry_out(replica, instruction)

    def deliver(self, source: Rank, target: Rank) -> bool:
        """Deliver the next message on that link; a late worker gets no folding weights."""
        queue = self.links[source, target]
        for at, message in enumerate(queue):
            if message.kind is not MessageKind.FOLD or target not in self.late:
                del queue[at]
                self.handle(target, MessageArrived(source, message))
                return True
        return False

    def steps(self, count: int) -> None:
        gradient_D = np.zeros(self.layout.size, np.float32)
        for _ in range(count):
            for rank in self.ranks:
                if self.may_step(rank):
                    at = self.replicas[rank].machine.next_iteration()
                    self.replicas[rank].iteration = at
                    self.handle(rank, LocalStepDone(at, gradient_D, SAMPLES, self.losses[rank]))
            self.deliver_all()

    def cut(self) -> None:
        for one, other in ACROSS:
            for source, target in ((one, other), (other, one)):
                self.links[source, target].clear()
                self.handle(target, MemberLeft(source))

    def heal(self) -> None:
        for one, other in ACROSS:
            for source, target in ((one, other), (other, one)):
                self.handle(target, MemberJoined(source, self.replicas[source].iteration))
        self.deliver_all()


@pytest.mark.parametrize("mode", ["synchronous", "bounded"])
@given(
    late=st.sets(st.sampled_from([Rank(0), Rank(1), Rank(2)])),
    late_steps=st.integers(1, 5),
    losses=st.permutations([1.0, 2.0, 3.0]),
)
@settings(max_examples=examples(40), deadline=None)
def test_all_reach_the_mean_by_samples(
    mode: str, late: set[Rank], late_steps: int, losses: list[float]
) -> None:
    cluster = Sides(job(mode, "best2all"), tuple(losses))
    cluster.steps(TOGETHER)
    cluster.cut()
    cluster.steps(APART)
    for rank, replica in cluster.replicas.items():
        replica.weights_D[:] = THERE if rank == ALONE else HERE
    cluster.late = late
    cluster.heal()
    cluster.steps(late_steps)
    cluster.late = set()
    cluster.deliver_all()
    cluster.steps(2)
    np.testing.assert_allclose(cluster.weights(), (2 * HERE + THERE) / 3, rtol=1e-5)
    merged = cluster.mixes
    cluster.steps(SETTLING_STEPS - late_steps - 4)
    assert cluster.mixes == merged  # until moments have come together
    cluster.steps(2 * PERIOD + late_steps + 4)
    assert cluster.mixes >= merged + 2  # and transfer continues
    np.testing.assert_allclose(cluster.weights(), (2 * HERE + THERE) / 3, rtol=1e-5)
