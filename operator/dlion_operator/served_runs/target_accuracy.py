"""When the job as a whole has reached its target accuracy. Pure.

`spec.trainer.stop.targetAccuracy` applies to the mean over replicas, which no worker knows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from dlion_api.endings import stop_rule_met

if TYPE_CHECKING:
    from dlion_api.names import Rank, WorkerIdentity
    from dlion_api.protocol.progress import EvaluationRecord
    from dlion_api.spec import Job


class TargetAccuracyMonitor:
    """Compares the latest accuracies of the replicas with the target."""

    def __init__(
        self,
        target_accuracy: float | None,
        ranks: Collection[Rank],
        trains: Callable[[Rank], bool] = lambda _: True,
    ) -> None:
        """Create it; `trains` reports whether a worker has a replica that counts."""
        self._target, self._trains = target_accuracy, trains
        self._ranks = frozenset(ranks)
        self._gone: frozenset[Rank] = frozenset()
        self._accuracy: dict[Rank, float] = {}

    @classmethod
    def of(cls, job: Job, workers: Iterable[WorkerIdentity]) -> TargetAccuracyMonitor:
        spec = job.spec
        ranks = [worker.rank for worker in workers]
        return cls(spec.trainer.stop.target_accuracy, ranks, spec.exchange.trains)

    def remove(self, rank: Rank) -> str | None:
        """Remove a permanently lost replica, which no longer counts. Returns as `take` does."""
        self._gone |= {rank}
        return self._reached()

    def expect(self, ranks: Collection[Rank]) -> str | None:
        """Set the job's current replicas. Returns as `take` does, without lost ones.

        A replica that returns counts from its next evaluation.
        """
        self._ranks = frozenset(ranks)
        self._accuracy = {
            rank: each for rank, each in self._accuracy.items() if rank in self._ranks
        }
        return self._reached()

    @property
    def accuracies(self) -> Mapping[Rank, float]:
        """The latest known accuracy of each replica during the run."""
        return self._accuracy

    def take_others(self, accuracies: Mapping[Rank, float]) -> str | None:
        """Take accuracies that replicas report to other sites. Returns as `take` does."""
        self._accuracy |= accuracies
        return self._reached()

    def take(self, record: EvaluationRecord) -> str | None:
        """Take an evaluation. Return why the run is over, once the mean over all replicas has
        reached the target."""
        if record.final:
            return None
        if 0.0 <= record.accuracy <= 1.0:  # a program's own metric may have any value, also NaN
            self._accuracy[record.rank] = record.accuracy
        return self._reached()

    def _reached(self) -> str | None:
        if self._target is None:
            return None
        counted = {rank for rank in self._ranks - self._gone if self._trains(rank)}
        known = [self._accuracy[rank] for rank in counted if rank in self._accuracy]
        if len(known) < len(counted) or not known:
            return None
        mean = sum(known) / len(known)
        if mean < self._target:
            return None
        met = stop_rule_met("targetAccuracy", self._target)
        return f"{met}: mean over {len(known)} replicas {mean:.4f}"
