"""Machines connected by queues in one process, for tests of several machines together.

Each replica trains a linear model by plain SGD on its own batches. Messages wait in one queue per
link until the test delivers them: in any order over links, in order on each.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dlion_api.names import Rank
from dlion_api.spec import Spec, load_job
from dlion_core.codecs import encode_weights
from dlion_core.policies.factory import build
from dlion_core.policies.interface import (
    ApplyGradient,
    AverageWeights,
    BudgetsChanged,
    Event,
    Instruction,
    Layout,
    LocalStepDone,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    PolicyMachine,
    RejectMessage,
    SendMessage,
    SendWeights,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

LEARNING_RATE = np.float32(0.05)
_TRUTH = 1 << 20


def spec(
    *,
    exchange: dict[str, object] | None = None,
    synchronization: dict[str, object] | None = None,
    knowledge_transfer: dict[str, object] | None = None,
) -> Spec:
    """A job's spec with these policy sections."""
    document: dict[str, object] = {
        "apiVersion": "dlion.dev/v1alpha1",
        "kind": "DLionJob",
        "metadata": {"name": "test"},
        "spec": {
            "runId": "1",
            "sites": [{"name": "a", "groups": [{"name": "g", "workers": 4}]}],
            "trainer": {
                "program": {"builtin": "digits"},
                "dataset": {"name": "digits"},
                "optimizer": {"name": "sgd", "learningRate": 0.05},
                "stop": {"maxSteps": 10},
            },
            "exchange": {"policy": "dlion", **(exchange or {})},
            "synchronization": synchronization or {},
            "knowledgeTransfer": knowledge_transfer or {"policy": "none"},
        },
    }
    return load_job(document).spec


def with_small_merges(found: Spec) -> Spec:
    """A spec in which ten samples suffice for a merge. Any batch is possible: `goodput` may choose
    the largest at once."""
    size = replace(found.batching.global_batch_size, initial=1, growth=True)
    return replace(
        found, batching=replace(found.batching, policy="goodput", global_batch_size=size)
    )


@dataclass
class Replica:
    """One worker: its machine, its weights, and the instructions that its machine has returned."""

    rank: Rank
    machine: PolicyMachine
    weights_D: NDArray[np.float32]
    rng: np.random.Generator
    local_batch_size: int
    iteration: int = 0
    instructions: list[Instruction] = field(default_factory=list)

    @property
    def resting_D(self) -> NDArray[np.float32]:  # noqa: N802 - the shape's suffix
        """The weights; without momentum they are at rest."""
        return self.weights_D.copy()

    def descents(self) -> list[ApplyGradient]:
        """The updates so far."""
        return [one for one in self.instructions if isinstance(one, ApplyGradient)]


