"""Who takes over whose weights: workers compare recent losses, weak ones ask the best.

Called by `machine`. Every `every_steps` iterations (a *period*) each worker shares the mean of its
last `loss_window` losses. Once every member's loss of that period or a later one is known, or has
been passed by (the member went on and its loss did not come), or the next period is over, the best
is chosen: the lowest loss, the lower rank among equals. Then

- `best2all`: everybody but the best asks the best for its weights;
- `best2worst`: only the worst does (highest loss, the higher rank among equals).

Nobody is ever waited for. If the best leaves, or its answer does not come within a period, that
period is skipped. Source: DLion's direct knowledge transfer (idea certain, numbers recalled); ours:
of when the two weights are that are merged, also where `dlion-published` repeats the rest.

The answer takes its time, in which both go on. What is merged is how they differed *then*, w + l
(w_best - w) with both w in the brackets of one moment: as if it had come at once, and all updates
since had followed. In lock step that moment is the step that ends the period: weights that are
equal stay so. Else it is when each of the two knows all losses of the period, and has heard most of
the gradients that the other has; of a best that is periods ahead, when it answers.
To mix late weights into today's would take back most of the updates made on the way: where the
loss is steep the next step then leaps, and its gradient throws all others off their way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_worker.codecs import (
    AnyCoding,
    ValueCodec,
    decode_loss,
    decode_weights,
    encode_loss,
    encode_weights,
)
from dlion_worker.policies.interface import (
    Instruction,
    Message,
    MessageKind,
    Mix,
    Send,
    SendWeights,
)

if TYPE_CHECKING:
    from dlion_worker.policies.interface import Flat, ReplicaView

SETTLING_STEPS = 30
"""After two sides have met, so many steps pass before weights are compared again: what moments that
differ still lead apart has come together by then (0.9 to the 30th: 4 %)."""

State = Mapping[str, NDArray[np.generic] | int | float | str]


@dataclass(frozen=True)
class TransferRule:
    """Knobs of the manifest's `knowledgeTransfer`."""

    policy: str = "none"
    every_steps: int = 100
    fraction: float = 0.75
    """lambda, the share of the best worker's weights in the merge."""
    loss_window: int = 20

    def __post_init__(self) -> None:
        if self.policy not in ("none", "best2all", "best2worst"):
            msg = f"knowledgeTransfer.policy {self.policy!r}; allowed: none, best2all, best2worst"
            raise ValueError(msg)


@dataclass(frozen=True)
class Peers:
    """The members that are counted on just now, and the last iteration each has finished."""

    ranks: Iterable[Rank]
    finished: Callable[[Rank], int]


@dataclass(frozen=True)
class _Asked:
    """A request under way."""

    best: Rank
    period: int
    since_D: Flat | None
    """These weights then; None: they are taken as they are when merged."""


