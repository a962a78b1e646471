"""Combine local and received gradients into the gradient for the optimizer.

Called by `gradient_exchange`. Both weightings are a common factor times the sender's local batch
size (LBS; GBS is the global batch size):

- `sample_mean`: LBS_j / GBS. Under full synchronous exchange replicas stay identical.
- `dlion_ratio`: (1/n) LBS_j / LBS_k at worker k. Source: DLion's weighted update (as recalled).

Without a barrier, `gradient_exchange` sums LBS_j g_j since the last update. At a barrier, it stores
the contributions of an iteration separately. They are summed in rank order in float32, so every
worker computes the same bits.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from dlion_api.names import Rank
from dlion_core.codecs import GradientPart
from dlion_core.phase_clock import Phase, counts_as
from dlion_core.policies.interface import Flat

MAX_ITERATIONS_AHEAD = 1
"""Contributions are kept this many iterations ahead of a worker at a barrier. A peer that waits for
this worker cannot be further ahead."""


def divisor(weighting: str, local_batch_sizes: Mapping[Rank, int], own: Rank) -> int:
    """Return the divisor of LBS_j, given the local batch sizes of all contributors.

    `weighting`: the manifest's `exchange.weighting`. A worker without a contribution of its own
    uses the mean.

    >>> divisor("sample_mean", {0: 30, 1: 10}, 1), divisor("dlion_ratio", {0: 30, 1: 10}, 1)
    (40, 20)
    """
    if weighting == "sample_mean" or own not in local_batch_sizes:
        return sum(local_batch_sizes.values())
    return len(local_batch_sizes) * local_batch_sizes[own]


@dataclass(frozen=True)
class Contribution:
    """A worker's or a site's gradient or weights, over some samples; `part` None: all zeros."""

    samples: int
    part: GradientPart | None


@counts_as(Phase.DECODE)
def combined_gradient(
    contributions: Iterable[Contribution], late_sum_D: Flat | None, *, size: int, divisor: int
) -> Flat:
    """Return the sum over contributions, in the given order, of (LBS_j / divisor) g_j.
    `late_sum_D`, a sum of LBS_j g_j, is added last."""
    total_D: Flat | None = None
    for contribution in contributions:
        if contribution.part is not None:
            weight = np.float32(contribution.samples / divisor)
            total_D = plus(total_D, contribution.part, weight)
    if late_sum_D is not None:
        total_D = plus(total_D, GradientPart(late_sum_D), np.float32(1 / divisor))
    return np.zeros(size, np.float32) if total_D is None else total_D


def sample_mean(contributions: Collection[Contribution], size: int) -> Flat:
    """Return the mean over contributions, weighted by samples, summed in the given order."""
    samples = sum(contribution.samples for contribution in contributions)
    return combined_gradient(contributions, None, size=size, divisor=samples)


def plus(total_D: Flat | None, part: GradientPart, weight: np.float32) -> Flat:
    """total + weight * part, in place; None as total means zeros."""
    if total_D is None:
        return part.weighted(weight)
    part.add_to(total_D, weight)
    return total_D
