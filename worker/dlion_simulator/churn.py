"""Decides which workers take part in a virtual run: late starts, losses and returns.

Holds the membership that sidecars receive, in place of the coordinator, gives them the results of
probes, and applies the environment's absences. `run` builds the workers, `admission` lets late ones
in, and `connections` manages the links.
"""

from collections.abc import Callable
from functools import partial

from dlion_api.names import Rank, WorkerIdentity
from dlion_api.protocol.measurements import Capacity, CpuAllowance, Peers, SpeedProbe
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_core.links.events import LinkDown, LinkUp, StateRequest, StateSnapshot
from dlion_core.policies.interface import PolicyMachine
from dlion_core.resource_control.budgets import PROBE_BYTES
from dlion_core.topology.topology import graph_of
from dlion_environments.plan import Absence, Conditions, Plan
from dlion_simulator.admission import VirtualAdmission
from dlion_simulator.clock import ScheduledEvent, VirtualClock
from dlion_simulator.connections import VirtualConnections
from dlion_simulator.context import WorkerParts, WorkerPhase
from dlion_simulator.links import VirtualLink
from dlion_simulator.network import VirtualNetwork
from dlion_simulator.worker import VirtualWorker

PROBE_CORE_S = 1.0
"""Measurement before the first step. It takes no virtual time, which begins with training."""

PROBE_WEIGHT_BYTES = 2**20
"""Bytes by which a probe's rate counts in the estimate of its link."""

MAX_PROBE_BYTES_PER_S = 1.25e9
"""Probe result on a link without a limit."""

STATE_RETRY_S = 0.01
"""Interval between checks whether a peer's state includes the requested iteration."""


