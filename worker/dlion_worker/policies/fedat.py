"""Policy `fedat`: workers in tiers by response time; in step inside a tier, tiers at own pace.

One worker is the server; it trains as well. A worker descends for some local steps from the global
weights, pulled back to them by a proximal term, sends its weights to the server and is held until
it has the new global ones. When all of a tier have answered, their mean by samples is that tier's
model, its count of updates goes up, and the global weights become the mean of the tiers' models in
which tier m of M weighs as tier M+1-m has updates (`tier_weights`): slow tiers count more. Weights
travel as polylines in both directions.

No policy has a clock: the server ranks workers by the order in which their answers come in the
first rounds, in which all start together, and cuts that order into tiers of equal size; or the
manifest declares the tiers. Who comes later, or misses one of those rounds, is of the slowest.

Source: Chai et al., "FedAT: a high-performance and communication-efficient federated learning
system with asynchronous tiers", SC 2021. Ours: the server trains; all of a tier take part; only
tiers that have a model and workers weigh (published: from the start, with the initial weights, so
that until the slowest tier's first update nothing would count); the optimizer's momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_worker.codecs import require_finite
from dlion_worker.codecs.polyline import decode_polyline, encode_polyline
from dlion_worker.policies.headers import by_rank
from dlion_worker.policies.interface import (
    Instruction,
    LocalStepDone,
    Message,
    MessageKind,
    Replace,
    Send,
)
from dlion_worker.policies.peer_machine import PeerMachine, flat
from dlion_worker.policies.synchronization import Rule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlion_worker.policies.building import Context
    from dlion_worker.policies.interface import Flat, Machine, Value
    from dlion_worker.policies.weight_parameters import FedatParameters

_TIER_OF, _PLACES, _MODEL, _COUNT = "tier_of_", "places_of_", "tier_model_", "tier_count_"
"""Before a rank or a tier, in a checkpoint."""

_NONE_TAKEN = -1


def fedat(context: Context, parameters: FedatParameters) -> Machine:
    """The server's machine at the one that has its role, a client's elsewhere."""
    server = Rank(parameters.server)
    if server == context.rank:
        return FedatServer(context, parameters, server)
    return FedatClient(context, parameters, server)


@dataclass(frozen=True)
class Answer:
    """What a worker has come to in a round: so many samples further, these weights."""

    samples: int
    weights_D: Flat


def tier_weights(counts: Sequence[int]) -> list[float]:
    """What each tier's model weighs, given the tiers' counts of updates, fastest tier first.

    >>> tier_weights([6, 3, 1])
    [0.1, 0.3, 0.6]
    """
    return [count / sum(counts) for count in reversed(counts)]


def mean_of(answers: Sequence[Answer]) -> Flat:
    """The answers' weights' mean by samples, summed in the order given, in float32."""
    samples = sum(answer.samples for answer in answers)
    mean_D = np.zeros_like(answers[0].weights_D)
    for answer in answers:
        mean_D += np.float32(answer.samples / samples) * answer.weights_D
    return mean_D


class FedatWorker(PeerMachine):
    """What server and clients do alike: rounds of local steps from an anchor."""

    def __init__(self, context: Context, parameters: FedatParameters, server: Rank) -> None:
        super().__init__(context, Rule(slack=None, spare=0, barrier=False))
        self._parameters = parameters
        self._server = server
        self._anchor_D: Flat | None = None
        self._steps = self._samples = 0  # of the round under way
        self._has_answered = False

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        """The own gradient, with what pulls back to the anchor: lambda (w - anchor)."""
        require_finite(step.gradient_D, "gradient")
        if self._anchor_D is None:
            self._anchor_D = self.weights_D.copy()
        self._steps += 1
        self._samples += step.local_batch_size
        pull = np.float32(self._parameters.proximal)
        gradient_D = step.gradient_D + pull * (self.weights_D - self._anchor_D)
        return [*self.progress(), self.update_alone(gradient_D)]

    def _start_round(self, weights_D: Flat) -> list[Instruction]:
        self._anchor_D = weights_D.copy()
        self._steps = self._samples = 0
        self._has_answered = False
        return [Replace(weights_D)]

    def _coded(self, weights_D: Flat) -> bytes:
        require_finite(weights_D, "weights")
        return encode_polyline(weights_D, self._parameters.decimals)

    def _decoded(self, payload: bytes | memoryview) -> Flat:
        return decode_polyline(payload, self.size, self._parameters.decimals)

    def progress_arrived(self, sender: Rank, message: Message) -> None:
        """How far a peer is; rounds do not depend on it."""

    def state(self) -> dict[str, Value]:
        """With the round under way."""
        state = super().state()
        open_ = not self._has_answered  # after a restart an answered round is begun anew
        state |= {"round_steps": open_ * self._steps, "round_samples": open_ * self._samples}
        if self._anchor_D is not None:
            state["anchor_D"] = self._anchor_D.copy()
        return state

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave; before any other event."""
        super().restore(state)
        self._steps, self._samples = int(state["round_steps"]), int(state["round_samples"])
        self._anchor_D = flat(state["anchor_D"]) if "anchor_D" in state else None


