"""A `Cluster` for policies that read and replace weights: `UpdateApplied`, `AddUpdate`,
`MergeReplicas`, `ReplaceWeights`.

As on real links, weights have a separate lane: progress messages may overtake them, and the
reverse.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dlion_core.links.framing import lane_of
from dlion_core.policies.factory import build
from dlion_core.policies.interface import (
    AddUpdate,
    ApplyGradient,
    Instruction,
    MemberJoined,
    MemberLeft,
    MergeReplicas,
    MessageArrived,
    ReplaceWeights,
    SendMessage,
    UpdateApplied,
    WithholdUpdate,
)
from policy_cluster import Cluster, Replica, spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlion_api.names import Rank
    from dlion_api.spec import Spec
    from dlion_core.policies.interface import Layout, PolicyMachine

MOMENTUM = np.float32(0.9)


def weights_spec(policy: str, initial: int = 192, codec: str = "float32", **values: object) -> Spec:
    """A job's spec with that policy and its parameters."""
    found = spec(exchange={"policy": policy, "codec": codec, "parameters": values})
    sizes = replace(found.batching.global_batch_size, initial=initial)
    return replace(found, batching=replace(found.batching, global_batch_size=sizes))


class WeightsCluster(Cluster):
    """Machines that read their replica. Applies plain SGD at that rate, or with momentum."""

    def __init__(
        self,
        job_spec: Spec,
        local_batch_sizes: Iterable[int],
        *,
        layout: Layout | None = None,
        seed: int = 0,
        rate: float = 0.05,
        momentum: bool = False,
    ) -> None:
        self.rate = np.float32(rate)
        self.momentum = np.float32(MOMENTUM if momentum else 0)
        self.rng = np.random.default_rng(seed)
        self.velocity_D: dict[Rank, np.ndarray] = {}
        self.updates: dict[Rank, list[np.ndarray]] = {}
        self.withheld: dict[Rank, np.ndarray] = {}
        super().__init__(spec(exchange={"policy": "none"}), local_batch_sizes, layout=layout)
        self.job_spec = job_spec
        self.start_D = np.random.default_rng(seed).standard_normal(self.layout.size)
        for rank in self.ranks:
            replica = self.replicas[rank]
            replica.weights_D[:] = self.start_D
            replica.rng = np.random.default_rng((seed, rank))
            replica.machine = self.built(replica)
            self.velocity_D[rank] = np.zeros(self.layout.size, np.float32)
            self.updates[rank] = []
        for rank in self.ranks:
            for peer in self.ranks:
                if peer != rank:
                    self.handle(rank, MemberJoined(peer))

    def built(self, replica: Replica) -> PolicyMachine:
        """A machine over that replica's weights."""
        return build(self.job_spec, replica.rank, self.layout, self.ranks, replica=replica)

    def _carry_out(self, replica: Replica, instruction: Instruction) -> None:
        match instruction:
            case ApplyGradient(gradient_D=gradient_D):
                before_D = replica.weights_D.copy()
                velocity_D = self.velocity_D[replica.rank]
                velocity_D *= self.momentum
                velocity_D -= self.rate * gradient_D
                replica.weights_D += velocity_D
                self.updates[replica.rank].append(replica.weights_D - before_D)
                self.handle(replica.rank, UpdateApplied())
            case AddUpdate(update_D=update_D):
                replica.weights_D += update_D
            case ReplaceWeights(weights_D=weights_D):
                replica.weights_D[:] = weights_D
            case WithholdUpdate(update_D=update_D):
                self.withheld[replica.rank] = update_D
            case MergeReplicas(
                weights_D=weights_D, own_samples=own, their_samples=theirs, since_D=since_D
            ):
                replica.weights_D += np.float32(theirs / (own + theirs)) * (weights_D - since_D)
            case SendMessage(peer=peer, message=message):
                copied = replace(message, payload=bytes(message.payload))
                self.links[replica.rank, peer].append(copied)
            case _:
                raise AssertionError(instruction)

    def deliver(self, source: Rank, target: Rank) -> bool:
        """Deliver the next message of one of that link's lanes; return whether there was one."""
        queue = self.links[source, target]
        if not queue:
            return False
        first = {lane_of(message.kind): at for at, message in reversed(list(enumerate(queue)))}
        lanes = sorted(first)
        at = first[lanes[self.rng.integers(len(lanes))]]
        message = queue[at]
        del queue[at]
        self.handle(target, MessageArrived(source, message))
        return True

    def cut(self, one: Rank, other: Rank) -> None:
        """Take their link down; messages in transit are lost."""
        for rank, peer in ((one, other), (other, one)):
            self.links[rank, peer].clear()
            self.handle(rank, MemberLeft(peer))

    def link(self, one: Rank, other: Rank) -> None:
        """Bring their link up again."""
        for rank, peer in ((one, other), (other, one)):
            self.handle(rank, MemberJoined(peer, self.replicas[peer].iteration))

    def weights(self) -> np.ndarray:
        """The weights of all replicas, a row each."""
        return np.array([self.replicas[rank].weights_D for rank in self.ranks])


