"""Compares runs of several variants over several seeds.

Extracts the figures of each run and combines seeds by median and range. `dlion compare` calls it
with loaded result folders.

Source: the project's definition of a fair comparison: accuracy is the interpolated mean over
replicas; bytes are those sent by all workers.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from dlion_api.status_names import ACCURACY
from dlion_results.report.runs import LoadedRun
from dlion_results.summary.accuracy_name import common_name
from dlion_results.summary.curves import at_times, time_to_accuracy
from dlion_results.summary.judgement import EndReason
from dlion_results.summary.summary import samples_at, sent_bytes_at
from dlion_results.summary.tally import trusted_workers

CURVE_POINTS: Final = 61
_SINGLE = (
    "time_to_target_s", "samples_to_target", "bytes_to_target", "accuracy", "best_replica",
    "averaged_model", "drift", "sent_bytes", "compute_share", "samples",
)  # fmt: skip
"""Figures with a median and a range."""
_HIGHER_IS_BETTER = {"accuracy", "best_replica", "averaged_model", "compute_share", "samples"}


@dataclass(frozen=True)
class Goal:
    """What is compared: time, samples and bytes to an accuracy, and accuracy at a time."""

    target_accuracy: float
    at_s: float


@dataclass(frozen=True)
class VariantRun:
    """Figures of one run; None if the target was not reached or nothing was measured.

    A diverged run has no figures and counts as the worst in each.
    """

    seed: int
    time_to_target_s: float | None
    bytes_to_target: float | None
    accuracy: float | None
    """Mean over replicas at the goal's time, or at the run's end if earlier."""
    best_replica: float | None
    averaged_model: float | None
    drift: float | None
    sent_bytes: float | None
    compute_share: float | None
    """Computing over computing and waiting, of all workers. The rest of steps, such as encoding, is
    in neither."""
    samples: int | None = None
    received_bytes: tuple[float, ...] = ()
    """Bytes received by each worker, by rank, until the run's end."""
    curve: tuple[float | None, ...] = ()
    """Mean accuracy over replicas at `CURVE_POINTS` equal steps from 0 to the goal's time; None
    before the first evaluation."""
    diverged: bool = False
    partial: bool = False
    """Whether the environment removed a worker whose replica the model lacks."""
    samples_to_target: float | None = None
    accuracy_name: str = ACCURACY
    """What people read for it: R² of targets."""


@dataclass(frozen=True)
class Spread:
    """Median and range over seeds; `missing` seeds have no value and count as the worst."""

    median: float | None
    least: float | None
    most: float | None
    missing: int = 0


@dataclass(frozen=True)
class VariantRow:
    """One variant in one environment."""

    environment: str
    variant: str
    learning_rate: float
    figures: tuple[VariantRun, ...]

    def spread(self, name: str) -> Spread:
        """Median and range of one figure over seeds."""
        values = [getattr(one, name) for one in self.figures]
        return spread(values, worst=-math.inf if name in _HIGHER_IS_BETTER else math.inf)

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
class RelativeResult:
    """One variant relative to another in the same environment; None without a median."""

    variant: str
    speed_up: float | None
    """The other's time to the target over this variant's."""
    points: float | None
    """Difference of accuracies at the goal's time, in percentage points."""
    relative: float | None
    """The same, relative to the other's accuracy; None for R², which may be 0 or negative."""
    at_least: float | None = None
    """Lower bound of the speed-up if only the other never reached the target."""


def accuracy_name_of(rows: Sequence[VariantRow]) -> str:
    """The common name of the accuracy in all runs that have one."""
    runs = (run for row in rows for run in row.figures)
    return common_name(run.accuracy_name for run in runs if run.accuracy is not None)


