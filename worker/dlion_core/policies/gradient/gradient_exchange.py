"""The `PolicyMachine` for policies that exchange gradients.

It defines the order of operations: what is sent after a local step, when the update is made, and
how each message is handled. The rules of its parts are in `gradient_selectors`, `aggregation`,
`synchronization` and `knowledge_transfer`.

After every local step each member receives one message, `GRADIENT` or `PROGRESS`. A `PROGRESS` with
zero samples only reports the sender's iteration and contributes nothing.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import numpy as np

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.protocol.refusals import CallerError
from dlion_core.codecs import GradientPart, decode_gradient
from dlion_core.policies.aggregation import (
    MAX_ITERATIONS_AHEAD,
    Contribution,
    combined_gradient,
    divisor,
    plus,
)
from dlion_core.policies.claims.magnitudes import peaks_of
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.gradient.gradient_selectors import GradientSelector, Payload
from dlion_core.policies.interface import (
    ApplyGradient,
    Event,
    Flat,
    Instruction,
    IterationReplayed,
    LocalStepDone,
    Message,
    MessageKind,
    Value,
)
from dlion_core.policies.knowledge_transfer import SETTLING_STEPS, DirectKnowledgeTransfer
from dlion_core.policies.peer_machine import PeerMachine
from dlion_core.policies.robust.robust_sum import ROBUST_METHODS, robust_sum
from dlion_core.policies.state_values import vector_or_none
from dlion_core.policies.synchronization import SyncRule, sync_rule


class GradientMachine(PeerMachine):
    """One worker's exchange policy, synchronisation and knowledge transfer."""

    def __init__(self, context: PolicyContext, selector: GradientSelector) -> None:
        """If `selector` does not combine gradients, the machine never waits and takes over no
        weights, whatever the manifest's other sections contain."""
        spec, knowledge = context.spec, context.spec.knowledge_transfer
        rule = sync_rule(spec.synchronization)
        if not selector.combines:
            rule, knowledge = SyncRule(slack=None), replace(knowledge, policy="none")
        super().__init__(context, rule)
        self._selector = selector
        self._counts_all = context.exchanges_with_all and selector.combines
        self._transfer = DirectKnowledgeTransfer(context, knowledge, in_lock_step=rule.barrier)
        self._gradient_of: dict[Rank, int] = {}
        """Iteration of the last gradient of each peer."""
        self._arrived_D: Flat | None = None
        """Sum of LBS_j g_j over the contributions for the next update; None: there are none."""
        self._rounds: defaultdict[int, dict[Rank, Contribution]] = defaultdict(dict)
        """At a barrier, contributions by iteration, until that iteration is summed."""
        self._is_open = False
        """Whether the update of the last iteration waits at the barrier."""
        self._updates = 0
        self._own_peak: float | None = None
        """The largest magnitude of this worker's last gradient; None: none yet."""
        self._early_peaks: dict[Rank, float] = {}
        """The largest of what each peer sent before, where it was added at once."""

    # ---- events ----------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        if isinstance(event, IterationReplayed):
            self.synchronizer.step_done(event.iteration)
            self._is_open = self.synchronizer.rule.barrier
        return super().handle(event)

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        peers, budget_bytes = self.synchronizer.active, self.links.budget_bytes
        outgoing = self._selector.prepare(step.gradient_D, peers, budget_bytes)
        instructions = self.step_messages(outgoing.payloads, self._updates)
        instructions += self._transfer.step_done(step.iteration, step.loss, self.synchronizer)
        own = Contribution(step.local_batch_size, outgoing.own)
        self._own_peak, peaks = outgoing.own.peak, {self.rank: outgoing.own.peak}
        if refused := self.excessive({**self._early_peaks, **peaks}):
            self._arrived_D = None
        self._early_peaks.clear()
        instructions += refused
        if self.synchronizer.rule.barrier:
            self._rounds[step.iteration][self.rank] = own
            self._is_open = True
            return instructions
        instructions += self.unusual(peaks)
        return [*instructions, self.combined_update([own], self.batch_sizes())]

    def left(self, rank: Rank) -> None:
        """Stop waiting for the peer. Its earlier contributions still count."""
        self._gradient_of.pop(rank, None)
        self._selector.forget(rank)
        self._transfer.left(rank)

    def set_merging(self, under_way: bool) -> None:
        """Suspend knowledge transfer during a partition merge, which would move weights twice."""
        if under_way:
            self._transfer.suspend()
        else:
            self._transfer.resume(SETTLING_STEPS)

    # ---- messages --------------------------------------------------------------------------------

    def received(self, sender: Rank, message: Message) -> list[Instruction]:
        match message.kind:
            case MessageKind.GRADIENT | MessageKind.PROGRESS:
                self.check_header(message)
                instructions: list[Instruction] = []
                if (contribution := self._contribution(sender, message)) is not None:
                    instructions = self._keep(sender, message.iteration, contribution)
                self.record_step(sender, message)
                return instructions
            case MessageKind.LOSS:
                self._transfer.loss_arrived(sender, message)
            case MessageKind.WEIGHTS_REQUEST:
                return self._transfer.weights_requested(sender, message)
            case MessageKind.WEIGHTS:
                mixes = self._transfer.weights_arrived(sender, message)
                self._updates += len(mixes)
                return mixes
            case MessageKind.STOP | MessageKind.MEET | MessageKind.REACH:
                pass  # the driver handles these
            case _:
                raise ContractError(f"{message.kind.name}: partitions are not merged here")
        return []

    def passed_over(self, sender: Rank, message: Message) -> list[Instruction]:
        """An invalid gradient contributes nothing, but ends the wait for it."""
        if message.kind is MessageKind.GRADIENT and message.iteration >= 1:
            self.synchronizer.heard(sender, message.iteration)
        return []

    def _contribution(self, sender: Rank, message: Message) -> Contribution | None:
        """Return the message's contribution; None if the message is a repetition."""
        iteration, size = message.iteration, message.local_batch_size
        if message.kind is MessageKind.PROGRESS:
            is_new = iteration > self._finished.get(sender, 0)
            return Contribution(size, None) if is_new and size else None
        if iteration <= self._gradient_of.get(sender, 0):
            return None
        part = self.decoded(message.payload)
        self._gradient_of[sender] = iteration
        return Contribution(size, part if self._selector.combines else None)

    def decoded(self, payload: Payload) -> GradientPart:
        """Decode a peer's `GRADIENT`. Raises ContractError if it is invalid."""
        return decode_gradient(payload, self.size)

    def _keep(self, sender: Rank, iteration: int, contribution: Contribution) -> list[Instruction]:
        """Store the contribution for its barrier if it is in time, else for the next update.
        Raises ContractError if it is added at once and too large."""
        rule = self.synchronizer.rule
        next_update = self._next_update()
        if rule.barrier and next_update <= iteration <= next_update + MAX_ITERATIONS_AHEAD:
            self._rounds[iteration][sender] = contribution
        elif (not rule.barrier or rule.spare) and contribution.part is not None:
            peak = contribution.part.peak
            for refused in self.excessive({sender: peak, **self._own_peaks()}):
                raise CallerError(refused.kind, refused.reason)
            if self._own_peak is None:  # compared with this worker's first gradient
                self._early_peaks[sender] = max(peak, self._early_peaks.get(sender, 0.0))
            self._add(contribution)
            return self.unusual({sender: peak})
        return []

    def _own_peaks(self) -> dict[Rank, float]:
        return {} if self._own_peak is None else {self.rank: self._own_peak}

    def _add(self, late: Contribution) -> None:
        if late.part is not None:
            self._arrived_D = plus(self._arrived_D, late.part, np.float32(late.samples))

    # ---- updates ---------------------------------------------------------------------------------

    def _next_update(self) -> int:
        return self.synchronizer.own if self._is_open else self.synchronizer.own + 1

    def advance(self) -> list[Instruction]:
        """Decide on knowledge transfer if all losses are here. At a barrier, make the update once
        the contributions have arrived."""
        instructions = self._transfer.decide(self.synchronizer)
        if not self._is_open or self.synchronizer.waiting_for():
            return instructions
        self._is_open = False
        own = self.synchronizer.own
        contributions = dict(sorted(self._rounds.pop(own, {}).items()))
        skipped = [self._rounds.pop(at) for at in sorted(self._rounds) if at < own]
        sizes = {rank: one.samples for rank, one in contributions.items()}
        if self.synchronizer.rule.spare:
            sizes = self.batch_sizes() | sizes
            for late in skipped:
                too_large = self.excessive({**peaks_of(late), **self._own_peaks()})
                instructions += too_large
                for one in too_large:
                    del late[one.peer]
                for contribution in late.values():
                    self._add(contribution)
        peaks = peaks_of(contributions)
        refused = self.excessive(peaks)
        for one in refused:
            del contributions[one.peer], peaks[one.peer], sizes[one.peer]
        instructions += [*refused, *self.unusual(peaks), *self.deviating(contributions)]
        if not contributions:  # this worker skips it, and all contributors have left
            return instructions
        return [*instructions, self.combined_update(contributions.values(), sizes)]

    def combined_update(
        self, contributions: Iterable[Contribution], sizes: Mapping[Rank, int]
    ) -> ApplyGradient:
        """Return the update of these contributions, with the batch sizes of all that count."""
        if not self._selector.combines:
            sizes = {self.rank: self.local_batch_size}
        self._updates += 1
        common = divisor(self.context.spec.exchange.weighting, sizes, self.rank)
        late_D, self._arrived_D = self._arrived_D, None
        update_D = self._combined(list(contributions), late_D, common)
        reported_batch_size = 0 if self._counts_all else self.reported_batch_size
        return ApplyGradient(update_D, sum(sizes.values()), reported_batch_size)

    def _combined(
        self, contributions: Collection[Contribution], late_D: Flat | None, common: int
    ) -> Flat:
        if self.robustness in ROBUST_METHODS and late_D is None:
            return robust_sum(self.robustness, contributions, size=self.size, divisor=common)
        return combined_gradient(contributions, late_D, size=self.size, divisor=common)

    def state(self) -> dict[str, Value]:
        """While the worker waits at a barrier, return the state before that iteration: its update
        is not made yet."""
        return {
            **super().state(),
            "iteration": self._next_update() - 1,
            "updates": self._updates,
            **({} if self._arrived_D is None else {"arrived_D": self._arrived_D.copy()}),
            **self._selector.state(),
            **self._transfer.state(),
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        self._updates = int(state["updates"])
        self._arrived_D = vector_or_none(state, "arrived_D")
        self._selector.restore(state)
        self._transfer.restore(state)
