"""A worker that makes rounds of local steps from the weights of a server.

Base of `halos` and `quorum-diloco`. After H local steps a worker sends its *change*, its weights
less those that it started from, to its server. The server is a worker as well: the lowest rank of
those that are known to train, or of a site's. It answers with weights to continue from. Until then
the worker makes at most `overlap_steps` further steps, which it keeps: it continues from the answer
plus what it changed since it sent.

A worker whose server leaves continues alone from its weights. It sends its next change to the next
server. That one begins from its own weights, even if it has served before: what it kept from then
is outdated. So the others continue without any one worker. What only a lost server had is lost.
Each change is answered, an invalid one too: else its sender would wait without end.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.codecs import (
    GradientPart,
    decode_gradient,
    encode_weights,
    encode_whole,
    require_finite,
)
from dlion_core.policies.claims.magnitudes import check_peak
from dlion_core.policies.claims.samples import check_samples
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.interface import (
    Flat,
    Instruction,
    LocalStepDone,
    Message,
    MessageKind,
    ReplaceWeights,
    SendMessage,
    Value,
)
from dlion_core.policies.peer_machine import PeerMachine
from dlion_core.policies.state_values import vector_or_none
from dlion_core.policies.synchronization import SyncRule


class Form(IntEnum):
    """What a `WEIGHTS` message is: `weights_version` is its samples times 4, plus this."""

    CHANGE = 0
    """A worker's change."""
    MODEL = 1
    """The answer. Its iteration is the change's."""
    SITE_CHANGE = 2
    """A site's change, for the server of all sites (`halos`)."""
    GLOBAL_MODEL = 3
    """The answer to that."""


_FORMS = len(Form)
_CHANGES = frozenset({Form.CHANGE, Form.SITE_CHANGE})


@dataclass(frozen=True)
class Change:
    """What the weights of a worker, or of a site, changed by."""

    part: GradientPart
    samples: int
    local_batch_size: int
    iteration: int
    """Iteration of the sender, which the answer repeats."""


@dataclass(frozen=True)
class SentChange:
    """A change that is not answered."""

    server: Rank
    iteration: int
    weights_D: Flat
    """The weights when it was sent."""


