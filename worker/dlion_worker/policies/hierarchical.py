"""Policy `hierarchical`: gradients inside a site, the sites' means between sites, in lock step.

In each iteration every worker sends its gradient to its site's gateway, the lowest rank there that
is known to train. That one takes their mean by samples and sends the largest entries of it, with
what earlier ones left over (error feedback), to the gateways of the other sites. From the means of
all sites each gateway makes the one gradient of the iteration, the *result*, and gives it to its
workers; all descend by it as it was coded, so replicas stay identical. Between sites travels one
coded mean per pair of sites, however many workers they have, and of each worker a few bytes to each
other that its step is done.

The results are a log: an update for each iteration, applied in order. So a worker that comes late
needs the weights of some iteration and every result since; the trainer lets it meet all others at
an iteration (`catalogue.Policy.lock_step`). When a gateway leaves, the next one is given the
gradients anew, or the result where it is out already. What a gateway had not sent of its site's
means goes with it. Whose link to its gateway breaks while both go on takes the results from a
worker that is linked with both, and counts again when the link is back (`site_gateways`).

Source: ours, after hierarchical aggregation over band-limited channels; robust means between sites
as in `site_means`. Receivers average. `synchronization`, `weighting`, `knowledgeTransfer` and
budgets have no part.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from dlion_api.errors import ContractError
from dlion_worker.codecs import require_finite
from dlion_worker.policies.headers import stranger
from dlion_worker.policies.interface import (
    Descend,
    Instruction,
    LocalStepDone,
    Message,
    MessageKind,
    Refuse,
    Send,
)
from dlion_worker.policies.peer_machine import PeerMachine
from dlion_worker.policies.site_coding import SiteCoder
from dlion_worker.policies.site_gateways import Gateways, to_version
from dlion_worker.policies.site_means import Share, combine, dense, groups_of, mean_of
from dlion_worker.policies.site_messages import (
    MEAN,
    PART,
    RESULT,
    Given,
    Heard,
    Told,
    check_source,
    is_tick,
    mean_source,
    share_of,
)
from dlion_worker.policies.synchronization import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dlion_api.names import Rank
    from dlion_worker.policies.building import Context
    from dlion_worker.policies.entries import Coded
    from dlion_worker.policies.interface import Machine, Value
    from dlion_worker.policies.parameters import HierarchicalParameters
    from dlion_worker.policies.site_gateways import View
    from dlion_worker.policies.site_messages import Source

_AHEAD = 1
"""Iterations that a worker can be ahead of one that it waits for: who is further has gone on."""

_RESULTS = 2
"""Kept: who follows this worker may lack the last but one, as it holds at most one step behind."""

_OVERHEARD = 64
"""Iterations by which a result that is handed on may precede all that is known of its maker."""


def hierarchical(context: Context, parameters: HierarchicalParameters) -> Machine:
    """Gradients inside sites, means of sites between them."""
    return Hierarchical(context, parameters)


class Hierarchical(PeerMachine):
    """One worker's part in its site, and its site's among the others."""

    def __init__(self, context: Context, parameters: HierarchicalParameters) -> None:
        super().__init__(context, Rule(slack=0, spare=0, barrier=True))
        self._parameters = parameters
        self._coder = SiteCoder(context, parameters)
        self._groups = groups_of(context.ranks, context.sites, parameters.group_size)
        self._gateways = Gateways(context.rank, self._groups)
        self._group_of, self._home = self._gateways.group_of, self._gateways.home
        self._open = False  # the local step is done, its update not made
        self._applied = 0  # the last iteration whose result is in the weights
        self._part: Told | None = None
        self._mean: Told | None = None  # of this site, as it is sent, for the open iteration
        self._results: deque[tuple[Told, Rank]] = deque(maxlen=_RESULTS)  # and who gave each
        self._heard = Heard()
        self._given_up: dict[Rank, int] = {}  # nothing of iterations up to that one will come
        self._given = Given()

    # ---- a local step ----------------------------------------------------------------------------

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """The own gradient, as it is coded; all hear that the step is done."""
        require_finite(step.gradient_D, "gradient")
        coded = self._coder.gradient(step.gradient_D)
        self._open = True
        self._mean = None
        self._part = self._told(PART, coded, step.local_batch_size)
        self._heard.forget_before(step.iteration)
        self._given.forget_before(step.iteration - 1)
        return self._say(self._views())

    def _told(self, what: int, coded: Coded, samples: int) -> Told:
        """A message of the open iteration, with what its receivers will read."""
        kind = MessageKind.PROGRESS if coded.payload is None else MessageKind.GRADIENT
        payload = bytes(coded.payload or b"")
        message = Message(kind, self.synchronizer.own, samples, what, payload)
        return Told(message, Share(samples, None if coded.payload is None else coded.part))

    def descended(self) -> list[Instruction]:
        """Nothing follows from an update."""
        return []

    def next_iteration(self) -> int:
        """One more than the last step, or than the last update. Where the others have gone on
        without this worker, the one that they are at: they may be waiting for its part of that."""
        past = super().next_iteration() - 1
        return max(past, self.synchronizer.own + 1, self._applied + 1)

    # ---- who is who ------------------------------------------------------------------------------

    @property
    def _gateway(self) -> Rank:
        """Whose results this worker takes; itself where it makes them."""
        return self._gateways.gateway(self.synchronizer.in_step())[0]

    def _members_of(self, group: int) -> list[Rank]:
        """Workers of that site that are counted on, but this one."""
        return self._gateways.members(group, self.synchronizer.in_step())

    def _views(self) -> dict[Rank, View]:
        """What members are to be told of gateways."""
        return self._gateways.views(self.synchronizer.in_step(), self.synchronizer.active)

    def _say(self, views: Mapping[Rank, View]) -> list[Instruction]:
        """That the last local step is done, with those views."""
        kind, own, samples = MessageKind.PROGRESS, self.synchronizer.own, self.local_batch_size
        self._gateways.told(views)
        return [
            Send(rank, Message(kind, own, samples, to_version(view)))
            for rank, view in views.items()
        ]

    def _other_gateways(self) -> Iterator[Rank]:
        """Of each other site the lowest rank that trains; else whom it may have to begin with."""
        counted = set(self.synchronizer.in_step())
        linked = self.synchronizer.active
        for group in range(len(self._groups)):
            known = [rank for rank in linked if self._group_of[rank] == group != self._home]
            if known:
                trains = self._gateways.step_of
                yield min(known, key=lambda r: (r not in counted, not trains(r), r))

    def _may_come(self, rank: Rank) -> bool:
        """Whether what that member owes for the open iteration may still be on its way."""
        own = self.synchronizer.own
        passed = self._gateways.step_of(rank) > own + _AHEAD
        return not passed and self._given_up.get(rank, 0) < own

    # ---- messages --------------------------------------------------------------------------------

    def _message_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        is_step = message.kind in (MessageKind.GRADIENT, MessageKind.PROGRESS)
        if not is_step or is_tick(message):
            return super()._message_arrived(sender, message)
        refusal = stranger(sender, self.context.rank, self.context.ranks)
        if refusal is not None:
            return [refusal]
        try:
            check_source(sender, message, self.context.rank, self._group_of, len(self._groups))
            told = Told(message, share_of(message, self.context))
        except ContractError as error:
            self._give_up(sender, min(message.iteration, self.synchronizer.own + _AHEAD))
            return [Refuse(sender, str(error))]
        # Whoever makes a result has told everybody before that its step is done.
        most = max(self.synchronizer.own, self.furthest_told()) + _OVERHEARD
        if message.weights_version == RESULT and message.iteration > most:
            reason = f"result of iteration {message.iteration}; allowed: up to {most}"
            return [Refuse(sender, reason)]
        return self._heard_of(sender, told)

    def _heard_of(self, sender: Rank, told: Told) -> list[Instruction]:
        message = told.message
        if message.weights_version == RESULT:
            return self._apply(told, sender)
        self._given.came(sender, message.iteration)
        if message.iteration >= self.synchronizer.own:
            self._heard.add(sender, told)
        return []

    def _known(self, source: Source) -> Told | None:
        """What that source brings to the open iteration."""
        return self._heard.known(source, self.synchronizer.own)

    def progress_arrived(self, sender: Rank, message: Message) -> None:
        """A step; without samples it says that nothing of that step will follow."""
        if message.local_batch_size:
            self._gateways.stepped(sender, message.iteration, message.weights_version)
        else:
            self._give_up(sender, message.iteration)

    def greeting(self) -> Message:
        """The last step once more: what a newcomer lacks of it follows."""
        return Message(MessageKind.PROGRESS, self.synchronizer.own, self.local_batch_size)

    def _give_up(self, sender: Rank, iteration: int) -> None:
        self._given_up[sender] = max(self._given_up.get(sender, 0), iteration)

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """No weights travel here."""
        raise ContractError(f"weights of worker {sender} at {message.iteration}; allowed: none")

    def joined(self, rank: Rank, iteration: int) -> None:
        """What it has finished is not waited for; whether it trains will be heard."""
        self._gateways.gone(rank)
        self._give_up(rank, iteration)

    def left(self, rank: Rank) -> None:
        """What it has given counts; of what it was given nothing is known."""
        self._gateways.gone(rank)
        self._given_up.pop(rank, None)
        self._given.left(rank)
        own = self.context.rank  # what it gave this worker hands on: it may be back without
        kept = [(told, own if giver == rank else giver) for told, giver in self._results]
        self._results = deque(kept, maxlen=_RESULTS)

    # ---- an iteration's result -------------------------------------------------------------------

    def held_for(self) -> frozenset[Rank]:
        """Whose word the open iteration's update waits for."""
        if not self._open:
            return frozenset()
        gateway = self._gateway
        if gateway != self.context.rank:
            return frozenset({gateway})
        return self._missing_parts() or self._missing_means()

    def _missing_parts(self) -> frozenset[Rank]:
        if self._mean is not None:
            return frozenset()
        return frozenset(
            rank
            for rank in self._members_of(self._home)
            if self._may_come(rank) and self._known(rank) is None
        )

    def _missing_means(self) -> frozenset[Rank]:
        return frozenset(
            rank
            for group in range(len(self._groups))
            if group != self._home and self._known(mean_source(group)) is None
            for rank in self._members_of(group)
            if self._may_come(rank)
        )

    def _is_passed_over(self) -> bool:
        """Whether those who would give this worker the result have gone on without it."""
        gateway = self._gateway
        if gateway != self.context.rank:
            return not self._may_come(gateway)
        steps = [self._gateways.step_of(rank) for rank in self.synchronizer.in_step()]
        others = [step for step in steps if step]
        return bool(others) and min(others) > self.synchronizer.own + _AHEAD

    def go_on(self) -> list[Instruction]:
        """At a gateway the site's mean and the result, once all is in; then what others lack."""
        if self._open and self._is_passed_over():
            self._open = False  # its gradient counts nowhere; the results will come
        told = self._decide()
        fresh = self._gateways.untold(self._views()) if self.synchronizer.stepped else {}
        return told + self._say(fresh)

    def _decide(self) -> list[Instruction]:
        if not (self._open and self._gateway == self.context.rank and not self._missing_parts()):
            return self._speak()
        self._take_mean()
        told = self._speak()
        update = [] if self._missing_means() else self._take_result()
        return [*told, *self._speak(), *update]

    def _take_mean(self) -> None:
        """This site's mean, as the other sites will read it."""
        if self._mean is not None or self._part is None:
            return
        shares = {self.context.rank: self._part.share}
        for rank in self._groups[self._home]:
            if rank != self.context.rank and (known := self._known(rank)) is not None:
                shares[rank] = known.share
        samples, mean_D = mean_of(shares, self.size)
        coded = self._coder.mean(mean_D, self.synchronizer.own)
        self._mean = self._told(MEAN + self._home, coded, samples)

    def _take_result(self) -> list[Instruction]:
        shares = []
        for group in range(len(self._groups)):
            told = self._mean if group == self._home else self._known(mean_source(group))
            if told is not None:
                shares.append(told.share)
        trim = {"mean": None, "median": len(shares), "trimmed": self._parameters.trim}
        result_D = combine(shares, self.size, trim[self._parameters.combine])
        samples = sum(share.samples for share in shares)
        told = self._told(RESULT, self._coder.result(result_D), samples)
        return self._apply(told, self.context.rank)

    def _apply(self, told: Told, sender: Rank) -> list[Instruction]:
        """The update of an iteration, once; in the order of the log."""
        iteration = told.message.iteration
        if iteration <= self._applied:
            return []
        self._applied = iteration
        self._results.append((told, sender))
        self._open = self._open and iteration < self.synchronizer.own
        return [Descend(dense(told.share, self.size), told.share.samples)]

    # ---- what others lack ------------------------------------------------------------------------

    def _speak(self) -> list[Instruction]:
        gateway = self._gateway
        told: list[Instruction] = []
        if self._open and self._part is not None and gateway != self.context.rank:
            told += self._pass_on()
        if self._open and self._mean is not None:
            counted = self.synchronizer.in_step()
            for rank in self._other_gateways():
                told += self._give(rank, self._mean) if rank in counted else []
        for result, giver in self._results:
            for rank in self._lacks(result.message.iteration, giver, gateway):
                told += self._give(rank, result)
        return told

    def _pass_on(self) -> list[Instruction]:
        """To the gateway: the own gradient, and means that came here instead of there."""
        gateway, is_in_sight = self._gateways.gateway(self.synchronizer.in_step())
        if not is_in_sight:
            return []  # who stands in for it only hands results on
        told = self._give(gateway, self._part)
        for sender, mean in self._heard.means(self.synchronizer.own):
            told += self._give(gateway, mean) if sender != gateway else []
        return told

    def _lacks(self, iteration: int, giver: Rank, gateway: Rank) -> Iterator[Rank]:
        """Who may need that result of this worker: who follows it; of a gateway its site's workers,
        and such gateways of other sites as were given nothing else; otherwise a gateway that is
        new, where its maker has left those of other sites, and who took this worker for one."""
        linked = self.synchronizer.active
        yield from self._gateways.followers(linked)
        if gateway == self.context.rank:
            yield from self._gateways.members(self._home, linked)
            for rank in self._other_gateways():
                if not self._given.has(rank, MEAN + self._home, iteration):
                    yield rank
            return
        if giver != gateway:
            yield gateway
        if giver == self.context.rank:
            yield from self._other_gateways()
        yield from self._given.givers(iteration)

    def _give(self, rank: Rank, told: Told | None) -> list[Instruction]:
        """Sends it once to a member that has not finished that iteration's update."""
        if told is None or rank not in self.synchronizer.active:
            return []
        message = told.message
        if self.synchronizer.finished(rank) > message.iteration:
            return []
        return [Send(rank, message)] if self._given.is_news(rank, message) else []

    # ---- checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Value]:
        """With what has not been sent yet, as of the last update that the weights have taken."""
        return {**super().state(), "iteration": self._applied, **self._coder.state()}

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave; before any other event."""
        super().restore(state)
        self._applied = self.synchronizer.own
        self._coder.restore(state)
