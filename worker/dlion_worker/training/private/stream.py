"""Batches in which no sample comes twice, with a count of the passes (`trainer.privacy`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlion_api.atomic_file import write_atomically
from dlion_api.errors import DataError
from dlion_core.policies.interface import Value
from dlion_worker.training.datasets.dataset import DataSet, Samples
from dlion_worker.training.datasets.stream import BatchStream

PASSES_FILE = "passes"
"""In a worker's folder: the passes that all of its starts may have begun."""
_MAX_BYTES = 20


class PrivateStream(BatchStream):
    """A stream that has a sample once at most in each pass, and once at most in each batch.

    So a sample changes the sum of a batch's clipped gradients by `clipNorm` at most, and in
    `passes` batches at most.
    A batch has at most as many samples as the data. Where it spans passes, the new pass has the
    samples of its first part last; after a restart that order is another one.

    With a `state_dir` the passes of all starts are kept there: a worker may be killed after its
    gradient has left and before it has reported the step.
    """

    def __init__(
        self, data: DataSet, *, seed: int, rank: int, state_dir: str | None = None
    ) -> None:
        """Raises: DataError (no sample, or a damaged count of passes); OSError."""
        super().__init__(data, seed=seed, rank=rank)
        self._passes = 0
        self._file = Path(state_dir) / PASSES_FILE if state_dir else None
        self._earlier_passes = _kept_passes(self._file) if self._file else None

    @property
    def passes(self) -> int:
        """Passes begun since the last `restore`: what was drawn before it trained nothing."""
        return self._passes

    @property
    def earlier_passes(self) -> int | None:
        return self._earlier_passes

    def next(self, batch_size: int) -> Samples:
        """As `BatchStream.next`. Raises: OSError where a new pass cannot be kept."""
        before = self._passes
        self._passes = max(1, before)
        batch = super().next(min(batch_size, self.samples))
        if self._file and self._passes > before:
            total = (self._earlier_passes or 0) + self._passes
            write_atomically(self._file, f"{total}\n".encode())
        return batch

    def restore(self, state: Mapping[str, Value]) -> None:
        super().restore(state)
        self._passes = 0

    def _next_order(self, drawn: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        self._passes += 1
        order_N = super()._next_order(drawn)
        is_drawn = np.isin(order_N, np.concatenate([np.zeros(0, np.int64), *drawn]))
        return np.concatenate([order_N[~is_drawn], order_N[is_drawn]])


def _kept_passes(path: Path) -> int:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return 0
    if not text.strip().isdigit() or len(text) > _MAX_BYTES:
        raise DataError(
            f"{path} is damaged: the passes that earlier starts began are unknown. Restore it, or "
            "begin a run in another folder, and add up the uses of both"
        )
    return int(text)
