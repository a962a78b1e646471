"""With whom one worker is linked: its neighbours while it trains, everybody once it has stopped.

Called by `worker` (membership, the end), `finishing` (who is still to come) and `companions`
(publishing, which takes weights from everybody, linked or not). Under `exchange.topology:
allToAll` neighbours are everybody.

Under `clustered` neighbours change with the sidecar's groupings, from before the first step on:
links end and begin as each worker hears of one, and policies are told (`Regrouped`). A link is
there only where both ends hold that they are neighbours.

At the end the word that the run is over goes from neighbour to neighbour. Whoever has heard it
opens links to all members that the coordinator knows; those that train on still refuse them, and
it tries again. So leads come to everybody's last state.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlion_worker.policies.clusters import by_sites, graph_of_groups, problem_of
from dlion_worker.policies.interface import Regrouped
from dlion_worker.policies.topology import CLUSTERED, neighbours_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dlion_api.measurements import Directive, Grouping
    from dlion_api.membership import Membership
    from dlion_api.names import Rank
    from dlion_api.spec import Job
    from dlion_api.worker_config import WorkerConfig
    from dlion_worker.exchange import Exchange, StateSnapshot, StateWanted

PATIENCE_S = 30.0
PATIENCE_STEPS = 4.0
"""For so long, or so many iterations of this worker, nobody new need come before those who are
missing at the end are given up: the word may have some way to go, an iteration for each link."""


@dataclass(frozen=True)
class _Reached:
    connected: bool = True


class Neighbourhood:
    """One worker's links, as far as topology and membership decide about them."""

    def __init__(
        self,
        job: Job,
        config: WorkerConfig,
        exchange: Exchange,
        membership: Callable[[], Membership | None],
        *,
        regrouped: Callable[[Regrouped], None] = lambda _event: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`regrouped`: neighbours are others from now on; from any thread."""
        self._job, self._config, self._exchange = job, config, exchange
        self._membership, self._clock_s = membership, clock_s
        self._rank = config.rank
        workers = {job.worker(config.rank), *job.workers()}
        self._sites = {worker.rank: worker.site for worker in workers}
        self._changing = threading.RLock()
        self._regrouped = regrouped
        self._grouping: Grouping | None = None
        self._neighbours = neighbours_of(job, self._rank)
        self.is_everybody = len(self._neighbours) == len(self._sites) - 1
        if job.spec.exchange.topology == CLUSTERED:
            self.is_everybody = False
            self._regroup(by_sites(self._sites))
        self._is_wide = self.is_everybody
        self._met: set[Rank] = set()
        self._news_s = 0.0
        self._patience_s = PATIENCE_S

    def neighbours(self) -> frozenset[Rank]:
        """With whom this worker exchanges now."""
        return self._neighbours

    def directed(self, directive: Directive) -> None:
        """The sidecar's newest word; from any thread."""
        grouping = directive.grouping
        if self._grouping is None or grouping is None or problem_of(grouping, self._sites):
            return
        with self._changing:
            if grouping > self._grouping:
                self._regroup(grouping)
                self.update()

    def _regroup(self, grouping: Grouping) -> None:
        self._grouping = grouping
        graph = graph_of_groups(grouping)
        self._neighbours = graph[self._rank]
        self._regrouped(Regrouped(graph))

    def update(self) -> None:
        """Links as the newest membership has it; from any thread."""
        with self._changing:
            membership = self._membership()
            if membership is None:
                return
            dial = {
                worker.rank: address
                for worker in self._job.workers()
                if (address := self._config.link_address(worker.rank, "exchange")) is not None
            }
            linked = None if self._is_wide else self._neighbours
            self._exchange.set_members(membership, dial, linked=linked)

    def widen(self, *, iteration_s: float) -> None:
        """This worker has stopped: links to everybody from now on."""
        self._patience_s = max(PATIENCE_S, PATIENCE_STEPS * iteration_s)
        self._news_s = self._clock_s()
        if not self._is_wide:
            self._is_wide = True
            self.update()

    def missing(self, linked: set[Rank]) -> set[Rank]:
        """At the end: who is there, as the coordinator says, has not been linked since this worker
        stopped and is worth waiting for: its link may have broken for a moment."""
        if linked - self._met:
            self._news_s = self._clock_s()
            self._met |= linked
        if self._clock_s() - self._news_s > self._patience_s:
            return set()
        return self._present() - self._met

    def _present(self) -> set[Rank]:
        membership = self._membership()
        ready = () if membership is None else membership.ready()
        return {member.identity.rank for member in ready} - {self._rank}

    # ---- for publishing ------------------------------------------------------------------------

    def link_states(self) -> Mapping[Rank, object]:
        """Whose weights can be had; of who is not linked the coordinator's word counts."""
        if self.is_everybody:
            return self._exchange.link_states()
        return dict.fromkeys(self._present(), _Reached())

    def pull_state(self, peer: Rank, wanted: StateWanted) -> StateSnapshot:
        """That worker's state. Raises: UnavailableError, ContractError."""
        return self._exchange.pull_state(peer, wanted)
