"""Policy `fedat`: tiers of workers by response time; synchronous inside a tier, tiers independent.

One worker is the server, which trains as well. A worker does some local steps from the global
weights, with a proximal term towards them. It sends its weights to the server and waits for new
global ones. When all workers of a tier have answered, their sample-weighted mean is the tier's
model, and the tier's update count increases. The global weights become the mean of the tiers'
models, in which tier m of M has the update count of tier M+1-m as its weight (`tier_weights`). So
slow tiers count more. Weights travel as polylines in both directions.

No policy has a clock. The server ranks workers by the order of their answers in the first rounds,
which all start together, and cuts that order into tiers of equal size. Alternatively the manifest
declares the tiers. A worker that joins later, or misses one of those rounds, is in the slowest
tier.

Source: Chai et al., "FedAT: a high-performance and communication-efficient federated learning
system with asynchronous tiers", SC 2021. Ours: the server trains; all of a tier take part; only
tiers with a model and workers have a weight (published: all from the start, with the initial
weights, so that nothing would count until the slowest tier's first update); the optimizer's
momentum.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.codecs import GradientPart, require_finite
from dlion_core.codecs.polyline import decode_polyline, encode_polyline
from dlion_core.policies.aggregation import Contribution, sample_mean
from dlion_core.policies.claims.magnitudes import check_weights
from dlion_core.policies.claims.samples import check_samples
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.interface import (
    Flat,
    Instruction,
    LocalStepDone,
    Message,
    MessageKind,
    PolicyMachine,
    ReplaceWeights,
    SendMessage,
    Value,
)
from dlion_core.policies.parameters import FedatParameters
from dlion_core.policies.peer_machine import PeerMachine
from dlion_core.policies.state_values import ints_by_rank, vector_or_none, vectors_by_rank
from dlion_core.policies.synchronization import SyncRule

_TIER_OF, _PLACES, _MODEL, _COUNT = "tier_of_", "places_of_", "tier_model_", "tier_count_"
"""Prefixes of checkpoint keys, followed by a rank or a tier."""

_NONE_TAKEN = -1


def fedat(context: PolicyContext, parameters: FedatParameters) -> PolicyMachine:
    """Build the server's machine at the server, a client's elsewhere."""
    machine = FedatServer if parameters.server == context.rank else FedatClient
    return machine(context, parameters)


def tier_weights(counts: Sequence[int]) -> list[float]:
    """Return the weight of each tier's model, given the tiers' update counts, fastest first.

    >>> tier_weights([6, 3, 1])
    [0.1, 0.3, 0.6]
    """
    return [count / sum(counts) for count in reversed(counts)]


class FedatWorker(PeerMachine):
    """Common part of server and clients: rounds of local steps from an anchor."""

    def __init__(self, context: PolicyContext, parameters: FedatParameters) -> None:
        super().__init__(context, SyncRule(slack=None))
        self._parameters = parameters
        self._server = Rank(parameters.server)
        self._anchor_D: Flat | None = None
        self._steps = self._samples = 0  # of the round under way
        self._has_answered = False

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """Apply the own gradient plus the proximal term lambda (w - anchor)."""
        require_finite(step.gradient_D, "gradient")
        if self._anchor_D is None:
            self._anchor_D = self.weights_D.copy()
        self._steps += 1
        self._samples += step.local_batch_size
        pull = np.float32(self._parameters.proximal)
        gradient_D = step.gradient_D + pull * (self.weights_D - self._anchor_D)
        return [*self.progress(), self.update_alone(gradient_D)]

    def begin_round(self, weights_D: Flat) -> list[Instruction]:
        """Continue from those weights, which are the anchor."""
        self._anchor_D = weights_D.copy()
        self._steps = self._samples = 0
        self._has_answered = False
        return [ReplaceWeights(weights_D)]

    def _coded(self, weights_D: Flat) -> bytes:
        require_finite(weights_D, "weights")
        return encode_polyline(weights_D, self._parameters.decimals)

    def _decoded(self, payload: bytes | memoryview) -> Flat:
        return decode_polyline(payload, self.size, self._parameters.decimals)

    def _received(self, payload: bytes | memoryview) -> Flat:
        return check_weights(self._decoded(payload), self.weights_D)

    def state(self) -> dict[str, Value]:
        state = super().state()
        open_ = not self._has_answered  # a restart repeats an answered round
        state |= {"round_steps": open_ * self._steps, "round_samples": open_ * self._samples}
        if self._anchor_D is not None:
            state["anchor_D"] = self._anchor_D.copy()
        return state

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        self._steps, self._samples = int(state["round_steps"]), int(state["round_samples"])
        self._anchor_D = vector_or_none(state, "anchor_D")


class FedatClient(FedatWorker):
    """Sends results to the server and continues from its answers; alone while it is absent."""

    def __init__(self, context: PolicyContext, parameters: FedatParameters) -> None:
        super().__init__(context, parameters)
        self._taken = _NONE_TAKEN  # version of the last global weights

    def update_applied(self) -> list[Instruction]:
        if self._steps < self._parameters.local_steps:
            return []
        if self._server not in self.synchronizer.active:
            self.begin_round(self.weights_D)  # the global weights are outdated
            return []
        self._has_answered = True
        payload = self._coded(self.weights_D)
        own = self.synchronizer.own
        message = Message(MessageKind.WEIGHTS, own, self.local_batch_size, self._samples, payload)
        return [SendMessage(self._server, message)]

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """Start a new round from the global weights."""
        if sender != self._server:
            raise ContractError(f"weights of worker {sender}; the server is {self._server}")
        try:
            weights_D = self._received(message.payload)
        except ContractError:
            self._go_on_alone()
            raise
        if message.weights_version <= self._taken:
            return []
        self._taken = message.weights_version
        return self.begin_round(weights_D)

    def _go_on_alone(self) -> None:
        """Stop waiting for the server; the next result is due after a full round."""
        if self._has_answered:
            self.begin_round(self.weights_D)

    def blocking_peers(self) -> frozenset[Rank]:
        """Return the server, once it has this round's result."""
        return frozenset({self._server}) if self._has_answered else frozenset()

    def joined(self, rank: Rank, iteration: int) -> None:  # noqa: ARG002 - the hook's
        """A returned server may restart its version numbers."""
        if rank == self._server:
            self._taken = _NONE_TAKEN

    def left(self, rank: Rank) -> None:
        """Without a server each worker trains alone."""
        if rank == self._server:
            self._go_on_alone()


