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
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dlion_worker.results.curves import at_times, first_time_judged
from dlion_worker.results.judgement import EndReason
from dlion_worker.results.summary import sent_bytes_at

if TYPE_CHECKING:
    from dlion_worker.results.report.runs import LoadedRun


CURVE_POINTS: Final = 61
_SINGLE = (
    "time_to_target_s", "bytes_to_target", "accuracy", "best_replica", "averaged_model", "drift",
    "sent_bytes", "compute_share", "samples",
)  # fmt: skip
"""Figures that have a median and a range."""


@dataclass(frozen=True)
class Goal:
    """What is compared: time and bytes to an accuracy, and accuracy at a time."""

    target_accuracy: float
    at_s: float


@dataclass(frozen=True)
class Figures:
    """One run's; None: the target was not reached, or nothing was measured.

    Where the run diverged nothing is known but that: it counts as the worst in every figure.
    """

    seed: int
    time_to_target_s: float | None
    bytes_to_target: float | None
    accuracy: float | None
    """Mean over replicas at the goal's time, or at the run's end where that came before."""
    best_replica: float | None
    averaged_model: float | None
    drift: float | None
    sent_bytes: float | None
    compute_share: float | None
    """Of the workers' time, computing; the rest is waiting and communication."""
    samples: int | None = None
    received_bytes: tuple[float, ...] = ()
    """Sent to each worker, by rank, until the run's end."""
    curve: tuple[float | None, ...] = ()
    """Mean accuracy over replicas at `CURVE_POINTS` equal steps from 0 to the goal's time; None
    before the first evaluation."""
    diverged: bool = False
    partial: bool = False
    """Whether the environment took a worker away whose replica the model lacks."""


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
        return {
            "environment": self.environment,
            "variant": self.variant,
            "learningRate": self.learning_rate,
            "runs": [asdict(one) for one in self.figures],
            **{name: asdict(self.spread(name)) for name in _SINGLE},
        }


@dataclass(frozen=True)
class Against:
    """One variant held against another of the same environment; None where one has no median."""

    variant: str
    speed_up: float | None
    """How many times as long the other takes to the target."""
    points: float | None
    """Accuracy at the goal's time above the other's, in percentage points."""
    relative: float | None
    """The same as a part of the other's accuracy."""
    at_least: float | None = None
    """Bound of the speed-up where only the other never got there: it had all the goal's time."""


def against(row: Row, other: Row, goal: Goal) -> Against:
    """How much better the row is than the other: medians over seeds."""
    own_s, its_s = (one.spread("time_to_target_s").median for one in (row, other))
    own, its = (one.spread("accuracy").median for one in (row, other))
    return Against(
        other.variant,
        speed_up=its_s / own_s if own_s and its_s else None,
        points=100 * (own - its) if own is not None and its is not None else None,
        relative=(own - its) / its if own is not None and its is not None and its else None,
        at_least=goal.at_s / own_s if own_s and its_s is None else None,
    )


def diverged(seed: int) -> Figures:
    """Of a run whose weights or loss overflowed."""
    return Figures(seed, None, None, None, None, None, None, None, None, diverged=True)


def figures_of(run: LoadedRun, goal: Goal, *, seed: int) -> Figures:
    """What one run comes to."""
    mean = run.mean_accuracy()
    replicas = [worker.accuracy_curve.points() for worker in run.workers]
    time_s = first_time_judged(replicas, goal.target_accuracy)
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
        samples=sum(worker.samples for worker in run.workers),
        received_bytes=tuple(
            float(sum(w.links[to.rank].sent_bytes for w in run.workers if to.rank in w.links))
            for to in run.workers
        ),
        curve=_curve(run, goal),
        partial=run.summary["ending"]["reason"] == EndReason.PARTIAL,
    )


def _curve(run: LoadedRun, goal: Goal) -> tuple[float | None, ...]:
    mean = run.mean_accuracy()
    if not len(mean):
        return ()
    times_s = np.linspace(0, goal.at_s, CURVE_POINTS)
    values = zip(times_s, at_times(mean, times_s), strict=True)
    begins_s = mean[:, 0].min()
    return tuple(None if at_s < begins_s else round(float(v), 5) for at_s, v in values)


def spread(values: Sequence[float | None]) -> Spread:
    """Median and range. Where more than half of the seeds have no value, neither has the median; of
    an even number it is the lower of the two in the middle, which is one of the runs.

    >>> spread([3.0, None, 1.0]).median, spread([None, None, 1.0]).median
    (3.0, None)
    >>> spread([1.0, 2.0, 3.0, 9.0]).median, spread([1.0, None]).median
    (2.0, 1.0)
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