class FedatClient(FedatWorker):
    """Answers the server, and goes on from what it is given; alone while the server is away."""

    def __init__(self, context: Context, parameters: FedatParameters, server: Rank) -> None:
        super().__init__(context, parameters, server)
        self._taken = _NONE_TAKEN  # the version of the global weights last taken over

    def descended(self) -> list[Instruction]:
        """Answers, where the round is over."""
        if self._steps < self._parameters.local_steps:
            return []
        if self._server not in self.synchronizer.active:
            self._begin_alone()
            return []
        self._has_answered = True
        payload = self._coded(self.weights_D)
        own = self.synchronizer.own
        message = Message(MessageKind.WEIGHTS, own, self.local_batch_size, self._samples, payload)
        return [Send(self._server, message)]

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """The global weights: a new round begins from them.

        Raises:
            ContractError: of a worker that is no server, or not this model's weights.
        """
        if sender != self._server:
            raise ContractError(f"weights of worker {sender}; the server is {self._server}")
        try:
            weights_D = self._decoded(message.payload)
        except ContractError:
            self._go_on_alone()
            raise
        if message.weights_version <= self._taken:
            return []
        self._taken = message.weights_version
        return self._start_round(weights_D)

    def _go_on_alone(self) -> None:
        """Nothing better is waited for; the next answer is after as many steps again."""
        if self._has_answered:
            self._begin_alone()

    def _begin_alone(self) -> None:
        """Old global weights no longer pull."""
        self._anchor_D = self.weights_D.copy()
        self._steps = self._samples = 0
        self._has_answered = False

    def held_for(self) -> frozenset[Rank]:
        """The server, once it has this round's answer."""
        return frozenset({self._server}) if self._has_answered else frozenset()

    def joined(self, rank: Rank, iteration: int) -> None:  # noqa: ARG002 - the hook's
        """A server that is back may count its versions anew."""
        if rank == self._server:
            self._taken = _NONE_TAKEN

    def left(self, rank: Rank) -> None:
        """Without a server each trains by itself."""
        if rank == self._server:
            self._go_on_alone()

    def go_on(self) -> list[Instruction]:
        """All is said as it comes."""
        return []


