"""Batches in which no sample comes twice, with a count of the passes (`trainer.privacy`)."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dlion_core.policies.interface import Value
from dlion_worker.training.datasets.dataset import Samples
from dlion_worker.training.datasets.stream import BatchStream


class PrivateStream(BatchStream):
    """A stream that has a sample once at most in each pass, and once at most in each batch.

    So a sample changes the sum of a batch's clipped gradients by `clipNorm` at most, and in
    `passes` batches at most.
    A batch has at most as many samples as the data. Where it spans passes, the new pass has the
    samples of its first part last; after a restart that order is another one.
    """

    _passes = 0

    @property
    def passes(self) -> int:
        """Passes begun since the last `restore`: what was drawn before it trained nothing."""
        return self._passes

    def next(self, batch_size: int) -> Samples:
        self._passes = max(1, self._passes)
        return super().next(min(batch_size, self.samples))

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        self._passes = 0

    def _next_order(self, drawn: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        self._passes += 1
        order_N = super()._next_order(drawn)
        is_drawn = np.isin(order_N, np.concatenate([np.zeros(0, np.int64), *drawn]))
        return np.concatenate([order_N[~is_drawn], order_N[is_drawn]])
