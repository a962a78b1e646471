"""A `WeightsCluster` of several sites: joins and departures, and lanes that keep their order.

For machines that know each worker's site.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dlion_api.names import Rank
from dlion_core.policies.factory import build
from dlion_core.policies.interface import MemberJoined, MemberLeft
from weights_cluster import WeightsCluster

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dlion_api.spec import Spec
    from dlion_core.policies.interface import Event, Instruction, Layout, PolicyMachine, Value
    from policy_cluster import Replica


class SitesCluster(WeightsCluster):
    """Workers by site, in rank order: `sites` are numbers of workers."""

    def __init__(
        self,
        job_spec: Spec,
        local_batch_sizes: Iterable[int],
        sites: Iterable[int],
        *,
        layout: Layout | None = None,
        seed: int = 0,
    ) -> None:
        names = [chr(97 + at) for at, count in enumerate(sites) for _ in range(count)]
        self.sites = {Rank(at): name for at, name in enumerate(names)}
        self.alive = set(self.sites)
        self._may_step: dict[Rank, bool] = {}
        super().__init__(job_spec, local_batch_sizes, layout=layout, seed=seed)

    def built(self, replica: Replica) -> PolicyMachine:
        """A machine over that replica's weights, which knows the sites."""
        return build(
            self.job_spec, replica.rank, self.layout, self.ranks, sites=self.sites, replica=replica
        )

    def handle(self, rank: Rank, event: Event) -> list[Instruction]:
        """Handle an event; forget the cached answer of `may_step`."""
        self._may_step.pop(rank, None)
        return super().handle(rank, event)

    def may_step(self, rank: Rank) -> bool:
        """The machine's answer after its last event."""
        if rank not in self._may_step:
            self._may_step[rank] = super().may_step(rank)
        return self._may_step[rank]

    def leave(self, gone: Rank) -> None:
        """Remove a worker that dies."""
        self.alive.discard(gone)
        super().leave(gone)

    def cut(self, one: Rank, other: Rank, rng: np.random.Generator, between: int) -> None:
        """Break their link; the second end notices that number of turns after the first."""
        for source, target in ((one, other), (other, one)):
            self.links[source, target].clear()
            self.handle(target, MemberLeft(source))
            for _ in range(between):
                self.turn(rng, steps=12)
        self.links[one, other].clear()

    def relink(self, one: Rank, other: Rank) -> None:
        """Bring their link up again."""
        finished = {rank: self.replicas[rank].iteration for rank in (one, other)}
        self.handle(one, MemberJoined(other, finished[other]))
        self.handle(other, MemberJoined(one, finished[one]))

    def replace_worker(
        self, rank: Rank, source: Rank, state: Mapping[str, Value] | None = None
    ) -> None:
        """Start a new incarnation: with another worker's weights and iteration, or with a state."""
        replica, other = self.replicas[rank], self.replicas[source]
        self.alive.add(rank)
        replica.machine = self.built(replica)
        self._may_step.pop(rank, None)
        replica.weights_D[:] = other.weights_D
        applied = int(other.machine.state()["iteration"])
        fresh = {**replica.machine.state(), "iteration": applied}
        replica.machine.restore(fresh if state is None else state)
        replica.iteration = replica.machine.next_iteration() - 1
        for peer in sorted(self.alive - {rank}):
            self.handle(peer, MemberJoined(rank, applied))
            self.handle(rank, MemberJoined(peer, applied))

    def turn(self, rng: np.random.Generator, steps: int) -> bool:
        """One random step or delivery; return False if nothing is left to do."""
        steppers = [
            rank
            for rank in sorted(self.alive)
            if self.replicas[rank].iteration < steps and self.may_step(rank)
        ]
        links = [link for link, queue in self.links.items() if queue and link[1] in self.alive]
        if not steppers and not links:
            return False
        choice = int(rng.integers(len(steppers) + len(links)))
        if choice < len(steppers):
            self.step(steppers[choice])
        else:
            self.deliver(*links[choice - len(steppers)])
        return True

    def run(self, seed: int, *, steps: int) -> None:
        """Run in random order until all live workers have done exactly `steps`."""
        rng = np.random.default_rng(seed)
        while self.turn(rng, steps):
            pass
        self._assert_none_blocked(steps)

    def run_at_least(self, seed: int, *, steps: int) -> None:
        """Run in random order until all live workers have done at least that number of steps;
        faster ones continue meanwhile."""
        rng = np.random.default_rng(seed)
        for _ in range(200 * steps * len(self.ranks)):
            if not self._late(steps) or not self.turn(rng, steps=10**9):
                break
        self._assert_none_blocked(steps)

    def _late(self, steps: int) -> list[Rank]:
        return [rank for rank in sorted(self.alive) if self.replicas[rank].iteration < steps]

    def _assert_none_blocked(self, steps: int) -> None:
        late = self._late(steps)
        held = {rank: self.replicas[rank].machine.waiting_for() for rank in late}
        assert not late, f"blocked: {held}"
