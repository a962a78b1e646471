"""Results of rounds of local steps, for `fedat` and `localsgd`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlion_core.policies.interface import Flat


@dataclass(frozen=True)
class RoundResult:
    """A worker's result of a round: samples trained on, and weights."""

    samples: int
    weights_D: Flat


def mean_weights(results: Sequence[RoundResult]) -> Flat:
    """Return the sample-weighted mean of the weights, summed in order in float32."""
    samples = sum(result.samples for result in results)
    mean_D = np.zeros_like(results[0].weights_D)
    for result in results:
        mean_D += np.float32(result.samples / samples) * result.weights_D
    return mean_D
