"""Policy `hierarchical`: gradients inside a site, means of sites between sites, in lock step.

Every worker sends its gradient to its site's gateway, the lowest rank there that is known to train.
The gateway computes their sample-weighted mean and sends its largest entries, with error feedback,
to the gateways of the other sites. From the means of all sites each gateway computes the gradient
of the iteration, the *result*, and sends it to its workers. All apply the result as encoded, so
replicas stay identical. Each worker also sends a short step report to every other worker.

The results form a log: one update per iteration, applied in order. So a late worker needs the
weights of some iteration and every later result. The trainer lets it join all others at an
iteration (`catalogue.Policy.lock_step`). When a gateway leaves, workers send the next one their
gradients again, or the result if it exists. The unsent part of the old gateway's means is lost. If
the link between a worker and its gateway is down while both continue, the worker takes the results
from one that is linked with both (`site_gateways`). It contributes again when the link is back.

Source: this project, after hierarchical aggregation over band-limited channels; robust means
between sites as in `site_means`. Receivers average. `synchronization`, `weighting`,
`knowledgeTransfer` and budgets are ignored.
"""

from collections import deque
from collections.abc import Iterator, Mapping

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.codecs import require_finite
from dlion_core.policies.aggregation import Contribution, sample_mean
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.gradient.entries import EncodedEntries
from dlion_core.policies.hierarchical.site_gateways import GatewayTracker, GatewayView, to_version
from dlion_core.policies.hierarchical.site_means import SiteCoder, combine, dense, groups_of
from dlion_core.policies.hierarchical.site_messages import (
    MEAN,
    PART,
    RESULT,
    ContributionSource,
    ReceivedContributions,
    SentLog,
    SiteMessage,
    check_source,
    decode_contribution,
    is_tick,
    mean_source,
)
from dlion_core.policies.interface import (
    ApplyGradient,
    Instruction,
    LocalStepDone,
    Message,
    MessageKind,
    SendMessage,
    Value,
)
from dlion_core.policies.parameters import HierarchicalParameters
from dlion_core.policies.peer_machine import PeerMachine
from dlion_core.policies.synchronization import SyncRule

_AHEAD = 1
"""Maximum lead over a worker that this one waits for; one further ahead has skipped it."""

_RESULTS = 2
"""Number of results kept. A follower may lack the last but one, since it is held at most one step
behind."""

_OVERHEARD = 64
"""Maximum iterations by which a forwarded result may precede all that is known of its maker."""