class Cluster:
    """Workers that are all linked."""

    def __init__(
        self,
        job_spec: Spec,
        local_batch_sizes: Iterable[int],
        *,
        layout: Layout | None = None,
        seed: int = 0,
        catches_up: bool = True,
    ) -> None:
        self.catches_up = catches_up
        self.layout = layout or Layout(("a", "b", "c"), (5, 12, 3))
        self.job_spec = job_spec
        sizes = list(local_batch_sizes)
        self.ranks = [Rank(index) for index in range(len(sizes))]
        start_D = np.random.default_rng(seed).standard_normal(self.layout.size).astype(np.float32)
        truth = np.random.default_rng((seed, _TRUTH))  # never the initial weights of any seed
        self.truth_D = truth.standard_normal(self.layout.size)
        self.replicas = {
            rank: Replica(
                rank,
                build(job_spec, rank, self.layout, self.ranks),
                start_D.copy(),
                np.random.default_rng((seed, rank)),
                sizes[rank],
            )
            for rank in self.ranks
        }
        self.links: dict[tuple[Rank, Rank], deque[Message]] = {
            (source, target): deque()
            for source in self.ranks
            for target in self.ranks
            if source != target
        }
        for rank in self.ranks:
            for peer in self.ranks:
                if peer != rank:
                    self.handle(rank, MemberJoined(peer))

    def handle(self, rank: Rank, event: Event) -> list[Instruction]:
        """Pass an event to a machine and carry out its instructions."""
        replica = self.replicas[rank]
        instructions = replica.machine.handle(event)
        replica.instructions += instructions
        for instruction in instructions:
            self._carry_out(replica, instruction)
        return instructions

    def _carry_out(self, replica: Replica, instruction: Instruction) -> None:
        match instruction:
            case ApplyGradient(gradient_D=gradient_D):
                replica.weights_D -= LEARNING_RATE * gradient_D
            case AverageWeights(weights_D=weights_D, fraction=fraction, since_D=since_D):
                then_D = replica.weights_D if since_D is None else since_D
                replica.weights_D += np.float32(fraction) * (weights_D - then_D)
            case SendMessage(peer=peer, message=message):
                self.links[replica.rank, peer].append(message)
            case SendWeights(peer=peer, iteration=iteration, weights_D=weights_D):
                sent_D = replica.weights_D if weights_D is None else weights_D
                payload = encode_weights(sent_D, "float32")
                message = Message(MessageKind.WEIGHTS, iteration, payload=payload)
                self.links[replica.rank, peer].append(message)
            case RejectMessage():
                raise AssertionError(instruction)

    def may_step(self, rank: Rank) -> bool:
        """Whether that worker's next local step may begin."""
        return not self.replicas[rank].machine.waiting_for()

    def batch(self, rank: Rank) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """A new batch of that worker."""
        replica = self.replicas[rank]
        x_BD = replica.rng.standard_normal((replica.local_batch_size, self.layout.size))
        return x_BD, x_BD @ self.truth_D

    def step(self, rank: Rank, gradient_D: NDArray[np.float32] | None = None) -> None:
        """One local step, on a new batch unless the gradient is given."""
        replica = self.replicas[rank]
        replica.iteration = (
            replica.machine.next_iteration() if self.catches_up else replica.iteration + 1
        )
        loss = 0.0
        if gradient_D is None:
            gradient_D, loss = linear_gradient(replica.weights_D, *self.batch(rank))
        of_all = sum(one.local_batch_size for one in self.replicas.values())
        self.handle(
            rank,
            LocalStepDone(replica.iteration, gradient_D, replica.local_batch_size, loss, of_all),
        )

    def deliver(self, source: Rank, target: Rank) -> bool:
        """Deliver the next message on that link; return whether there was one."""
        queue = self.links[source, target]
        if not queue:
            return False
        self.handle(target, MessageArrived(source, queue.popleft()))
        return True

    def deliver_all(self) -> None:
        """Deliver all messages."""
        while any(queue and self.deliver(*link) for link, queue in self.links.items()):
            pass

    def lockstep(self, steps: int) -> None:
        """Repeat: every worker steps, then everything arrives."""
        for _ in range(steps):
            for rank in self.ranks:
                self.step(rank)
            self.deliver_all()

    def budgets(self, rank: Rank, budget_bytes: dict[Rank, int]) -> None:
        """Set the sidecar's budgets for that worker's links."""
        self.handle(rank, BudgetsChanged(budget_bytes))

    def leave(self, gone: Rank) -> None:
        """Remove a worker: its messages in transit are lost, and all peers are notified."""
        for source, target in self.links:
            if gone in (source, target):
                self.links[source, target].clear()
        for rank in self.ranks:
            if rank != gone:
                self.handle(rank, MemberLeft(gone))


def linear_gradient(
    weights_D: NDArray[np.float32], x_BD: NDArray[np.float64], y_B: NDArray[np.float64]
) -> tuple[NDArray[np.float32], float]:
    """Gradient and value of the mean squared error of a linear model."""
    error_B = x_BD @ weights_D.astype(np.float64) - y_B
    return (x_BD.T @ error_B / len(y_B)).astype(np.float32), float(error_B @ error_B / len(y_B))
