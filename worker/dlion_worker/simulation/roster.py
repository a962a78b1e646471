"""Who takes part in a virtual run, from when to when: workers leave, come back and come late.

Owns the membership that sidecars are told of, in the coordinator's place, and carries out the
environment's absences. Called by `run`, which builds workers. How a latecomer gets in is
`entrance`'s business, which links there are `connections`'.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dlion_api.membership import Member, Membership, MemberState
from dlion_api.reasons import EventReason
from dlion_worker.exchange import LinkUp
from dlion_worker.policies.topology import graph_of
from dlion_worker.simulation.connections import Connections
from dlion_worker.simulation.entrance import VirtualEntrance
from dlion_worker.simulation.introduction import (
    introduce,
    probe_link,
    probe_pairs,
    probe_speed,
    tell_membership,
)
from dlion_worker.simulation.surroundings import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlion_api.measurements import Capacity
    from dlion_api.names import Rank, WorkerIdentity
    from dlion_api.spec import Job
    from dlion_worker.environments.plan import Absence, Conditions, Plan
    from dlion_worker.exchange import LinkDown, StateSnapshot, StateWanted
    from dlion_worker.policies.interface import Machine
    from dlion_worker.simulation.clock import Appointment, VirtualClock
    from dlion_worker.simulation.links import VirtualLink
    from dlion_worker.simulation.network import Network
    from dlion_worker.simulation.worker import VirtualWorker


WANTED_AGAIN_S = 0.01
"""Between looks for an update that a peer's state is to hold."""


