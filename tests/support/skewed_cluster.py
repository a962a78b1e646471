"""A `WeightsCluster` under `d2` on quadratics with skewed data, and its faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from dlion_api.names import Rank
from dlion_api.spec import Spec
from dlion_core.policies.interface import Event, Instruction, MemberJoined, MemberLeft, Value
from dlion_core.policies.iteration_guard import IterationGuard
from dlion_core.topology.topology import graph_of
from weights_cluster import WeightsCluster, weights_spec

WORKERS = 6
Checkpoint = tuple[int, np.ndarray, dict[str, Value]]
"""Iteration, weights, the machine's state."""


def on_a_graph() -> Spec:
    job_spec = weights_spec("d2")
    exchange = replace(job_spec.exchange, topology="randomRegular", degree=3)
    return replace(job_spec, exchange=exchange)


KINDS = {
    "complete": weights_spec("d2"),
    "ring": weights_spec("d2", mixing="ring"),
    "graph": on_a_graph(),
}


class Skewed(WeightsCluster):
    """Worker k has the loss |w - optima[k]|^2 / 2. Only neighbours are linked."""

    def __init__(self, kind: str, workers: int = WORKERS, seed: int = 0) -> None:
        ranks = [Rank(rank) for rank in range(workers)]
        self.graph = dict(graph_of(KINDS[kind], ranks))
        self.optima = np.random.default_rng(seed).standard_normal((workers, 20))
        super().__init__(KINDS[kind], [2] * workers, seed=seed % 1000, rate=0.3)
        self.alive = list(ranks)

    def handle(self, rank: Rank, event: Event) -> list[Instruction]:
        if isinstance(event, MemberJoined | MemberLeft) and event.rank not in self.graph[rank]:
            return []
        return super().handle(rank, event)

    def step(self, rank: Rank, gradient_D: np.ndarray | None = None) -> None:
        away_D = self.replicas[rank].weights_D - self.optima[rank]
        super().step(rank, away_D.astype(np.float32) if gradient_D is None else gradient_D)

    def all_step(self) -> None:
        """One local step of each worker; nothing is delivered yet."""
        for rank in filter(self.may_step, self.alive):
            self.step(rank)

    def run_lockstep(self, steps: int) -> None:
        """Run the live workers in lock step."""
        for _ in range(steps):
            self.all_step()
            self.deliver_all()

    def converges(self) -> bool:
        """Whether the live workers reach their optimum in 150 steps. All restarts are over after
        the first 40."""
        self.run_lockstep(40)
        for _ in range(11):
            if self.distance() < 1e-4:
                return True
            self.run_lockstep(10)
        return self.distance() < 1e-4

    def deliver_to(self, targets: Iterable[int]) -> None:
        """Deliver everything in transit to these."""
        for link in self.links:
            while link[1] in targets and self.deliver(*link):
                pass

    def die(self, rank: Rank) -> None:
        """Remove a worker, for good or until it is replaced."""
        self.alive.remove(rank)
        self.leave(rank)

    def take_over(self, rank: Rank, donor: Rank) -> None:
        """Start a worker in a new process, with another's weights."""
        given_by = self.replicas[donor]
        self._begin(
            rank,
            (given_by.iteration, given_by.weights_D, {}),
            lambda machine: machine.take_over(given_by.iteration),
        )
        self.alive = sorted({*self.alive, rank})
        for peer in set(self.alive) - {rank}:
            self.link(rank, peer)

    def restart_from_checkpoint(self, rank: Rank) -> None:
        """Start a worker in a new process, from a checkpoint of this moment."""
        saved = self.saved()[rank]
        self.leave(rank)
        self._begin(rank, saved, lambda machine: machine.restore(saved[2]))
        for peer in set(self.alive) - {rank}:
            self.link(rank, peer)

    def resume(self, checkpoints: dict[Rank, Checkpoint]) -> None:
        """Stop all workers and resume them from these checkpoints."""
        for queue in self.links.values():
            queue.clear()
        for rank, saved in checkpoints.items():
            self._begin(rank, saved, partial(IterationGuard.restore, state=saved[2]))
        for rank in self.alive:  # a restarted worker expects the others at its own iteration
            for peer in set(self.alive) - {rank}:
                self.handle(rank, MemberJoined(peer, self.replicas[rank].iteration))
        self.deliver_all()

    def _begin(
        self, rank: Rank, saved: Checkpoint, restore: Callable[[IterationGuard], None]
    ) -> None:
        replica = self.replicas[rank]
        replica.iteration, replica.weights_D[:] = saved[:2]
        replica.machine = machine = self.built(replica)
        assert isinstance(machine, IterationGuard)
        restore(machine)

    def saved(self) -> dict[Rank, Checkpoint]:
        """A checkpoint of each worker."""
        return {
            rank: (one.iteration, one.weights_D.copy(), one.machine.state())
            for rank, one in self.replicas.items()
        }

    def corrections(self) -> dict[Rank, np.ndarray]:
        """The corrections of the live workers that have one."""
        states = {rank: self.replicas[rank].machine.state() for rank in self.alive}
        name = "d2_correction_D"
        return {rank: state[name] for rank, state in states.items() if name in state}

    def correction_sum_D(self) -> np.ndarray:  # noqa: N802 - the shape's suffix
        return np.sum([np.zeros(20), *self.corrections().values()], axis=0)

    def distance(self) -> float:
        """The maximum distance of a live worker from their joint optimum."""
        best_D = self.optima[self.alive].mean(axis=0)
        return float(np.abs(self.weights()[self.alive] - best_D).max())
