"""Selects the peers to link with: neighbours while training, everyone after the stop.

Under `exchange.topology: allToAll` everyone is a neighbour. Under `clustered`, neighbours follow
the sidecar's groupings, and policies get a `TopologyChanged` event. A link exists only while both
ends agree. Called by `worker`, `shutdown` and `background_tasks`.
"""

import threading
import time
from collections.abc import Callable

from dlion_api.names import Rank
from dlion_api.protocol.measurements import Directive, Grouping
from dlion_api.protocol.membership import Membership
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.spec import Job
from dlion_core.policies.interface import TopologyChanged
from dlion_core.topology.clusters import graph_of_groups, grouping_problem, groups_by_site
from dlion_core.topology.topology import CLUSTERED, is_all_to_all, neighbours_of
from dlion_worker.transport.peer_exchange import PeerExchange

MIN_PATIENCE_S = 30.0
MIN_PATIENCE_STEPS = 4.0
"""Missing workers are given up after this many seconds or own iterations without a new link.

The stop message may need an iteration for each link on its way.
"""


class PeerSelection:
    """One worker's links, as determined by topology and membership."""

    def __init__(
        self,
        job: Job,
        config: WorkerConfig,
        exchange: PeerExchange,
        membership: Callable[[], Membership | None],
        *,
        on_regroup: Callable[[TopologyChanged], None] = lambda _event: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_regroup` is called when neighbours change, from any thread."""
        self._job, self._config, self._exchange = job, config, exchange
        self._membership, self._clock_s = membership, clock_s
        self._rank = config.rank
        workers = {job.worker(config.rank), *job.workers()}
        self._sites = {worker.rank: worker.site for worker in workers}
        self._lock = threading.RLock()
        self._regrouped = on_regroup
        self._grouping: Grouping | None = None
        self._neighbours = neighbours_of(job, self._rank)
        self.is_all_to_all = is_all_to_all(job, self._rank)
        if job.spec.exchange.topology == CLUSTERED:
            self._regroup(groups_by_site(self._sites))
        self._is_linked_to_all = self.is_all_to_all
        self._linked_since_stop: set[Rank] = set()
        self._last_link_s = 0.0
        self._patience_s = MIN_PATIENCE_S

    def neighbours(self) -> frozenset[Rank]:
        """The peers that this worker exchanges with now."""
        return self._neighbours

    def on_directive(self, directive: Directive) -> None:
        """Take the sidecar's latest directive; from any thread."""
        grouping = directive.grouping
        if self._grouping is None or grouping is None or grouping_problem(grouping, self._sites):
            return
        with self._lock:
            if grouping > self._grouping:
                self._regroup(grouping)
                self.update()

    def _regroup(self, grouping: Grouping) -> None:
        self._grouping = grouping
        graph = graph_of_groups(grouping)
        self._neighbours = graph[self._rank]
        self._regrouped(TopologyChanged(graph))

    def update(self) -> None:
        """Set the links for the latest membership; from any thread."""
        with self._lock:
            membership = self._membership()
            if membership is None:
                return
            dial = {
                worker.rank: address
                for worker in self._job.workers()
                if (address := self._config.link_address(worker.rank, "exchange")) is not None
            }
            linked = None if self._is_linked_to_all else self._neighbours
            self._exchange.set_members(membership, dial, linked=linked)

    def connect_all(self, *, iteration_s: float) -> None:
        """Link with everyone from now on, because this worker has stopped.

        The stop message spreads from neighbour to neighbour. Peers that still train reject the
        link, and it is retried, so leads reach everyone's final state.
        """
        self._patience_s = max(MIN_PATIENCE_S, MIN_PATIENCE_STEPS * iteration_s)
        self._last_link_s = self._clock_s()
        if not self._is_linked_to_all:
            self._is_linked_to_all = True
            self.update()

    def missing(self, linked: set[Rank]) -> set[Rank]:
        """Ready members not linked since the stop, while it is worth waiting for them.

        A link may have broken for a moment. From a peer in quarantine none comes.
        """
        if linked - self._linked_since_stop:
            self._last_link_s = self._clock_s()
            self._linked_since_stop |= linked
        if self._clock_s() - self._last_link_s > self._patience_s:
            return set()
        return self._present() - self._linked_since_stop - self._exchange.quarantined()

    def _present(self) -> set[Rank]:
        membership = self._membership()
        ready = () if membership is None else membership.ready()
        return {member.identity.rank for member in ready} - {self._rank}

    def reachable(self) -> set[Rank]:
        """Peers to pull weights from: the linked ones, or all ready ones where few are linked."""
        if not self.is_all_to_all:
            return self._present()
        return {peer for peer, link in self._exchange.link_counters().items() if link.connected}
