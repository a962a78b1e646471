"""When the job as a whole is accurate enough. Pure; called with every evaluation that comes in.

`spec.trainer.stop.targetAccuracy` is judged on the mean over replicas, which no worker sees alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dlion_api.endings import stop_rule_met
from dlion_api.names import Rank
from dlion_api.progress import EvaluationRecord


class TargetWatch:
    """The last accuracy of each replica, held against the target."""

    def __init__(self, target_accuracy: float | None, ranks: Collection[Rank]) -> None:
        self._target = target_accuracy
        self._ranks = frozenset(ranks)
        self._gone: frozenset[Rank] = frozenset()
        self._accuracy: dict[Rank, float] = {}

    def left(self, rank: Rank) -> str | None:
        """That replica no longer counts: it is lost for good. As `take`, of those who are left."""
        self._gone |= {rank}
        return self._reached()

    def expect(self, ranks: Collection[Rank]) -> str | None:
        """The job has these replicas now. As `take`, of those that are not lost for good. One that
        comes back later counts from its next evaluation on."""
        self._ranks = frozenset(ranks)
        self._accuracy = {
            rank: each for rank, each in self._accuracy.items() if rank in self._ranks
        }
        return self._reached()

    @property
    def accuracies(self) -> Mapping[Rank, float]:
        """The last of each replica in mid-run, as far as they are known here."""
        return self._accuracy

    def take_others(self, accuracies: Mapping[Rank, float]) -> str | None:
        """As `take`, of replicas that report elsewhere."""
        self._accuracy |= accuracies
        return self._reached()

    def take(self, record: EvaluationRecord) -> str | None:
        """Why the run is over, once the mean over all replicas has reached the target."""
        if record.final:
            return None
        if 0.0 <= record.accuracy <= 1.0:  # a program's own metric may be anything, NaN too
            self._accuracy[record.rank] = record.accuracy
        return self._reached()

    def _reached(self) -> str | None:
        if self._target is None:
            return None
        counted = self._ranks - self._gone
        known = [self._accuracy[rank] for rank in counted if rank in self._accuracy]
        if len(known) < len(counted) or not known:
            return None
        mean = sum(known) / len(known)
        if mean < self._target:
            return None
        met = stop_rule_met("targetAccuracy", self._target)
        return f"{met}: mean over {len(known)} replicas {mean:.4f}"