class FedatServer(FedatWorker):
    """Keeps the tiers' models, and is a client of itself."""

    def __init__(self, context: PolicyContext, parameters: FedatParameters) -> None:
        super().__init__(context, parameters)
        tiers = dict(zip(sorted(context.ranks), parameters.tiers, strict=False))
        self._tier_of: dict[Rank, int] = dict(tiers)
        self._places: dict[Rank, int] = {}  # sums of positions in the profiling rounds
        self._profiled = 0
        self._version = 0
        self._global_D: Flat | None = None
        self._models: dict[int, Flat] = {}
        self._counts: dict[int, int] = {}
        self._answers: dict[Rank, Contribution | None] = {}
        """Answers in order of arrival; None: invalid."""
        self._newcomers: set[Rank] = set()

    def update_applied(self) -> list[Instruction]:
        if self._steps >= self._parameters.local_steps:
            self._has_answered = True
            weights = GradientPart(self.weights_D.copy())
            self._answers[self.rank] = Contribution(self._samples, weights)
        return []

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """Record a worker's result. Do not wait for a replacement of an invalid one."""
        self._answers.pop(sender, None)
        self._answers[sender] = None
        samples = message.weights_version
        most = self._parameters.local_steps * self.context.max_batch_at(message.iteration)
        check_samples("weights", samples, most)
        weights = GradientPart(self._received(message.payload))
        self._answers[sender] = Contribution(samples, weights)
        return []

    def joined(self, rank: Rank, iteration: int) -> None:  # noqa: ARG002 - the hook's
        """Give it the global weights; its tier waits for it once it sends a message. While there
        are no global weights, its result may have arrived before this event."""
        if self._global_D is not None:
            self._answers.pop(rank, None)
            self._newcomers.add(rank)

    def left(self, rank: Rank) -> None:
        """Do not wait for it. Its result counts; the model of a tier without workers does not."""
        self._newcomers.discard(rank)
        inhabited = {self._tier(one) for one in self._workers()}
        self._models = {tier: one for tier, one in self._models.items() if tier in inhabited}

    # ---- tiers -----------------------------------------------------------------------------------

    @property
    def _is_profiling(self) -> bool:
        return not self._tier_of

    def _tier(self, rank: Rank) -> int:
        """All workers share a tier during profiling; a worker that missed it is in the slowest."""
        if self._is_profiling:
            return 0
        return self._tier_of.get(rank, max(self._tier_of.values()))

    def _workers(self) -> list[Rank]:
        """Workers that are waited for, including this one, in rank order."""
        return sorted([self.rank, *self.synchronizer.in_step()])

    def _awaited(self, tier: int) -> list[Rank]:
        workers = self._workers()
        return [r for r in workers if self._tier(r) == tier and r not in self._answers]

    def blocking_peers(self) -> frozenset[Rank]:
        """Return workers that have not sent their result to this worker's own tier."""
        if not self._has_answered:
            return frozenset()
        return frozenset(self._awaited(self._tier(self.rank)))

    def advance(self) -> list[Instruction]:
        """End rounds of complete tiers; send the weights to new members."""
        instructions: list[Instruction] = []
        for tier in sorted({self._tier(rank) for rank in self._answers}):
            if not self._awaited(tier):
                instructions += self._end_round(tier)
        if self._newcomers and self._global_D is not None:
            instructions += self._give(self._newcomers, self._coded(self._global_D))
        self._newcomers.clear()
        return instructions

    def _end_round(self, tier: int) -> list[Instruction]:
        """Compute the tier's model from its results, and the global weights from all models."""
        members = [rank for rank in self._answers if self._tier(rank) == tier]
        answers = {rank: self._answers.pop(rank) for rank in members}
        useful = [answer for _, answer in sorted(answers.items()) if answer is not None]
        if useful:
            model_D = sample_mean(useful, self.size)
            if self._is_profiling:
                self._global_D = model_D
                self._profile(members)
            else:
                self._models[tier] = model_D
                self._counts[tier] = self._counts.get(tier, 0) + 1
                self._global_D = self._combined()
        self._version += 1
        if self._global_D is None:
            self._global_D = self.weights_D.copy()
        payload = self._coded(self._global_D)
        own = self.begin_round(self._decoded(payload)) if self.rank in members else []
        return [*self._give(set(members), payload), *own]

    def _give(self, ranks: set[Rank], payload: bytes) -> list[Instruction]:
        iteration = max(1, self.synchronizer.own)
        message = Message(
            MessageKind.WEIGHTS, iteration, weights_version=self._version, payload=payload
        )
        return [SendMessage(rank, message) for rank in self.synchronizer.active if rank in ranks]

    def _profile(self, members: Sequence[Rank]) -> None:
        """Record a profiling round; after the last one, assign the tiers."""
        known = self._places if self._profiled else dict.fromkeys(members, 0)
        self._places = {  # drop workers that missed a round: their sums are not comparable
            rank: known[rank] + place for place, rank in enumerate(members) if rank in known
        }
        self._profiled += 1
        if self._profiled < self._parameters.profile_rounds:
            return
        order = sorted(self._places, key=lambda rank: (self._places[rank], rank))
        tiers = min(self._parameters.tier_count, len(order))
        self._tier_of = {rank: 1 + at * tiers // len(order) for at, rank in enumerate(order)}

    def _combined(self) -> Flat:
        """Mean of the tiers' models, each weighted by its mirrored tier's count."""
        tiers = sorted(self._models)
        combined_D = np.zeros(self.size, np.float32)
        weights = tier_weights([self._counts[tier] for tier in tiers])
        for tier, weight in zip(tiers, weights, strict=True):
            combined_D += np.float32(weight) * self._models[tier]
        return combined_D

    def state(self) -> dict[str, Value]:
        state: dict[str, Value] = {
            **super().state(),
            "version": self._version,
            "profiled": self._profiled,
            **{f"{_TIER_OF}{rank}": tier for rank, tier in self._tier_of.items()},
            **{f"{_PLACES}{rank}": places for rank, places in self._places.items()},
            **{f"{_COUNT}{tier}": count for tier, count in self._counts.items()},
            **{f"{_MODEL}{tier}": model_D.copy() for tier, model_D in self._models.items()},
        }
        if self._global_D is not None:
            state["global_D"] = self._global_D.copy()
        return state

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        self._version, self._profiled = int(state["version"]), int(state["profiled"])
        self._tier_of = ints_by_rank(state, _TIER_OF)
        self._places = ints_by_rank(state, _PLACES)
        self._counts = {int(tier): count for tier, count in ints_by_rank(state, _COUNT).items()}
        models = vectors_by_rank(state, _MODEL)
        self._models = {int(tier): model_D for tier, model_D in models.items()}
        self._global_D = vector_or_none(state, "global_D")
