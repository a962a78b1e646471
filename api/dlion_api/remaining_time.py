"""How much of a run is done, and how long it will take, for each of its stop rules. Pure.

Used for the same records by `dlion run`, by the operator (`status.trainerStatus`) and by the Python
client, so that all predict the same. Memory is bounded.

- maxSeconds: what is left of the seconds of training, by the workers' own count, which leaves out
  the pause before a resume.
- maxSteps, maxEpochs: the samples or epochs that are left, at the pace of the second half of the
  run so far. The first half has the start-up, the second one follows changes. Batches that are to
  grow make later steps longer. The worker that ends first counts.
- targetAccuracy: a range that holds nine tenths of the probability. Two standard forms of learning
  curves (Weibull and Hill) of many limits, shapes and paces are fitted to the mean
  accuracy of the replicas, and each predicts with the weight of its fit. How a learning curve will
  flatten does not show in its beginning, so a single figure would pretend a precision that there is
  not. Source of the forms: Domhan et al., IJCAI 2015; weights and grid are ours, in place of their
  sampling, as is the prior: times that differ by a factor are equally probable.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from dlion_api.names import Rank
from dlion_api.protocol.progress import EvaluationRecord, StepRecord

if TYPE_CHECKING:
    from dlion_api.spec import GlobalBatchSize, Spec

MAX_POINTS: Final = 128
"""Maximum points kept of a curve; above it every second point is dropped."""
PACE_SHARE: Final = 0.5
"""A pace is measured over this last part of the elapsed time."""
MAX_ADJUSTMENTS: Final = 1000
"""Maximum future changes of the global batch that are computed."""
MIN_TIME_S: Final = 1e-6
"""Earlier evaluations come from a faulty clock."""
MIN_EVALUATIONS: Final = 4
"""Minimum evaluations of the mean over replicas before a target is predicted."""
LIMITS: Final = (0.05, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Limits of accuracy that curves approach: how far from the target to 1."""
FORMS: Final = (
    *(("weibull", shape) for shape in (0.6, 0.8, 1.0, 1.3, 1.7, 2.2)),
    *(("hill", shape) for shape in (0.8, 1.0, 1.4, 2.0, 3.0, 4.5)),
)
"""Forms of curves and their shapes."""
PACES: Final = tuple(8.0 ** (step / 12) for step in range(-12, 13))
"""Time constants of curves, in lengths of the curve so far."""
LINE_WEIGHT: Final = 4.0
"""The weight of a line, in curves of the grid; few of these are near the same points."""
NOISE: Final = 0.02
"""Standard deviation of an accuracy that is assumed before any evaluation."""
NOISE_WEIGHT: Final = 4
"""The weight of that assumption, in evaluations."""
MAX_EVIDENCE: Final = 6
"""Maximum weight of evaluations: neighbours deviate together, and no form fits exactly."""
MAX_FITTED: Final = 32
"""Maximum points of the curve that are fitted, evenly chosen."""
QUANTILES: Final = (0.05, 0.95)
"""Cumulative probabilities at which a range begins and ends."""
MAX_RATIO: Final = 4.0
"""Maximum ratio of the longest to the shortest prediction; wider ranges are unknown."""
MAX_REMAINING_S: Final = 2.0**31 - 1
"""Upper bound of all times, which fits the status. Records of later times are ignored."""
MAX_TRAINING_SET: Final = 2**53
MAX_CLOCK_ERROR_S: Final = 5.0
"""A worker's seconds of training that exceed those since its beginning by more are ignored."""


@dataclass(frozen=True)
class Remaining:
    """When the run will end, as far as that can be predicted."""

    fraction: float | None = None
    """Fraction of the run that is done; None: unknown."""
    seconds: float | None = None
    """Seconds until the first end that can be predicted exactly; None: there is none."""
    target_s: tuple[float, float] | None = None
    """The range until the target accuracy; None: no target, or unknown."""
    has_target: bool = False
    """Whether an accuracy may end the run before `seconds`."""

    @property
    def is_reached(self) -> bool:
        """Whether an end other than the target is reached. A step or exchange may still run."""
        return self.fraction == 1.0 and self.seconds == 0.0


