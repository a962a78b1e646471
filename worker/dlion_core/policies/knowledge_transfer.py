"""Direct knowledge transfer: workers with a high loss take over weights of the best worker.

Called by `gradient_exchange`. Every `every_steps` iterations (a *period*) each worker shares the
mean of its last `loss_window` losses. It decides once every member has sent a loss of that period
or a later one, or has continued without sending it, or when the next period ends. The best worker
has the lowest loss; ties go to the lower rank. Then

- `best2all`: every other worker requests the weights of the best;
- `best2worst`: only the worst does (highest loss; ties go to the higher rank).

No worker ever waits. If the best leaves or does not answer within a period, the period is skipped.

The answer takes time, during which both workers continue. The merge is w + l (w_best - w), with
both w in the brackets of the same earlier time. So it acts as if the answer had come at once,
followed by all updates since. In lock step that time is the last step of the period, so equal
weights stay equal. Otherwise it is when each of the two knows all losses of the period. Then each
has received most of the gradients that the other has. If the best is periods ahead, it is when it
answers. Merging late weights into the current ones would undo most updates made meanwhile. With a
steep loss the next step then diverges, and its gradient disturbs all other workers.

Source: DLion's direct knowledge transfer (idea certain, numbers recalled). Ours: the time of the
merged weights, also where `dlion-published` repeats the rest.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.protocol.refusals import CallerError, PeerRefusal
from dlion_api.spec.policies import KnowledgeTransfer
from dlion_core.codecs import decode_loss, decode_weights, encode_loss, encode_weights
from dlion_core.policies.claims.magnitudes import check_weights
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.interface import (
    AverageWeights,
    Flat,
    Instruction,
    MeasuredReplica,
    Message,
    MessageKind,
    RejectMessage,
    SendMessage,
    SendWeights,
    Value,
)
from dlion_core.policies.synchronization import Synchronizer

SETTLING_STEPS = 30
"""Steps after a partition merge before weights are compared again. Differences that diverging
moments cause have decayed by then (0.9 to the 30th: 4 %)."""

MAX_LOSS_RATIO = 1000.0
"""Maximum ratio of a peer's negative loss to the largest magnitude of this worker's recent ones, or
to 1."""

MAX_MEASURED_RATIO = 2.0
"""Maximum ratio of the loss of the best weights on this worker's samples to its own, or to its
first one if that is larger. Honest weights of few steps were as bad as untrained ones on another
worker's samples."""

FIRST_LOSS_STATE = "loss_first"
"""State key that stays valid when a worker takes over a peer's weights."""


@dataclass(frozen=True)
class _PendingRequest:
    """A pending request for weights."""

    best: Rank
    period: int
    since_D: Flat | None
    """This worker's weights at the comparison time. None: use the current ones when merging."""


