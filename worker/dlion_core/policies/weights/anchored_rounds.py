"""Rounds in which all hold the same anchor and send parts of their changes of it.

Base of `adaptive` and `sparseloco`. Each worker makes H local steps from the anchor, the weights of
the last round. Then it sends its pseudo-gradient, the anchor less its weights, to every peer: some
of the entries, in few bits. What it does not send, and what rounding lost, it adds to the next one
times `feedback` (error feedback). All wait for the pseudo-gradients of all, weigh them by the
samples of the round, make the same outer step, and continue from the anchor that it gives. All use
the largest H that a worker of the last round has proposed.

**Repair.** Every contribution has the checksum of its anchor. A worker whose anchor is not that of
most others, because it has just joined or was cut off, takes over theirs when the round closes.
"""

import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.codecs import (
    HEADER_BYTES,
    Coding,
    IndexCodec,
    ValueCodec,
    decode_gradient,
    decode_weights,
    encode_weights,
)
from dlion_core.policies.aggregation import Contribution, sample_mean
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.gradient.entries import Residual
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
from dlion_core.policies.state_values import vector_or_none
from dlion_core.policies.weights.local_rounds import LocalRounds

_CONTRIBUTION, _ANCHOR = 0, 1
_HEAD = struct.Struct("<BIIH")
"""Of a `WEIGHTS` message: which of the two it is, checksum of the sender's anchor, samples of its
round, and its proposal for H (anchor: the H in use). A gradient follows; or the anchor, and the
outer velocity if there is one."""


@dataclass(frozen=True)
class PseudoGradient(Contribution):
    """A worker's contribution to a round."""

    checksum: int
    """Of its anchor."""
    local_steps: int
    """Its proposal for H."""


