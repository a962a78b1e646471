"""Batching policy `goodput`: the global batch size with the most progress per second.

Progress per second is throughput times statistical efficiency. All inputs are measured: the fixed
time F of an iteration besides its samples (the exchange), the sum R of the workers' capacities, and
the gradient noise scale phi. For a batch of B samples and an initial one of B_0:

    goodput(B) = B / (F + B / R) * (phi + B_0) / (phi + B)

phi = tr(Sigma) / |G|^2 is the batch size at which a gradient's noise equals the gradient. It is
estimated from the squared norms of each worker's own gradient g_k, over b_k samples, and of their
sample-weighted mean g, over B. With a single sample's covariance Sigma and the true gradient G,

    E |g_k|^2 = |G|^2 + tr(Sigma) / b_k      E |g|^2 = |G|^2 + tr(Sigma) / B

so b_k (|g_k|^2 - |g|^2) / (1 - b_k / B) is an unbiased estimate of tr(Sigma), for any b_k < B. Over
workers these are averaged with weights 1 - b_k / B, which gives the analysis of variance's (sum b_k
|g_k|^2 - B |g|^2) / (n - 1). Over iterations numerators and weights decay alike. Workers with
different data count as noisy, because their gradients do differ.

Called by the director. Pure. Every sidecar chooses by the latest estimates of all, among few
candidates (a geometric grid), so most choose the same. If the best two are close they may differ.
So each sends its choice, and among several choices of a period that of the lowest rank counts.

Source: goodput, efficiency: Qiao et al., Pollux, OSDI 2021; noise scale: McCandlish et al., "An
empirical model of large-batch training", 2018; unequal batches: Nie et al., Cannikin, 2024 (as
recalled: there the weights minimise the variance node by node). Ours: the grid, the averages.
"""

import math
from collections.abc import Iterable

from dlion_api.names import Rank
from dlion_api.protocol.measurements import BatchChoice, GradientNoise, GradientNorms
from dlion_api.spec import GlobalBatchSize

DECAY = 0.98
"""Weight of the history when an iteration is added; about fifty iterations count."""

MIN_STEPS = 10
"""Iterations before the first estimate."""

ROUNDING = 1e-12
"""Relative difference between equal goodputs by rounding alone."""

STEPS_PER_DOUBLING = 4
"""Candidates between a batch size and twice that."""


class DecayingMean:
    """Exponentially decaying mean; unbiased from the first value on."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float) -> None:
        self._sum = DECAY * self._sum + (1 - DECAY) * value
        self._weight = DECAY * self._weight + (1 - DECAY)

    @property
    def value(self) -> float:
        """The mean; 0 before any value."""
        return self._sum / self._weight if self._weight else 0.0


class NoiseEstimator:
    """Estimates gradient and noise from one worker's norms."""

    def __init__(self) -> None:
        self._steps = 0
        self._excess, self._weight = DecayingMean(), DecayingMean()
        self._mean_square, self._inverse = DecayingMean(), DecayingMean()

    def add(self, norms: GradientNorms) -> None:
        share = norms.own_samples / norms.mean_samples if norms.mean_samples else 1.0
        if not 0 < share < 1:
            return
        self._steps += 1
        self._excess.add(norms.own_samples * (norms.own_square - norms.mean_square))
        self._weight.add(1 - share)
        self._mean_square.add(norms.mean_square)
        self._inverse.add(1 / norms.mean_samples)

    def estimate(self) -> GradientNoise | None:
        """Return the current estimate; None: too few iterations."""
        if self._steps < MIN_STEPS:
            return None
        variance = self._excess.value / self._weight.value
        square = self._mean_square.value - variance * self._inverse.value
        return GradientNoise(square, variance, self._weight.value)


def noise_scale(parts: Iterable[GradientNoise]) -> float | None:
    """Return phi in samples, from all workers' estimates; infinite if noise hides the gradient.

    >>> noise_scale([GradientNoise(2.0, 100.0, 0.5), GradientNoise(2.0, 300.0, 0.5)])
    100.0
    """
    known = list(parts)
    weight = math.fsum(part.weight for part in known)
    if not weight > 0:
        return None
    square = math.fsum(part.weight * part.square for part in known) / weight
    variance = math.fsum(part.weight * part.variance for part in known) / weight
    if variance <= 0:
        return 0.0
    return variance / square if square > 0 else math.inf


