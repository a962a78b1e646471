"""Policy `twostep`: velocity is gathered for each link until it passes the link's threshold.

Step one. At each local step, with momentum m, for every link l:

    u <- m u + g        momentum correction: velocity is gathered, not gradient
    v_l <- v_l + u
    release v_l where |v_l| >= W_l;  v_l <- v_l - released

The threshold W_l comes of the cost model. A release of b bytes takes T_c = latency + b / bandwidth;
it may take `ratio` of the time computed since the last one. In iterations of this worker, with the
measured bytes that the link carries in one, B, its latency d, and k iterations since the last
release, that is b <= B min(ratio, ratio k - d): W_l is the lowest magnitude whose entries fit,
never below `threshold`. A slower or farther link so has the higher threshold, releases less and
less often. Step two codes what is released: half floats, and whichever positions are shortest.

Updates are asynchronous (`delayed`: receivers *add* each as it comes, weighted by the manifest; how
stale they were stands in the state). A worker takes its own velocity whole and at once, so the
optimizer is to have no momentum. What a codec rounds off stays in v_l; a peer that leaves takes its
link's v_l with it.

Combining: at every `combineEverySteps` iterations the first worker (by rank) of each site sends its
model to all workers of other sites. A receiver, whose weights stand for its own site's, takes the
mean by the sites' samples of what has come since its own last turn. That asks for `allToAll`, where
a worker hears of all samples.

Source: Sudharsan et al., "Toward distributed, global, deep learning using IoT devices", IEEE
Internet Computing 2021, and its slides: both steps, the cost model, a high threshold on a poor
connection; combining from the same authors' ML-Model-Combining (weighted average; theirs is of
predictions). As recalled: momentum correction in the form of `dgc`, without masking. Ours: how the
cost sets the threshold, per link. Thinning the data is the data set's (docs/data.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_worker.codecs import (
    AnyCoding,
    GradientPart,
    decode_weights,
    kept_that_fit,
    require_finite,
)
from dlion_worker.policies.delayed import DelayedMachine
from dlion_worker.policies.entries import Residual, largest
from dlion_worker.policies.headers import by_rank
from dlion_worker.policies.interface import Mix, SendWeights
from dlion_worker.policies.sending import Outgoing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from dlion_worker.policies.building import Context
    from dlion_worker.policies.interface import (
        BudgetsChanged,
        Flat,
        Instruction,
        LocalStepDone,
        Machine,
        Message,
        Value,
    )
    from dlion_worker.policies.parameters import TwostepParameters
    from dlion_worker.policies.sending import Payload

_GATHERED = "twostep_gathered_D_of_"
_WAITED = "twostep_steps_since_"
_COMBINED = "twostep_combined_with_"
"""Before a rank, in a checkpoint."""


def twostep(context: Context, parameters: TwostepParameters) -> Machine:
    """Velocity to every peer, entry by entry, once it passes that link's threshold."""
    return TwoStep(context, parameters)


def room_for_release(
    budget_bytes: int | None, delay_steps: float, waited_steps: int, ratio: float
) -> float:
    """The most bytes b with delay + b / budget <= ratio * waited, no more than ratio * budget.

    >>> room_for_release(1000, 0.25, 1, 1.0), room_for_release(1000, 2.5, 2, 1.0)
    (750.0, 0.0)
    """
    if budget_bytes is None:
        return float("inf") if ratio * waited_steps > delay_steps else 0.0
    return budget_bytes * max(0.0, min(ratio, ratio * waited_steps - delay_steps))