def relative_result(row: VariantRow, other: VariantRow, goal: Goal) -> RelativeResult:
    """Compare two rows by medians over seeds."""
    own_s, its_s = (one.spread("time_to_target_s").median for one in (row, other))
    own, its = (one.spread("accuracy").median for one in (row, other))
    gain = own - its if own is not None and its is not None else None
    has_ratio = its is not None and its > 0 and accuracy_name_of([row, other]) == ACCURACY
    return RelativeResult(
        other.variant,
        speed_up=its_s / own_s if own_s and its_s else None,
        points=None if gain is None else 100 * gain,
        relative=gain / its if has_ratio and gain is not None and its else None,
        at_least=goal.at_s / own_s if own_s and its_s is None else None,
    )


@dataclass(frozen=True)
class Verdict:
    """Which variant won in one environment."""

    winner: str
    text: str
    """The margin over the second, with the range over seeds."""


def verdict(rows: Sequence[VariantRow], goal: Goal) -> Verdict | None:
    """Judge the variants of one environment by medians: earliest at the target, else most accurate.

    None for fewer than two, or if none has figures. The range is that of the ratio, or difference,
    of two runs with the same seed.
    """
    ranked = sorted(rows, key=_rank)
    if len(ranked) < 2 or ranked[0].spread("accuracy").median is None:
        return None
    first, second = ranked[:2]
    name = accuracy_name_of(rows)
    is_accuracy = name == ACCURACY
    target = f"{100 * goal.target_accuracy:g} %"
    if not is_accuracy:
        target = f"{name} {goal.target_accuracy:g}"
    against = relative_result(first, second, goal)
    if against.speed_up is not None:
        pairs = _pairs(first, second, "time_to_target_s")
        ratios = [its_s / own_s for own_s, its_s in pairs if own_s]
        by = f"{against.speed_up:.2f} times as soon as {second.variant}"
        doubt = bool(ratios) and min(ratios) < 1
        doubt |= _is_ahead_without_value(first, second, "time_to_target_s")
        return Verdict(
            first.variant,
            f"{first.variant} is first at {target}: {by}{_range(ratios, '{:.2f}', doubt)}",
        )
    if against.at_least is not None:
        reached = len(second.figures) - second.spread("time_to_target_s").missing
        there = (
            f"is there with {reached} of {len(second.figures)} seeds"
            if reached
            else "never is there"
        )
        by = f"over {against.at_least:.2f} times as soon as {second.variant}, which {there}"
        return Verdict(first.variant, f"{first.variant} is first at {target}: {by}")
    unit, form, best = ("points ", "{:.1f}", "is the most accurate")
    if not is_accuracy:
        unit, form, best = "", "{:.2f}", f"has the highest {name}"
    scale = 100 if is_accuracy else 1
    gains = [scale * (own - its) for own, its in _pairs(first, second, "accuracy")]
    doubt = bool(gains) and min(gains) < 0
    doubt |= _is_ahead_without_value(first, second, "accuracy")
    gain = form.format((against.points or 0.0) * scale / 100)
    return Verdict(
        first.variant,
        f"no column reaches {target}; {first.variant} {best}: "
        f"{gain} {unit}above {second.variant}{_range(gains, form, doubt)}",
    )


def _rank(row: VariantRow) -> tuple[float, float]:
    time_s, accuracy = row.spread("time_to_target_s").median, row.spread("accuracy").median
    return (
        float("inf") if time_s is None else time_s,
        float("inf") if accuracy is None else -accuracy,
    )


def _pairs(first: VariantRow, second: VariantRow, name: str) -> list[tuple[float, float]]:
    """Both values of each seed that has both."""
    others = {one.seed: getattr(one, name) for one in second.figures}
    values = [(getattr(one, name), others.get(one.seed)) for one in first.figures]
    return [(own, its) for own, its in values if own is not None and its is not None]


def _is_ahead_without_value(first: VariantRow, second: VariantRow, name: str) -> bool:
    """Whether the second has a value with a seed of which the first has none."""
    others = {one.seed: getattr(one, name) for one in second.figures}
    return any(
        getattr(one, name) is None and others.get(one.seed) is not None for one in first.figures
    )