class BoundedCurve:
    """Values over time: at most MAX_POINTS, evenly spread, and the newest."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._newest: tuple[float, float] | None = None
        self._stride, self._skipped = 1, 0

    def append(self, time_s: float, value: float) -> None:
        """Add a point; earlier times than the newest are ignored."""
        if self._newest is not None and time_s < self._newest[0]:
            return
        self._newest = time_s, value
        self._skipped += 1
        if self._skipped < self._stride:
            return
        self._skipped = 0
        self._points.append(self._newest)
        if len(self._points) >= MAX_POINTS:
            self._points = self._points[::2]
            self._stride *= 2

    def points(self) -> list[tuple[float, float]]:
        newest = [] if self._newest is None or self._newest in self._points[-1:] else [self._newest]
        return [*self._points, *newest]

    def recent_pace(self) -> float | None:
        """Growth per second over the last half of the time; None: unknown, or no growth (data may
        grow faster than epochs pass)."""
        points = self.points()
        if len(points) < 2:
            return None
        since_s = points[-1][0] - PACE_SHARE * (points[-1][0] - points[0][0])
        first = next((point for point in reversed(points[:-1]) if point[0] <= since_s), points[0])
        grown, span_s = points[-1][1] - first[1], points[-1][0] - first[0]
        return grown / span_s if grown > 0 and span_s > 0 else None


class _Worker:
    """The known progress of one worker."""

    def __init__(self) -> None:
        self.samples, self.epochs = BoundedCurve(), BoundedCurve()
        """Samples and epochs of the job, as this worker counts them, since its first known step."""
        self.iteration = self.global_batch_size = self._counted = self._incarnation = 0
        self.began_s = 0.0
        """When the first known step began."""
        self.done_before = 0
        """Earlier steps: reported to an earlier operator, or done before a restart."""
        self.last_s = -math.inf
        self._origin_s: float | None = None
        """When the run would have begun to train without pauses; None: not reported."""

    def add(self, record: StepRecord) -> None:
        if self.last_s == -math.inf:
            self.began_s = record.time_s - record.wall_s
            self.done_before = max(0, record.iteration - 1)
        elif record.iteration <= self.iteration or self._has_rejoined(record):
            # It resumed from a checkpoint or a peer's state, which voids its old pace.
            self.samples, self.epochs = BoundedCurve(), BoundedCurve()
        else:
            self._counted += (record.iteration - self.iteration) * record.global_batch_size
        self.iteration, self.last_s = record.iteration, max(self.last_s, record.time_s)
        self._incarnation = record.incarnation
        self.global_batch_size = record.global_batch_size
        # A worker known from its first step has not trained before: start-up took that time.
        since_s = 0.0 if self.done_before else self.began_s
        max_s = record.time_s - since_s + MAX_CLOCK_ERROR_S
        if record.trained_s is not None and 0.0 <= record.trained_s <= max_s:
            self._origin_s = record.time_s - record.trained_s
        trained_s = record.time_s - (self._origin_s or 0.0)
        self.samples.append(trained_s, self._counted)
        if record.epochs:
            self.epochs.append(trained_s, record.epochs)

    def _has_rejoined(self, record: StepRecord) -> bool:
        """Whether it took the iteration of peers that trained on meanwhile."""
        is_restarted = record.incarnation != self._incarnation
        return is_restarted and record.iteration > self.iteration + 1

    def training_set_samples(self) -> int:
        """Training samples of all workers; 0: unknown."""
        samples, epochs = self.samples.recent_pace(), self.epochs.recent_pace()
        return round(min(samples / epochs, MAX_TRAINING_SET)) if samples and epochs else 0

    def samples_until(self, iteration: int, growth: GlobalBatchSize) -> float:
        """The job's samples from now until that iteration, with batches that grow as planned."""
        size, at, total = self.global_batch_size, self.iteration, 0.0
        training_set = self.training_set_samples() if growth.growth else 0
        for _ in range(MAX_ADJUSTMENTS if training_set else 0):
            until = min(iteration, (at // growth.every_steps + 1) * growth.every_steps)
            total += max(0, until - at) * size
            grown, at = growth.grown(size, training_set), until
            if grown == size or at >= iteration:
                break
            size = grown
        return total + (iteration - at) * size

    def started_s(self) -> float:
        """When it began to train, shifted by later pauses if they are counted. Without its own
        report it is an estimate: unknown steps count at the present pace."""
        if self._origin_s is not None:
            return self._origin_s
        pace = self.samples.recent_pace()
        before_s = self.done_before * self.global_batch_size / pace if pace else 0.0
        return max(0.0, self.began_s - before_s)


class RemainingTime:
    """Predicts the end of one run from its records, which come in order of arrival."""

    def __init__(self, spec: Spec) -> None:
        self._stop, self._growth = spec.trainer.stop, spec.global_batch_size
        if spec.batching.policy == "goodput":  # its batches follow no plan
            self._growth = replace(self._growth, growth=False)
        self._trains = spec.exchange.trains
        self._workers: dict[Rank, _Worker] = {}
        self._accuracies: dict[Rank, float] = {}
        self._evaluated: set[Rank] = set()
        """Workers that have evaluated since the last point of the curve."""
        self._accuracy = BoundedCurve()
        """Mean over replicas, against seconds of training."""
        self._fitted: tuple[list[tuple[float, float]], tuple[float, float] | None] = [], None
        """The curve of the last prediction, and its range."""

    def expect(self, ranks: Collection[Rank]) -> None:
        """Set the present workers; others no longer count."""
        self._workers = {rank: each for rank, each in self._workers.items() if rank in ranks}
        self._accuracies = {rank: a for rank, a in self._accuracies.items() if rank in ranks}

    def take(self, record: StepRecord | EvaluationRecord) -> None:
        """Add one record. A time that no run has is ignored: a faulty worker must not stop this."""
        if not 0.0 <= record.time_s <= MAX_REMAINING_S:
            return
        if isinstance(record, StepRecord):
            self._workers.setdefault(record.rank, _Worker()).add(record)
        elif not record.final and 0.0 <= record.accuracy <= 1.0:
            if record.rank in self._evaluated:
                self._close_round(record.time_s)
            self._evaluated.add(record.rank)
            self._accuracies[record.rank] = record.accuracy
            if self._evaluated >= self._training().keys():
                self._close_round(record.time_s)

    def _training(self) -> dict[Rank, _Worker]:
        """The workers whose steps count: sensors make other ones, and evaluate nothing."""
        return {rank: each for rank, each in self._workers.items() if self._trains(rank)}

    def _close_round(self, time_s: float) -> None:
        known = self._accuracies.values()
        if known and self._accuracies.keys() >= self._training().keys():
            self._accuracy.append(time_s - self._began_s(), sum(known) / len(known))
        self._evaluated.clear()

    def _began_s(self) -> float:
        """When the worker began that has trained longest; 0 before the first step.

        Of three and more it is the second one, so that no faulty worker decides alone. It is not
        the median: workers that join late are no reason to expect a later end.
        """
        started_s = sorted(worker.started_s() for worker in self._workers.values())
        return started_s[len(started_s) > 2] if started_s else 0.0

    def predict(self, now_s: float | None = None) -> Remaining:
        """The prediction. `now_s`: the run's present time; None: that of its newest step."""
        target, has_target = None, self._stop.target_accuracy is not None
        if not self._workers:
            return Remaining(has_target=has_target)
        began_s = self._began_s()
        if now_s is None:
            now_s = max(worker.last_s for worker in self._workers.values())
        if self._stop.target_accuracy is not None:
            target = self._until_target(self._stop.target_accuracy)
        ends = list(self._ends(now_s, began_s))
        first = min(ends, key=lambda end: end[1], default=None)
        seconds = None if first is None else min(max(0.0, first[1]), MAX_REMAINING_S)
        fraction = None if first is None else min(1.0, max(0.0, first[0]))
        target_s: tuple[float, float] | None = None
        if target is not None:
            low_s, high_s = max(0.0, began_s + target[0] - now_s), began_s + target[1] - now_s
            # Past its end the prediction was wrong.
            if high_s > 0 and (seconds is None or low_s < seconds):
                target_s = low_s, high_s
                done_s, left_s = now_s - began_s, math.sqrt(max(low_s, 1e-3) * max(high_s, 1e-3))
                nearer = seconds is None or left_s < seconds
                fraction = done_s / (done_s + left_s) if nearer and done_s > 0 else fraction
        return Remaining(fraction, seconds, target_s, has_target)

    def _until_target(self, target: float) -> tuple[float, float] | None:
        """The range of seconds from the beginning to the target. Cached for each curve: a view asks
        several times a second."""
        curve = self._accuracy.points()
        if curve != self._fitted[0]:
            self._fitted = curve, _time_to(target, curve)
        return self._fitted[1]

    def _ends(self, now_s: float, began_s: float) -> Iterator[tuple[float, float]]:
        """Fraction of the way and seconds left for each end that can be predicted exactly."""
        stop = self._stop
        if stop.max_seconds is not None:
            trained_s = now_s - began_s
            yield trained_s / stop.max_seconds, stop.max_seconds - trained_s
        # The first worker to reach the last step or epoch ends the run for all.
        workers = self._training().values()
        furthest = max((worker.iteration for worker in workers), default=0)
        for worker in workers:
            since_s = now_s - worker.last_s
            if stop.max_steps is not None and (pace := worker.samples.recent_pace()):
                left = worker.samples_until(stop.max_steps, self._growth)
                yield furthest / stop.max_steps, left / pace - since_s
            if stop.max_epochs is not None and (pace := worker.epochs.recent_pace()):
                done = worker.epochs.points()[-1][1]  # each worker counts the samples of all
                yield done / stop.max_epochs, (stop.max_epochs - done) / pace - since_s


def _time_to(target: float, curve: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """The range of seconds at which the curve will reach the target; None: unknown."""
    usable = [(time_s, value) for time_s, value in curve if time_s > MIN_TIME_S]
    if len(usable) < MIN_EVALUATIONS or not usable[0][1] < usable[-1][1] < target:
        return None
    step = max(1.0, (len(usable) - 1) / (MAX_FITTED - 1))
    chosen = [
        usable[-1 - round(step * place)] for place in range(int((len(usable) - 1) / step) + 1)
    ]
    last_s = usable[-1][0]
    predictions = sorted(
        (time_s, weight * last_s / time_s)
        for time_s, weight in _fits(target, chosen, last_s)
        if last_s < time_s < math.inf
    )
    total = sum(weight for _, weight in predictions)
    if total <= 0.0:
        return None
    low_s, high_s = (_quantile(predictions, share * total) for share in QUANTILES)
    return (low_s, high_s) if high_s <= min(MAX_RATIO * low_s, MAX_REMAINING_S) else None


def _quantile(weighted: Sequence[tuple[float, float]], weight: float) -> float:
    """The first of the ordered values whose cumulative weight reaches `weight`."""
    reached = itertools.accumulate(each for _, each in weighted)
    return next((v for (v, _), sum_ in zip(weighted, reached, strict=True) if sum_ >= weight),
                weighted[-1][0])  # fmt: skip


def _fits(
    target: float, points: Sequence[tuple[float, float]], last_s: float
) -> Iterator[tuple[float, float]]:
    """(seconds to the target, likelihood) of each curve that rises: a = limit - b f(t / pace).

    b is that of least squares. The likelihood is Student's, as the noise is not known.
    """
    count = len(points)
    values = [value for _, value in points]
    value_sum, square_sum = sum(values), sum(value * value for value in values)
    highest = max(*values, target)
    limits = [highest + share * (1.0 - highest) + 1e-6 for share in LIMITS]
    evidence = min(count, MAX_EVIDENCE)

    def likelihood(error: float) -> float:
        against = 1.0 + evidence * error / (NOISE_WEIGHT * NOISE * NOISE)
        return float(against ** (-(evidence + NOISE_WEIGHT) / 2))

    for scale, back in ((float, float), (math.log, _exp)):  # lines over seconds and their logarithm
        xs = [scale(time_s) for time_s, _ in points]
        u, v = _line(xs, values)
        if v > 0.0:
            errors = (u + v * x - value for x, value in zip(xs, values, strict=True))
            error = sum(each * each for each in errors) / count
            yield back((target - u) / v), LINE_WEIGHT * likelihood(error)
    for pace, (form, shape) in itertools.product(PACES, FORMS):
        fs = [_falls(time_s / (pace * last_s), form, shape) for time_s, _ in points]
        f_sum, ff_sum = sum(fs), sum(f * f for f in fs)
        fv_sum = sum(f * value for f, value in zip(fs, values, strict=True))
        if ff_sum <= 0.0:
            continue
        for limit in limits:
            b = (limit * f_sum - fv_sum) / ff_sum
            left = (limit - target) / b if b > 0.0 else 1.0
            if not 0.0 < left < 1.0 or b > limit + NOISE:  # falls, or begins far below 0
                continue
            gap_squares = count * limit * limit - 2.0 * limit * value_sum + square_sum
            error = max(0.0, gap_squares - b * b * ff_sum) / count
            yield pace * last_s * _inverse(left, form, shape), likelihood(error)


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Offset and slope of the line of least squares; slope 0 if all x are equal."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    if spread <= 0:
        return mean_y, 0.0
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    return mean_y - slope * mean_x, slope


def _exp(power: float) -> float:
    return math.exp(min(power, 50.0))


def _falls(x: float, form: str, shape: float) -> float:
    """The value of this form at x; it falls from 1 at 0 towards 0."""
    return math.exp(-(x**shape)) if form == "weibull" else 1.0 / (1.0 + x**shape)


def _inverse(f: float, form: str, shape: float) -> float:
    """The x at which this form has fallen to f."""
    power = -math.log(f) if form == "weibull" else 1.0 / f - 1.0
    return float(power ** (1.0 / shape))
