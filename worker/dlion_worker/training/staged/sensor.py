"""The stream and the replica of a worker that sends features instead of training (`staged`).

Its data are encoded when they are loaded (`encoding`). A step takes the next batch of them
in a fixed order; the policy sends it.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_api.names import Rank
from dlion_api.spec import Job
from dlion_core.policies.interface import LocalFeatures
from dlion_core.policies.staged.feature_batch import BATCH_SAMPLES
from dlion_worker.training.datasets import BatchStream, DataSet
from dlion_worker.training.datasets.dataset import Samples
from dlion_worker.training.keras_optimizer import ModelOptimizer
from dlion_worker.training.model import FlatModel, StepResult
from dlion_worker.training.private.stream import PrivateStream
from dlion_worker.training.replica import LocalReplica


class SensorStream(BatchStream):
    """Batches of `BATCH_SAMPLES` samples in their order; the last of a pass may have fewer."""

    first = 0
    """Number of the first sample of the last batch."""

    def next(self, batch_size: int) -> Samples:  # noqa: ARG002 - the decoder decides
        with self._lock:
            self.first = self._position % len(self._order)
            rows = self._order[self.first : self.first + BATCH_SAMPLES]
            self._position = self.first + len(rows)
            return self._x[rows], self._y[rows]

    def _shuffled(self) -> NDArray[np.int64]:
        return np.sort(np.concatenate(list(self._rows.values())))


class SensorReplica(LocalReplica):
    """A replica that is not trained: its steps return features, and no loss."""

    def __init__(
        self,
        job: Job,
        rank: Rank,
        model: FlatModel,
        optimizer: ModelOptimizer,
        stream: SensorStream,
    ) -> None:
        super().__init__(job, rank, model, optimizer)
        self._stream = stream

    def step(self, x_B: NDArray[Any], y_B: NDArray[Any]) -> StepResult:
        features = LocalFeatures(self._stream.first, self._stream.samples, x_B, y_B)
        return StepResult(math.nan, np.zeros(0, np.float32), finite=True, features=features)


def local_stream(job: Job, rank: Rank, data: DataSet, state_dir: str | None = None) -> BatchStream:
    """The stream of that worker's samples. `state_dir`: what must outlive this start lies there.

    Raises: DataError where there is no sample, or that folder has no readable count of passes.
    """
    seed = job.spec.trainer.seed
    if not job.spec.exchange.trains(rank):
        return SensorStream(data, seed=seed, rank=rank)
    if job.spec.trainer.privacy is not None:
        return PrivateStream(data, seed=seed, rank=rank, state_dir=state_dir)
    return BatchStream(data, seed=seed, rank=rank)


def local_replica(
    job: Job, rank: Rank, model: FlatModel, optimizer: ModelOptimizer, stream: BatchStream
) -> LocalReplica:
    """The replica of that worker, for its stream."""
    if isinstance(stream, SensorStream):
        return SensorReplica(job, rank, model, optimizer, stream)
    return LocalReplica(job, rank, model, optimizer)
