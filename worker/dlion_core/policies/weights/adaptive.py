"""Policy `adaptive`: local steps, then an average of what changed most, as often as links allow.

All workers hold the same anchor, the weights of the last round. Each makes H local steps from it
and then sends its pseudo-gradient, the anchor less its weights, to every peer: only the largest
entries, in a few bits each. What it does not send, and what rounding lost, it adds to the next one
(error feedback). All wait for the pseudo-gradients of all, and with the weights n_k / N, by the
samples of the round, make the same outer step:

    d = sum_k (n_k / N) sent_k;  v <- m v + d
    anchor <- anchor - rate (d + m v)         (Nesterov; without momentum: rate d)

and continue from the anchor. m is the momentum of the optimizer sgd: it belongs to the step that
all make together, from all samples, and local steps have none. Batches follow capacity, so all
reach the end of a round together.

`round_planner` chooses H for all, and for each worker how much it sends: as much as its narrowest
link carries in a small part of the round. All workers use the largest H that a worker of the last
round has proposed.

**Repair.** Every contribution has the checksum of its anchor. A worker whose anchor is not that of
most others, because it has just joined or was cut off, takes over theirs when the round closes.

Source: Stich, Local SGD converges fast and communicates little, ICLR 2019; Douillard et al.,
DiLoCo, 2023 (outer step); Karimireddy et al., Error feedback fixes SignSGD, ICML 2019; SparseLoCo,
2025 (sparse pseudo-gradients with error feedback and few bits, as recalled). The planner, weights
by samples and the repair are ours.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dlion_api.errors import ContractError
from dlion_core.codecs import (
    HEADER_BYTES,
    Coding,
    GradientPart,
    IndexCodec,
    ValueCodec,
    decode_gradient,
    decode_weights,
    encode_weights,
    require_finite,
)
from dlion_core.policies.gradient.entries import Residual, largest_indices
from dlion_core.policies.interface import (
    Message,
    MessageKind,
    ReplaceWeights,
    ReportPlan,
    SendMessage,
)
from dlion_core.policies.peer_machine import PeerMachine
from dlion_core.policies.state_values import vector_or_none
from dlion_core.policies.synchronization import SyncRule
from dlion_core.policies.weights.round_planner import MAX_LOCAL_STEPS, RoundPlanner

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dlion_api.names import Rank
    from dlion_core.policies.factory import PolicyContext
    from dlion_core.policies.interface import Flat, Instruction, LocalStepDone, Value
    from dlion_core.policies.parameters import AdaptiveParameters

_CONTRIBUTION, _ANCHOR = 0, 1
_HEAD = struct.Struct("<BIIH")
"""Of a `WEIGHTS` message: which of the two it is, checksum of the sender's anchor, samples of its
round, and its proposal for H (anchor: the H in use). A gradient follows; or the anchor, and v if
there is one."""

_KEPT_ROUNDS = 2
"""Contributions of a peer that are kept until due. It waits for this worker in the second."""


@dataclass(frozen=True)
class _Contribution:
    checksum: int
    samples: int
    local_steps: int
    part: GradientPart | None


class AdaptiveLocalSteps(PeerMachine):
    """One worker's rounds. A round ends at an iteration that is a multiple of its H."""

    def __init__(self, context: PolicyContext, parameters: AdaptiveParameters) -> None:
        super().__init__(context, SyncRule(slack=MAX_LOCAL_STEPS))
        self._parameters = parameters
        optimizer = context.spec.trainer.optimizer
        usual = optimizer.momentum if optimizer.name == "sgd" else 0.0
        given = parameters.outer_momentum
        self._momentum = np.float32(usual if given is None else given)
        coding = context.coding
        self._coding = Coding(
            ValueCodec(parameters.codec), IndexCodec.SMALLEST, coding.decimals, coding.seed
        )
        self._planner = RoundPlanner(
            parameters,
            size=self.size,
            coding=self._coding,
            bandwidth_fraction=context.spec.network.bandwidth_fraction,
        )
        self._anchor_D: Flat | None = None
        self._velocity_D: Flat | None = None
        self._residual = Residual.zeros(self.size)
        self._samples = 0  # of this round
        self._local_steps = 1
        self._end: int | None = None  # iteration at which the current round ends
        self._closed = 0  # the end of the last round
        self._own: _Contribution | None = None  # while the round waits for others
        self._plan_text = ""
        """Why it has proposed another H."""
        self._message: Message | None = None
        self._expected: set[Rank] = set()
        self._newcomers: set[Rank] = set()
        self._received: dict[Rank, dict[int, _Contribution]] = {}
        self._steps_of: dict[Rank, int] = {}
        """H as each peer reported it last."""
        self._adopting: Rank | None = None
        """The peer whose anchor this worker awaits."""
        self._has_closed = False
        """Whether a round has closed and the weights are not those of the anchor yet."""
        self._owed: set[Rank] = set()
        """Peers that requested the anchor of the round that is open."""
        self._served: dict[Rank, int] = {}

    # ---- a local step ----------------------------------------------------------------------------

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """Apply the own gradient only; report the iteration to the others."""
        require_finite(step.gradient_D, "gradient")
        if self._anchor_D is None:
            self._anchor_D = self.weights_D.copy()
        if self._end is None:  # it starts, or has taken over a peer's weights
            self._local_steps = max(self._steps_of.values(), default=1)
            self._end = _next_multiple(step.iteration - 1, self._local_steps)
        self._samples += step.local_batch_size
        reported = self.progress(weights_version=self._local_steps)
        return [*reported, self.update_alone(step.gradient_D)]

    def update_applied(self) -> list[Instruction]:
        """Open the round if it is due: send the pseudo-gradient to every member."""
        if self._end is None or self._anchor_D is None or self.synchronizer.own < self._end:
            return []
        self._residual.value_D += self._anchor_D
        self._residual.value_D -= self.weights_D
        count = self._planner.count(self.links, self._local_steps)
        sent = self._residual.send(largest_indices(self._residual.value_D, count), self._coding)
        if not self._parameters.error_feedback:
            self._residual = Residual.zeros(self.size)
        samples = min(self._samples, self._max_samples)
        proposal = self._planner.local_steps(self.links, self._local_steps)
        if proposal != self._local_steps:
            self._plan_text = self._planner.explanation(self.links, proposal)
        checksum = _checksum(self._anchor_D)
        self._own = _Contribution(checksum, samples, proposal, sent.part)
        head = _HEAD.pack(_CONTRIBUTION, checksum, samples, proposal)
        payload = b"".join((head, sent.payload or b""))
        self._message = Message(
            MessageKind.WEIGHTS, self._end, self.local_batch_size, payload=payload
        )
        self._expected = {  # a worker past it has continued without this one
            rank
            for rank in self.synchronizer.in_step()
            if self.synchronizer.finished(rank) <= self.synchronizer.own
        }
        return [SendMessage(peer, self._message) for peer in self.synchronizer.active]

    @property
    def _max_samples(self) -> int:
        return MAX_LOCAL_STEPS * self.context.max_samples

    # ---- messages --------------------------------------------------------------------------------

    def received(self, sender: Rank, message: Message) -> list[Instruction]:
        if message.kind is MessageKind.WEIGHTS_REQUEST:
            return self._anchor_requested(sender, message.iteration)
        return super().received(sender, message)

    def progress_arrived(self, sender: Rank, message: Message) -> None:
        """Learn the H that others use."""
        if 1 <= message.weights_version <= MAX_LOCAL_STEPS:
            self._steps_of[sender] = message.weights_version

    def greeting(self) -> Message:
        own = self.synchronizer.own
        return Message(MessageKind.PROGRESS, own, weights_version=self._local_steps)

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """Store a contribution until its round closes here, or take over an anchor."""
        whole = memoryview(message.payload)
        if len(whole) < _HEAD.size:
            raise ContractError(f"WEIGHTS of {len(whole)} bytes; allowed: {_HEAD.size} on")
        kind, checksum, samples, steps = _HEAD.unpack_from(whole)
        rest = whole[_HEAD.size :]
        if kind not in (_CONTRIBUTION, _ANCHOR) or not 1 <= steps <= MAX_LOCAL_STEPS:
            raise ContractError(
                f"WEIGHTS of form {kind} for {steps} local steps; allowed: form 0 or 1, 1 to"
                f" {MAX_LOCAL_STEPS} steps"
            )
        if kind == _ANCHOR:
            return self._adopt(sender, message.iteration, steps, rest)
        if not 1 <= samples <= self._max_samples:
            raise ContractError(f"{samples} samples of a round; allowed: 1 to {self._max_samples}")
        first = self._closed + 1 if self._end is None or self._own is None else self._end
        if message.iteration >= first:
            part = decode_gradient(rest, self.size) if rest else None
            rounds = self._received.setdefault(sender, {})
            rounds[message.iteration] = _Contribution(checksum, samples, steps, part)
            if len(rounds) > _KEPT_ROUNDS:
                del rounds[min(rounds)]
        return []

    def passed_over(self, sender: Rank, message: Message) -> list[Instruction]:
        """Do not wait for a replacement of an invalid contribution or anchor."""
        if message.kind is MessageKind.WEIGHTS:
            self._expected.discard(sender)
            if self._adopting == sender:
                self._adopting = None
        return []

    def blocking_peers(self) -> frozenset[Rank]:
        """Return members that may still contribute to the open round, or that owe their anchor."""
        if self._adopting is not None:
            return frozenset({self._adopting})
        if self._own is None or self._end is None:
            return frozenset()
        return frozenset(
            rank
            for rank in self._expected
            if not any(at >= self._end for at in self._received.get(rank, ()))
        )

    # ---- members ---------------------------------------------------------------------------------

    def joined(self, rank: Rank, iteration: int) -> None:  # noqa: ARG002 - the hook's
        """Wait for it from the next round on. Send it this round: it may take part."""
        if self._own is not None:
            self._newcomers.add(rank)

    def left(self, rank: Rank) -> None:
        """Do not wait for it. Its contribution to the open round counts."""
        self._expected.discard(rank)
        self._newcomers.discard(rank)
        self._owed.discard(rank)
        self._steps_of.pop(rank, None)
        self._served.pop(rank, None)
        if self._adopting == rank:
            self._adopting = None
        if self._own is None:
            self._received.pop(rank, None)

    # ---- the end of a round ----------------------------------------------------------------------

    def advance(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        if self._message is not None:
            instructions = [SendMessage(rank, self._message) for rank in sorted(self._newcomers)]
            self._newcomers.clear()
        if self.blocking_peers():
            return instructions
        if self._own is not None and self._end is not None:
            instructions += self._close(self._own, self._end)
        if self._has_closed and self._adopting is None:
            self._has_closed = False
            instructions += [*self._replace(), *self._answer_owed()]
        return instructions

    def _close(self, own: _Contribution, end: int) -> list[Instruction]:
        contributions = {self.rank: own}
        for rank, rounds in self._received.items():
            if end in rounds:
                contributions[rank] = rounds[end]
            self._received[rank] = {at: one for at, one in rounds.items() if at > end}
        self._own = self._message = None
        self._samples, self._has_closed = 0, True
        contributions = dict(sorted(contributions.items()))
        self._outer_step(contributions)
        before = self._local_steps
        self._follow(end, max(one.local_steps for one in contributions.values()))
        reported: list[Instruction] = []
        if own.local_steps == self._local_steps != before:  # it is this worker's proposal
            reported = [ReportPlan(self._plan_text)]
        common = _most_common(one.checksum for one in contributions.values())
        if own.checksum == common:
            return reported
        holders = [rank for rank, one in contributions.items() if one.checksum == common]
        self._adopting = holders[0]
        return [*reported, SendMessage(holders[0], Message(MessageKind.WEIGHTS_REQUEST, end))]

    def _outer_step(self, contributions: Mapping[Rank, _Contribution]) -> None:
        assert self._anchor_D is not None
        samples = sum(one.samples for one in contributions.values())
        mean_D = np.zeros(self.size, np.float32)
        for one in contributions.values():
            if one.part is not None:
                one.part.add_to(mean_D, np.float32(one.samples / samples))
        if self._momentum:
            if self._velocity_D is None:
                self._velocity_D = np.zeros_like(mean_D)
            self._velocity_D = self._momentum * self._velocity_D + mean_D
            mean_D += self._momentum * self._velocity_D
        mean_D *= np.float32(self._parameters.outer_learning_rate)
        self._anchor_D = self._anchor_D - mean_D

    def _follow(self, closed: int, local_steps: int) -> None:
        """Plan the next round after one that closed at that iteration."""
        self._closed, self._local_steps = closed, local_steps
        self._end = _next_multiple(max(closed, self.synchronizer.own), local_steps)

    def _replace(self) -> list[Instruction]:
        assert self._anchor_D is not None
        return [ReplaceWeights(self._anchor_D.copy())]

    # ---- repair ----------------------------------------------------------------------------------

    def _anchor_requested(self, sender: Rank, iteration: int) -> list[Instruction]:
        """Answer with the anchor once the round of that iteration has closed here."""
        if self._closed >= iteration:
            return self._anchor_for(sender)
        self._owed.add(sender)
        return []

    def _answer_owed(self) -> list[Instruction]:
        owed, self._owed = self._owed, set()
        return [one for peer in sorted(owed) for one in self._anchor_for(peer)]

    def _anchor_for(self, peer: Rank) -> list[Instruction]:
        if self._anchor_D is None or self._served.get(peer) == self._closed:
            return []
        self._served[peer] = self._closed
        head = _HEAD.pack(_ANCHOR, 0, 0, self._local_steps)
        # Exact, so that both have the same checksums from now on.
        vectors = [self._anchor_D, *([] if self._velocity_D is None else [self._velocity_D])]
        coded = [encode_weights(vector_D, ValueCodec.FLOAT32) for vector_D in vectors]
        payload = b"".join((head, *coded))
        return [SendMessage(peer, Message(MessageKind.WEIGHTS, self._closed, payload=payload))]

    def _adopt(
        self, sender: Rank, iteration: int, local_steps: int, payload: memoryview
    ) -> list[Instruction]:
        if sender != self._adopting:
            return []
        length = HEADER_BYTES + ValueCodec.FLOAT32.bytes_of(self.size)
        anchor_D = decode_weights(payload[:length], self.size).copy()
        rest = payload[length:]
        self._velocity_D = decode_weights(rest, self.size).copy() if rest else None
        self._anchor_D, self._adopting = anchor_D, None
        self._follow(iteration, local_steps)
        return []

    # ---- checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Value]:
        state = {
            **super().state(),
            "round_samples": self._samples,
            "round_local_steps": self._local_steps,
            "round_end": self._end or 0,
            "residual_D": self._residual.value_D.copy(),
        }
        for name, vector_D in (("anchor_D", self._anchor_D), ("velocity_D", self._velocity_D)):
            if vector_D is not None:
                state[name] = vector_D.copy()
        return state

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        self._samples = int(state["round_samples"])
        self._local_steps = int(state["round_local_steps"])
        self._end = int(state["round_end"]) or None
        residual_D = vector_or_none(state, "residual_D")
        self._residual = Residual.zeros(self.size) if residual_D is None else Residual(residual_D)
        self._anchor_D = vector_or_none(state, "anchor_D")
        self._velocity_D = vector_or_none(state, "velocity_D")


def _next_multiple(after: int, step: int) -> int:
    """Return the first multiple of `step` after that number."""
    return (after // step + 1) * step


def _checksum(anchor_D: Flat) -> int:
    return zlib.crc32(anchor_D.data)


def _most_common(checksums: Iterable[int]) -> int:
    """Return the most frequent one; of several, the first."""
    return Counter(checksums).most_common(1)[0][0]