class FedatServer(FedatWorker):
    """Keeps the tiers' models; a client of its own, too."""

    def __init__(self, context: Context, parameters: FedatParameters, server: Rank) -> None:
        super().__init__(context, parameters, server)
        tiers = dict(zip(sorted(context.ranks), parameters.tiers, strict=False))
        self._tier_of: dict[Rank, int] = dict(tiers)
        self._places: dict[Rank, int] = {}  # sums of places in the rounds of the profile
        self._profiled = 0
        self._version = 0
        self._global_D: Flat | None = None
        self._models: dict[int, Flat] = {}
        self._counts: dict[int, int] = {}
        self._answers: dict[Rank, Answer | None] = {}
        """In the order in which they came; None: it made no sense."""
        self._newcomers: set[Rank] = set()

    def descended(self) -> list[Instruction]:
        """The own answer, where the round is over."""
        if self._steps >= self._parameters.local_steps:
            self._has_answered = True
            self._answers[self.context.rank] = Answer(self._samples, self.weights_D.copy())
        return []

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        """A worker's answer; nonsense is not waited for.

        Raises:
            ContractError: after no samples or too many, or not this model's weights.
        """
        self._answers.pop(sender, None)
        self._answers[sender] = None
        samples = message.weights_version
        most = self._parameters.local_steps * self.context.most_samples
        if not 1 <= samples <= most:
            raise ContractError(f"weights after {samples} samples; allowed: 1 to {most}")
        self._answers[sender] = Answer(samples, self._decoded(message.payload))
        return []

    def joined(self, rank: Rank, iteration: int) -> None:  # noqa: ARG002 - the hook's
        """Is given the global weights; its tier waits for it once it has been heard. Before there
        are any, an answer may have come ahead of the word that its link is up."""
        if self._global_D is not None:
            self._answers.pop(rank, None)
            self._newcomers.add(rank)

    def left(self, rank: Rank) -> None:
        """It is not waited for; what it has answered still counts, a deserted tier's model not."""
        self._newcomers.discard(rank)
        inhabited = {self._tier(one) for one in self._workers()}
        self._models = {tier: one for tier, one in self._models.items() if tier in inhabited}

    # ---- tiers -----------------------------------------------------------------------------------

    @property
    def _is_profiling(self) -> bool:
        return not self._tier_of

    def _tier(self, rank: Rank) -> int:
        """While workers are profiled all are in one; who missed any of it is of the slowest."""
        if self._is_profiling:
            return 0
        return self._tier_of.get(rank, max(self._tier_of.values()))

    def _workers(self) -> list[Rank]:
        """Those that are counted on, this one included, in rank order."""
        return sorted([self.context.rank, *self.synchronizer.in_step()])

    def _awaited(self, tier: int) -> list[Rank]:
        workers = self._workers()
        return [r for r in workers if self._tier(r) == tier and r not in self._answers]

    def held_for(self) -> frozenset[Rank]:
        """Whose answers this worker's own tier waits for."""
        if not self._has_answered:
            return frozenset()
        return frozenset(self._awaited(self._tier(self.context.rank)))

    def go_on(self) -> list[Instruction]:
        """Ends the rounds of tiers that have answered; newcomers are given the weights."""
        told: list[Instruction] = []
        for tier in sorted({self._tier(rank) for rank in self._answers}):
            if not self._awaited(tier):
                told += self._end_round(tier)
        if self._newcomers and self._global_D is not None:
            told += self._give(self._newcomers, self._coded(self._global_D))
        self._newcomers.clear()
        return told

    def _end_round(self, tier: int) -> list[Instruction]:
        """A tier's model out of its answers, and the global weights out of all tiers'."""
        members = [rank for rank in self._answers if self._tier(rank) == tier]
        answers = {rank: self._answers.pop(rank) for rank in members}
        useful = [answer for _, answer in sorted(answers.items()) if answer is not None]
        if useful:
            model_D = mean_of(useful)
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
        own = self._start_round(self._decoded(payload)) if self.context.rank in members else []
        return [*self._give(set(members), payload), *own]

    def _give(self, ranks: set[Rank], payload: bytes) -> list[Instruction]:
        iteration = max(1, self.synchronizer.own)
        message = Message(
            MessageKind.WEIGHTS, iteration, weights_version=self._version, payload=payload
        )
        return [Send(rank, message) for rank in self.synchronizer.active if rank in ranks]

    def _profile(self, members: Sequence[Rank]) -> None:
        """One more round in which all have started together; at last, the tiers."""
        known = self._places if self._profiled else dict.fromkeys(members, 0)
        self._places = {  # who has missed a round has the smaller sum, and is not compared
            rank: known[rank] + place for place, rank in enumerate(members) if rank in known
        }
        self._profiled += 1
        if self._profiled < self._parameters.profile_rounds:
            return
        order = sorted(self._places, key=lambda rank: (self._places[rank], rank))
        tiers = min(self._parameters.tier_count, len(order))
        self._tier_of = {rank: 1 + at * tiers // len(order) for at, rank in enumerate(order)}

    def _combined(self) -> Flat:
        """The tiers' models, each by its mirrored tier's count."""
        tiers = sorted(self._models)
        combined_D = np.zeros(self.size, np.float32)
        weights = tier_weights([self._counts[tier] for tier in tiers])
        for tier, weight in zip(tiers, weights, strict=True):
            combined_D += np.float32(weight) * self._models[tier]
        return combined_D

    # ---- checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Value]:
        """With the tiers and their models; answers of rounds under way are asked for anew."""
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
        """Takes back what `state` gave; before any other event."""
        super().restore(state)
        self._version, self._profiled = int(state["version"]), int(state["profiled"])
        self._tier_of = by_rank(state, _TIER_OF)
        self._places = by_rank(state, _PLACES)
        self._counts = {int(tier): count for tier, count in by_rank(state, _COUNT).items()}
        self._models = {
            int(name.removeprefix(_MODEL)): flat(value)
            for name, value in state.items()
            if name.startswith(_MODEL)
        }
        self._global_D = flat(state["global_D"]) if "global_D" in state else None