def goodput(
    batch: int, *, scale: float, initial: int, samples_per_s: float, fixed_s: float
) -> float:
    """Return samples per second, weighted by their efficiency relative to the initial batch."""
    efficiency = 1.0 if math.isinf(scale) else (scale + initial) / (scale + batch)
    return batch / (fixed_s + batch / samples_per_s) * efficiency


def candidates(initial: int, most: int) -> list[int]:
    """Return candidate batch sizes, increasing by a 4th root of 2.

    >>> candidates(100, 250)
    [100, 119, 141, 168, 200, 238, 250]
    """
    count = math.floor(STEPS_PER_DOUBLING * math.log2(most / initial)) + 1
    sizes = {round(initial * 2 ** (step / STEPS_PER_DOUBLING)) for step in range(count)}
    return sorted({min(size, most) for size in sizes} | {most})


def best_batch(
    growth: GlobalBatchSize, *, scale: float, samples_per_s: float, fixed_s: float
) -> int:
    """Return the candidate with the largest goodput; ties: the smallest."""
    measured = {"scale": scale, "samples_per_s": samples_per_s, "fixed_s": fixed_s}
    worth = {
        batch: goodput(batch, initial=growth.initial, **measured)
        for batch in candidates(growth.initial, growth.max)
    }
    most = max(worth.values())
    return min(batch for batch, value in worth.items() if value >= most * (1 - ROUNDING))


class GoodputController:
    """Global batch size over iterations: chosen periodically, up or down."""

    def __init__(self, growth: GlobalBatchSize, rank: Rank) -> None:
        self._growth, self._rank = growth, rank
        self._adjusted: int | None = 0
        """Period of the last choice. None: resumed; set at the next call."""
        self._due = 0
        self._size = growth.initial
        self.held: BatchChoice | None = None
        """The choice to send to other sidecars; None: no sidecar has chosen yet."""

    def resume(self, size: int, iteration: int = 0) -> None:
        """Continue with an earlier sidecar's choice until the next one is due.

        `iteration`: that of the checkpoint with this size; 0: an earlier sidecar's. Workers may
        resume from checkpoints of different times, and no sidecar holds a choice then. So each
        sends this one, and those of the same or neighbouring periods agree. Without a barrier,
        periods may lie further apart: then the sizes differ until the worker behind comes near.
        """
        self._adjusted = self.held = None
        self._size = self._growth.within(size)
        if period := self._period(iteration):
            self._hold(BatchChoice(period, self._rank, self._size))

    def take(self, choice: BatchChoice) -> bool:
        """Accept another sidecar's choice; return whether it replaces the local one.

        A later period has priority, then a lower rank. A choice of a period beyond the next is
        ignored until it is sent again.
        """
        held, adjusted = self.held, self._adjusted
        if adjusted is None or not max(1, adjusted) <= choice.period <= self._due + 1:
            return False
        counts = held is None or choice.period > adjusted or choice.decider < held.decider
        if counts:
            self._hold(choice)
        return counts

    def _hold(self, choice: BatchChoice) -> None:
        self.held, self._adjusted = choice, choice.period
        self._size = self._growth.within(choice.size)

    def _period(self, iteration: int) -> int:
        return iteration // self._growth.every_steps if self._growth.growth else 0

    def at(
        self, iteration: int, *, scale: float | None, samples_per_s: float, fixed_s: float
    ) -> int:
        """Return the samples of that iteration over all workers; unchanged while `scale` is
        unknown."""
        due = self._due = self._period(iteration)
        if self._adjusted is None:
            if iteration <= 1:  # after resuming, the iteration of the run is unknown
                return self._size
            self._adjusted = due
        if due > self._adjusted and scale is not None:
            size = best_batch(
                self._growth, scale=scale, samples_per_s=samples_per_s, fixed_s=fixed_s
            )
            self._hold(BatchChoice(due, self._rank, size))
        return self._size
