"""The sum of all contributions to one update, by the method of `exchange.robustness`.

Called by the policies at a barrier, with the contributions in rank order. With `clip` it is the
usual sum, bit for bit, as long as none is too large.
"""

import math
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from dlion_core.codecs import GradientPart
from dlion_core.codecs.norms import add_and_measure, squared_norm_of
from dlion_core.phase_clock import Phase, counts_as
from dlion_core.policies.aggregation import Contribution, plus, sample_mean
from dlion_core.policies.interface import Flat
from dlion_core.policies.robust.clipping import clipping_factors
from dlion_core.policies.robust.krum import nearest
from dlion_core.policies.robust.trimmed_mean import trimmed_mean

ROBUST_METHODS: Final = frozenset({"clip", "trimmed", "krum"})
"""Values of `exchange.robustness` that change the sum."""


def max_bad(count: int) -> int:
    """Return how many of that many contributions may be bad: a quarter, at least one."""
    return max(1, count // 4)


@counts_as(Phase.DECODE)
def robust_sum(
    method: str, contributions: Collection[Contribution], *, size: int, divisor: int
) -> Flat:
    """Return what replaces the sum over contributions of (LBS_j / divisor) g_j, shape [D].

    `clip` and `krum` weigh by samples, those that are kept by the samples of all. `trimmed` weighs
    all equally. `trimmed` and `krum` need memory for each contribution as a whole.
    """
    given = list(contributions)
    if method == "clip":
        return _clipped(given, [one.samples / divisor for one in given], size)
    total = sum(one.samples for one in given)
    dense_PD = [_dense(one, size) for one in given]
    if method == "trimmed":
        mean_D = trimmed_mean(dense_PD, size, max_bad(len(given)))
        return mean_D if total == divisor else mean_D * np.float32(total / divisor)
    kept = [given[at] for at in nearest(dense_PD, max_bad(len(given)))]
    samples = sum(one.samples for one in kept)
    return _weighted(kept, [one.samples / samples * (total / divisor) for one in kept], size)


def robust_mean(method: str, contributions: Collection[Contribution], size: int) -> Flat:
    """Return the mean by samples, or what the method makes of it."""
    if method not in ROBUST_METHODS:
        return sample_mean(contributions, size)
    divisor = sum(one.samples for one in contributions)
    return robust_sum(method, contributions, size=size, divisor=divisor)


def _clipped(given: Sequence[Contribution], shares: Sequence[float], size: int) -> Flat:
    """Return the sum with bounded norms. Each contribution is decoded once, for its norm and for
    the usual sum. That is the result, unless one is too large."""
    total_D = np.zeros(size, np.float32)
    norms = []
    for one, share in zip(given, shares, strict=True):
        squared = 0.0 if one.part is None else _add(one.part, np.float32(share), total_D)
        norms.append(math.sqrt(squared))
    factors = clipping_factors(norms)
    if all(factor == 1 for factor in factors):
        return total_D
    return _weighted(given, [a * b for a, b in zip(shares, factors, strict=True)], size)


def _add(part: GradientPart, weight: np.float32, total_D: Flat) -> float:
    """total += weight * part. Return the sum of the part's squares."""
    value_K = part.value_K
    if part.where is None:
        return float(add_and_measure(value_K, weight, total_D))
    part.where.add(value_K, weight, total_D)
    return float(squared_norm_of(value_K))


def _dense(contribution: Contribution, size: int) -> Flat:
    if contribution.part is None:
        return np.zeros(size, np.float32)
    return contribution.part.weighted(np.float32(1))


def _weighted(contributions: Sequence[Contribution], weights: Sequence[float], size: int) -> Flat:
    total_D: Flat | None = None
    for one, weight in zip(contributions, weights, strict=True):
        if one.part is not None:
            total_D = plus(total_D, one.part, np.float32(weight))
    return np.zeros(size, np.float32) if total_D is None else total_D
