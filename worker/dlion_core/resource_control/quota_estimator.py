"""Decides whether a worker's CPU quota limits its speed. Pure."""

from collections import deque
from dataclasses import dataclass

THROTTLED_FRACTION = 0.1
"""Fraction of computing time throttled, above which the quota is the limit."""

MAX_INTERVALS = 8
"""Number of recent quota reports to consider, some seconds in all.

In a single one, the worker may have waited for peers throughout and not been throttled.
"""

MIN_COMPUTE_S = 1.0
WAITED_FRACTION = 0.1
"""A worker that waits more saves up quota meanwhile, so its speed shows no limit."""

UNUSED_S, UNUSED_FRACTION = 0.5, 0.2
"""Unused quota, in seconds and as a fraction, of a busy and unthrottled worker that shows that
another limit applies."""

EVIDENCE_TIMEOUT_S = 30.0
"""After this time without new evidence the quota counts as the limit again.

What used the rest of the machine may have ended, and only more work can show it.
"""


@dataclass
class _Interval:
    compute_s: float = 0.0
    wall_s: float = 0.0
    waited_s: float = 0.0
    cpu_s: float = 0.0
    throttled_s: float = 0.0


class QuotaEstimator:
    """The quota, and `is_limiting`: whether it limits a worker that computes without pause.

    Assumed until refuted: a worker that was always busy used less and was not throttled, because
    its program has too few threads or other processes use the machine.

    Short bursts between waits prove nothing: they may be slow although quota is left, when peers on
    the same machine compute at the same time. Trusting such a speed would give the worker less to
    do, so that it could never show more.

    Source: this project.
    """

    def __init__(self) -> None:
        self.cores: float | None = None
        self.is_limiting = True
        self._intervals: deque[_Interval] = deque(maxlen=MAX_INTERVALS)
        self._open = _Interval()
        self._throttled_s: float | None = None
        self._unconfirmed_s = 0.0

    def trainer_started(self) -> None:
        """Reset for a new process: its counters restart."""
        self._throttled_s = None
        self._intervals.clear()
        self._open = _Interval()

    def change(self, cores: float | None) -> bool:
        """Set the current quota; return whether it changed."""
        if cores == self.cores:
            return False
        self.cores, self.is_limiting = cores, True
        self.trainer_started()
        return True

    def add(
        self,
        *,
        compute_s: float,
        wall_s: float,
        waited_s: float,
        cpu_s: float,
        throttled_s: float = 0.0,
    ) -> None:
        """Add some time of training; `throttled_s` only if known for exactly this time."""
        self._open.compute_s += compute_s
        self._open.wall_s += wall_s
        self._open.waited_s += waited_s
        self._open.cpu_s += cpu_s
        self._open.throttled_s += throttled_s
        self._unconfirmed_s += wall_s
        if self._unconfirmed_s > EVIDENCE_TIMEOUT_S:
            self.is_limiting = True
        self._update()

    def add_throttling(self, throttled_s: float) -> None:
        """Add a report of the total time throttled since the process started."""
        if self._throttled_s is not None:
            self._open.throttled_s += max(0.0, throttled_s - self._throttled_s)
        self._throttled_s = throttled_s
        self.end_interval()

    def end_interval(self) -> None:
        """The throttling of the current interval is known: start the next."""
        self._intervals.append(self._open)
        self._open = _Interval()
        self._update()

    def _update(self) -> None:
        if self.cores is None:
            return
        intervals = [*self._intervals, self._open]
        compute_s = sum(one.compute_s for one in intervals)
        if compute_s < MIN_COMPUTE_S:
            return
        if sum(one.throttled_s for one in intervals) > THROTTLED_FRACTION * compute_s:
            self.is_limiting = True
            return
        # The open interval may have been throttled: this is only known at its end.
        wall_s = sum(one.wall_s for one in self._intervals)
        waited_s = sum(one.waited_s for one in self._intervals)
        cpu_s = sum(one.cpu_s for one in self._intervals)
        unused_s = (wall_s - waited_s) - cpu_s / self.cores
        min_s = max(UNUSED_S, UNUSED_FRACTION * (wall_s - waited_s))
        if waited_s <= WAITED_FRACTION * wall_s and unused_s >= min_s:
            self.is_limiting, self._unconfirmed_s = False, 0.0
