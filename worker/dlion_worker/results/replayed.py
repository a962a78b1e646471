"""A recorded run beside its replay: the same figures of both, from records alone.

Owns which figures are compared. Called by `dlion replay`. Time counts from the first step on: a
simulated run has no start-up.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dlion_api.progress import EvaluationRecord, EventRecord, LinkRecord, StepRecord
from dlion_api.reasons import EventReason
from dlion_worker.results.curves import Curve, first_time_judged, mean_over_replicas
from dlion_worker.results.summary import LEVELS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dlion_api.names import Rank
    from dlion_api.progress import ProgressRecord

KILO = 1000


@dataclass(frozen=True)
class RunFigures:
    """One run's; accuracy is the mean over replicas."""

    seconds: float
    steps_per_s: float
    """Of all workers together, per worker."""
    accuracy: float | None
    time_to_s: dict[float, float | None]
    bytes_per_step: dict[tuple[int, int], float]
    """By (sender, receiver): of the sender's steps as far as its links were reported."""
    batch: dict[int, float]
    """Mean local batch size by rank."""


@dataclass(frozen=True)
class Figure:
    """One line of the comparison; None: not reached, or nothing was sent."""

    name: str
    unit: str
    recorded: float | None
    replayed: float | None

    @property
    def difference(self) -> float | None:
        """Relative to what was recorded."""
        if self.recorded is None or self.replayed is None or not self.recorded:
            return None
        return self.replayed / self.recorded - 1

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "difference": self.difference}


def figures_of(records: Iterable[ProgressRecord], ranks: Sequence[Rank]) -> RunFigures:
    """What is compared, of one run."""
    starts: list[float] = []
    last_s = 0.0
    steps: dict[int, int] = defaultdict(int)
    samples: dict[int, int] = defaultdict(int)
    sent: dict[tuple[int, int], int] = defaultdict(int)
    counted: dict[tuple[int, int], int] = {}  # a run that was broken off did not report its last
    curves = {rank: Curve(1) for rank in ranks}
    for record in records:
        if isinstance(record, StepRecord):
            steps[record.rank] += 1
            samples[record.rank] += record.local_batch_size
            last_s = max(last_s, record.time_s)
        elif isinstance(record, LinkRecord):
            link = (record.rank, record.peer)
            sent[link] += record.sent_bytes
            counted[link] = steps[record.rank]
        elif isinstance(record, EvaluationRecord) and record.rank in curves:
            if record.final:
                curves[record.rank].hold(record.time_s)
            curves[record.rank].append(record.time_s, record.accuracy)
        elif isinstance(record, EventRecord) and record.reason == EventReason.TRAINING_STARTED:
            starts.append(record.time_s)
    began_s = min(starts, default=0.0)
    seconds = max(0.0, last_s - began_s)
    replicas = [curve.points() for curve in curves.values()]
    mean = mean_over_replicas(replicas)
    reached = {level: first_time_judged(replicas, level) for level in LEVELS}
    return RunFigures(
        seconds=seconds,
        steps_per_s=sum(steps.values()) / len(ranks) / seconds if seconds else 0.0,
        accuracy=float(mean[-1, 1]) if len(mean) else None,
        time_to_s={level: None if t is None else t - began_s for level, t in reached.items()},
        bytes_per_step={link: sent[link] / count for link, count in counted.items() if count},
        batch={rank: samples[rank] / steps[rank] for rank in ranks if steps[rank]},
    )


def side_by_side(recorded: RunFigures, replayed: RunFigures) -> list[Figure]:
    """All figures of both, in the order in which they are shown."""
    rows = [
        Figure("time of training", "s", recorded.seconds, replayed.seconds),
        Figure("iterations/s", "", recorded.steps_per_s, replayed.steps_per_s),
        Figure("accuracy at the end", "accuracy", recorded.accuracy, replayed.accuracy),
    ]
    for level in LEVELS:
        times = (recorded.time_to_s.get(level), replayed.time_to_s.get(level))
        if times != (None, None):
            rows.append(Figure(f"time to {level:.0%}", "s", *times))
    for rank in sorted({*recorded.batch, *replayed.batch}):
        sizes = (recorded.batch.get(rank), replayed.batch.get(rank))
        rows.append(Figure(f"batch of worker {rank}", "", *sizes))
    links = sorted({*recorded.bytes_per_step, *replayed.bytes_per_step})
    for link in links:
        sizes = (recorded.bytes_per_step.get(link, 0.0), replayed.bytes_per_step.get(link, 0.0))
        name = f"sent per iteration, {link[0]} to {link[1]}"
        rows.append(Figure(name, "kB", *(size / KILO for size in sizes)))
    return rows
