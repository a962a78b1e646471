"""Curves over time in bounded memory, with subsampling and interpolation.

Used by `tally` during a run, and by `summary` and `report` afterwards. Independent of records.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]
"""Shape [T, 1 + V]: time in seconds, then the values."""
POINTS_PER_CHART: Final = 2400
MIN_POINTS: Final = 24


class Curve:
    """Values over time in at most `limit` rows.

    When it is full, pairs of rows are merged, and each new row holds twice as many samples. So rows
    are evenly spread over the run; the newest sample is always included. With `averaged` a row is
    the mean of its samples (losses), else the first (accuracies and running totals).
    """

    def __init__(self, value_count: int, *, limit: int = 2048, averaged: bool = False) -> None:
        self._width = value_count + 1
        self._limit = limit
        self._averaged = averaged
        self._rows: list[NDArray[np.float64]] = []
        self._stride = 1
        self._open = np.zeros(self._width)
        self._open_count = 0
        self._newest: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self._rows) + (self._open_count > 0)

    def append(self, time_s: float, *values: float | None) -> None:
        """Add one sample; None or NaN marks an unknown value."""
        row = np.array((time_s, *values), dtype=np.float64)
        self._newest = row
        if self._averaged and self._open_count:
            self._open = self._open + row
        elif not self._open_count:
            self._open = row
        self._open_count += 1
        if self._open_count == self._stride:
            self._rows.append(self._closed())
            self._open_count = 0
            if len(self._rows) >= self._limit:
                self._fold()

    def hold(self, until_s: float) -> None:
        """Hold the newest values until just before `until_s`, where a different quantity starts.

        Interpolation before that time then ignores it. Values of that very time become earlier. The
        newest values stay a row: they may be what ended the run.
        """
        before_s = float(np.nextafter(until_s, -np.inf))
        if self._newest is None:
            return
        if len(self._rows) > self._limit - 6:  # not soon after: it would drop rows that are kept
            self._fold()
        self._keep_newest()
        if self._newest[0] < before_s:
            self.append(before_s, *self._newest[1:])
            self._keep_newest()
        elif self._newest[0] == until_s:  # in virtual time, the evaluation that ended the run
            self._newest[0] = before_s

    def points(self) -> Points:
        """All rows, shape [T, 1 + V], in order."""
        rows = list(self._rows)
        if self._open_count:
            rows.append(self._closed())
        if not self._averaged and self._newest is not None and rows[-1] is not self._newest:
            rows.append(self._newest)
        return np.array(rows) if rows else np.empty((0, self._width))

    def _keep_newest(self) -> None:
        for row in (self._open if self._open_count else None, self._newest):
            if row is not None and not (self._rows and row is self._rows[-1]):
                self._rows.append(row)
        self._open_count = 0

    def _closed(self) -> NDArray[np.float64]:
        return self._open / self._open_count if self._averaged else self._open

    def _fold(self) -> None:
        even, odd = self._rows[0::2], self._rows[1::2]
        if self._averaged:
            pairs = zip(even, odd, strict=False)  # an unpaired last row is dropped
            self._rows = [(first + second) / 2 for first, second in pairs]
        else:
            self._rows = even
        self._stride *= 2


def at_times(points: Points, times_s: Sequence[float] | Points, column: int = 1) -> Points:
    """Interpolate a column linearly; constant before the first and after the last row."""
    if len(points) == 0:
        return np.full(len(times_s), np.nan)
    ordered = points[np.argsort(points[:, 0], kind="stable")]
    values = ordered[:, column]
    between = np.interp(np.asarray(times_s), ordered[:, 0], values)
    # Where times differ by next to nothing, the slope is infinite.
    result: Points = np.clip(between, values.min(), values.max())
    return result


def mean_over_replicas(replicas: Sequence[Points]) -> Points:
    """Mean accuracy over replicas against time, shape [T, 2].

    Begins when every replica has an evaluation, and has a row at each evaluation of any. A replica
    that ended early keeps its last accuracy. Source: the project's fair comparison, interpolated.
    """
    known = [points for points in replicas if len(points)]
    if not known:
        return np.empty((0, 2))
    start_s = max(points[:, 0].min() for points in known)
    times_s = np.unique(np.concatenate([points[:, 0] for points in known]))
    times_s = times_s[times_s >= start_s]
    mean = np.mean([at_times(points, times_s) for points in known], axis=0)
    return np.column_stack((times_s, mean))


def first_crossing_s(curve: Points, level: float) -> float | None:
    """Seconds at which the curve first reaches `level`, interpolated; None if never.

    A curve that begins above the level yields the time of its first point.
    """
    above = np.flatnonzero(curve[:, 1] >= level)
    if len(above) == 0:
        return None
    after = int(above[0])
    if after == 0:
        return float(curve[0, 0])
    (t0_s, low), (t1_s, high) = curve[after - 1, :2], curve[after, :2]
    return float(t0_s + (t1_s - t0_s) * (level - low) / (high - low))


def time_to_accuracy(replicas: Sequence[Points], level: float) -> float | None:
    """Seconds at which the mean over replicas first reaches `level`; None if never.

    The earlier of two criteria: the interpolated curves (`mean_over_replicas`), and each replica's
    last accuracy, by which a run tests its target. Later evaluations may lower an interpolated
    curve below the level again.
    """
    known = [points[np.argsort(points[:, 0], kind="stable")] for points in replicas if len(points)]
    if not known:
        return None
    interpolated = mean_over_replicas(known)
    times_s = interpolated[:, 0]
    last = [points[np.searchsorted(points[:, 0], times_s, side="right") - 1, 1] for points in known]
    reached = np.flatnonzero(np.mean(last, axis=0) >= level)
    candidates = [first_crossing_s(interpolated, level), *times_s[reached[:1]].tolist()]
    return min((time_s for time_s in candidates if time_s is not None), default=None)


def subsampled(points: Points, line_count: int) -> Points:
    """Subsample so that all lines of a chart stay within its points; ends are kept."""
    most = max(MIN_POINTS, POINTS_PER_CHART // max(1, line_count))
    if len(points) <= most:
        return points
    kept = np.unique(np.linspace(0, len(points) - 1, most).round().astype(int))
    rows: Points = points[kept]
    return rows


def smoothed(points: Points, line_count: int, *, bins: int = 120) -> Points:
    """Means over equal parts of the curve, for values that vary from step to step."""
    most = min(bins, max(MIN_POINTS, POINTS_PER_CHART // max(1, line_count)))
    if len(points) <= most:
        return points
    means: Points = np.array([part.mean(axis=0) for part in np.array_split(points, most)])
    return means
