"""CPU seconds per sample: what a step typically costs, whatever single steps have cost.

Owns the one estimator of a cost. Called by the capacity estimator. Pure: CPU time is an argument.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

LEAST_CPU_S = 0.02
"""Shorter observations are merged: a process's CPU clock and its caches are no better."""

ENOUGH_CPU_S = 0.2
ENOUGH_OBSERVATIONS = 3

FADING_OBSERVATIONS = 4
"""So many observations replace what was known before, one part each."""

MOST_OBSERVATIONS = 40
MOST_CHANGE_AT_ONCE = 0.5
"""While they do, one counts as at most so much more or less: it may be far off."""

LEFT_OUT_FRACTION = 0.25
"""Of the observations, the lowest and the highest; one each at least, where there are three."""

CHANGE_FRACTION = 0.15
CHANGE_OBSERVATIONS = 5
"""So many observations in a row on the same side of what was known, that far: it has changed."""


@dataclass
class _Observation:
    samples: float
    cpu_s: float

    @property
    def cost_s(self) -> float:
        return self.cpu_s / self.samples


class TypicalCost:
    """The trimmed mean of recent observations.

    Trimmed, since single steps cost up to three times as much, as where memory is touched for the
    first time. CPU time, unlike wall time, hides no quota behind that (design.md section 6 forbids
    it of step times). A median would jump where steps are of two kinds, as beside a neighbour that
    computes and beside one that waits.

    What was known before, by a measurement or until `begin_anew`, gives way part by part: what all
    workers pay more from now on then moves all their costs at about the same time.

    Source: ours; the trimmed mean (here the midmean) is Tukey's.
    """

    def __init__(self) -> None:
        self._seen: deque[_Observation] = deque(maxlen=MOST_OBSERVATIONS)
        self._before_s: float | None = None

    def add(self, samples: float, cpu_s: float) -> None:
        """Takes one observation."""
        if samples <= 0 or cpu_s <= 0:
            return
        newest = self._seen[-1] if self._seen else None
        if newest is not None and newest.cpu_s < LEAST_CPU_S:
            newest.samples += samples
            newest.cpu_s += cpu_s
        else:
            self._seen.append(_Observation(samples, cpu_s))
        self._forget()

    def add_measured(self, samples: float, cpu_s: float) -> None:
        """Takes a measurement that will do until there are observations; older ones go."""
        if samples > 0 and cpu_s > 0:
            self._before_s = cpu_s / samples
            self._seen.clear()

    def begin_anew(self) -> None:
        """What is measured has been replaced by something like it."""
        self._before_s = self.cost_s()
        self._seen.clear()

    @property
    def window_s(self) -> float:
        """CPU time that the estimate stands on; 0 while it is that of before."""
        return sum(one.cpu_s for one in self._seen)

    def cost_s(self) -> float | None:
        """CPU seconds per sample; None until there is an observation worth the name."""
        count = len(self._seen)
        if self._before_s is None:
            enough = count >= ENOUGH_OBSERVATIONS or self.window_s >= ENOUGH_CPU_S
            return _trimmed_mean(self._seen) if enough else None
        if not count:
            return self._before_s
        new = min(1.0, count / FADING_OBSERVATIONS)
        cost_s = _trimmed_mean(self._seen)
        if new < 1.0:
            most_s = MOST_CHANGE_AT_ONCE * self._before_s
            cost_s = min(max(cost_s, self._before_s - most_s), self._before_s + most_s)
        return (1.0 - new) * self._before_s + new * cost_s

    def _forget(self) -> None:
        older = list(self._seen)[:-CHANGE_OBSERVATIONS]
        if not older:
            return
        known_s = _trimmed_mean(older)
        changes = [one.cost_s / known_s - 1 for one in list(self._seen)[-CHANGE_OBSERVATIONS:]]
        if min(changes) > CHANGE_FRACTION or max(changes) < -CHANGE_FRACTION:
            for _ in older:
                self._seen.popleft()


def _trimmed_mean(seen: Collection[_Observation]) -> float:
    """CPU seconds per sample, each observation counting the same."""
    costs = sorted(one.cost_s for one in seen)
    left_out = max(int(LEFT_OUT_FRACTION * len(costs)), len(costs) >= 3)
    return statistics.fmean(costs[left_out : len(costs) - left_out])