class Releases:
    """The velocity, what each link has not released of it, and each link's threshold."""

    own_as_peers = False

    def __init__(self, size: int, codec: AnyCoding, parameters: TwostepParameters) -> None:
        self._size, self._codec, self._parameters = size, codec, parameters
        self._velocity_D = np.zeros(size, np.float32)
        self._gathered: dict[Rank, Residual] = {}
        self._waited: dict[Rank, int] = {}
        self.threshold: dict[Rank, float] = {}
        """The last of each link; infinite where the link carried nothing at all."""

    def prepare(self, gradient_D: Flat, peers: Sequence[Rank], links: BudgetsChanged) -> Outgoing:
        """A payload for each link on which something passes; the whole velocity counts here.

        Raises:
            ValueError: an entry is not finite.
        """
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
        return Outgoing(payloads, GradientPart(velocity_D))

    def _gather(self, peer: Rank, links: BudgetsChanged) -> float:
        """One velocity more for that link; the bytes that may be released on it now."""
        self._gathered.setdefault(peer, Residual(self._size)).value_D += self._velocity_D
        waited = self._waited[peer] = self._waited.get(peer, 0) + 1
        budget, delay = links.budget_bytes.get(peer), links.delay_steps.get(peer, 0.0)
        return room_for_release(budget, delay, waited, self._parameters.ratio)

    def _passing(self, peer: Rank, room_bytes: float) -> NDArray[np.intp]:
        """Positions that pass the link's threshold, which is set here."""
        value_D = self._gathered[peer].value_D
        fits = self._size
        if room_bytes != float("inf"):
            fits = kept_that_fit(int(room_bytes), self._size, self._codec)
        if not fits:
            self.threshold[peer] = float("inf")
            return np.empty(0, np.intp)
        where = largest(value_D, fits)
        lowest = float(np.abs(value_D[where]).min()) if fits < self._size and where.size else 0.0
        self.threshold[peer] = max(lowest, self._parameters.threshold)
        return where[np.abs(value_D[where]) >= np.float32(self.threshold[peer])]

    def correct(self, gradient_D: Flat, part: GradientPart, sender: Rank) -> None:
        """Old velocity counts as it is."""

    def applied(self, part: GradientPart) -> None:
        """Nothing is counted."""

    def read(self, reader: Rank) -> None:
        """Nothing is kept of what a peer has read."""

    def forget(self, reader: Rank) -> None:
        """What was gathered for its link is void."""
        for kept in (self._gathered, self._waited, self.threshold):
            kept.pop(reader, None)

    def state(self) -> dict[str, Value]:
        """Velocity, and for each link what waits and since when."""
        return {
            "twostep_velocity_D": self._velocity_D.copy(),
            **{f"{_GATHERED}{peer}": one.value_D.copy() for peer, one in self._gathered.items()},
            **{f"{_WAITED}{peer}": waited for peer, waited in self._waited.items()},
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave."""
        self._velocity_D = np.array(state["twostep_velocity_D"], np.float32)
        self._waited = by_rank(state, _WAITED)
        self._gathered = {}
        for name, value_D in state.items():
            if name.startswith(_GATHERED):
                gathered = self._gathered[Rank(int(name.removeprefix(_GATHERED)))] = Residual(0)
                gathered.value_D = np.array(value_D, np.float32)


class TwoStep(DelayedMachine):
    """Asynchronous updates of what links release, and models of sites combined."""

    def __init__(self, context: Context, parameters: TwostepParameters) -> None:
        self.releases = Releases(context.layout.size, context.coding, parameters)
        super().__init__(context, self.releases, bound=parameters.bound, server=None, share=True)
        self._sites = context.sites
        self._every = parameters.combine_every_steps
        self._turn = 0
        """The last of this worker's own, in multiples of `combineEverySteps`."""
        self._combined: dict[Rank, int] = {}
        """The iteration of the last model that was taken in of each worker."""
        self._taken_samples = 0
        """Of the sites whose models were taken in since the last turn."""

    def _step_done(self, step: LocalStepDone) -> list[Instruction]:
        return super()._step_done(step) + self._combine(step.iteration)

    def _combine(self, iteration: int) -> list[Instruction]:
        """This site's model to the workers of the others, where it is this worker's turn."""
        if not self._every or iteration // self._every <= self._turn:
            return []
        self._turn, self._taken_samples = iteration // self._every, 0
        site, members = self._sites.get(self._rank), self._synchronizer.active
        if any(self._sites.get(peer) == site and peer < self._rank for peer in members):
            return []
        return [SendWeights(peer, iteration) for peer in members if self._sites.get(peer) != site]

    def _weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        if not self._every or self._sites.get(sender) == self._sites.get(self._rank):
            raise ContractError(f"weights of worker {sender}, whose model is not combined here")
        weights_D = decode_weights(message.payload, self._size)
        if message.iteration <= self._combined.get(sender, 0):
            return []
        self._combined[sender] = message.iteration
        theirs = self._samples_of(sender)
        self._taken_samples += theirs
        fraction = theirs / (self._samples_of(self._rank) + self._taken_samples)
        return [Mix(weights_D, fraction, sender)]

    def _samples_of(self, rank: Rank) -> int:
        """One iteration's, over the site of that worker."""
        site = self._sites.get(rank)
        sizes = {rank: self._batch_of.get(rank, self._batch_size)} | self._batch_sizes()
        return sum(size for peer, size in sizes.items() if self._sites.get(peer) == site)

    def _left(self, rank: Rank) -> None:
        super()._left(rank)
        self._combined.pop(rank, None)

    def state(self) -> dict[str, Value]:
        """With the models taken in since this worker's last turn."""
        return {
            **super().state(),
            "twostep_turn": self._turn,
            "twostep_taken_samples": self._taken_samples,
            **{f"{_COMBINED}{rank}": at for rank, at in self._combined.items()},
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave; before any other event."""
        super().restore(state)
        passed = int(state["iteration"]) // self._every if self._every else 0
        self._turn = max(passed, int(state["twostep_turn"]))
        self._taken_samples = int(state["twostep_taken_samples"])
        self._combined = by_rank(state, _COMBINED)