def comparable(instructions: list[Instruction], *, with_versions: bool = True) -> list[object]:
    """Instructions in a form that can be compared.

    `with_versions` includes the versions in messages.
    """
    forms: list[object] = []
    for one in instructions:
        match one:
            case (
                ApplyGradient(gradient_D=value_D)
                | AddUpdate(update_D=value_D)
                | ReplaceWeights(weights_D=value_D)
                | WithholdUpdate(update_D=value_D)
            ):
                forms.append((type(one).__name__, value_D.tobytes()))
            case SendMessage(peer=peer, message=message):
                version = message.weights_version if with_versions else 0
                head = (message.kind, message.iteration, version)
                forms.append((peer, *head, message.local_batch_size, bytes(message.payload)))
            case _:
                forms.append(one)
    return forms


def run_at_random(
    cluster: WeightsCluster,
    seed: int,
    *,
    steps: int,
    alive: Iterable[Rank] | None = None,
    check: Callable[[WeightsCluster, Rank], None] = lambda _c, _r: None,
) -> None:
    """Steps and deliveries in random order until every worker has done `steps`, or none can.

    `check` is called before each step.
    """
    rng = np.random.default_rng(seed)
    ranks = sorted(cluster.ranks if alive is None else alive)
    while True:
        steppers = [
            rank
            for rank in ranks
            if cluster.replicas[rank].iteration < steps and cluster.may_step(rank)
        ]
        links = [link for link, queue in cluster.links.items() if queue]
        if not steppers and not links:
            break
        choice = int(rng.integers(len(steppers) + len(links)))
        if choice < len(steppers):
            check(cluster, steppers[choice])
            cluster.step(steppers[choice])
        else:
            cluster.deliver(*links[choice - len(steppers)])
    late = [rank for rank in ranks if cluster.replicas[rank].iteration < steps]
    assert not late, f"blocked: {late}"


def check_a_restored_worker_continues_identically(
    cluster: WeightsCluster, restored: Rank, seed: int, *, steps: int, with_versions: bool = True
) -> None:
    """Replace the worker's machine by a restored one in a copy of the cluster, run both, and
    compare."""
    for one in cluster.replicas.values():
        one.instructions.clear()
    twin = copy.deepcopy(cluster)
    replica = twin.replicas[restored]
    state = replica.machine.state()
    replica.machine = twin.built(replica)
    replica.machine.restore(copy.deepcopy(state))
    for peer in cluster.ranks:
        if peer != restored:
            finished = cluster.replicas[peer].iteration
            withheld = replica.machine.handle(MemberJoined(peer, finished))
            assert all(isinstance(one, WithholdUpdate) for one in withheld)
    for one in (cluster, twin):
        run_at_random(one, seed, steps=steps)
    for rank in cluster.ranks:
        before, after = cluster.replicas[rank].instructions, twin.replicas[rank].instructions
        forms = [comparable(each, with_versions=with_versions) for each in (before, after)]
        assert forms[0] == forms[1]
    np.testing.assert_array_equal(cluster.weights(), twin.weights())
