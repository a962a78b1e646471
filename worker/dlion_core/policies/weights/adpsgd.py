"""Policy `adpsgd`: pairs of workers average their weights, without any barrier.

The graph is bipartite: workers at even positions (by rank) are active, the others passive. A ring
of odd length has a link between two active workers, which is not used. After its local step, an
active worker sends its weights to a random passive neighbour. The passive one answers with its own
weights as soon as it handles the message, and takes the mean. The active one takes the mean when
the answer arrives, and only then applies its own gradient, computed before. Its weights do not
change in between, so the exchange is atomic.

With `overlap` computation continues and no worker is ever held. Gradients of steps that end while
an answer is pending are applied with it, as their sample-weighted mean. Without, the active worker
waits for the answer. Only active workers wait, and only for passive ones, so no deadlock is
possible. A passive worker applies its gradients as its steps end. An active worker without a
present neighbour continues alone.

Receivers average two weights, half each. Codec rounding errors stay with their worker, so an
exchange preserves the sum of all weights. If the partner leaves, the active worker keeps its
weights.

Source: Lian et al., Asynchronous decentralized parallel stochastic gradient descent, ICML 2018.
Deviation: a passive worker that is computing answers when its step is done.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.codecs import decode_weights, encode_weights
from dlion_core.codecs.payload import Payload
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
from dlion_core.policies.parameters import AdpsgdParameters
from dlion_core.policies.peer_machine import PeerMachine
from dlion_core.policies.state_values import vector_from_state
from dlion_core.policies.synchronization import SyncRule
from dlion_core.topology.topology import ring_neighbours


def pairing_candidates(ranks: Sequence[Rank], rank: Rank, graph: str) -> list[Rank]:
    """Return the workers with which that worker may form a pair, all of the other side.

    >>> pairing_candidates([0, 1, 2, 3, 4], 0, "complete")
    [1, 3]
    >>> pairing_candidates([0, 1, 2, 3, 4], 0, "ring")
    [1]
    """
    place = ranks.index(rank)
    other_side = [peer for at, peer in enumerate(ranks) if (at - place) % 2]
    if graph == "complete":
        return other_side
    return [peer for peer in other_side if peer in ring_neighbours(ranks, rank)]


class AdPsgd(PeerMachine):
    """One worker, active or passive."""

    def __init__(self, context: PolicyContext, parameters: AdpsgdParameters) -> None:
        super().__init__(context, SyncRule(slack=None))
        self._is_active = context.ranks.index(context.rank) % 2 == 0
        self._overlap = parameters.overlap
        other_side = pairing_candidates(context.ranks, context.rank, parameters.graph)
        self._neighbours = context.neighbours.intersection(other_side)
        self._gradient_D: Flat | None = None
        """Mean of the gradients that are not applied yet, over `_samples` samples."""
        self._samples = 0
        self._asked: Rank | None = None
        self._asked_at = 0
        self._sent: Payload = b""
        self._requests: dict[Rank, tuple[int, Flat]] = {}
        self._answered: dict[Rank, int] = {}

    # ---- own steps -------------------------------------------------------------------------------

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """An active worker sends a request; the gradient waits for the answer."""
        self._take_in(step)
        if self._asked is not None:
            return self.progress()
        there = [rank for rank in self.synchronizer.active if rank in self._neighbours]
        if not (self._is_active and there):
            return self.progress()
        seed = (self.context.spec.trainer.seed, self.rank, step.iteration)
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

    def advance(self) -> list[Instruction]:
        """Answer requests, then apply the own gradient if no answer is pending."""
        instructions: list[Instruction] = []
        asking = sorted(set(self._requests).intersection(self.synchronizer.active))
        if asking:  # one per event: the first answer replaces the weights
            instructions = self._answer(asking[0])
        if self._gradient_D is not None and self._asked is None:
            instructions.append(self.update(self._gradient_D))
            self._gradient_D, self._samples = None, 0
        return instructions

    def blocking_peers(self) -> frozenset[Rank]:
        """Return the neighbour that owes an answer, unless computation overlaps."""
        if self._overlap or self._asked is None:
            return frozenset()
        return frozenset({self._asked})

    # ---- exchanges -------------------------------------------------------------------------------

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """Handle a request (passive worker) or the answer to an own request (active worker)."""
        if sender not in self._neighbours:
            raise ContractError(f"weights from worker {sender}, which is not a neighbour")
        if self._is_active:
            return self._answer_arrived(sender, message)
        if message.iteration > self._answered.get(sender, 0):
            self._answered[sender] = message.iteration
            theirs_D = self.peer_weights(message.payload)
            self._requests[sender] = (message.iteration, theirs_D)
        return []

    def _answer_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        if (self._asked, self._asked_at) != (sender, message.iteration):
            return []  # of an abandoned exchange
        self._asked = None
        theirs_D = self.peer_weights(message.payload)
        mean_D = self._mean(theirs_D, self._sent)
        self._sent = b""
        return [ReplaceWeights(mean_D)]

    def _answer(self, sender: Rank) -> list[Instruction]:
        iteration, theirs_D = self._requests.pop(sender)
        payload = self._coded()
        mean = ReplaceWeights(self._mean(theirs_D, payload))
        return [mean, self._weights(sender, iteration, payload)]

    def _mean(self, theirs_D: Flat, sent: Payload) -> Flat:
        """The mean of both sent values, with equal bits at both workers, plus the local rounding
        error."""
        ours_D = decode_weights(sent, self.size)
        mean_D: Flat = (ours_D + theirs_D) * np.float32(0.5)
        mean_D += self.weights_D - ours_D
        return mean_D

    def _coded(self) -> Payload:
        return encode_weights(self.weights_D, self.context.coding)

    def _weights(self, peer: Rank, iteration: int, payload: Payload) -> SendMessage:
        return SendMessage(
            peer, Message(MessageKind.WEIGHTS, iteration, self.local_batch_size, payload=payload)
        )

    # ---- members ---------------------------------------------------------------------------------

    def joined(self, rank: Rank, iteration: int) -> None:  # noqa: ARG002 - the hook's
        """No answer of the previous link will arrive."""
        if self._asked == rank:
            self._asked = None

    def left(self, rank: Rank) -> None:
        if self._asked == rank:
            self._asked = None
        self._requests.pop(rank, None)
        self._answered.pop(rank, None)

    def state(self) -> dict[str, Value]:
        state = super().state()
        if self._gradient_D is not None:
            state["adpsgd_gradient_D"] = self._gradient_D.copy()
            state["adpsgd_samples"] = self._samples
        return state

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        self._gradient_D, self._samples = None, 0
        if "adpsgd_gradient_D" in state:
            self._gradient_D = vector_from_state(state["adpsgd_gradient_D"])
            self._samples = int(state["adpsgd_samples"])
