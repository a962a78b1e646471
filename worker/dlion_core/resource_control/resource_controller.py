"""Decides batch sizes and link budgets from all that the sidecar knows.

Pure: time is an argument, and callers carry out what is returned.
"""

from collections.abc import Mapping
from dataclasses import replace

from dlion_api.names import Rank
from dlion_api.protocol.measurements import (
    Capacity,
    CpuAllowance,
    Directive,
    Grouping,
    LinkDelivery,
    MeasuringEndpoint,
    Peers,
    SpeedProbe,
    StepTiming,
)
from dlion_api.protocol.membership import Member
from dlion_api.protocol.sidecar_protocol import TrainerRecord
from dlion_api.spec import Job
from dlion_core.resource_control.active_workers import ActiveWorkers
from dlion_core.resource_control.batching import BatchShares
from dlion_core.resource_control.budgets import RECEIVER_DELAY_S, LinkBudgets
from dlion_core.resource_control.capacity import CapacityEstimator
from dlion_core.resource_control.capacity_table import CapacityTable, PublishedCapacities
from dlion_core.resource_control.directive_reasons import differs, is_complete, reason_for
from dlion_core.resource_control.exchange_cost import ExchangeCost
from dlion_core.resource_control.global_batch import GlobalBatch
from dlion_core.resource_control.goodput import DecayingMean, NoiseEstimator
from dlion_core.topology.grouping import GroupingState
from dlion_core.topology.topology import CLUSTERED, neighbours_of

SHARE_TOLERANCE_FRACTION = 0.02
MAX_OWN_FACTOR = 2.0
"""A budget covers at most this many times the gradient's computing time. A worker with an expensive
exchange does not get still more to send for being slow."""

REGULAR_S = 5.0
"""Capacities are published at least this often, however little they change."""

IDLE_LINK_S, PROBE_RETRY_S = 30.0, 10.0


