"""Policy `sparseloco`: local steps, then a sparse mean of the changes in two bits per value.

All workers hold the same weights w at the start of a round. Each makes H local steps with the job's
optimizer, to w_k. With the error feedback e_k of worker k:

    e_k <- beta e_k + w - w_k
    sent_k = the largest entries of each chunk of e_k, rounded;  e_k <- e_k - sent_k
    w <- w - alpha * mean of all sent_k

All wait for all at the end of a round. `anchored_rounds` has the rounds, and the repair of a worker
that has other weights.

Source: Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", 2025. As recalled:
beta 0.95, chunks of 4096 entries, 1 to 3 % of each, two bits per value. Ours: means are by samples,
the default of H is shorter, and values are rounded to thirds of the largest of 256 at random, so
that their means are right (codec `int2`).
"""

import numpy as np
from numpy.typing import NDArray

from dlion_core.policies.context import PolicyContext
from dlion_core.policies.gradient.entries import chunks_of, largest_of_chunks
from dlion_core.policies.interface import Flat
from dlion_core.policies.round_parameters import SparselocoParameters
from dlion_core.policies.weights.anchored_rounds import AnchoredRounds


class SparseLocalSteps(AnchoredRounds):
    """One worker's rounds of H local steps."""

    def __init__(self, context: PolicyContext, parameters: SparselocoParameters) -> None:
        steps = parameters.local_steps
        super().__init__(
            context,
            codec=parameters.codec,
            feedback=parameters.feedback,
            local_steps=range(steps, steps + 1),
        )
        self._share, self._rate = parameters.share, np.float32(parameters.outer_learning_rate)
        self._chunks = chunks_of(context.layout, parameters.chunk)

    def chosen(self) -> NDArray[np.bool_]:
        """Return the largest entries of each chunk, at least one."""
        return largest_of_chunks(
            self.residual.value_D, self._chunks, lambda length: max(1, int(self._share * length))
        )

    def outer_step(self, mean_D: Flat) -> Flat:
        mean_D *= self._rate
        return mean_D
