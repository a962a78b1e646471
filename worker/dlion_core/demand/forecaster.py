"""Continues a series of readings, one a second, by the rule that has erred least. Pure.

Sidecars do not load NumPy, and so no library for time series: see decision 54.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from heapq import nsmallest

MAX_HISTORY = 900
"""Readings kept: cycles of up to seven minutes are found, as one must have come twice."""

MEMORIES = (10.0, 40.0, 160.0)
"""How many readings of the past must resemble the present: few find what follows an edge, many find
where in a long cycle the present is."""

NEIGHBOURS = 3
"""Passages of the past whose continuations count: their median, so that a single one does not."""

LEVEL_FRACTION = 0.35
"""Part of the difference from a new reading by which the smoothed level changes."""

ERROR_MEMORY = 60.0
"""Readings over which the rules are compared."""

PERSISTENCE = "last reading"


class DemandForecaster:
    """Forecasts the mean of the next readings.

    The rules: the last reading stays; a smoothed level; and the continuations of those passages of
    the past that resemble the present most, for three lengths of what counts as the present. The
    latter find cycles without a search for their period, and edges that come a known time after
    another. Each rule's forecasts are compared with what came, and the one with the least error
    counts.

    Source: the method of analogues (Lorenz, Atmospheric Predictability as Revealed by Naturally
    Occurring Analogues, 1969), and following the leader with forgetting; their combination is ours.
    """

    def __init__(self) -> None:
        self._history: list[float] = []
        """Newest last."""
        self._distances: list[list[float]] = [[] for _ in MEMORIES]
        """By memory and lag - 1: the distance between the present and the past of this lag."""
        self._level = 0.0
        self._open: deque[tuple[int, int, dict[str, float]]] = deque(maxlen=100)
        """Forecasts of which readings are still missing: when made, over how many, by rule."""
        self._count = 0
        self._errors: dict[str, float] = {}

    def add(self, value: float) -> None:
        """Add the reading of the next second. Raises ValueError for one that is not finite."""
        if not math.isfinite(value):
            raise ValueError(f"reading {value}; allowed: finite numbers")
        self._update_distances(value)
        fraction = LEVEL_FRACTION if self._history else 1.0
        self._level += fraction * (value - self._level)
        self._count += 1
        self._history.append(value)
        del self._history[:-MAX_HISTORY]
        self._compare()

    def forecast(self, readings: int) -> tuple[float, str]:
        """The mean of that many readings to come, and the rule that it rests on.

        Raises ValueError before the first reading.
        """
        if not self._history:
            raise ValueError("no reading yet")
        readings = min(max(readings, 1), MAX_HISTORY // 10)
        by_rule = self._by_rule(readings)
        self._open.append((self._count, readings, by_rule))
        # The first of equals, and of rules without a comparison, is the last reading.
        rule = min(by_rule, key=lambda each: self._errors.get(each, math.inf))
        return by_rule[rule], rule

    def _by_rule(self, readings: int) -> dict[str, float]:
        by_rule = {PERSISTENCE: self._history[-1], "level": self._level}
        for memory, distances in zip(MEMORIES, self._distances, strict=True):
            value = self._continued(distances, readings, int(memory))
            if value is not None:
                by_rule[f"pattern of {memory:g} s"] = value
        return by_rule

    def _continued(self, distances: Sequence[float], readings: int, memory: int) -> float | None:
        """The median continuation of the passages that are nearest to the present."""
        # A passage must be known as far as it counts, and so must its continuation.
        lags = range(readings, len(self._history) - memory)
        if len(lags) < NEIGHBOURS:
            return None
        values = []
        for lag in nsmallest(NEIGHBOURS, lags, key=lambda each: distances[each - 1]):
            begin = len(self._history) - lag
            values.append(math.fsum(self._history[begin : begin + readings]) / readings)
        return statistics.median(values)

    def _update_distances(self, value: float) -> None:
        """Let the distances of all lags follow a new reading."""
        apart = [abs(value - each) for each in reversed(self._history)]
        for index, memory in enumerate(MEMORIES):
            kept, old = math.exp(-1.0 / memory), self._distances[index]
            new = [kept * before + now for before, now in zip(old, apart, strict=False)]
            self._distances[index] = new + apart[len(new) :]

    def _compare(self) -> None:
        """Compare the forecasts whose readings are complete with what came."""
        kept = math.exp(-1.0 / ERROR_MEMORY)
        while self._open and self._open[0][0] + self._open[0][1] <= self._count:
            made, readings, by_rule = self._open.popleft()
            end = len(self._history) - (self._count - made - readings)
            if end < readings:  # forecasts pause for longer than the history
                continue
            came = math.fsum(self._history[end - readings : end]) / readings
            for rule, value in by_rule.items():
                error = abs(value - came)
                before = self._errors.get(rule, error / (1.0 - kept))
                self._errors[rule] = kept * before + error