def _range(values: Sequence[float], form: str, doubt: bool) -> str:
    """The range over seeds, and whether it leaves the winner open."""
    if len(values) < 2:
        return ""
    ends = " to ".join(form.format(end) for end in (min(values), max(values)))
    return f" ({ends} over {len(values)} seeds{': no clear winner' * doubt})"


def diverged(seed: int) -> VariantRun:
    """The figures of a run whose weights or loss overflowed."""
    return VariantRun(seed, None, None, None, None, None, None, None, None, diverged=True)


def variant_run(run: LoadedRun, goal: Goal, *, seed: int) -> VariantRun:
    mean = run.mean_accuracy()
    replicas = [worker.accuracy_curve.points() for worker in trusted_workers(run.workers)]
    time_s = time_to_accuracy(replicas, goal.target_accuracy)
    reached_s = [] if time_s is None else [time_s]
    (sent,) = sent_bytes_at(run.workers, reached_s).tolist() or [None]
    trained = [each for each in run.workers if run.job.spec.exchange.trains(each.rank)]
    (trained_on,) = samples_at(trained, reached_s).tolist() or [None]
    accuracy = run.summary["accuracy"]
    wall_s = sum(worker.compute_s + worker.waited_s for worker in run.workers)
    return VariantRun(
        seed=seed,
        time_to_target_s=time_s,
        bytes_to_target=sent,
        accuracy=float(at_times(mean, [goal.at_s])[0]) if len(mean) else None,
        best_replica=accuracy["max"],
        averaged_model=accuracy["averaged_model"],
        drift=run.summary["drift"]["last"],
        sent_bytes=float(run.summary["sent_bytes"]),
        compute_share=sum(w.compute_s for w in run.workers) / wall_s if wall_s else None,
        samples=run.summary["samples"],
        samples_to_target=trained_on,
        received_bytes=tuple(
            float(sum(w.links[to.rank].sent_bytes for w in run.workers if to.rank in w.links))
            for to in run.workers
        ),
        curve=_curve(run, goal),
        partial=run.summary["ending"]["reason"] == EndReason.PARTIAL,
        accuracy_name=run.accuracy_name,
    )


def _curve(run: LoadedRun, goal: Goal) -> tuple[float | None, ...]:
    mean = run.mean_accuracy()
    if not len(mean):
        return ()
    times_s = np.linspace(0, goal.at_s, CURVE_POINTS)
    values = zip(times_s, at_times(mean, times_s), strict=True)
    begins_s = mean[:, 0].min()
    return tuple(None if at_s < begins_s else round(float(v), 5) for at_s, v in values)


def spread(values: Sequence[float | None], *, worst: float = math.inf) -> Spread:
    """Median and range. A missing value counts as the worst one, infinity with either sign.

    The median is None where it is a missing value. For an even number it is the lower of the two
    middle values, so it is always a value of one run.

    >>> spread([3.0, None, 1.0]).median, spread([None, None, 1.0]).median
    (3.0, None)
    >>> spread([0.9, None, 0.8], worst=-math.inf).median
    0.8
    >>> spread([1.0, 2.0, 3.0, 9.0]).median, spread([1.0, None]).median
    (2.0, 1.0)
    """
    known = sorted(value for value in values if value is not None)
    missing = len(values) - len(known)
    ranked = sorted([*known, *[worst] * missing])
    median = statistics.median_low(ranked) if ranked else None
    return Spread(
        median=None if median == worst else median,
        least=known[0] if known else None,
        most=known[-1] if known else None,
        missing=missing,
    )


def is_better(first: VariantRow, second: VariantRow) -> bool:
    """Whether the first of two learning rates is better: earlier at the target, else more accurate
    at the goal's time."""
    one, other = first.spread("time_to_target_s"), second.spread("time_to_target_s")
    if one.median is not None or other.median is not None:
        return other.median is None or (one.median is not None and one.median < other.median)
    own, its = first.spread("accuracy").median, second.spread("accuracy").median
    return its is None or (own is not None and own > its)