class ResourceController:
    """One worker's sidecar without its sockets."""

    def __init__(self, job: Job, rank: Rank, *, receiver_delay_s: float = RECEIVER_DELAY_S) -> None:
        """`receiver_delay_s` is that of `LinkBudgets`."""
        self._job, self._rank = job, rank
        self._workers = ActiveWorkers(job, rank)
        self._groups = GroupingState(job, rank) if job.spec.exchange.topology == CLUSTERED else None
        self._fixed_neighbours = None if job.may_grow else neighbours_of(job, rank)
        """None: all present workers."""
        self._estimator = CapacityEstimator()
        self.capacities = CapacityTable(rank)
        network, exchange = job.spec.network, job.spec.exchange
        self.links = LinkBudgets(
            shared_uplink={"sharedUplink": True, "perPeer": False}.get(network.link_shape),
            fraction=network.bandwidth_fraction,
            receiver_delay_s=receiver_delay_s,
        )
        # Only `dlion` limits CPU use: published systems send what they specify.
        is_limiting = exchange.policy == "dlion" and exchange.prioritization
        self._exchange_cost = ExchangeCost(exchange.cpu_fraction) if is_limiting else None
        self._is_limited = False
        self._global_batch = GlobalBatch(job, rank, self.capacities)
        self._noise, self._exchange_s = NoiseEstimator(), DecayingMean()
        self._shares = BatchShares(
            weighted=job.spec.batching.policy != "even",
            tolerance_fraction=SHARE_TOLERANCE_FRACTION,
            data_fraction=job.spec.data_fraction,
        )
        self._batches: Mapping[Rank, int] = {}
        self._latest: PublishedCapacities | None = None
        self._shared: tuple[PublishedCapacities, int] | None = None
        """What `_batches` were computed from: also the global batch size."""
        self._slowest: tuple[PublishedCapacities, Mapping[Rank, int], float] | None = None
        self._training_set_samples = self._own_samples = self._iteration = self._version = 0
        self._published_s = float("-inf")
        self._compute_share = self._capacity_share = 1.0
        self._measured_at_s: dict[Rank, float] = {}
        self.directive: Directive | None = None
        self.allowance: CpuAllowance | None = None
        self.steps_total = 0
        self.samples_total = 0

    # ---- events ---------------------------------------------------------------------

    def trainer_started(self) -> None:
        """A trainer connected, the first or a restarted one."""
        self._estimator.trainer_started()

    def handle(self, record: TrainerRecord | MeasuringEndpoint, now_s: float) -> Directive | None:
        """Handle one record of the trainer; return a new directive if it changes what to do."""
        match record:
            case SpeedProbe():
                self._estimator.add_probe(record)
                self._publish(now_s)
            case StepTiming():
                self._step(record, now_s)
            case LinkDelivery():
                self.links.deliver(record)
                if record.busy_bytes > 0:
                    self._measured_at_s[record.peer] = now_s
                return None  # budgets are computed once the iteration's reports are complete
            case CpuAllowance():
                self.allowance = record
                self._estimator.set_allowance(record)
                self._publish(now_s)
            case Peers():
                self._workers.set_membership(record.membership, record.linked_lost)
                self._training_set_samples = record.training_set_samples
                self._own_samples = record.own_samples
                self.capacities.set_own_samples(record.own_samples)
                self._global_batch.resume_at(record.iteration, record.global_batch_size)
                self._set_links()
                self._regroup(now_s)
            case Directive():
                self._resume(record)
        return self._next_directive()

    def handle_capacity(self, capacity: Capacity, incarnation: int) -> Directive | None:
        """Handle the capacity that a peer's sidecar sent. Raises: ContractError if its grouping is
        invalid."""
        is_news = self._workers.report_iteration(capacity.rank, incarnation, capacity.iteration)
        is_news |= self._update_groups(capacity)
        is_news |= self.capacities.update(capacity, incarnation)
        is_news |= self._global_batch.take_choice(capacity.batch_choice)
        return self._next_directive() if is_news else None

    def regroup_if_due(self, now_s: float) -> Directive | None:
        """Regroup workers if due; called about once a second."""
        return self._next_directive() if self._regroup(now_s) else None

    def probed(
        self, peer: Rank, busy_bytes: int, receiver_busy_s: float, now_s: float
    ) -> Directive | None:
        if self._groups is not None:
            if receiver_busy_s > 0:
                self._groups.rates.probed(peer, busy_bytes / receiver_busy_s)
            if now_s - self._measured_at_s.get(peer, float("-inf")) < IDLE_LINK_S:
                return None  # training uses the link, and its own transfers are better measurements
        self._measured_at_s[peer] = now_s
        self.links.probed(peer, busy_bytes, receiver_busy_s)
        return self._next_directive()

    def set_compute_share(self, share: float, mean_share: float, now_s: float) -> Directive | None:
        """Let the trainer compute for `share` of the time. Its capacity, and so its part of the
        batch, shrink to `mean_share`. Raises ValueError for one outside of 0 < share <= 1."""
        if not (0 < share <= 1 and 0 < mean_share <= 1):
            raise ValueError(f"shares {share}, {mean_share}; allowed: above 0, at most 1")
        self._compute_share, self._capacity_share = share, mean_share
        self._publish(now_s)
        return self._next_directive()

    def set_expected_speed(
        self, samples_per_s: float | None, why: str, now_s: float
    ) -> Directive | None:
        """Use a forecast of this worker's speed; None: the measured one. Raises as `expect`."""
        self._estimator.expect(samples_per_s, why)
        self._publish(now_s)
        return self._next_directive()

    # ---- queries -------------------------------------------------------------------------

    @property
    def peers(self) -> tuple[Member, ...]:
        """The other present workers."""
        return self._workers.peers

    def neighbours(self) -> tuple[Member, ...]:
        """The peers that this worker has a link to."""
        ranks = self._fixed_neighbours if self._groups is None else self._groups.neighbours
        if ranks is None:
            return self.peers
        return tuple(m for m in self.peers if m.identity.rank in ranks)

    @property
    def grouping(self) -> Grouping | None:
        return None if self._groups is None else self._groups.held

    def measured_samples_per_s(self) -> float | None:
        """This worker's measured speed, whatever is expected; None: unknown."""
        return None if (now := self._estimator.measured()) is None else now.samples_per_s

    def own(self) -> Capacity:
        """The capacity to send to other sidecars."""
        capacity = self.capacities.own()
        if (choice := self._global_batch.choice) is not None:
            capacity = replace(capacity, batch_choice=choice)
        if self._groups is None:
            return capacity
        rates = self._groups.rates.own()
        return replace(capacity, link_bytes_per_s=rates, grouping=self._groups.held)

    def incarnation(self) -> int:
        """As of `ActiveWorkers`."""
        return self._workers.incarnation()

    def is_revoked(self, rank: Rank) -> bool:
        return self._workers.is_revoked(rank)

    def link_to_probe(self, now_s: float) -> Member | None:
        """A peer whose idle link is due for a probe; None if none is due.

        Calling this counts as probing, so a failed probe is not repeated at once. Under the
        clustered topology all links are probed in turn, used or not.
        """
        if self._groups is not None:
            by_rank = {member.identity.rank: member for member in self.peers}
            rank_to_probe = self._groups.rates.next_to_probe(by_rank, now_s)
            return None if rank_to_probe is None else by_rank[rank_to_probe]
        for member in self.neighbours():
            rank = member.identity.rank
            known = rank in self.links.bandwidths()
            measured_at_s = self._measured_at_s.get(rank, float("-inf"))
            if now_s - measured_at_s >= (IDLE_LINK_S if known else PROBE_RETRY_S):
                self._measured_at_s[rank] = now_s
                return member
        return None

    # ---- internal --------------------------------------------------------------------------------

    def _step(self, step: StepTiming, now_s: float) -> None:
        self._iteration, self._workers.has_begun = step.iteration, True
        self._global_batch.step_done(step.iteration)
        self.steps_total += 1
        self.samples_total += step.samples
        self._estimator.add_step(step)
        if step.norms is not None:
            self._noise.add(step.norms)
            self._exchange_s.add(max(0.0, step.wall_s - step.compute_s))
        own_s = step.compute_s
        if step.waited_s is not None:
            own_s = min(step.wall_s - step.waited_s, MAX_OWN_FACTOR * step.compute_s)
        max_bytes: float | None = None
        if self._exchange_cost is not None:
            self._exchange_cost.add(step)
            max_bytes = self._exchange_cost.max_bytes()
        self.links.end_round(
            wall_s=step.wall_s, own_s=max(own_s, self._slowest_s()), max_bytes=max_bytes
        )
        self._publish(now_s)

    def _slowest_s(self) -> float:
        """Compute time of the slowest peer if all wait for each other: links are usable meanwhile.

        Batches cannot compensate for the fixed cost of a step. It excludes the cost of sending, so
        a full link does not raise its own budget.
        """
        if self._job.spec.synchronization.mode == "asynchronous" or self.directive is None:
            return 0.0
        published, batches = self._published(), self._batches
        if self._slowest is None or self._slowest[:2] != (published, batches):
            known = published.samples_per_s.items()
            times = [batches[rank] / rate for rank, rate in known if rank in batches]
            self._slowest = published, batches, max(times, default=0.0)
        return self._slowest[2]

    def _bandwidths(self) -> dict[Rank, float]:
        """Rates of existing links and, for replays of the run, of probed ones."""
        probed = {} if self._groups is None else self._groups.rates.own()
        return {**probed, **self.links.bandwidths()}

    def _set_links(self) -> None:
        """Update the links with budgets; a new neighbour may already have been probed."""
        self.links.set_peers(member.identity.rank for member in self.neighbours())
        if self._groups is not None:
            self.links.resume(self._groups.rates.own())

    def _update_groups(self, capacity: Capacity) -> bool:
        """Update rates and grouping from a peer; return whether the grouping changed."""
        if self._groups is None:
            return False
        self._groups.rates.add_peer_rates(capacity.rank, capacity.link_bytes_per_s)
        if capacity.grouping is None or not self._groups.take(capacity.grouping):
            return False
        self._set_links()
        return True

    def _regroup(self, now_s: float) -> bool:
        if self._groups is None or self._workers.membership is None:
            return False
        regrouped = self._groups.regroup(self._workers.ranks(), now_s)
        if regrouped:
            self._set_links()
        return regrouped

    def _publish(self, now_s: float) -> None:
        estimate = self._estimator.estimate()
        if estimate is None:
            return
        own = Capacity(
            rank=self._rank,
            samples_per_s=estimate.samples_per_s * self._capacity_share,
            window_s=estimate.window_s,
            source=estimate.source,
            iteration=self._iteration,
            training_set_samples=self._training_set_samples,
            own_samples=self._own_samples,
            noise=self._noise.estimate(),
            exchange_s=self._exchange_s.value,
        )
        if self.capacities.publish(own, regular=now_s - self._published_s >= REGULAR_S):
            self._published_s = now_s

    def _resume(self, directive: Directive) -> None:
        """Continue from the last directive of an earlier sidecar, which the trainer reports."""
        if directive.version <= self._version:
            return
        self._version, self.directive = directive.version, directive
        self._workers.has_begun = True
        self._compute_share = self._capacity_share = directive.compute_share
        if self._groups is not None and directive.grouping is not None:
            self._groups.take(directive.grouping)
        self._global_batch.resume(directive.global_batch_size)
        self.capacities.resume(dict(directive.capacities), directive.training_set_samples)
        self.links.set_peers(directive.bandwidth_bytes_per_s)
        self.links.resume(directive.bandwidth_bytes_per_s)

    def _published(self) -> PublishedCapacities:
        membership, latest = self._workers.membership, self._latest
        ranks_version = membership, self._workers.has_begun, self._workers.peers
        if latest is None or latest.ranks_version != ranks_version:
            members = [] if membership is None else [m.identity.rank for m in membership.members]
            latest = self.capacities.published(self._workers.ranks(), members, ranks_version)
        elif latest.version != self.capacities.version:
            latest = self.capacities.published(latest.active, latest.members, ranks_version)
        self._latest = latest
        return latest

    def _next_directive(self) -> Directive | None:
        """A new directive if it differs from the last one by more than noise."""
        published = self._published()
        if self._workers.membership is None or not published.active:
            return None
        global_size = self._global_batch.next_size(published, self._training_set_samples)
        if self._shared != (published, global_size):
            self._shared = published, global_size
            self._batches = self._shares.update(
                global_size, published.capacities, published.own_samples
            )
        wanted = Directive(
            version=self._version + 1,
            local_batch_size=self._batches[self._rank],
            global_batch_size=global_size,
            budget_bytes=self.links.budgets(),
            capacities=published.samples_per_s,
            bandwidth_bytes_per_s=self._bandwidths(),
            grouping=self.grouping,
            training_set_samples=published.total_samples,
            compute_share=self._compute_share,
        )
        if self.directive is not None and not (
            differs(self.directive, wanted) or is_complete(self.directive, wanted, published.active)
        ):
            return None
        reason = reason_for(self.directive, wanted)
        if self.links.is_limited != self._is_limited:
            self._is_limited = self.links.is_limited
            negation = "" if self._is_limited else "no longer "
            reason += f"; CPU costs {negation}limit the exchange to less than the links carry"
        reason = "; ".join(filter(None, (reason, self._estimator.why_expected)))
        self.directive = replace(wanted, reason=reason)
        self._version = wanted.version
        return self.directive