class Hierarchical(PeerMachine):
    """One worker's part in its site, and its site's part among the others."""

    def __init__(self, context: PolicyContext, parameters: HierarchicalParameters) -> None:
        super().__init__(context, SyncRule(slack=0, barrier=True))
        self._parameters = parameters
        self._coder = SiteCoder(context, parameters)
        self._groups = groups_of(context.ranks, context.sites, parameters.group_size)
        self._gateways = GatewayTracker(context.rank, self._groups)
        self._group_of, self._home = self._gateways.group_of, self._gateways.home
        self._open = False  # the local step is done, its update is pending
        self._applied = 0  # the last iteration whose result is in the weights
        self._part: SiteMessage | None = None
        self._mean: SiteMessage | None = None  # of this site, as sent, for the open iteration
        self._results: deque[tuple[SiteMessage, Rank]] = deque(maxlen=_RESULTS)
        """Results with the sender of each."""
        self._received = ReceivedContributions()
        self._given_up: dict[Rank, int] = {}  # nothing of iterations up to that one will arrive
        self._sent = SentLog()

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """Encode the own gradient and report the step to all members."""
        require_finite(step.gradient_D, "gradient")
        coded = self._coder.gradient(step.gradient_D)
        self._open = True
        self._mean = None
        self._part = self._message(PART, coded, step.local_batch_size)
        self._received.forget_before(step.iteration)
        self._sent.forget_before(step.iteration - 1)
        return self._report_step(self._views())

    def _message(self, what: int, coded: EncodedEntries, samples: int) -> SiteMessage:
        """A message of the open iteration, with what its receivers decode."""
        kind = MessageKind.PROGRESS if coded.payload is None else MessageKind.GRADIENT
        payload = bytes(coded.payload or b"")
        message = Message(kind, self.synchronizer.own, samples, what, payload)
        return SiteMessage(
            message, Contribution(samples, None if coded.payload is None else coded.part)
        )

    def next_iteration(self) -> int:
        """Return the iteration after the last step or the last update. If the others continued
        without this worker, it is their current one, for which they may wait."""
        past = super().next_iteration() - 1
        return max(past, self.synchronizer.own + 1, self._applied + 1)

    # ---- gateways and members --------------------------------------------------------------------

    @property
    def _gateway(self) -> Rank:
        """The worker that provides the results; this one if it is the gateway."""
        return self._gateways.gateway(self.synchronizer.in_step())[0]

    def _members_of(self, group: int) -> list[Rank]:
        """Workers of that site that are waited for, except this one."""
        return self._gateways.members(group, self.synchronizer.in_step())

    def _views(self) -> dict[Rank, GatewayView]:
        return self._gateways.views(self.synchronizer.in_step(), self.synchronizer.active)

    def _report_step(self, views: Mapping[Rank, GatewayView]) -> list[Instruction]:
        kind, own, samples = MessageKind.PROGRESS, self.synchronizer.own, self.local_batch_size
        self._gateways.record_sent(views)
        return [
            SendMessage(rank, Message(kind, own, samples, to_version(view)))
            for rank, view in views.items()
        ]

    def _other_gateways(self) -> Iterator[Rank]:
        """For each other site the lowest rank that trains, else a likely one."""
        counted = set(self.synchronizer.in_step())
        linked = self.synchronizer.active
        for group in range(len(self._groups)):
            known = [rank for rank in linked if self._group_of[rank] == group != self._home]
            if known:
                trains = self._gateways.step_of
                yield min(known, key=lambda r: (r not in counted, not trains(r), r))

    def _may_arrive(self, rank: Rank) -> bool:
        """Whether that member's message for the open iteration may still arrive."""
        own = self.synchronizer.own
        passed = self._gateways.step_of(rank) > own + _AHEAD
        return not passed and self._given_up.get(rank, 0) < own

    # ---- messages --------------------------------------------------------------------------------

    def received(self, sender: Rank, message: Message) -> list[Instruction]:
        is_step = message.kind in (MessageKind.GRADIENT, MessageKind.PROGRESS)
        if not is_step or is_tick(message):
            return super().received(sender, message)
        try:
            check_source(sender, message, self.rank, self._group_of, len(self._groups))
            contribution = SiteMessage(message, decode_contribution(message, self.context))
        except ContractError:
            self._give_up(sender, min(message.iteration, self.synchronizer.own + _AHEAD))
            raise
        # The maker of a result has reported its step to all members before.
        most = max([self.synchronizer.own, *self._finished.values()]) + _OVERHEARD
        if message.weights_version == RESULT and message.iteration > most:
            raise ContractError(f"result of iteration {message.iteration}; allowed: up to {most}")
        if message.weights_version == RESULT:
            return self._apply(contribution, sender)
        self._sent.record_received(sender, message.iteration)
        if message.iteration >= self.synchronizer.own:
            self._received.add(sender, contribution)
        return []

    def _known(self, source: ContributionSource) -> SiteMessage | None:
        return self._received.known(source, self.synchronizer.own)

    def progress_arrived(self, sender: Rank, message: Message) -> None:
        """Record a step. With zero samples, no other message of that step follows."""
        if message.local_batch_size:
            self._gateways.stepped(sender, message.iteration, message.weights_version)
        else:
            self._give_up(sender, message.iteration)

    def greeting(self) -> Message:
        """Return the report of the last step again; missing messages of it follow."""
        return Message(MessageKind.PROGRESS, self.synchronizer.own, self.local_batch_size)

    def _give_up(self, sender: Rank, iteration: int) -> None:
        self._given_up[sender] = max(self._given_up.get(sender, 0), iteration)

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """Reject: this policy sends no weights."""
        raise ContractError(f"weights of worker {sender} at {message.iteration}; allowed: none")

    def joined(self, rank: Rank, iteration: int) -> None:
        """Do not wait for what it has finished. Its messages will show whether it trains."""
        self._gateways.forget(rank)
        self._give_up(rank, iteration)

    def left(self, rank: Rank) -> None:
        """Its contributions count. Forget what was sent to it."""
        self._gateways.forget(rank)
        self._given_up.pop(rank, None)
        self._sent.left(rank)
        for at, (result, giver) in enumerate(self._results):
            if giver == rank:  # this worker forwards its results: it may return without them
                self._results[at] = (result, self.rank)

    # ---- an iteration's result -------------------------------------------------------------------

    def blocking_peers(self) -> frozenset[Rank]:
        """Return the workers that the open iteration's update waits for."""
        if not self._open:
            return frozenset()
        gateway = self._gateway
        if gateway != self.rank:
            return frozenset({gateway})
        return self._missing_parts() or self._missing_means()

    def _missing_parts(self) -> frozenset[Rank]:
        if self._mean is not None:
            return frozenset()
        return frozenset(
            rank
            for rank in self._members_of(self._home)
            if self._may_arrive(rank) and self._known(rank) is None
        )

    def _missing_means(self) -> frozenset[Rank]:
        return frozenset(
            rank
            for group in range(len(self._groups))
            if group != self._home and self._known(mean_source(group)) is None
            for rank in self._members_of(group)
            if self._may_arrive(rank)
        )

    def _is_passed_over(self) -> bool:
        """Whether the workers that compute this worker's result continued without it."""
        gateway = self._gateway
        if gateway != self.rank:
            return not self._may_arrive(gateway)
        steps = [self._gateways.step_of(rank) for rank in self.synchronizer.in_step()]
        others = [step for step in steps if step]
        return bool(others) and min(others) > self.synchronizer.own + _AHEAD

    def advance(self) -> list[Instruction]:
        """At a gateway, compute mean and result when complete; then send what others lack."""
        if self._open and self._is_passed_over():
            self._open = False  # its gradient is not used; the results will arrive
        instructions = self._decide()
        changed = self._gateways.changed_views(self._views()) if self.synchronizer.stepped else {}
        return instructions + self._report_step(changed)

    def _decide(self) -> list[Instruction]:
        if not (self._open and self._gateway == self.rank and not self._missing_parts()):
            return self._send_missing()
        self._take_mean()
        instructions = self._send_missing()
        update = [] if self._missing_means() else self._take_result()
        return [*instructions, *self._send_missing(), *update]

    def _take_mean(self) -> None:
        """Compute this site's mean as the other sites decode it."""
        if self._mean is not None or self._part is None:
            return
        shares = {self.rank: self._part.share}
        for rank in self._groups[self._home]:
            if rank != self.rank and (known := self._known(rank)) is not None:
                shares[rank] = known.share
        mean_D = sample_mean([share for _, share in sorted(shares.items())], self.size)
        coded = self._coder.mean(mean_D, self.synchronizer.own)
        samples = sum(share.samples for share in shares.values())
        self._mean = self._message(MEAN + self._home, coded, samples)

    def _take_result(self) -> list[Instruction]:
        shares = []
        for group in range(len(self._groups)):
            contribution = self._mean if group == self._home else self._known(mean_source(group))
            if contribution is not None:
                shares.append(contribution.share)
        trim = {"mean": None, "median": len(shares), "trimmed": self._parameters.trim}
        result_D = combine(shares, self.size, trim[self._parameters.combine])
        samples = sum(share.samples for share in shares)
        contribution = self._message(RESULT, self._coder.result(result_D), samples)
        return self._apply(contribution, self.rank)

    def _apply(self, contribution: SiteMessage, sender: Rank) -> list[Instruction]:
        """Apply an iteration's result once, in the order of the log."""
        iteration = contribution.message.iteration
        if iteration <= self._applied:
            return []
        self._applied = iteration
        self._results.append((contribution, sender))
        self._open = self._open and iteration < self.synchronizer.own
        return [ApplyGradient(dense(contribution.share, self.size), contribution.share.samples)]

    # ---- forwarding ------------------------------------------------------------------------------

    def _send_missing(self) -> list[Instruction]:
        gateway = self._gateway
        instructions: list[Instruction] = []
        if self._open and self._part is not None and gateway != self.rank:
            instructions += self._pass_on()
        if self._open and self._mean is not None:
            counted = self.synchronizer.in_step()
            for rank in self._other_gateways():
                instructions += self._give(rank, self._mean) if rank in counted else []
        for result, giver in self._results:
            for rank in self._lacks(result.message.iteration, giver, gateway):
                instructions += self._give(rank, result)
        return instructions

    def _pass_on(self) -> list[Instruction]:
        """Send the gateway the own gradient, and means that arrived here instead of there."""
        gateway, is_in_sight = self._gateways.gateway(self.synchronizer.in_step())
        if not is_in_sight:
            return []  # a stand-in only forwards results
        instructions = self._give(gateway, self._part)
        for sender, mean in self._received.means(self.synchronizer.own):
            instructions += self._give(gateway, mean) if sender != gateway else []
        return instructions

    def _lacks(self, iteration: int, giver: Rank, gateway: Rank) -> Iterator[Rank]:
        """Workers that may need that result from this worker.

        These are its followers. From a gateway: its site's workers, and gateways of other sites
        that were sent nothing else. From another worker: a new gateway, the gateways of other sites
        if the result's maker has left, and workers that took or take this one for a gateway.
        """
        linked = self.synchronizer.active
        yield from self._gateways.followers(linked)
        if gateway == self.rank:
            yield from self._gateways.members(self._home, linked)
            for rank in self._other_gateways():
                if not self._sent.has(rank, MEAN + self._home, iteration):
                    yield rank
            return
        if giver != gateway:
            yield gateway
        if giver == self.rank:
            yield from self._other_gateways()
        yield from self._sent.senders_for(iteration)
        yield from self._gateways.takers_for_gateway(linked)

    def _give(self, rank: Rank, contribution: SiteMessage | None) -> list[Instruction]:
        """Send it once to a member that has not finished that iteration's update."""
        if contribution is None or rank not in self.synchronizer.active:
            return []
        message = contribution.message
        if self.synchronizer.finished(rank) > message.iteration:
            return []
        return [SendMessage(rank, message)] if self._sent.mark_sent(rank, message) else []

    def state(self) -> dict[str, Value]:
        return {**super().state(), "iteration": self._applied, **self._coder.state()}

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        self._applied = self.synchronizer.own
        self._coder.restore(state)
