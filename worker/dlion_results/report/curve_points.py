"""Thins out curves, so that all lines of a chart together stay within a number of points."""

from typing import Final

import numpy as np

from dlion_results.summary.curves import Points

POINTS_PER_CHART: Final = 2400
MIN_POINTS: Final = 24


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
