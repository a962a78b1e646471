"""Estimates the CPU seconds per sample of a typical step. Pure: CPU time is an argument."""

import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

MIN_CPU_S = 0.02
"""Shorter observations are merged: the CPU clock and caches are no more precise."""

ENOUGH_CPU_S = 0.2
ENOUGH_OBSERVATIONS = 3

BLENDING_OBSERVATIONS = 4
"""This many observations replace the previous estimate, one part each."""

MAX_OBSERVATIONS = 40
MAX_BLENDING_CHANGE_FRACTION = 0.5
"""Limit for an observation's deviation from the previous estimate meanwhile: it may be far off."""

TRIMMED_FRACTION = 0.25
"""Fraction of observations to drop at each end; at least one each if there are three."""

CHANGE_FRACTION = 0.15
CHANGE_OBSERVATIONS = 5
"""This many consecutive observations that far on the same side mean that the cost has changed."""


@dataclass
class _Observation:
    samples: float
    cpu_s: float

    @property
    def cost_s(self) -> float:
        return self.cpu_s / self.samples


class SampleCost:
    """The trimmed mean of recent observations.

    Trimmed, because single steps cost up to three times as much, for example when memory is first
    used. CPU time, unlike wall time, hides no quota in that. A median would jump between two
    kinds of steps.

    A previous estimate, from a measurement or before `reset`, is replaced gradually. A cost that
    rises for all workers then changes all estimates at about the same time.

    Source: this project; the trimmed mean (here the midmean) is Tukey's.
    """

    def __init__(self) -> None:
        self._observations: deque[_Observation] = deque(maxlen=MAX_OBSERVATIONS)
        self._previous_s: float | None = None

    def add(self, samples: float, cpu_s: float) -> None:
        if samples <= 0 or cpu_s <= 0:
            return
        newest = self._observations[-1] if self._observations else None
        if newest is not None and newest.cpu_s < MIN_CPU_S:
            newest.samples += samples
            newest.cpu_s += cpu_s
        else:
            self._observations.append(_Observation(samples, cpu_s))
        self._forget()

    def add_measured(self, samples: float, cpu_s: float) -> None:
        """Set a measurement to use until there are observations; drop older ones."""
        if samples > 0 and cpu_s > 0:
            self._previous_s = cpu_s / samples
            self._observations.clear()

    def reset(self) -> None:
        """Conditions have changed somewhat: keep the estimate only as a starting point."""
        self._previous_s = self.cost_s()
        self._observations.clear()

    @property
    def window_s(self) -> float:
        """CPU time of the observations; 0 while there are none."""
        return sum(one.cpu_s for one in self._observations)

    def cost_s(self) -> float | None:
        """CPU seconds per sample; None until there are enough observations."""
        count = len(self._observations)
        if self._previous_s is None:
            enough = count >= ENOUGH_OBSERVATIONS or self.window_s >= ENOUGH_CPU_S
            return _trimmed_mean(self._observations) if enough else None
        if not count:
            return self._previous_s
        new = min(1.0, count / BLENDING_OBSERVATIONS)
        cost_s = _trimmed_mean(self._observations)
        if new < 1.0:
            max_s = MAX_BLENDING_CHANGE_FRACTION * self._previous_s
            cost_s = min(max(cost_s, self._previous_s - max_s), self._previous_s + max_s)
        return (1.0 - new) * self._previous_s + new * cost_s

    def _forget(self) -> None:
        older = list(self._observations)[:-CHANGE_OBSERVATIONS]
        if not older:
            return
        known_s = _trimmed_mean(older)
        changes = [
            one.cost_s / known_s - 1 for one in list(self._observations)[-CHANGE_OBSERVATIONS:]
        ]
        if min(changes) > CHANGE_FRACTION or max(changes) < -CHANGE_FRACTION:
            for _ in older:
                self._observations.popleft()


def _trimmed_mean(observations: Collection[_Observation]) -> float:
    costs = sorted(one.cost_s for one in observations)
    trimmed = max(int(TRIMMED_FRACTION * len(costs)), len(costs) >= 3)
    return statistics.fmean(costs[trimmed : len(costs) - trimmed])