class Roster:
    """The workers of a run by rank, in their latest incarnations."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        clock: VirtualClock,
        network: Network,
        *,
        build: Callable[[WorkerIdentity, int], VirtualWorker],
        stopped: Callable[[str], None],
        failed: Callable[[str], None],
        lost: Callable[[Rank], str | None],
    ) -> None:
        """`build(identity, incarnation)`: a worker without links. `stopped`: the run is over, and
        why; `failed`: and it has not come to its end. `lost`, told of a worker that never comes
        back, says why the run is over."""
        self._job, self._plan = job, plan
        self._clock, self._network = clock, network
        self._conditions = plan.initial
        self._build, self._lost = build, lost
        self._stopped, self._failed = stopped, failed
        self.workers: dict[Rank, VirtualWorker] = {}
        """All that have ever come, in order of rank."""
        self._members: dict[Rank, Member] = {}
        self._version = 0
        self._lost_for_good: set[Rank] = set()
        self._connections = Connections(
            clock,
            network,
            plan.initial,
            graph_of(job.spec, [identity.rank for identity in job.workers()]),
            link=lambda sender, receiver: self.workers[sender].parts.links[receiver],
            tell=self._link_changed,
            iteration_of=lambda rank: self.workers[rank].progress.iteration,
        )

    @property
    def present(self) -> dict[Rank, VirtualWorker]:
        """Those whose process runs."""
        return {r: worker for r, worker in self.workers.items() if worker.phase is not Phase.GONE}

    @property
    def inside(self) -> dict[Rank, VirtualWorker]:
        """Those of them that train."""
        return {rank: worker for rank, worker in self.workers.items() if worker.is_in}

    # ---- the start -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Whoever is there at the start is ready, measured and linked."""
        late = {absence.rank for absence in self._plan.absences if absence.leaves_s is None}
        for identity in self._job.workers():
            if identity.rank not in late:
                self.workers[identity.rank] = self._build(identity, 1)
                self._note(identity, MemberState.READY, 1)
        membership = self._membership()
        for worker in self.workers.values():
            worker.follow_grouping()
        self._connections.begin(self.workers)
        for rank, worker in self.workers.items():
            introduce(worker.parts, membership, 0.0)
            for peer in worker.parts.links:
                self._probe(rank, peer, self._plan.probed_bytes_per_s.get((rank, peer)))
            probe_speed(worker.parts, 0.0)
            worker.tell()
        for rank, worker in self.workers.items():
            # Nobody is asked how far it is: nobody has trained.
            worker.inbox.lives = dict.fromkeys(self._connections.linked(rank), 1)
            worker.take_part(0)
            worker.parts.reporter.event(
                EventReason.TRAINING_STARTED, f"linked with {len(worker.inbox.lives)} workers"
            )

    def appointments(self) -> list[Appointment]:
        """The environment's comings and goings, from now on."""
        made = []
        for absence in self._plan.absences:
            if absence.leaves_s is not None:
                made.append(self._clock.after(absence.leaves_s, partial(self._leave, absence)))
            if absence.comes_s is not None:
                made.append(self._clock.after(absence.comes_s, partial(self._come, absence.rank)))
        return made

    # ---- the run -------------------------------------------------------------------------------

    def change(self, conditions: Conditions) -> None:
        """Other links from now on, and other capacities."""
        self._conditions = conditions
        self._network.set_conditions(conditions)
        self._connections.change(conditions)

    def told(self, rank: Rank, capacity: Capacity) -> None:
        """A capacity for all sidecars that its worker's reaches."""
        cut = self._conditions.worker(rank).cut_peers
        for peer, worker in self.present.items():
            if peer != rank and peer not in cut:
                worker.heard(capacity, self._incarnation(rank))

    def measure(self, rank: Rank) -> None:
        """Probes of links that are due at that worker's sidecar."""
        probe_pairs(self.workers[rank].parts, self._conditions, self._clock.now_s)

    def regroup(self, rank: Rank, neighbours: frozenset[Rank]) -> None:
        """A worker is to be linked with those from now on."""
        self._connections.regroup(rank, neighbours)

    def give_up(self, rank: Rank, peer: Rank, reason: str) -> None:
        """A worker breaks a link off."""
        self._connections.broken_off(rank, peer, reason)

    def stop(self, reason: str) -> None:
        """The run is over: all end with their present step; who was not in stays out."""
        for rank, worker in self.present.items():
            worker.stop(reason)
            if not worker.is_in:
                worker.leave()
                self._connections.died(rank, reason)

    # ---- comings and goings --------------------------------------------------------------------

    def _leave(self, absence: Absence) -> None:
        rank, worker = absence.rank, self.workers[absence.rank]
        worker.parts.reporter.event(
            EventReason.WORKER_LOST,
            "its process died, as the environment says",
            iteration=worker.progress.iteration,
            warning=True,
        )
        worker.leave()
        self._connections.died(rank, "the peer's process has ended")
        self._note(self._job.worker(rank), MemberState.LOST, self._incarnation(rank))
        self._tell_membership()
        if absence.comes_s is None:
            self._lost_for_good.add(rank)
            if why := self._why_over():
                self._failed(f"worker {rank} is gone for good, and {why}")
            elif reason := self._lost(rank):
                self._stopped(reason)

    def _why_over(self) -> str:
        """Why the run cannot go on without those who never come back; empty: it can."""
        spec = self._job.spec
        if spec.failure_policy == "Fail":
            return "failurePolicy is Fail"
        left = {w.site for w in self._job.workers() if w.rank not in self._lost_for_good}
        if len(left) < spec.min_sites:
            return f"{len(left)} sites are left (minSites {spec.min_sites})"
        return ""

    def _come(self, rank: Rank) -> None:
        identity = self._job.worker(rank)
        incarnation = 1 + self._incarnation(rank)
        before = self.workers.get(rank)
        worker = self._build(identity, incarnation)
        if before is not None:  # its sidecar has lived on
            worker.parts.director = before.parts.director
        self.workers = dict(sorted({**self.workers, rank: worker}.items()))
        worker.entrance = self._entrance(worker)
        worker.parts.reporter.event(
            EventReason.WORKER_READY, f"incarnation {incarnation} is ready to train"
        )
        self._note(identity, MemberState.READY, incarnation)
        introduce(worker.parts, self._membership(), self._clock.now_s)
        worker.follow_grouping()
        self._tell_membership()
        self._connections.came(rank)

    def come_in_anew(self, rank: Rank) -> None:
        """Others have trained while a worker held still: as after a restart, over new links."""
        worker = self.workers[rank]
        before = worker.parts.machine
        worker.begin_anew()
        worker.entrance = self._entrance(worker, before)
        for peer in self._connections.linked(rank):
            self._connections.broken_off(rank, peer, "comes in anew: others trained meanwhile")

    def _entrance(self, worker: VirtualWorker, before: Machine | None = None) -> VirtualEntrance:
        return VirtualEntrance(
            worker,
            self._clock,
            pull=partial(self._pull, worker.rank),
            come_in=worker.begin_step,
            come_anew=partial(self.come_in_anew, worker.rank),
            before=before,
        )

    def _pull(
        self, rank: Rank, donor: Rank, wanted: StateWanted, take: Callable[[StateSnapshot], None]
    ) -> None:
        """Asks a peer for its state, which comes over the link from there once it is as wanted."""
        link: VirtualLink = self.workers[donor].parts.links[rank]

        def give() -> None:
            worker = self.workers[donor]
            if not link.is_up or worker.parts.links[rank] is not link:
                return
            if worker.parts.replica.iteration < wanted.at_least:
                self._clock.after(WANTED_AGAIN_S, give)
                return
            snapshot = worker.parts.replica.provide(wanted)
            link.pull(len(snapshot.payload), lambda: take(snapshot))

        self._clock.after(self._network.latency_s(rank, donor), give)

    def _link_changed(self, rank: Rank, event: LinkUp | LinkDown) -> None:
        if isinstance(event, LinkUp):
            self._probe(rank, event.peer)
            peer = self.workers[event.peer]
            self.workers[rank].heard(peer.parts.director.own(), self._incarnation(event.peer))
        self.workers[rank].arrive(event)

    def _probe(self, rank: Rank, peer: Rank, found_bytes_per_s: float | None = None) -> None:
        bytes_per_s = found_bytes_per_s or self._conditions.link_bytes_per_s(rank, peer)
        probe_link(self.workers[rank].parts, peer, bytes_per_s, self._clock.now_s)

    # ---- the coordinator's part ----------------------------------------------------------------

    def _incarnation(self, rank: Rank) -> int:
        return self._members[rank].incarnation if rank in self._members else 0

    def _note(self, identity: WorkerIdentity, state: MemberState, incarnation: int) -> None:
        self._version += 1
        self._members[identity.rank] = Member(identity, incarnation, state, "", "")

    def _membership(self) -> Membership:
        members = tuple(self._members[rank] for rank in sorted(self._members))
        return Membership(self._version, self._job.key, len(self._job.workers()), members)

    def _tell_membership(self) -> None:
        membership, now_s = self._membership(), self._clock.now_s
        for worker in self.present.values():
            tell_membership(worker.parts, membership, now_s)
            worker.follow_grouping()