class AnchoredRounds(LocalRounds[PseudoGradient]):
    """One worker's rounds. A round ends at an iteration that is a multiple of its H."""

    def __init__(
        self, context: PolicyContext, *, codec: str, feedback: float, local_steps: range
    ) -> None:
        """`codec`: of the sent entries. `local_steps`: every H that a worker may propose."""
        super().__init__(context, max_local_steps=local_steps[-1])
        coding = context.coding
        self.coding = Coding(ValueCodec(codec), IndexCodec.SMALLEST, coding.decimals, coding.seed)
        self._feedback = np.float32(feedback)
        self.residual = Residual.zeros(self.size)
        self.local_steps = local_steps[0]
        self._allowed_steps = local_steps
        self._end: int | None = None  # iteration at which the current round ends
        self._steps_of: dict[Rank, int] = {}
        """H as each peer reported it last."""
        self._adopting: Rank | None = None
        """The peer whose anchor this worker awaits."""
        self._has_closed = False
        """Whether a round has closed and the weights are not those of the anchor yet."""
        self._owed: set[Rank] = set()
        """Peers that requested the anchor of the round that is open."""
        self._served: dict[Rank, int] = {}

    # ---- hooks of a policy -----------------------------------------------------------------------

    def chosen(self) -> NDArray[np.intp] | NDArray[np.bool_]:
        """Return the entries of the residual to send at the end of this round."""
        raise NotImplementedError

    def proposal(self) -> int:
        return self.local_steps

    def outer_step(self, mean_D: Flat) -> Flat:
        """Return what to subtract from the anchor. May change and return the mean."""
        raise NotImplementedError

    def steps_changed(self, own_proposal: int, before: int) -> list[Instruction]:  # noqa: ARG002
        """Handle the end of a round; `local_steps` is that of the next, `before` of this one."""
        return []

    # ---- a local step ----------------------------------------------------------------------------

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """Apply the own gradient only; report the iteration to the others."""
        self.count_step(step)
        if self._end is None:  # it starts, or has taken over a peer's weights
            self.local_steps = max(self._steps_of.values(), default=self.local_steps)
            self._end = _next_multiple(step.iteration - 1, self.local_steps)
        reported = self.progress(weights_version=self.local_steps)
        return [*reported, self.update_alone(step.gradient_D)]

    def update_applied(self) -> list[Instruction]:
        """Open the round if it is due: send the pseudo-gradient to every member."""
        if self._end is None or self.anchor_D is None or self.synchronizer.own < self._end:
            return []
        self.residual.value_D += self.anchor_D
        self.residual.value_D -= self.weights_D
        sent = self.residual.send(self.chosen(), self.coding)
        self.residual.value_D *= self._feedback
        samples, proposal = min(self.samples, self.max_samples), self.proposal()
        checksum = _checksum(self.anchor_D)
        own = PseudoGradient(samples, sent.part, checksum, proposal)
        head = _HEAD.pack(_CONTRIBUTION, checksum, samples, proposal)
        payload = b"".join((head, sent.payload or b""))
        message = Message(MessageKind.WEIGHTS, self._end, self.local_batch_size, payload=payload)
        return self.open_round(self._end, own, message)

    # ---- messages --------------------------------------------------------------------------------

    def received(self, sender: Rank, message: Message) -> list[Instruction]:
        if message.kind is MessageKind.WEIGHTS_REQUEST:
            return self._anchor_requested(sender, message.iteration)
        return super().received(sender, message)

    def progress_arrived(self, sender: Rank, message: Message) -> None:
        """Learn the H that others use."""
        if message.weights_version in self._allowed_steps:
            self._steps_of[sender] = message.weights_version

    def greeting(self) -> Message:
        own = self.synchronizer.own
        return Message(MessageKind.PROGRESS, own, weights_version=self.local_steps)

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """Store a contribution until its round closes here, or take over an anchor."""
        whole = memoryview(message.payload)
        if len(whole) < _HEAD.size:
            raise ContractError(f"WEIGHTS of {len(whole)} bytes; allowed: {_HEAD.size} on")
        kind, checksum, samples, steps = _HEAD.unpack_from(whole)
        rest = whole[_HEAD.size :]
        if kind not in (_CONTRIBUTION, _ANCHOR) or steps not in self._allowed_steps:
            raise ContractError(
                f"WEIGHTS of form {kind} for {steps} local steps; allowed: form 0 or 1,"
                f" {self._allowed_steps[0]} to {self._allowed_steps[-1]} steps"
            )
        if kind == _ANCHOR:
            return self._adopt(sender, message.iteration, steps, rest)
        if not 1 <= samples <= self.max_samples:
            raise ContractError(f"{samples} samples of a round; allowed: 1 to {self.max_samples}")
        if message.iteration >= self.first_wanted:
            part = decode_gradient(rest, self.size) if rest else None
            contribution = PseudoGradient(samples, part, checksum, steps)
            self.keep(sender, message.iteration, contribution)
        return []

    def passed_over(self, sender: Rank, message: Message) -> list[Instruction]:
        """Do not wait for a replacement of an invalid contribution or anchor."""
        if message.kind is MessageKind.WEIGHTS:
            if self.open is not None:
                self.open.expected.discard(sender)
            if self._adopting == sender:
                self._adopting = None
        return []

    def blocking_peers(self) -> frozenset[Rank]:
        """Return members that may still contribute to the open round, or that owe their anchor."""
        if self._adopting is not None:
            return frozenset({self._adopting})
        return super().blocking_peers()

    def left(self, rank: Rank) -> None:
        """Do not wait for it. Its contribution to the open round counts."""
        super().left(rank)
        self._owed.discard(rank)
        self._steps_of.pop(rank, None)
        self._served.pop(rank, None)
        if self._adopting == rank:
            self._adopting = None

    # ---- the end of a round ----------------------------------------------------------------------

    def advance(self) -> list[Instruction]:
        instructions = super().advance()
        if self._has_closed and self._adopting is None and self.anchor_D is not None:
            self._has_closed = False
            instructions += [ReplaceWeights(self.anchor_D.copy()), *self._answer_owed()]
        return instructions

    def close_round(
        self, contributions: Mapping[Rank, PseudoGradient], end: int
    ) -> list[Instruction]:
        """Make the outer step. Request the anchor of most if this worker has another."""
        assert self.anchor_D is not None
        self._has_closed = True
        mean_D = sample_mean(contributions.values(), self.size)
        self.anchor_D = self.anchor_D - self.outer_step(mean_D)
        own, before = contributions[self.rank], self.local_steps
        self._follow(end, max(one.local_steps for one in contributions.values()))
        reported = self.steps_changed(own.local_steps, before)
        common = _most_common(one.checksum for one in contributions.values())
        if own.checksum == common:
            return reported
        holders = [rank for rank, one in contributions.items() if one.checksum == common]
        self._adopting = holders[0]
        return [*reported, SendMessage(holders[0], Message(MessageKind.WEIGHTS_REQUEST, end))]

    def _follow(self, closed: int, local_steps: int) -> None:
        """Plan the next round after one that closed at that iteration."""
        self.closed, self.local_steps = closed, local_steps
        self._end = _next_multiple(max(closed, self.synchronizer.own), local_steps)

    # ---- repair ----------------------------------------------------------------------------------

    def _anchor_requested(self, sender: Rank, iteration: int) -> list[Instruction]:
        """Answer with the anchor once the round of that iteration has closed here."""
        if self.closed >= iteration:
            return self._anchor_for(sender)
        self._owed.add(sender)
        return []

    def _answer_owed(self) -> list[Instruction]:
        owed, self._owed = self._owed, set()
        return [one for peer in sorted(owed) for one in self._anchor_for(peer)]

    def _anchor_for(self, peer: Rank) -> list[Instruction]:
        if self.anchor_D is None or self._served.get(peer) == self.closed:
            return []
        self._served[peer] = self.closed
        head = _HEAD.pack(_ANCHOR, 0, 0, self.local_steps)
        # Exact, so that both have the same checksums from now on.
        vectors = [self.anchor_D, *([] if self.velocity_D is None else [self.velocity_D])]
        coded = [encode_weights(vector_D, ValueCodec.FLOAT32) for vector_D in vectors]
        payload = b"".join((head, *coded))
        return [SendMessage(peer, Message(MessageKind.WEIGHTS, self.closed, payload=payload))]

    def _adopt(
        self, sender: Rank, iteration: int, local_steps: int, payload: memoryview
    ) -> list[Instruction]:
        if sender != self._adopting:
            return []
        length = HEADER_BYTES + ValueCodec.FLOAT32.bytes_of(self.size)
        anchor_D = decode_weights(payload[:length], self.size).copy()
        rest = payload[length:]
        self.velocity_D = decode_weights(rest, self.size).copy() if rest else None
        self.anchor_D, self._adopting = anchor_D, None
        self._follow(iteration, local_steps)
        return []

    # ---- checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Value]:
        return {
            **super().state(),
            "round_local_steps": self.local_steps,
            "round_end": self._end or 0,
            "residual_D": self.residual.value_D.copy(),
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        self.local_steps = int(state["round_local_steps"])
        self._end = int(state["round_end"]) or None
        residual_D = vector_or_none(state, "residual_D")
        self.residual = Residual.zeros(self.size) if residual_D is None else Residual(residual_D)


def _next_multiple(after: int, step: int) -> int:
    """Return the first multiple of `step` after that number."""
    return (after // step + 1) * step


def _checksum(anchor_D: Flat) -> int:
    return zlib.crc32(anchor_D.data)


def _most_common(checksums: Iterable[int]) -> int:
    """Return the most frequent one; of several, the first."""
    return Counter(checksums).most_common(1)[0][0]
