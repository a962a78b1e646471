"""Policy `twostep`: accumulate velocity per link until it passes the link's threshold.

Step one. At each local step, with momentum m, for every link l:

    u <- m u + g        momentum correction: velocity is accumulated, not gradient
    v_l <- v_l + u
    release v_l where |v_l| >= W_l;  v_l <- v_l - released

The threshold W_l follows from the cost model. A release of b bytes takes T_c = latency + b /
bandwidth. It may take `ratio` of the time computed since the last one. In iterations of this
worker, let B be the measured bytes per iteration of the link, d its latency, and k the iterations
since the last release. Then b <= B min(ratio, ratio k - d), and W_l is the lowest magnitude whose
entries fit, at least `threshold`. So a slower or more distant link has a higher threshold, and
releases less and less often. Step two encodes the release: half floats and the shortest encoding of
positions.

Updates are asynchronous (`delayed_gradients`: receivers *add* each on arrival, weighted by the
manifest; the state contains their staleness). A worker applies its own velocity whole and at once,
so the optimizer must have no momentum. Codec rounding errors stay in v_l. If a peer leaves, its
link's v_l is dropped.

Combining: at every `combineEverySteps` iterations the first worker (by rank) of each site sends its
model to all workers of other sites. A receiver's weights represent its own site. It takes the mean,
weighted by the sites' samples, of the models received since its own last turn. This requires
`allToAll`, where a worker knows all samples.

Source: Sudharsan et al., "Toward distributed, global, deep learning using IoT devices", IEEE
Internet Computing 2021, and its slides: both steps, the cost model, a high threshold on a poor
connection; combining from the same authors' ML-Model-Combining (weighted average; theirs is of
predictions). As recalled: momentum correction in the form of `dgc`, without masking. Ours: how the
cost sets the threshold, per link. Data subsampling is part of the dataset (docs/data.md).
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.codecs import (
    AnyCoding,
    GradientPart,
    max_kept_entries,
    require_finite,
)
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.gradient.delayed_gradients import DelayedGradientMachine, StalenessRule
from dlion_core.policies.gradient.entries import Residual, largest_indices
from dlion_core.policies.gradient.gradient_selectors import OutgoingPayloads, Payload
from dlion_core.policies.interface import (
    AverageWeights,
    BudgetsChanged,
    Flat,
    Instruction,
    LocalStepDone,
    Message,
    SendWeights,
    Value,
)
from dlion_core.policies.parameters import TwostepParameters
from dlion_core.policies.state_values import ints_by_rank, vectors_by_rank

_GATHERED = "twostep_gathered_D_of_"
_WAITED = "twostep_steps_since_"
_COMBINED = "twostep_combined_with_"
"""Prefixes of checkpoint keys, each followed by a rank."""


def room_for_release(
    budget_bytes: int | None, delay_steps: float, waited_steps: int, ratio: float
) -> float:
    """Return the maximum bytes b with delay + b / budget <= ratio * waited, at most ratio * budget.

    >>> room_for_release(1000, 0.25, 1, 1.0), room_for_release(1000, 2.5, 2, 1.0)
    (750.0, 0.0)
    """
    if budget_bytes is None:
        return float("inf") if ratio * waited_steps > delay_steps else 0.0
    return budget_bytes * max(0.0, min(ratio, ratio * waited_steps - delay_steps))


class LinkReleases(StalenessRule):
    """The velocity, and each link's unreleased part and threshold."""

    def __init__(self, size: int, codec: AnyCoding, parameters: TwostepParameters) -> None:
        self._size, self._codec, self._parameters = size, codec, parameters
        self._velocity_D = np.zeros(size, np.float32)
        self._gathered: dict[Rank, Residual] = {}
        self._waited: dict[Rank, int] = {}
        self.threshold: dict[Rank, float] = {}
        """Last threshold per link; infinite if the link could carry nothing."""

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], links: BudgetsChanged
    ) -> OutgoingPayloads:
        """Return a payload for each link with entries above its threshold. The whole velocity
        counts locally."""
        require_finite(gradient_D, "gradient")
        velocity_D = np.float32(self._parameters.momentum) * self._velocity_D + gradient_D
        require_finite(velocity_D, "velocity")
        self._velocity_D = velocity_D
        payloads: dict[Rank, Payload] = {}
        for peer in peers:
            room_bytes = self._gather(peer, links)
            coded = self._gathered[peer].send(self._passing(peer, room_bytes), self._codec)
            if coded.payload is not None:
                payloads[peer] = coded.payload
                self._waited[peer] = 0
        return OutgoingPayloads(payloads, GradientPart(velocity_D))

    def _gather(self, peer: Rank, links: BudgetsChanged) -> float:
        """Add the velocity for that link; return the bytes that may be released now."""
        self._gathered.setdefault(peer, Residual.zeros(self._size)).value_D += self._velocity_D
        waited = self._waited[peer] = self._waited.get(peer, 0) + 1
        budget, delay = links.budget_bytes.get(peer), links.delay_steps.get(peer, 0.0)
        return room_for_release(budget, delay, waited, self._parameters.ratio)

    def _passing(self, peer: Rank, room_bytes: float) -> NDArray[np.intp]:
        """Set the link's threshold; return the positions that pass it."""
        value_D = self._gathered[peer].value_D
        fits = self._size
        if room_bytes != float("inf"):
            fits = max_kept_entries(int(room_bytes), self._size, self._codec)
        if not fits:
            self.threshold[peer] = float("inf")
            return np.empty(0, np.intp)
        where = largest_indices(value_D, fits)
        lowest = float(np.abs(value_D[where]).min()) if fits < self._size and where.size else 0.0
        self.threshold[peer] = max(lowest, self._parameters.threshold)
        return where[np.abs(value_D[where]) >= np.float32(self.threshold[peer])]

    def forget(self, reader: Rank) -> None:
        for kept in (self._gathered, self._waited, self.threshold):
            kept.pop(reader, None)

    def state(self) -> dict[str, Value]:
        """Return the velocity, and per link the unreleased part and the steps since a release."""
        return {
            "twostep_velocity_D": self._velocity_D.copy(),
            **{f"{_GATHERED}{peer}": one.value_D.copy() for peer, one in self._gathered.items()},
            **{f"{_WAITED}{peer}": waited for peer, waited in self._waited.items()},
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        self._velocity_D = np.array(state["twostep_velocity_D"], np.float32)
        self._waited = ints_by_rank(state, _WAITED)
        gathered = vectors_by_rank(state, _GATHERED)
        self._gathered = {peer: Residual(value_D) for peer, value_D in gathered.items()}


class TwoStep(DelayedGradientMachine):
    """Asynchronous updates from releases, and combination of the sites' models."""

    def __init__(self, context: PolicyContext, parameters: TwostepParameters) -> None:
        self.releases = LinkReleases(context.layout.size, context.coding, parameters)
        super().__init__(context, self.releases, bound=parameters.bound, server=None, share=True)
        self._every = parameters.combine_every_steps
        self._turn = 0
        """Last own turn, in multiples of `combineEverySteps`."""
        self._combined: dict[Rank, int] = {}
        """Iteration of the last combined model of each worker."""
        self._taken_samples = 0
        """Samples of the sites with models that were combined since the last turn."""

    def stepped(self, step: LocalStepDone) -> list[Instruction]:
        return super().stepped(step) + self._combine(step.iteration)

    def _combine(self, iteration: int) -> list[Instruction]:
        """Send this site's model to workers of other sites if it is this worker's turn."""
        if not self._every or iteration // self._every <= self._turn:
            return []
        self._turn, self._taken_samples = iteration // self._every, 0
        site, members = self._site_of(self.rank), self.synchronizer.active
        if any(self._site_of(peer) == site and peer < self.rank for peer in members):
            return []
        return [SendWeights(peer, iteration) for peer in members if self._site_of(peer) != site]

    def weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        if not self._every or self._site_of(sender) == self._site_of(self.rank):
            raise ContractError(f"weights of worker {sender}: its model is not combined here")
        weights_D = self.peer_weights(message.payload)
        if message.iteration <= self._combined.get(sender, 0):
            return []
        self._combined[sender] = message.iteration
        theirs = self._samples_of(sender)
        self._taken_samples += theirs
        fraction = theirs / (self._samples_of(self.rank) + self._taken_samples)
        return [AverageWeights(weights_D, fraction, sender)]

    def _samples_of(self, rank: Rank) -> int:
        """Samples per iteration of that worker's site."""
        sizes = {rank: self._batch_of.get(rank, self.local_batch_size)} | self.batch_sizes()
        site = self._site_of(rank)
        return sum(size for peer, size in sizes.items() if self._site_of(peer) == site)

    def _site_of(self, rank: Rank) -> str | None:
        return self.context.sites.get(rank)

    def left(self, rank: Rank) -> None:
        super().left(rank)
        self._combined.pop(rank, None)

    def state(self) -> dict[str, Value]:
        return {
            **super().state(),
            "twostep_turn": self._turn,
            "twostep_taken_samples": self._taken_samples,
            **{f"{_COMBINED}{rank}": at for rank, at in self._combined.items()},
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        passed = int(state["iteration"]) // self._every if self._every else 0
        self._turn = max(passed, int(state["twostep_turn"]))
        self._taken_samples = int(state["twostep_taken_samples"])
        self._combined = ints_by_rank(state, _COMBINED)