class ServedWorker(PeerMachine):
    """One worker's rounds. Subclasses are servers too."""

    def __init__(self, context: PolicyContext, *, local_steps: int, overlap_steps: int = 0) -> None:
        super().__init__(context, SyncRule(slack=None))
        self._local_steps, self.overlap_steps = local_steps, overlap_steps
        self._coding = context.coding
        self._anchor_D: Flat | None = None
        """The weights that the change is measured from."""
        self._steps = self._samples = 0
        """Steps and samples since the last change was sent, or since this worker continued
        alone."""
        self.sent: SentChange | None = None
        self._served_by = self.rank
        """The server of the last change; this worker while it has not sent any."""
        self.is_mid_step = False
        """Whether the gradient of a local step is not applied yet."""
        self._changed_at: dict[Rank, int] = {}
        """Iteration of each peer's last change: a worker makes no iteration twice."""
        self._owed: dict[Rank, tuple[Form, int]] = {}
        """Answers to peers whose change came before the word that their link is up."""

    # ---- hooks of a policy -----------------------------------------------------------------------

    def server(self) -> Rank:
        """Return the worker that serves this one; this one if it serves itself."""
        raise NotImplementedError

    def take(self, form: Form, sender: Rank, change: Change) -> list[Instruction]:
        """Handle a change of a worker, this one included, or of a site."""
        raise NotImplementedError

    def model_for(self, form: Form) -> Flat:
        """Return the weights to answer a change of that form with."""
        raise NotImplementedError

    def global_model_arrived(self, sender: Rank, iteration: int, weights_D: Flat) -> None:
        """Handle the answer to a change of this worker's site."""
        del weights_D
        raise ContractError(f"global weights of worker {sender} at {iteration}; allowed: none")

    def begin_serving(self) -> None:
        """Forget the weights of an earlier time as a server: this worker's server has left, and
        this worker is the next one."""

    def max_samples(self, form: Form, iteration: int) -> int:
        """The largest number of samples of a change that was sent at that iteration."""
        del form
        return (self._local_steps + self.overlap_steps) * self.context.max_batch_at(iteration)

    # ---- a worker's rounds -----------------------------------------------------------------------

    def lowest(self, ranks: frozenset[Rank] | None = None) -> Rank:
        """Return the lowest rank that trains, this worker included, of those or of all."""
        present = [self.rank, *self.synchronizer.in_step()]
        return min(rank for rank in present if ranks is None or rank in ranks)

    def own_weights(self) -> Flat:
        """Return a copy of the weights that this worker last continued from; initially its own."""
        return (self.weights_D if self._anchor_D is None else self._anchor_D).copy()

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """Apply the own gradient only; report the iteration to the others."""
        require_finite(step.gradient_D, "gradient")
        if self._anchor_D is None:
            self._anchor_D = self.weights_D.copy()
        self.is_mid_step = True
        self._steps += 1
        self._samples += step.local_batch_size
        return [*self.progress(), self.update_alone(step.gradient_D)]

    def update_applied(self) -> list[Instruction]:
        """Send the change if it is due."""
        self.is_mid_step = False
        if self.sent is not None or self._steps < self._local_steps:
            return []
        assert self._anchor_D is not None
        change_D = self.weights_D - self._anchor_D
        require_finite(change_D, "change")
        own, server = self.synchronizer.own, self.server()
        samples = min(self._samples, self.max_samples(Form.CHANGE, own))
        self.sent, self._served_by = SentChange(server, own, self.weights_D.copy()), server
        self._steps = self._samples = 0
        change = Change(GradientPart(change_D), samples, self.local_batch_size, own)
        if server == self.rank:
            return self.take(Form.CHANGE, self.rank, change)
        return [self.change_message(server, Form.CHANGE, change_D, change)]

    def change_message(
        self, server: Rank, form: Form, change_D: Flat, change: Change
    ) -> SendMessage:
        require_finite(change_D, "change")
        payload, version = encode_whole(change_D, self._coding), _FORMS * change.samples + form
        batch, at = change.local_batch_size, change.iteration
        return SendMessage(server, Message(MessageKind.WEIGHTS, at, batch, version, payload))

    def answer(self, form: Form, rank: Rank, iteration: int) -> list[Instruction]:
        """Give a worker the weights to continue from, now or once its link is up."""
        model_D = self.model_for(form)
        if rank == self.rank:
            return self._go_on_from(model_D)
        if rank not in self.synchronizer.active:
            self._owed[rank] = (form, iteration)
            return []
        payload = encode_weights(model_D, self._coding)
        message = Message(MessageKind.WEIGHTS, iteration, weights_version=form + 1, payload=payload)
        return [SendMessage(rank, message)]

    def _go_on_from(self, model_D: Flat) -> list[Instruction]:
        """Continue from the weights of a server, plus what this worker changed since it sent."""
        assert self.sent is not None
        weights_D = model_D.copy()
        if self._steps:
            weights_D += self.weights_D - self.sent.weights_D
        self._anchor_D, self.sent = model_D.copy(), None
        return [ReplaceWeights(weights_D)]

    def _go_on_alone(self) -> None:
        """Do not wait for an answer. The next change is due after a full round."""
        self.sent = None
        self._anchor_D = self.weights_D.copy()
        self._steps = self._samples = 0

    # ---- messages --------------------------------------------------------------------------------

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """Handle a change as a server, or an answer as a worker."""
        form, samples = Form(message.weights_version % _FORMS), message.weights_version // _FORMS
        if form in _CHANGES:
            check_samples("change", samples, self._max_samples_of(sender, form, message.iteration))
            check_samples("change with a local batch", message.local_batch_size, samples)
            part = decode_gradient(message.payload, self.size)
            check_peak(part.peak, self.weights_D)
            change = Change(part, samples, message.local_batch_size, message.iteration)
            instructions = self.take(form, sender, change)
            if form is Form.CHANGE:
                self._changed_at[sender] = message.iteration
            return instructions
        if form is Form.GLOBAL_MODEL:
            model_D = self.peer_weights(message.payload)
            self.global_model_arrived(sender, message.iteration, model_D)
        elif self._is_awaited(sender, message.iteration):
            return self._go_on_from(self.peer_weights(message.payload))
        return []

    def _max_samples_of(self, sender: Rank, form: Form, iteration: int) -> int:
        """As `max_samples`, and of a worker no more than it can have had since its last change."""
        most = self.max_samples(form, iteration)
        if form is not Form.CHANGE:  # of all workers of a site
            return most
        steps = max(0, iteration - self._changed_at.get(sender, 0))
        return min(most, steps * self.context.max_batch_at(iteration))

    def _is_awaited(self, sender: Rank, iteration: int) -> bool:
        sent = self.sent
        return sent is not None and (sent.server, sent.iteration) == (sender, iteration)

    def passed_over(self, sender: Rank, message: Message) -> list[Instruction]:
        """Answer a change that was invalid. Do not wait for another answer than an invalid one."""
        if message.kind is not MessageKind.WEIGHTS:
            return []
        form = Form(message.weights_version % _FORMS)
        if form in _CHANGES:
            return self.answer(form, sender, max(1, message.iteration))
        if self._is_awaited(sender, message.iteration):
            self._go_on_alone()
        return []

    def left(self, rank: Rank) -> None:
        self._owed.pop(rank, None)
        self._changed_at.pop(rank, None)
        if self.sent is not None and self.sent.server == rank:
            self._go_on_alone()
        if self._served_by == rank:
            self._served_by = self.server()
            if self._served_by == self.rank:
                self.begin_serving()

    def blocking_peers(self) -> frozenset[Rank]:
        """Return the server, once this worker has made its further steps."""
        if self.sent is None or self._steps < self.overlap_steps:
            return frozenset()
        return frozenset({self.sent.server})

    def advance(self) -> list[Instruction]:
        """Answer those whose link is up now."""
        known = [rank for rank in self._owed if rank in self.synchronizer.active]
        return [
            one
            for rank in known
            for one in self.answer(self._owed[rank][0], rank, self._owed.pop(rank)[1])
        ]

    # ---- checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Value]:
        """As of all policies. A change that was sent counts there: the next one is what follows."""
        anchor_D = self._anchor_D if self.sent is None else self.sent.weights_D
        state = {**super().state(), "round_steps": self._steps, "round_samples": self._samples}
        if anchor_D is not None:
            state["anchor_D"] = anchor_D.copy()
        return state

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        self._steps, self._samples = int(state["round_steps"]), int(state["round_samples"])
        self._anchor_D = vector_or_none(state, "anchor_D")
        self.sent = None


def as_vector(part: GradientPart, weight: float = 1.0) -> Flat:
    """Return the change times a weight, as a new array."""
    return part.weighted(np.float32(weight))