class KnowledgeTransfer:
    """One worker's part in direct knowledge transfer."""

    def __init__(
        self,
        rule: TransferRule,
        *,
        rank: Rank,
        size: int,
        replica: ReplicaView | None = None,
        in_lock_step: bool = False,
        coding: AnyCoding = ValueCodec.FLOAT32,
    ) -> None:
        """`replica`: whose weights are compared; None: they are taken as they are when merged.
        `coding`: what all send weights in."""
        self._rule = rule
        self._replica = replica
        self._coding = coding
        self._in_lock_step = in_lock_step
        self._rank = rank
        self._size = size
        self._recent: deque[float] = deque(maxlen=rule.loss_window)
        self._latest: dict[Rank, tuple[int, float]] = {}  # period and loss, by member
        self._open: int | None = None  # the own period that is not decided yet
        self._asked: _Asked | None = None
        self._ever_asked: set[Rank] = set()
        self._served: dict[Rank, int] = {}  # the last period answered, by member
        self._kept: tuple[int, Flat] | None = None  # a period, and these weights of then
        self._void = 0  # no period up to this one is answered
        self._suspended = False
        self._settling = 0
        """Steps until it is not suspended any more; 0: until it is said."""

    @property
    def enabled(self) -> bool:
        """Whether weights are taken over at all."""
        return self._rule.policy != "none"

    def step_done(self, iteration: int, loss: float, peers: Peers) -> list[Instruction]:
        """A local step's loss; at a period's end the loss to share, and maybe a request."""
        if not self.enabled:
            return []
        if self._settling:
            self._settling -= 1
            self._suspended = self._settling > 0
        self._recent.append(loss)
        if iteration % self._rule.every_steps:
            return self.decide(peers)
        told: list[Instruction] = self._decide_with(self._known(peers))  # the period before: now
        period = iteration // self._rule.every_steps
        mean = math.fsum(self._recent) / len(self._recent)
        self._latest[self._rank] = (period, mean)
        if self._suspended:
            self._void = period
            return told
        self._open = period
        if self._in_lock_step:
            self._keep(period)
        message = Message(MessageKind.LOSS, iteration, payload=encode_loss(mean))
        told += [Send(peer, message) for peer in peers.ranks]
        return told + self.decide(peers)

    def decide(self, peers: Peers) -> list[Instruction]:
        """Chooses the best once all losses that can come are in; called whenever one may be."""
        period = self._open
        if period is None:
            return []
        end = period * self._rule.every_steps
        for rank in peers.ranks:
            told = rank in self._latest and self._latest[rank][0] >= period
            if not told and peers.finished(rank) <= end:
                return []
        if not self._in_lock_step:
            self._keep(period)
        return self._decide_with(self._known(peers))

    def _known(self, peers: Peers) -> dict[Rank, float]:
        """Losses of the open period or later, by member, this worker's with them."""
        counted = {*peers.ranks, self._rank}
        return {
            rank: loss
            for rank, (period, loss) in self._latest.items()
            if rank in counted and self._open is not None and period >= self._open
        }

    def _decide_with(self, loss_by_rank: Mapping[Rank, float]) -> list[Instruction]:
        period, self._open = self._open, None
        if period is None or len(loss_by_rank) < 2:
            return []
        if self._asked is not None and self._asked.period < period - 1:
            self._asked = None
        best = min(loss_by_rank, key=lambda rank: (loss_by_rank[rank], rank))
        worst = max(loss_by_rank, key=lambda rank: (loss_by_rank[rank], rank))
        asks = self._rank == worst if self._rule.policy == "best2worst" else self._rank != best
        if not asks or self._asked is not None:
            return []  # an answer of the period before may still be under way
        self._asked = _Asked(best, period, self._weights_of(period, else_now=True))
        self._ever_asked.add(best)
        iteration = period * self._rule.every_steps
        return [Send(best, Message(MessageKind.WEIGHTS_REQUEST, iteration))]

    def _keep(self, period: int) -> None:
        if self._replica is not None:
            self._kept = (period, self._replica.weights_D.copy())

    def _weights_of(self, period: int, *, else_now: bool = False) -> Flat | None:
        """Those kept; None: none were."""
        if self._kept is not None and self._kept[0] == period:
            return self._kept[1]
        return self._replica.weights_D.copy() if else_now and self._replica is not None else None

    def suspend(self) -> None:
        """From now on these weights, or others', move to where two sides meet: what was compared
        before is void. The period that is open or asked for is skipped."""
        self._suspended, self._settling = True, 0
        self._asked = self._open = self._kept = None
        self._void = self._latest.get(self._rank, (0, 0.0))[0]

    def resume(self, settling_steps: int = 0) -> None:
        """They have met, or do not: after so many steps periods count again. Merged before, a
        difference of a moment, which moments would take back, would stay."""
        self._settling = settling_steps
        self._suspended = settling_steps > 0

    def loss_arrived(self, sender: Rank, message: Message) -> None:
        """A member's loss of a period.

        Raises:
            ContractError: not a finite loss, or not of a period's end.
        """
        if not self.enabled:
            return
        period = self._period_of(message)
        loss = decode_loss(message.payload)
        if period >= self._latest.get(sender, (0, 0.0))[0]:
            self._latest[sender] = (period, loss)

    def weights_requested(self, sender: Rank, message: Message) -> list[Instruction]:
        """The request's answer: once per peer and period, and only for periods reached here.

        Raises:
            ContractError: a request for a period that this worker cannot have shared a loss of.
        """
        if not self.enabled:
            return []
        period = self._period_of(message)
        if period > self._latest.get(self._rank, (0, 0.0))[0]:
            msg = f"weights asked for iteration {message.iteration}, which is not over here"
            raise ContractError(msg)
        if period <= max(self._void, self._served.get(sender, 0)):
            return []
        self._served[sender] = period
        then_D = self._weights_of(period)
        if self._in_lock_step and self._replica is not None and then_D is None:
            return []  # of a period before the last
        return [SendWeights(sender, message.iteration, then_D)]

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """The merge; nothing where the answer comes too late.

        Raises:
            ContractError: that peer was never asked, or its weights do not fit.
        """
        if sender not in self._ever_asked:
            raise ContractError("weights that nobody asked for")
        period = self._period_of(message)
        asked = self._asked
        if asked is None or (asked.best, asked.period) != (sender, period):
            return []
        self._asked = None
        weights_D = decode_weights(message.payload, self._size)
        since_D = asked.since_D
        if since_D is not None:  # rounded alike, so that equal weights do not differ
            since_D = decode_weights(encode_weights(since_D, self._coding), self._size)
        return [Mix(weights_D, self._rule.fraction, sender, since_D)]

    def left(self, rank: Rank) -> None:
        """A member is gone: what it owes is not expected any more."""
        self._latest.pop(rank, None)
        self._served.pop(rank, None)
        self._ever_asked.discard(rank)
        if self._asked is not None and self._asked.best == rank:
            self._asked = None

    def _period_of(self, message: Message) -> int:
        period, rest = divmod(message.iteration, self._rule.every_steps)
        if rest or period < 1:
            msg = (
                f"{message.kind.name} of iteration {message.iteration}; "
                f"allowed: multiples of everySteps, {self._rule.every_steps}"
            )
            raise ContractError(msg)
        return period

    def state(self) -> dict[str, NDArray[np.generic] | int | float]:
        """Recent losses and the period they led to; requests and peers start anew."""
        state: dict[str, NDArray[np.generic] | int | float] = {
            "recent_losses": np.array(self._recent, np.float64)
        }
        if self._rank in self._latest:
            period, loss = self._latest[self._rank]
            state |= {"loss_period": period, "loss_mean": loss}
        return state

    def restore(self, state: State) -> None:
        """Takes back what `state` gave."""
        self._recent.clear()
        self._recent.extend(np.asarray(state["recent_losses"], np.float64).tolist())
        if "loss_period" in state:
            self._void = int(state["loss_period"])
            self._latest[self._rank] = (self._void, float(state["loss_mean"]))
