"""Squared norms of an iteration's own and mean gradient, for the batching policy `goodput`.

The loop and the simulator's worker call it around each local step, `instruction_executor` at the
update. Under other batching policies nothing is computed.
"""

from __future__ import annotations

import math

import numpy as np

from dlion_api.protocol.measurements import GradientNorms
from dlion_api.spec import Job
from dlion_core.policies.interface import Flat

MAX_SQUARED_NORM = 1e18
"""Larger norms are not reported: the record's limit, and no useful gradient."""


def squared_norm(gradient_D: Flat) -> float:
    """|g|^2, summed in float64, part by part."""
    parts = np.array_split(gradient_D, max(1, gradient_D.size // 2**16))
    return math.fsum(float(np.dot(wide, wide)) for wide in (p.astype(np.float64) for p in parts))


class NormMeter:
    """The norms of one iteration."""

    def __init__(self, job: Job) -> None:
        self._is_enabled = job.spec.batching.policy == "goodput"
        self._own: tuple[float, int] | None = None
        self._mean: tuple[float, int] | None = None

    def own(self, gradient_D: Flat, samples: int) -> None:
        """Record the local gradient before a policy gets it; starts a new iteration."""
        if self._is_enabled:
            self._own, self._mean = (squared_norm(gradient_D), samples), None

    def mean(self, gradient_D: Flat, samples: int) -> None:
        """Record the optimizer's gradient, over the samples of all workers."""
        if self._is_enabled:
            self._mean = (squared_norm(gradient_D), samples)

    def take(self) -> GradientNorms | None:
        """Return this iteration's norms; None without an update, or if not enabled."""
        own, mean = self._own, self._mean
        self._own = self._mean = None
        if own is None or mean is None or max(own[0], mean[0]) > MAX_SQUARED_NORM:
            return None
        return GradientNorms(*own, *mean)