class DirectKnowledgeTransfer:
    """One worker's part in direct knowledge transfer."""

    def __init__(
        self, context: PolicyContext, rule: KnowledgeTransfer, *, in_lock_step: bool
    ) -> None:
        """Without a replica in `context`, the current weights are used when merging."""
        self._rule = rule
        self._replica, self._coding = context.replica, context.coding
        replica: object = context.replica
        self._measured = replica if isinstance(replica, MeasuredReplica) else None
        self._in_lock_step = in_lock_step
        self._rank, self._size = context.rank, context.layout.size
        self._recent: deque[float] = deque(maxlen=rule.loss_window)
        self._first_loss: float | None = None
        """Loss of the weights from which training began, also where a peer's replaced them."""
        self._latest: dict[Rank, tuple[int, float]] = {}  # period and loss, by member
        self._open: int | None = None  # the own period that is not decided yet
        self._asked: _PendingRequest | None = None
        self._ever_asked: set[Rank] = set()
        self._served: dict[Rank, int] = {}  # the last period answered, by member
        self._kept: tuple[int, Flat] | None = None  # a period and the weights at its end
        self._void = 0  # no period up to this one is answered
        self._suspended = False
        self._settling = 0
        """Steps until the suspension ends; 0: until `resume`."""

    @property
    def enabled(self) -> bool:
        return self._rule.policy != "none"

    def step_done(self, iteration: int, loss: float, peers: Synchronizer) -> list[Instruction]:
        """Record a local loss; at the end of a period, share its mean and maybe send a request."""
        if not self.enabled:
            return []
        if self._settling:
            self._settling -= 1
            self._suspended = self._settling > 0
        self._recent.append(loss)
        if self._first_loss is None:
            untrained = None if self._measured is None else self._measured.untrained_loss
            self._first_loss = loss if untrained is None else untrained
        if iteration % self._rule.every_steps:
            return self.decide(peers)
        # the previous period ends now
        instructions = self._decide_now(peers)
        period = iteration // self._rule.every_steps
        mean = math.fsum(self._recent) / len(self._recent)
        self._latest[self._rank] = (period, mean)
        if self._suspended:
            self._void = period
            return instructions
        self._open = period
        if self._in_lock_step:
            self._keep(period)
        message = Message(MessageKind.LOSS, iteration, payload=encode_loss(mean))
        instructions += [SendMessage(peer, message) for peer in peers.in_step()]
        return instructions + self.decide(peers)

    def decide(self, peers: Synchronizer) -> list[Instruction]:
        """Choose the best worker once all expected losses have arrived."""
        period = self._open
        if period is None:
            return []
        end = period * self._rule.every_steps
        for rank in peers.in_step():
            has_loss = rank in self._latest and self._latest[rank][0] >= period
            if not has_loss and peers.finished(rank) <= end:
                return []
        if not self._in_lock_step:
            self._keep(period)
        return self._decide_now(peers)

    def _decide_now(self, peers: Synchronizer) -> list[Instruction]:
        """Choose by the known losses of the open period or a later one, this worker's included."""
        period, self._open = self._open, None
        if period is None:
            return []
        counted = {*peers.in_step(), self._rank}
        loss_by_rank = {
            rank: loss
            for rank, (at, loss) in self._latest.items()
            if rank in counted and at >= period and self._is_possible(loss)
        }
        if len(loss_by_rank) < 2:
            return []
        if self._asked is not None and self._asked.period < period - 1:
            self._asked = None
        best = min(loss_by_rank, key=lambda rank: (loss_by_rank[rank], rank))
        worst = max(loss_by_rank, key=lambda rank: (loss_by_rank[rank], rank))
        asks = self._rank == worst if self._rule.policy == "best2worst" else self._rank != best
        if not asks or self._asked is not None:
            return []  # the answer of the previous period may still arrive
        self._asked = _PendingRequest(best, period, self._weights_of(period, else_now=True))
        self._ever_asked.add(best)
        iteration = period * self._rule.every_steps
        return [SendMessage(best, Message(MessageKind.WEIGHTS_REQUEST, iteration))]

    def _keep(self, period: int) -> None:
        if self._replica is not None:
            self._kept = (period, self._replica.weights_D.copy())

    def _weights_of(self, period: int, *, else_now: bool = False) -> Flat | None:
        """Return the weights kept for the period; None: none kept."""
        if self._kept is not None and self._kept[0] == period:
            return self._kept[1]
        return self._replica.weights_D.copy() if else_now and self._replica is not None else None

    def suspend(self) -> None:
        """Suspend during a partition merge, which moves the weights. Earlier comparisons become
        invalid, so the open or requested period is skipped."""
        self._suspended, self._settling = True, 0
        self._asked = self._open = self._kept = None
        self._void = self._latest.get(self._rank, (0, 0.0))[0]

    def resume(self, settling_steps: int = 0) -> None:
        """Resume after a partition merge, once `settling_steps` have passed. An earlier merge would
        make a temporary difference permanent, which the moments would otherwise remove."""
        self._settling = settling_steps
        self._suspended = settling_steps > 0

    def loss_arrived(self, sender: Rank, message: Message) -> None:
        """Record a member's loss of a period. Raises ContractError if it is invalid."""
        if not self.enabled:
            return
        period = self._period_of(message)
        loss = decode_loss(message.payload)
        if not self._is_possible(loss):
            min_loss = self._min_loss()
            msg = f"loss {loss:.6g}; allowed: {min_loss:.6g} on, by this worker's own losses"
            raise CallerError(PeerRefusal.IMPLAUSIBLE, msg)
        if period >= self._latest.get(sender, (0, 0.0))[0]:
            self._latest[sender] = (period, loss)

    def _is_possible(self, loss: float) -> bool:
        """Whether a peer's loss is in the range that this worker's own losses imply."""
        return not self._recent or loss >= self._min_loss()

    def _min_loss(self) -> float:
        """The least loss that is believed. A program's own loss, such as a likelihood of densities,
        becomes negative at one worker before the others. Where losses are never negative, such a
        claim wins no more than one of zero."""
        return -MAX_LOSS_RATIO * max(1.0, *map(abs, self._recent))

    def weights_requested(self, sender: Rank, message: Message) -> list[Instruction]:
        """Answer a request, once per peer and period, and only for periods reached here. Raises
        ContractError if this worker cannot have shared a loss of that period."""
        if not self.enabled:
            return []
        period = self._period_of(message)
        if period > self._latest.get(self._rank, (0, 0.0))[0]:
            msg = f"weights requested for iteration {message.iteration}, which is not finished here"
            raise ContractError(msg)
        if period <= max(self._void, self._served.get(sender, 0)):
            return []
        self._served[sender] = period
        then_D = self._weights_of(period)
        if self._in_lock_step and self._replica is not None and then_D is None:
            return []  # only the last period is kept
        return [SendWeights(sender, message.iteration, then_D)]

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """Return the merge; nothing if it is too late. Raises ContractError if it is invalid."""
        if sender not in self._ever_asked:
            raise ContractError("weights that were not requested")
        period = self._period_of(message)
        asked = self._asked
        if asked is None or (asked.best, asked.period) != (sender, period):
            return []
        self._asked = None
        weights_D = decode_weights(message.payload, self._size)
        check_weights(weights_D, None if self._replica is None else self._replica.weights_D)
        if (why := self._what_is_worse(weights_D)) is not None:
            claimed = self._latest.get(sender, (0, math.nan))[1]
            reason = f"claimed a loss of {claimed:.3g}, but {why}; they are not merged"
            return [RejectMessage(sender, reason, PeerRefusal.IMPLAUSIBLE, is_violation=False)]
        since_D = asked.since_D
        if since_D is not None:  # same rounding, so that equal weights stay equal
            since_D = decode_weights(encode_weights(since_D, self._coding), self._size)
        return [AverageWeights(weights_D, self._rule.lambda_, sender, since_D)]

    def _what_is_worse(self, weights_D: Flat) -> str | None:
        """Return how far these weights are from the best ones, if they cannot be, by this worker's
        own samples. The best of other samples may be somewhat worse here."""
        if self._first_loss is None or self._measured is None:
            return None
        own, theirs = self._measured.loss_of(None), self._measured.loss_of(weights_D)
        if own is None or theirs is None:
            return None
        known = [abs(loss) for loss in (own, self._first_loss) if not math.isnan(loss)]
        most = MAX_MEASURED_RATIO * max(known, default=math.inf)
        if theirs <= most:
            return None
        return f"its weights have {theirs:.3g} on samples held out here; allowed: up to {most:.3g}"

    def left(self, rank: Rank) -> None:
        """A member has left: do not expect its answers."""
        self._latest.pop(rank, None)
        self._served.pop(rank, None)
        self._ever_asked.discard(rank)
        if self._asked is not None and self._asked.best == rank:
            self._asked = None

    def _period_of(self, message: Message) -> int:
        period, rest = divmod(message.iteration, self._rule.every_steps)
        if rest or period < 1:
            raise ContractError(
                f"{message.kind.name} of iteration {message.iteration}; "
                f"allowed: multiples of everySteps, {self._rule.every_steps}"
            )
        return period

    def state(self) -> dict[str, Value]:
        state: dict[str, Value] = {"recent_losses": np.array(self._recent, np.float64)}
        if self._first_loss is not None:
            state[FIRST_LOSS_STATE] = self._first_loss
        if self._rank in self._latest:
            period, loss = self._latest[self._rank]
            state |= {"loss_period": period, "loss_mean": loss}
        return state

    def restore(self, state: Mapping[str, Value]) -> None:
        self._recent.clear()
        self._recent.extend(np.asarray(state["recent_losses"], np.float64).tolist())
        if FIRST_LOSS_STATE in state:
            self._first_loss = float(state[FIRST_LOSS_STATE])
        if "loss_period" in state:
            self._void = int(state["loss_period"])
            self._latest[self._rank] = (self._void, float(state["loss_mean"]))
