"""The squared norms of an iteration's own and mean gradient, for the batching policy `goodput`.

Called by the loop and the simulator's worker around each local step, and by `instructions` at the
update. Where another policy shares out the batch nothing is computed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from dlion_api.measurements import GradientNorms

if TYPE_CHECKING:
    from dlion_api.spec import Job
    from dlion_worker.policies.interface import Flat

MOST_SQUARE = 1e18
"""Larger ones are not told: the record's bound, and no gradient that anybody trains with."""


def squared_norm(gradient_D: Flat) -> float:
    """|g|^2, summed in float64 a part at a time."""
    parts = np.array_split(gradient_D, max(1, gradient_D.size // 2**16))
    return math.fsum(float(np.dot(wide, wide)) for wide in (p.astype(np.float64) for p in parts))


class NormMeter:
    """One iteration's."""

    def __init__(self, job: Job) -> None:
        self._wanted = job.spec.batching.policy == "goodput"
        self._own: tuple[float, int] | None = None
        self._mean: tuple[float, int] | None = None

    def own(self, gradient_D: Flat, samples: int) -> None:
        """The local gradient, before a policy has it: a new iteration."""
        if self._wanted:
            self._own, self._mean = (squared_norm(gradient_D), samples), None

    def mean(self, gradient_D: Flat, samples: int) -> None:
        """What the optimizer is given, over the samples of all workers."""
        if self._wanted:
            self._mean = (squared_norm(gradient_D), samples)

    def take(self) -> GradientNorms | None:
        """This iteration's; None where it had no update, or nobody wants to know."""
        own, mean = self._own, self._mean
        self._own = self._mean = None
        if own is None or mean is None or max(own[0], mean[0]) > MOST_SQUARE:
            return None
        return GradientNorms(*own, *mean)
