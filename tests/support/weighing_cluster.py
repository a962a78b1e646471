"""`policy_cluster` for policies that read or replace weights, or that receive `UpdateApplied`.

For machines made with a view of their replica's weights.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dlion_api.names import Rank
from dlion_core.codecs import encode_weights
from dlion_core.policies.factory import build
from dlion_core.policies.interface import (
    AddUpdate,
    ApplyGradient,
    Flat,
    Instruction,
    Layout,
    LocalStepDone,
    MemberJoined,
    Message,
    MessageKind,
    PolicyMachine,
    ReplaceWeights,
    SendWeights,
    UpdateApplied,
)
from policy_cluster import LEARNING_RATE, Cluster, Replica

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dlion_api.spec import Spec
    from dlion_core.policies.interface import Value


@dataclass
class View:
    """The weights that a machine reads."""

    weights_D: Flat

    @property
    def resting_D(self) -> Flat:  # noqa: N802 - the shape's suffix
        """The weights; without momentum they are at rest."""
        return self.weights_D.copy()


class WeighingCluster(Cluster):
    """Workers whose machines read their weights; each queue keeps its order, over both lanes."""

    def __init__(
        self,
        job_spec: Spec,
        local_batch_sizes: Iterable[int],
        *,
        layout: Layout | None = None,
        seed: int = 0,
    ) -> None:
        sizes = list(local_batch_sizes)
        super().__init__(job_spec, [], layout=layout, seed=seed)
        self.ranks = [Rank(index) for index in range(len(sizes))]
        start_D = np.random.default_rng(seed).standard_normal(self.layout.size).astype(np.float32)
        for rank in self.ranks:
            weights_D = start_D.copy()
            self.replicas[rank] = Replica(
                rank, self.machine(rank, weights_D), weights_D,
                np.random.default_rng((seed, rank)), sizes[rank],
            )  # fmt: skip
            for peer in self.ranks:
                if peer != rank:
                    self.links[rank, peer] = deque()
        for rank in self.ranks:
            for peer in self.ranks:
                if peer != rank:
                    self.handle(rank, MemberJoined(peer))

    def machine(self, rank: Rank, weights_D: Flat) -> PolicyMachine:
        """A machine over these weights."""
        return build(self.job_spec, rank, self.layout, self.ranks, replica=View(weights_D))

    def restore_worker(self, rank: Rank, state: Mapping[str, Value], weights_D: Flat) -> None:
        """Start a new incarnation of a worker from a checkpoint."""
        replica = self.replicas[rank]
        replica.weights_D = weights_D.copy()
        replica.machine = self.machine(rank, replica.weights_D)
        replica.machine.restore(state)
        replica.iteration = replica.machine.next_iteration() - 1
        for peer in self.ranks:
            if peer != rank:
                self.handle(rank, MemberJoined(peer))
                self.handle(peer, MemberJoined(rank))

    def _carry_out(self, replica: Replica, instruction: Instruction) -> None:
        match instruction:
            case ApplyGradient(gradient_D=gradient_D):
                replica.weights_D -= LEARNING_RATE * gradient_D
                self.handle(replica.rank, UpdateApplied())
            case AddUpdate(update_D=update_D):
                replica.weights_D += update_D
            case ReplaceWeights(weights_D=weights_D):
                replica.weights_D[:] = weights_D
            case SendWeights(peer=peer, iteration=iteration, weights_D=weights_D):
                sent_D = replica.weights_D if weights_D is None else weights_D
                payload = encode_weights(sent_D, self.job_spec.exchange.codec)
                message = Message(MessageKind.WEIGHTS, iteration, payload=payload)
                self.links[replica.rank, peer].append(message)
            case _:
                super()._carry_out(replica, instruction)


def run_at_random(
    cluster: Cluster, seed: int, *, steps: int, leaves: tuple[int, Rank] | None = None
) -> None:
    """Steps and deliveries in random order until all have done `steps`.

    `leaves` maps a turn to the worker that dies then.
    """
    rng = np.random.default_rng(seed)
    alive = list(cluster.ranks)
    turn = 0
    while True:
        turn += 1
        if leaves is not None and turn == leaves[0]:
            alive.remove(leaves[1])
            cluster.leave(leaves[1])
        steppers = [
            rank
            for rank in alive
            if cluster.replicas[rank].iteration < steps and cluster.may_step(rank)
        ]
        links = [link for link, queue in cluster.links.items() if queue and link[1] in alive]
        if not steppers and not links:
            break
        choice = int(rng.integers(len(steppers) + len(links)))
        if choice < len(steppers):
            cluster.step(steppers[choice])
        else:
            cluster.deliver(*links[choice - len(steppers)])
    assert all(cluster.replicas[rank].iteration >= steps for rank in alive), "blocked"


def own_step(iteration: int, gradient_D: Flat, batch: int = 1) -> LocalStepDone:
    """A local step with that gradient."""
    return LocalStepDone(iteration, gradient_D, batch, loss=0.5)


def comparable(instructions: Iterable[Instruction]) -> list[object]:
    """Instructions in a form that can be compared, bit for bit."""
    forms: list[object] = []
    for one in instructions:
        parts = [
            value.tobytes() if isinstance(value, np.ndarray) else value
            for value in vars(one).values()
        ]
        forms.append((type(one).__name__, *(_plain(part) for part in parts)))
    return forms


def _plain(part: object) -> object:
    if isinstance(part, Message):
        return (part.kind, part.iteration, part.local_batch_size, bytes(part.payload))
    return part


def lose_for_a_while(cluster: WeighingCluster, lost: Rank, *, steps: int) -> None:
    """Let the others make at most that number of steps without a worker, which returns with its old
    state."""
    gone = cluster.replicas[lost]
    kept, weights_D = gone.machine.state(), gone.weights_D.copy()
    cluster.leave(lost)
    for _ in range(steps):
        for rank in cluster.ranks:
            if rank != lost and cluster.may_step(rank):
                cluster.step(rank)
        for link in cluster.links:
            while lost not in link and cluster.deliver(*link):
                pass
    for link in cluster.links:
        if lost in link:
            cluster.links[link].clear()
    cluster.restore_worker(lost, kept, weights_D)
    cluster.deliver_all()
