"""CPU seconds per sample: what a step typically costs, whatever single steps have cost.

Owns the one estimator of a cost. Called by the capacity estimator. Pure: CPU time is an argument.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

LEAST_CPU_S = 0.02
"""Shorter observations are merged: a process's CPU clock and its caches are no better."""

ENOUGH_CPU_S = 0.2
ENOUGH_OBSERVATIONS = 3

MOST_OBSERVATIONS = 21
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
    """The median cost of recent observations.

    CPU time, unlike wall time, hides no quota behind a median (design.md section 6 forbids that of
    step times); single steps do cost up to three times as much, where memory is touched for the
    first time or the exchange has emptied the caches, and a mean would keep that for long.

    After `begin_anew` the last value stands until there are as many new observations as outvote
    one that is far off.

    Source: ours.
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
        """Takes a measurement that will do by itself: it counts as so many observations."""
        if samples > 0 and cpu_s > 0:
            part = 1.0 / ENOUGH_OBSERVATIONS
            for _ in range(ENOUGH_OBSERVATIONS):
                self._seen.append(_Observation(samples * part, cpu_s * part))
            self._forget()

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
        enough = len(self._seen) >= ENOUGH_OBSERVATIONS
        if self._before_s is None:
            enough = enough or self.window_s >= ENOUGH_CPU_S
        if not enough:
            return self._before_s
        return statistics.median(one.cost_s for one in self._seen)

    def _forget(self) -> None:
        older = list(self._seen)[:-CHANGE_OBSERVATIONS]
        if not older:
            return
        known_s = statistics.median(one.cost_s for one in older)
        changes = [one.cost_s / known_s - 1 for one in list(self._seen)[-CHANGE_OBSERVATIONS:]]
        if min(changes) > CHANGE_FRACTION or max(changes) < -CHANGE_FRACTION:
            for _ in older:
                self._seen.popleft()