class ChurnController:
    """The workers of a run by rank, in their latest incarnations."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        clock: VirtualClock,
        network: VirtualNetwork,
        *,
        build: Callable[[WorkerIdentity, int], VirtualWorker],
        on_stop: Callable[[str], None],
        on_failure: Callable[[str], None],
        lost: Callable[[Rank], str | None],
    ) -> None:
        """Set up the workers of `job`; no worker is started yet.

        `build(identity, incarnation)` returns an unlinked worker. `on_stop` ends the run with a
        reason, `on_failure` as a failure. `lost` returns a reason to stop when a worker never
        returns.
        """
        self._job, self._plan = job, plan
        self._clock, self._network = clock, network
        self._conditions = plan.initial
        self._build, self._lost = build, lost
        self._on_stop, self._on_failure = on_stop, on_failure
        self.workers: dict[Rank, VirtualWorker] = {}
        """All workers that have ever started, in order of rank."""
        self._members: dict[Rank, Member] = {}
        self._version = 0
        self._lost_permanently: set[Rank] = set()
        self._connections = VirtualConnections(
            clock,
            network,
            plan.initial,
            graph_of(job.spec, [identity.rank for identity in job.workers()]),
            link=lambda sender, receiver: self.workers[sender].parts.links[receiver],
            notify=self._link_changed,
            iteration_of=lambda rank: self.workers[rank].progress.iteration,
        )

    @property
    def present(self) -> dict[Rank, VirtualWorker]:
        """Workers whose process runs."""
        return {
            r: worker for r, worker in self.workers.items() if worker.phase is not WorkerPhase.GONE
        }

    @property
    def training(self) -> dict[Rank, VirtualWorker]:
        """Workers that train."""
        return {rank: worker for rank, worker in self.workers.items() if worker.is_training}

    # ---- the start -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the initial workers: ready, measured and linked."""
        late = {absence.rank for absence in self._plan.absences if absence.leaves_s is None}
        for identity in self._job.workers():
            if identity.rank not in late:
                self.workers[identity.rank] = self._build(identity, 1)
                self._set_member(identity, MemberState.READY, 1)
        membership = self._membership()
        for worker in self.workers.values():
            worker.follow_grouping()
        self._connections.begin(self.workers)
        for rank, worker in self.workers.items():
            self._connect_sidecar(worker.parts, membership)
            for peer in worker.parts.links:
                self._probe(rank, peer, self._plan.probed_bytes_per_s.get((rank, peer)))
            self._probe_speed(worker.parts)
            worker.send_capacity()
        for rank, worker in self.workers.items():
            # No need to ask peers for their iteration: no worker has trained.
            worker.inbox.link_epochs = dict.fromkeys(self._connections.linked(rank), 1)
            worker.start_at(0)
            worker.parts.reporter.event(
                EventReason.TRAINING_STARTED, f"linked workers: {len(worker.inbox.link_epochs)}"
            )

    def schedule_absences(self) -> list[ScheduledEvent]:
        """Schedule the environment's losses and starts of workers."""
        made: list[tuple[float | None, Callable[[], None]]] = []
        for absence in self._plan.absences:
            made.append((absence.leaves_s, partial(self._end_worker, absence)))
            made.append((absence.comes_s, partial(self._start_late_worker, absence.rank)))
        return [self._clock.after(at_s, act) for at_s, act in made if at_s is not None]

    # ---- the run -------------------------------------------------------------------------------

    def change(self, conditions: Conditions) -> None:
        """Apply other links and capacities from now on."""
        self._conditions = conditions
        self._network.set_conditions(conditions)
        self._connections.change(conditions)

    def publish_capacity(self, rank: Rank, capacity: Capacity) -> None:
        """Send a worker's capacity to every sidecar that it can reach."""
        cut = self._conditions.worker(rank).cut_peers
        for peer, worker in self.present.items():
            if peer != rank and peer not in cut:
                worker.heard(capacity, self._incarnation(rank))

    def probe_links(self, rank: Rank) -> None:
        """If groups depend on link rates: run a sidecar's due probes and update its grouping."""
        director, now_s = self.workers[rank].parts.director, self._clock.now_s
        if director.grouping is None:
            return
        while (member := director.link_to_probe(now_s)) is not None:
            peer = member.identity.rank
            rate = min(MAX_PROBE_BYTES_PER_S, self._conditions.link_bytes_per_s(rank, peer))
            if rate > 0:
                self._take_probe(rank, peer, rate)
        director.regroup_if_due(now_s)

    def check_links(self) -> None:
        """Let the sidecars of training workers do what they do by the clock."""
        for worker in self.training.values():
            worker.check_links()

    def set_neighbours(self, rank: Rank, neighbours: frozenset[Rank]) -> None:
        """Change the neighbours of a worker."""
        self._connections.set_neighbours(rank, neighbours)

    def give_up(self, rank: Rank, peer: Rank, reason: str) -> None:
        """Close a link on behalf of a worker."""
        self._connections.disconnect(rank, peer, reason)

    def stop(self, reason: str) -> None:
        """End the run: workers finish their current step; joining workers leave."""
        for rank, worker in self.present.items():
            worker.stop(reason)
            if not worker.is_training:
                worker.leave()
                self._connections.process_ended(rank, reason)

    # ---- comings and goings --------------------------------------------------------------------

    def quarantine(self, rank: Rank, message: str) -> None:
        """End a worker that the others do not accept any more. It never returns."""
        worker = self.workers[rank]
        worker.parts.reporter.event(
            EventReason.WORKER_QUARANTINED,
            message,
            iteration=worker.progress.iteration,
            warning=True,
        )
        worker.leave()
        self._connections.process_ended(rank, "it is quarantined")
        incarnation = self._incarnation(rank)
        self._set_member(self._job.worker(rank), MemberState.FINISHED, incarnation, is_revoked=True)
        self._publish_membership()
        self._lost_permanently.add(rank)
        if why := self._lacking_workers():
            self._on_failure(f"worker {rank} is quarantined, and {why}")
        elif reason := self._lost(rank):
            self._on_stop(reason)

    def _is_quarantined(self, rank: Rank) -> bool:
        return rank in self._members and self._members[rank].revoked

    def _end_worker(self, absence: Absence) -> None:
        rank, worker = absence.rank, self.workers[absence.rank]
        if self._is_quarantined(rank):
            return
        worker.parts.reporter.event(
            EventReason.WORKER_LOST,
            "its process has ended, as the environment requires",
            iteration=worker.progress.iteration,
            warning=True,
        )
        worker.leave()
        self._connections.process_ended(rank, "the peer's process has ended")
        self._set_member(self._job.worker(rank), MemberState.LOST, self._incarnation(rank))
        self._publish_membership()
        if absence.comes_s is None:
            self._lost_permanently.add(rank)
            if why := self._stop_cause():
                self._on_failure(f"worker {rank} is gone for good, and {why}")
            elif reason := self._lost(rank):
                self._on_stop(reason)

    def _stop_cause(self) -> str:
        """Why the run cannot continue without the permanently lost workers; empty if it can."""
        if self._job.spec.failure_policy == "Fail":
            return "failurePolicy is Fail"
        return self._lacking_workers()

    def _lacking_workers(self) -> str:
        """The reason if too few sites are left, or no worker that trains; empty if there are
        enough."""
        workers, min_sites = self._job.workers(), self._job.spec.min_sites
        left = {w.site for w in workers if w.rank not in self._lost_permanently}
        few = f"{len(left)} sites are left (minSites {min_sites})" if len(left) < min_sites else ""
        return few or self._job.spec.exchange.lacks_trainer(self._lost_permanently)

    def _start_late_worker(self, rank: Rank) -> None:
        if self._is_quarantined(rank):
            return
        identity = self._job.worker(rank)
        incarnation = 1 + self._incarnation(rank)
        before = self.workers.get(rank)
        worker = self._build(identity, incarnation)
        if before is not None:  # the sidecar kept running
            worker.parts.director = before.parts.director
        self.workers = dict(sorted({**self.workers, rank: worker}.items()))
        worker.admission = self._admission(worker)
        worker.parts.reporter.event(
            EventReason.WORKER_READY, f"incarnation {incarnation} is ready to train"
        )
        self._set_member(identity, MemberState.READY, incarnation)
        self._connect_sidecar(worker.parts, self._membership())
        worker.follow_grouping()
        self._publish_membership()
        self._connections.process_started(rank)

    def rejoin(self, rank: Rank) -> None:
        """Let a worker join again over new links, because others trained while it was paused."""
        worker = self.workers[rank]
        before = worker.parts.machine
        worker.reset()
        worker.admission = self._admission(worker, before)
        for peer in self._connections.linked(rank):
            self._connections.disconnect(rank, peer, "joins again: others trained meanwhile")

    def _admission(
        self, worker: VirtualWorker, before: PolicyMachine | None = None
    ) -> VirtualAdmission:
        return VirtualAdmission(
            worker,
            self._clock,
            membership=self._membership,
            pull=partial(self._pull, worker.rank),
            retry=partial(self.rejoin, worker.rank),
            before=before,
        )

    def _pull(
        self, rank: Rank, donor: Rank, wanted: StateRequest, take: Callable[[StateSnapshot], None]
    ) -> None:
        """Request a peer's state and deliver it once it includes the requested iteration."""
        link: VirtualLink = self.workers[donor].parts.links[rank]

        def give() -> None:
            worker = self.workers[donor]
            if not link.is_up or worker.parts.links[rank] is not link:
                return
            if worker.parts.replica.iteration < wanted.at_least:
                self._clock.after(STATE_RETRY_S, give)
                return
            snapshot = worker.parts.replica.snapshot_for(wanted)
            link.pull(len(snapshot.payload), lambda: take(snapshot))

        self._clock.after(self._network.latency_s(rank, donor), give)

    def _link_changed(self, rank: Rank, event: LinkUp | LinkDown) -> None:
        if isinstance(event, LinkUp):
            self._probe(rank, event.peer)
            peer = self.workers[event.peer]
            self.workers[rank].heard(peer.parts.director.own(), self._incarnation(event.peer))
        self.workers[rank].arrive(event)

    # ---- what sidecars know before the first step ----------------------------------------------

    def _connect_sidecar(self, parts: WorkerParts, membership: Membership) -> None:
        """Connect a trainer to its sidecar."""
        parts.director.trainer_started()
        if parts.demand is not None:
            parts.demand.trainer_started()
        self._send_membership(parts, membership)
        parts.director.handle(CpuAllowance(parts.quota_cores, 0.0, 0.0), self._clock.now_s)

    def _send_membership(self, parts: WorkerParts, membership: Membership) -> None:
        peers = Peers(membership, parts.training_set_samples, parts.stream.samples)
        parts.director.handle(peers, self._clock.now_s)

    def _probe(self, rank: Rank, peer: Rank, probed_bytes_per_s: float | None = None) -> None:
        """Report the probed rate of a link whose rate is unknown."""
        rate = probed_bytes_per_s or self._conditions.link_bytes_per_s(rank, peer)
        director = self.workers[rank].parts.director
        if peer not in director.links.bandwidths() and 0 < rate < float("inf"):
            self._take_probe(rank, peer, rate)

    def _take_probe(self, rank: Rank, peer: Rank, bytes_per_s: float) -> None:
        parts = self.workers[rank].parts
        busy_s, now_s = PROBE_WEIGHT_BYTES / bytes_per_s, self._clock.now_s
        parts.director.probed(peer, PROBE_WEIGHT_BYTES, busy_s, now_s)
        if (link := parts.links.get(peer)) is not None:
            link.count_probe(PROBE_BYTES)

    def _probe_speed(self, parts: WorkerParts) -> None:
        """Report the speed measured by discarded gradients before the first step."""
        samples = max(1, self._job.spec.batching.global_batch_size.initial // 4)
        cost_s = parts.costs.core_s(samples)
        repeated = max(1, round(PROBE_CORE_S / cost_s))
        probe = SpeedProbe(
            samples=repeated * samples,
            compute_s=repeated * cost_s / parts.units,
            cpu_s=repeated * cost_s,
            throttled_s=0.0,
            quota_cores=parts.quota_cores,
            largest_batch=samples,
        )
        parts.director.handle(probe, self._clock.now_s)

    # ---- the coordinator's part ----------------------------------------------------------------

    def _incarnation(self, rank: Rank) -> int:
        return self._members[rank].incarnation if rank in self._members else 0

    def _set_member(
        self,
        identity: WorkerIdentity,
        state: MemberState,
        incarnation: int,
        *,
        is_revoked: bool = False,
    ) -> None:
        self._version += 1
        member = Member(identity, incarnation, state, "", "", revoked=is_revoked)
        self._members[identity.rank] = member

    def _membership(self) -> Membership:
        members = tuple(self._members[rank] for rank in sorted(self._members))
        return Membership(self._version, self._job.key, len(self._job.workers()), members)

    def _publish_membership(self) -> None:
        membership = self._membership()
        for worker in self.present.values():
            self._send_membership(worker.parts, membership)
            worker.follow_grouping()
