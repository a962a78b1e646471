"""A simulated worker's machine with other work on it, and the counters that its kernel has.

The worker advances its time at the end of each step, and whenever the other work changes meanwhile.
"""

from __future__ import annotations

import bisect
import itertools
import math
from typing import TYPE_CHECKING

from dlion_core.demand.demand_meter import MachineCpu

if TYPE_CHECKING:
    from dlion_environments.plan import CoLocatedDemand

MIN_SHARE = 0.5
"""Minimum share of the cores for a worker: the fair share of two equal weights."""


class SharedMachine:
    """One for all incarnations of a worker: a restart does not change what others do."""

    def __init__(self, demand: CoLocatedDemand) -> None:
        self._levels = [cores for _, cores in demand.phases]
        self._ends_s = list(itertools.accumulate(seconds for seconds, _ in demand.phases))
        self._repeats = demand.repeats
        self._now_s = self._busy_s = self._pressure_s = 0.0
        self._worked_s = self._lost_s = 0.0

    def wanted(self, now_s: float) -> float:
        """Units that others want at that time."""
        return self._levels[self._phase(now_s)[0]]

    def left(self, now_s: float, units: float) -> float:
        """Units that a worker of a machine of `units` gets while it computes."""
        return max(units - self.wanted(now_s), MIN_SHARE * units)

    def next_change_s(self, now_s: float) -> float:
        """When the other work changes; inf: never."""
        return self._phase(now_s)[1]

    def advance(self, to_s: float, units: float, *, is_busy: bool) -> None:
        """Advance to `to_s`; the worker has computed all the time since the last call, or not."""
        while self._now_s < to_s:
            until_s = min(to_s, self.next_change_s(self._now_s))
            passed_s, wanted = until_s - self._now_s, self.wanted(self._now_s)
            own = self.left(self._now_s, units) if is_busy else 0.0
            self._busy_s += passed_s * (own + min(wanted, units - own))
            if is_busy:
                self._pressure_s += passed_s * (wanted + units > units)
                self._worked_s += passed_s
                self._lost_s += passed_s * (1.0 - own / units)
            self._now_s = until_s

    def counters(self, units: float) -> MachineCpu:
        """What the kernel counts, in units for cores."""
        return MachineCpu(units, self._busy_s, pressure_s=self._pressure_s)

    def summary(self) -> str:
        """What became of the machine until now, in one line."""
        lost = self._lost_s / self._worked_s if self._worked_s else 0.0
        return f"other work took {lost:.1%} of the worker's compute"

    def _phase(self, now_s: float) -> tuple[int, float]:
        """The phase of that time, and when it ends."""
        period_s = self._ends_s[-1]
        begin_s = 0.0
        if now_s >= period_s:
            if not self._repeats:
                return len(self._levels) - 1, math.inf
            begin_s = math.floor(now_s / period_s) * period_s
        index = bisect.bisect_right(self._ends_s, now_s - begin_s)
        if index == len(self._levels):  # rounding
            index, begin_s = 0, begin_s + period_s
        end_s = begin_s + self._ends_s[index]
        if end_s <= now_s:
            return self._phase(math.nextafter(end_s, math.inf) + 1e-9)
        is_last = not self._repeats and index == len(self._levels) - 1
        return index, math.inf if is_last else end_s
