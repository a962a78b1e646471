"""Policy `adpsgd`: pairs of workers take the mean of their weights, without any barrier.

The graph is bipartite: workers at even places (by rank) are active, the others passive; of a ring
of an odd number the link between two active ones is not used. When its
local step is done, an active worker sends its weights to a passive neighbour chosen by chance. The
passive one, as soon as it handles the message, answers with its own weights and takes the mean; so
does the active one with the answer, and only then applies its own gradient, computed before.
Between the two its weights stay as they are: the exchange is atomic. With `overlap` computing goes
on beside it, and nobody is ever held: gradients of steps that end while an answer is awaited are
applied with it, as one, their mean by samples. Without, the active worker is held for the answer;
only active ones wait, for passive ones, so there is no circle of waiting. A passive worker applies
its gradients as its steps end. An active worker without a member among its neighbours goes on
alone.

Receivers average (two weights, half each). What a codec rounds off stays with its worker, so that
an exchange preserves the sum of all weights. If the partner leaves meanwhile, the active worker
goes on with the weights that it has.

Source: Lian et al., Asynchronous decentralized parallel stochastic gradient descent, ICML 2018.
Deviation: a passive worker that is computing answers when its step is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dlion_api.errors import ContractError
from dlion_worker.codecs import decode_weights, encode_weights
from dlion_worker.policies.interface import (
    Flat,
    Instruction,
    LocalStepDone,
    Message,
    MessageKind,
    Replace,
    Send,
    Value,
)
from dlion_worker.policies.peer_machine import PeerMachine, flat
from dlion_worker.policies.synchronization import Rule
from dlion_worker.policies.topology import beside

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlion_api.names import Rank
    from dlion_worker.codecs.payload import Payload
    from dlion_worker.policies.building import Context
from dlion_worker.policies.weight_parameters import AdpsgdParameters


def adpsgd(context: Context, parameters: AdpsgdParameters) -> AdPsgd:
    """Means of pairs on a bipartite graph."""
    return AdPsgd(context, parameters)


def neighbours(ranks: Sequence[Rank], rank: Rank, graph: str) -> list[Rank]:
    """With whom that worker may form a pair: never one of its own side.

    >>> neighbours([0, 1, 2, 3, 4], 0, "complete"), neighbours([0, 1, 2, 3, 4], 0, "ring")
    ([1, 3], [1])
    """
    place = ranks.index(rank)
    other_side = [peer for at, peer in enumerate(ranks) if (at - place) % 2]
    if graph == "complete":
        return other_side
    return [peer for peer in other_side if peer in beside(ranks, rank)]


class AdPsgd(PeerMachine):
    """One worker, active or passive."""

    def __init__(self, context: Context, parameters: AdpsgdParameters) -> None:
        super().__init__(context, Rule(slack=None, spare=0, barrier=False))
        self._is_active = context.ranks.index(context.rank) % 2 == 0
        self._overlap = parameters.overlap
        other_side = neighbours(context.ranks, context.rank, parameters.graph)
        self._neighbours = context.neighbours.intersection(other_side)
        self._gradient_D: Flat | None = None
        """Mean of the gradients that are not applied yet, over so many samples."""
        self._samples = 0
        self._asked: Rank | None = None
        self._asked_at = 0
        self._sent: Payload = b""
        self._requests: dict[Rank, tuple[int, Flat]] = {}
        self._answered: dict[Rank, int] = {}

    # ---- own steps -----------------------------------------------------------------------------

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """An active worker asks a neighbour; the gradient waits for the answer."""
        self._take_in(step)
        if self._asked is not None:
            return self.progress()
        there = [rank for rank in self.synchronizer.active if rank in self._neighbours]
        if not (self._is_active and there):
            return self.progress()
        seed = (self.context.spec.trainer.seed, self.context.rank, step.iteration)
        self._asked = there[int(np.random.default_rng(seed).integers(len(there)))]
        self._asked_at, self._sent = step.iteration, self._coded()
        return [*self.progress(), self._weights(self._asked, step.iteration, self._sent)]

    def _take_in(self, step: LocalStepDone) -> None:
        self._samples += step.local_batch_size
        if self._gradient_D is None:
            self._gradient_D = step.gradient_D
        else:
            share = np.float32(step.local_batch_size / self._samples)
            self._gradient_D = self._gradient_D + share * (step.gradient_D - self._gradient_D)

    def descended(self) -> list[Instruction]:
        """Nothing is told: weights go out with the next step."""
        return []

    def go_on(self) -> list[Instruction]:
        """Answers to who has asked, then the own gradient once no answer is awaited."""
        told: list[Instruction] = []
        asking = sorted(set(self._requests).intersection(self.synchronizer.active))
        if asking:  # one for each event: a second would be of weights that are to be replaced
            told = self._answer(asking[0])
        if self._gradient_D is not None and self._asked is None:
            told.append(self.update(self._gradient_D))
            self._gradient_D, self._samples = None, 0
        return told

    def held_for(self) -> frozenset[Rank]:
        """The neighbour whose answer is awaited, if computing does not go on beside it."""
        if self._overlap or self._asked is None:
            return frozenset()
        return frozenset({self._asked})

    # ---- exchanges -----------------------------------------------------------------------------

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """A request, for a passive worker; for an active one the answer to its own."""
        if sender not in self._neighbours:
            raise ContractError(f"weights from worker {sender}, which is no neighbour")
        if self._is_active:
            return self._answer_arrived(sender, message)
        if message.iteration > self._answered.get(sender, 0):
            self._answered[sender] = message.iteration
            theirs_D = decode_weights(message.payload, self.size)
            self._requests[sender] = (message.iteration, theirs_D)
        return []

    def _answer_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        if (self._asked, self._asked_at) != (sender, message.iteration):
            return []  # of an exchange that this worker has given up
        self._asked = None
        theirs_D = decode_weights(message.payload, self.size)
        mean_D = self._mean(theirs_D, self._sent)
        self._sent = b""
        return [Replace(mean_D)]

    def _answer(self, sender: Rank) -> list[Instruction]:
        iteration, theirs_D = self._requests.pop(sender)
        payload = self._coded()
        mean = Replace(self._mean(theirs_D, payload))
        return [mean, self._weights(sender, iteration, payload)]

    def _mean(self, theirs_D: Flat, sent: Payload) -> Flat:
        """The mean of what both have sent, the same bits at both; and what was rounded off here."""
        ours_D = decode_weights(sent, self.size)
        mean_D: Flat = (ours_D + theirs_D) * np.float32(0.5)
        mean_D += self.weights_D - ours_D
        return mean_D

    def _coded(self) -> Payload:
        return encode_weights(self.weights_D, self.context.coding)

    def _weights(self, peer: Rank, iteration: int, payload: Payload) -> Send:
        return Send(
            peer, Message(MessageKind.WEIGHTS, iteration, self.local_batch_size, payload=payload)
        )

    def progress_arrived(self, sender: Rank, message: Message) -> None:
        """Nobody waits for a peer's steps."""

    # ---- members -------------------------------------------------------------------------------

    def joined(self, rank: Rank, iteration: int) -> None:  # noqa: ARG002 - the hook's
        """On a new link no answer of before will come."""
        if self._asked == rank:
            self._asked = None

    def left(self, rank: Rank) -> None:
        """No answer will come, and none is wanted."""
        if self._asked == rank:
            self._asked = None
        self._requests.pop(rank, None)
        self._answered.pop(rank, None)

    # ---- checkpoints ---------------------------------------------------------------------------

    def state(self) -> dict[str, Value]:
        """With the gradients that wait for an answer, which after a restart nobody awaits."""
        state = super().state()
        if self._gradient_D is not None:
            state["adpsgd_gradient_D"] = self._gradient_D.copy()
            state["adpsgd_samples"] = self._samples
        return state

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave."""
        super().restore(state)
        self._gradient_D, self._samples = None, 0
        if "adpsgd_gradient_D" in state:
            self._gradient_D = flat(state["adpsgd_gradient_D"])
            self._samples = int(state["adpsgd_samples"])
