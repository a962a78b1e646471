"""Runs of several variants and seeds side by side: the figures of a fair comparison.

Owns what is read off the runs of one variant and how seeds are put together (median and range).
Called by `dlion compare` with loaded result folders. Draws and runs nothing.

Source: fair comparison of the project (policies.md section 6): accuracy is the mean over replicas,
interpolated; bytes are those sent by all workers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dlion_worker.results.curves import at_times, first_time_at
from dlion_worker.results.summary import sent_bytes_at

if TYPE_CHECKING:
    from dlion_worker.results.report.runs import LoadedRun


@dataclass(frozen=True)
class Goal:
    """What is compared: time and bytes to an accuracy, and accuracy at a time."""

    target_accuracy: float
    at_s: float


@dataclass(frozen=True)
class Figures:
    """One run's; None: the target was not reached, or nothing was measured."""

    seed: int
    time_to_target_s: float | None
    bytes_to_target: float | None
    accuracy: float | None
    """Mean over replicas at the goal's time, or at the run's end where that came before."""
    best_replica: float | None
    averaged_model: float | None
    drift: float | None
    sent_bytes: float
    compute_share: float | None
    """Of the workers' time, computing; the rest is waiting and communication."""


@dataclass(frozen=True)
class Spread:
    """Median and range over seeds; `missing` seeds have no value and count as the worst."""

    median: float | None
    least: float | None
    most: float | None
    missing: int = 0


@dataclass(frozen=True)
class Row:
    """One variant in one environment."""

    environment: str
    variant: str
    learning_rate: float
    figures: tuple[Figures, ...]

    def spread(self, name: str) -> Spread:
        """Over seeds, of one of the figures."""
        return spread([getattr(one, name) for one in self.figures])

    def document(self) -> dict[str, Any]:
        """As JSON."""
        names = [name for name in Figures.__dataclass_fields__ if name != "seed"]
        return {
            "environment": self.environment,
            "variant": self.variant,
            "learningRate": self.learning_rate,
            "runs": [asdict(one) for one in self.figures],
            **{name: asdict(self.spread(name)) for name in names},
        }


def figures_of(run: LoadedRun, goal: Goal, *, seed: int) -> Figures:
    """What one run comes to."""
    mean = run.mean_accuracy()
    time_s = first_time_at(mean, goal.target_accuracy) if len(mean) else None
    sent = None if time_s is None else float(sent_bytes_at(run.workers, [time_s])[0])
    accuracy = run.summary["accuracy"]
    wall_s = sum(worker.compute_s + worker.waited_s for worker in run.workers)
    return Figures(
        seed=seed,
        time_to_target_s=time_s,
        bytes_to_target=sent,
        accuracy=float(at_times(mean, [goal.at_s])[0]) if len(mean) else None,
        best_replica=accuracy["max"],
        averaged_model=accuracy["averaged_model"],
        drift=run.summary["drift"]["last"],
        sent_bytes=float(run.summary["sent_bytes"]),
        compute_share=sum(w.compute_s for w in run.workers) / wall_s if wall_s else None,
    )


def spread(values: Sequence[float | None]) -> Spread:
    """Median and range. Where more than half of the seeds have no value, neither has the median.

    >>> spread([3.0, None, 1.0]).median, spread([None, None, 1.0]).median
    (3.0, None)
    """
    known = sorted(value for value in values if value is not None)
    missing = len(values) - len(known)
    padded = [*known, *[float("inf")] * missing]
    median = statistics.median_low(padded) if padded else None
    return Spread(
        median=None if median is None or median == float("inf") else median,
        least=known[0] if known else None,
        most=known[-1] if known else None,
        missing=missing,
    )


def better(first: Row, second: Row) -> bool:
    """Whether the first is the better of two learning rates: sooner at the target, else more
    accurate at the goal's time."""
    one, other = first.spread("time_to_target_s"), second.spread("time_to_target_s")
    if one.median is not None or other.median is not None:
        return other.median is None or (one.median is not None and one.median < other.median)
    own, its = first.spread("accuracy").median, second.spread("accuracy").median
    return its is None or (own is not None and own > its)
