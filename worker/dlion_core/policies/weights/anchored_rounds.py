"""Rounds in which all hold the same anchor and send parts of their changes of it.

Base of `adaptive` and `sparseloco`. Each worker makes H local steps from the anchor, the weights of
the last round. Then it sends its pseudo-gradient, the anchor less its weights, to every peer: some
of the entries, in few bits. What it does not send, and what rounding lost, it adds to the next one
times `feedback` (error feedback). All wait for the pseudo-gradients of all, weigh them by the
samples of the round, make the same outer step, and continue from the anchor that it gives. All use
the largest H that a worker of the last round has proposed.

**Repair.** Every contribution has a checksum of anchor and outer velocity. They may differ when a
round closes, because a worker has just joined or some were cut off. Then `anchor_merge` selects the
anchor from which all continue.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_core.codecs import (
    HEADER_BYTES,
    Coding,
    IndexCodec,
    ValueCodec,
    decode_gradient,
    decode_weights,
    encode_weights,
)
from dlion_core.policies.claims.magnitudes import peaks_of
from dlion_core.policies.claims.samples import check_samples, check_vector
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.gradient.entries import Residual
from dlion_core.policies.interface import (
    TAKEN_OVER,
    Flat,
    Instruction,
    LocalStepDone,
    Message,
    MessageKind,
    ReplaceWeights,
    ReportEvent,
    SendMessage,
    Value,
)
from dlion_core.policies.partitions.version_vector import (
    MERGE_ITERATIONS,
    SampleCounter,
    VersionVector,
    decode_version_vector,
    encode_version_vector,
)
from dlion_core.policies.robust.robust_sum import robust_mean
from dlion_core.policies.state_values import vector_or_none
from dlion_core.policies.weights.anchor_merge import (
    ANCHOR,
    CONTRIBUTION,
    HEAD,
    Anchor,
    AnchorMerge,
    PseudoGradient,
    checksum_of,
    group_by_anchor,
    parse_head,
    repair,
)
from dlion_core.policies.weights.local_rounds import LocalRounds

_ANSWERED = (MessageKind.HELD_REQUEST, MessageKind.WEIGHTS_REQUEST)
MAX_ANSWERS = 3
"""Maximum answers of each kind to a peer until the next round closes. A peer that is behind asks
for each of the rounds of which it has this worker's contribution (`local_rounds` keeps two)."""


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
        self._merge: AnchorMerge | None = None
        """The repair that awaits answers of peers."""
        self._trained = SampleCounter()
        """The samples that the anchor contains."""
        self._min_samples = MERGE_ITERATIONS * context.spec.batching.global_batch_size.initial
        self._has_closed = False
        """Whether a round has closed and the weights are not those of the anchor yet."""
        self._gone: set[Rank] = set()
        """Peers that left after their last contribution: a new link or process knows nothing of it.
        """
        self._apart: set[Rank] = set()  # joined later, and never had this worker's anchor since
        self._to_greet: set[Rank] = set()  # joined, and learn which samples the anchor contains
        self._is_taken_over = False  # it has a peer's weights and has not stepped since
        self._owed: dict[tuple[Rank, MessageKind], int] = {}
        """Requests of peers, and the end of the round that must have closed before the answer."""
        self._answers: Counter[tuple[Rank, MessageKind]] = Counter()
        """Answers since the last round closed."""

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
        self._is_taken_over = False
        if self._end is None or self._end < step.iteration:
            # It starts, has taken over a peer's weights, or continues where others are.
            self.local_steps = max(self._steps_of.values(), default=self.local_steps)
            self._end = _next_multiple(step.iteration - 1, self.local_steps)
        reported = self.progress(weights_version=self.local_steps)
        return [*reported, self.update_alone(step.gradient_D)]

    def next_iteration(self) -> int:
        """Return the iteration after the last. Continue at that of the furthest member if it is too
        far ahead for common rounds: it has trained apart."""
        own, slack = self.synchronizer.own, self.synchronizer.rule.slack or 0
        furthest = max(map(self.synchronizer.finished, self.synchronizer.in_step()), default=0)
        return furthest + 1 if furthest > own + slack + 1 else own + 1

    def update_applied(self) -> list[Instruction]:
        """Open the round if it is due: send the pseudo-gradient to every member."""
        if self._end is None or self.anchor_D is None or self.synchronizer.own < self._end:
            return []
        self.residual.value_D += self.anchor_D
        self.residual.value_D -= self.weights_D
        sent = self.residual.send(self.chosen(), self.coding)
        self.residual.value_D *= self._feedback
        samples, proposal = min(self.samples, self.max_samples(self._end)), self.proposal()
        checksum = checksum_of(self.anchor_D, self.velocity_D)
        own = PseudoGradient(samples, sent.part, checksum, proposal)
        payload = HEAD.pack(CONTRIBUTION, checksum, samples, proposal) + bytes(sent.payload or b"")
        message = Message(MessageKind.WEIGHTS, self._end, self.local_batch_size, payload=payload)
        return self.open_round(self._end, own, message)

    # ---- messages --------------------------------------------------------------------------------

    def received(self, sender: Rank, message: Message) -> list[Instruction]:
        match message.kind:
            case MessageKind.WEIGHTS_REQUEST | MessageKind.HELD_REQUEST:
                return self._requested(sender, message)
            case MessageKind.HELD:
                if self.open is not None and self.open.end <= message.iteration:
                    # It closed there, maybe before the link was up: no contribution follows.
                    self.open.expected.discard(sender)
                return self._vector_arrived(sender, message)
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
        (form, checksum, samples, steps), rest = parse_head(message.payload, self._allowed_steps)
        if form == ANCHOR:
            return self._anchor_arrived(sender, message.iteration, steps, rest)
        check_samples("round", samples, self.max_samples(message.iteration, sender))
        if message.iteration >= self.first_wanted:
            part = decode_gradient(rest, self.size) if rest else None
            contribution = PseudoGradient(samples, part, checksum, steps)
            self.keep(sender, message.iteration, contribution)
            self._gone.discard(sender)
        return []

    def passed_over(self, sender: Rank, message: Message) -> list[Instruction]:
        """Do not wait for a replacement of an invalid contribution or anchor."""
        super().passed_over(sender, message)
        if message.kind in (MessageKind.WEIGHTS, MessageKind.HELD) and self._merge is not None:
            self._merge.lost(sender)
        return []

    def blocking_peers(self) -> frozenset[Rank]:
        """Return members that may still contribute to the open round, or owe a vector or anchor."""
        if self._merge is not None:
            return self._merge.awaited()
        return super().blocking_peers()

    def joined(self, rank: Rank, iteration: int) -> None:
        super().joined(rank, iteration)
        self._to_greet.add(rank)
        if self.synchronizer.stepped or self._trained.held:
            self._apart.add(rank)

    def left(self, rank: Rank) -> None:
        """Do not wait for it. Its contribution to the open round counts."""
        super().left(rank)
        for kind in _ANSWERED:
            self._owed.pop((rank, kind), None)
            del self._answers[rank, kind]
        self._steps_of.pop(rank, None)
        self._gone.add(rank)
        self._to_greet.discard(rank)
        if self._merge is not None:
            self._merge.lost(rank)

    # ---- the end of a round ----------------------------------------------------------------------

    def advance(self) -> list[Instruction]:
        closed = self.closed
        instructions = super().advance()
        if self.closed != closed:
            self._answers.clear()
        instructions += self._answer_owed()
        if self._to_greet and self.anchor_D is not None:
            greeted, self._to_greet = self._to_greet if self._trained.held else set(), set()
            instructions += [SendMessage(peer, self._vector()) for peer in sorted(greeted)]
        if (merge := self._merge) is not None and not merge.awaited():
            if merge.wanted is None:
                wanted = sorted(merge.choose(self._trained.held))
                request = Message(MessageKind.WEIGHTS_REQUEST, merge.end)
                instructions += [SendMessage(peer, request) for peer in wanted]
            if not merge.awaited():
                self._continue_from(merge.merged(self._anchor()))
                self._merge = None
                if merge.text:
                    instructions += [ReportEvent(EventReason.FOLDED_TOGETHER, merge.text)]
        if self._has_closed and self._merge is None and self.anchor_D is not None:
            self._has_closed = False
            instructions += [ReplaceWeights(self.anchor_D.copy())]
        return instructions

    def close_round(
        self, contributions: Mapping[Rank, PseudoGradient], end: int
    ) -> list[Instruction]:
        """Make the outer step. Begin a repair if some workers have another anchor."""
        assert self.anchor_D is not None
        self._has_closed = True
        contributions, peaks = dict(contributions), peaks_of(contributions)
        refused = self.excessive(peaks)
        for one in refused:
            del contributions[one.peer], peaks[one.peer]
        mean_D = robust_mean(self.robustness, contributions.values(), self.size)
        self.anchor_D = self.anchor_D - self.outer_step(mean_D)
        own, before = contributions[self.rank], self.local_steps
        self._follow(end, max(one.local_steps for one in contributions.values()))
        for rank, contribution in contributions.items():
            self._trained.count(rank, end, contribution.samples)
        instructions = [
            *refused,
            *self.unusual(peaks),
            *self.deviating(contributions),
            *self.steps_changed(own.local_steps, before),
        ]
        present = {self.rank, *self.synchronizer.active} - self._gone
        checksums = {rank: contributions[rank].checksum for rank in present & contributions.keys()}
        self._apart -= {rank for rank, one in checksums.items() if one == own.checksum}
        groups = group_by_anchor(checksums)
        if len(groups) > 1:
            self._merge = repair(end, groups, self.rank, self._apart, self._min_samples)
            request = Message(MessageKind.HELD_REQUEST, end)
            instructions += [SendMessage(one, request) for one in sorted(self._merge.awaited())]
        return instructions

    def _follow(self, closed: int, local_steps: int) -> None:
        """Plan the next round after one that closed at that iteration."""
        self.closed, self.local_steps = closed, local_steps
        self._end = _next_multiple(max(closed, self.synchronizer.own), local_steps)

    # ---- repair ----------------------------------------------------------------------------------

    def _anchor(self) -> Anchor:
        assert self.anchor_D is not None
        held = dict(self._trained.held)
        return Anchor(held, self.closed, self.local_steps, self.anchor_D, self.velocity_D)

    def _continue_from(self, anchor: Anchor) -> None:
        self.anchor_D, self.velocity_D = anchor.anchor_D, anchor.velocity_D
        self._trained.held = dict(anchor.held)
        self._follow(anchor.iteration, anchor.local_steps)

    def _requested(self, sender: Rank, message: Message) -> list[Instruction]:
        self._owed[sender, message.kind] = message.iteration
        return self._answer_owed()

    def _answer_owed(self) -> list[Instruction]:
        """Answer what was requested of rounds that have closed here, or that this worker left out:
        it has taken over a later state."""
        own, at = self.synchronizer.own, self.open.end if self.open is not None else None
        answers: list[Instruction] = []
        for (peer, kind), end in sorted(self._owed.items()):
            if self.closed >= end or (own >= end and (at is None or at > end)):
                del self._owed[peer, kind]
                answers += self._answer(peer, kind, end)
        return answers

    def _answer(self, peer: Rank, kind: MessageKind, end: int) -> list[Instruction]:
        self._answers[peer, kind] += 1
        if self.anchor_D is None or self._answers[peer, kind] > MAX_ANSWERS:
            return []
        if kind is MessageKind.HELD_REQUEST:
            return [SendMessage(peer, self._vector())]
        head = HEAD.pack(ANCHOR, 0, 0, self.local_steps)
        # Exact, so that both have the same checksums from now on.
        vectors = [self.anchor_D, *([] if self.velocity_D is None else [self.velocity_D])]
        coded = [encode_weights(vector_D, ValueCodec.FLOAT32) for vector_D in vectors]
        payload = b"".join((head, encode_version_vector(self._trained.held), *coded))
        closed = max(self.closed, end)
        return [SendMessage(peer, Message(MessageKind.WEIGHTS, closed, payload=payload))]

    def _vector(self) -> Message:
        payload = encode_version_vector(self._trained.held)
        return Message(MessageKind.HELD, self.closed, payload=payload)

    def _check_vector(self, held: VersionVector, iteration: int) -> None:
        """Raise CallerError if it has more samples than workers can have made until then."""
        until = max(iteration, self.synchronizer.own) + 2 * self._allowed_steps[-1]
        check_vector(held, self._trained.most(held, until, self.context.spec))

    def _vector_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        merge = self._merge
        is_answer = merge is not None and merge.wanted is None and sender in merge.awaited()
        if not (is_answer or self._is_taken_over):
            return []
        held, rest = decode_version_vector(message.payload, self.context.possible_ranks)
        if rest.nbytes:
            raise ContractError(f"HELD with {rest.nbytes} extra bytes; allowed: none")
        self._check_vector(held, message.iteration)
        if is_answer and merge is not None:
            merge.vectors[sender] = held
        else:
            self._trained.include(held)
        return []

    def _anchor_arrived(
        self, sender: Rank, iteration: int, local_steps: int, payload: memoryview
    ) -> list[Instruction]:
        merge = self._merge
        if merge is not None and merge.wanted is not None and sender in merge.awaited():
            known = max(self.synchronizer.own, self.synchronizer.finished(sender))
            if iteration > known + self._allowed_steps[-1]:
                raise ContractError(f"anchor of iteration {iteration}; allowed: up to {known}")
            held, coded = decode_version_vector(payload, self.context.possible_ranks)
            self._check_vector(held, iteration)
            length = HEADER_BYTES + ValueCodec.FLOAT32.bytes_of(self.size)
            anchor_D = self.peer_weights(coded[:length])
            rest = coded[length:]
            velocity_D = decode_weights(rest, self.size) if rest else None
            merge.anchors[sender] = Anchor(held, iteration, local_steps, anchor_D, velocity_D)
        return []

    # ---- checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Value]:
        return {
            **super().state(),
            "round_local_steps": self.local_steps,
            "round_end": self._end or 0,
            "residual_D": self.residual.value_D.copy(),
            **self._trained.state(),
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        self.local_steps = int(state["round_local_steps"])
        self._end = int(state["round_end"]) or None
        self._is_taken_over = TAKEN_OVER in state
        self._trained.restore(state)
        residual_D = vector_or_none(state, "residual_D")
        self.residual = Residual.zeros(self.size) if residual_D is None else Residual(residual_D)


def _next_multiple(after: int, step: int) -> int:
    """Return the first multiple of `step` after that number."""
    return (after // step + 1) * step
