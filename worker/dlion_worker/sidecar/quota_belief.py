"""Whether a worker's CPU quota is what sets its pace.

Owns that judgement. Called by the capacity estimator with what the trainer reports. Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

THROTTLED_FRACTION = 0.1
"""Share of the computing time held by the quota, above which the quota sets the pace."""

ALLOWANCES = 8
"""So many of the last reports on the quota are looked at together: some seconds, as for rates. In
one alone the worker may have waited for peers all along, and the quota held nobody."""

LEAST_COMPUTE_S = 1.0
WAITED_FRACTION = 0.1
"""A worker that waits more does not show what it can: it saves up quota meanwhile."""

MISSED_S, MISSED_FRACTION = 0.5, 0.2
"""So many seconds' worth of its quota, and such a part of it, a busy worker must have missed,
unthrottled, to show that it would not get it at all."""

DOUBT_S = 30.0
"""After so much training without fresh evidence the quota is believed again: what took the rest of
the machine may be gone, and only more work can show it."""


@dataclass
class _Stretch:
    """From one report on the quota to the next."""

    compute_s: float = 0.0
    wall_s: float = 0.0
    waited_s: float = 0.0
    cpu_s: float = 0.0
    throttled_s: float = 0.0


class QuotaBelief:
    """The quota, and `holds`: whether it limits the worker when that computes without a pause.

    Believed until the contrary shows: a worker that was busy all along used less and was not
    throttled, as its program has too few threads, or others on the machine take the rest. Short
    bursts between waits show nothing. They may be slow although the quota would be had: peers on
    the same machine burst at the same time, and are throttled soon after. Who believed such a
    pace would give that worker less to do, and never learn better.

    Source: ours.
    """

    def __init__(self) -> None:
        self.cores: float | None = None
        self.holds = True
        self._seen: deque[_Stretch] = deque(maxlen=ALLOWANCES)
        self._open = _Stretch()
        self._throttled_s: float | None = None
        self._doubted_s = 0.0

    def trainer_started(self) -> None:
        """The sums of a new process begin again."""
        self._throttled_s = None
        self._seen.clear()
        self._open = _Stretch()

    def change(self, cores: float | None) -> bool:
        """Takes the quota as it is now; whether it is another one."""
        if cores == self.cores:
            return False
        self.cores, self.holds = cores, True
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
        """Takes some time of training; `throttled_s` where that is known of just this time."""
        self._open.compute_s += compute_s
        self._open.wall_s += wall_s
        self._open.waited_s += waited_s
        self._open.cpu_s += cpu_s
        self._open.throttled_s += throttled_s
        self._doubted_s += wall_s
        if self._doubted_s > DOUBT_S:
            self.holds = True
        self._judge()

    def told(self, throttled_s: float) -> None:
        """Takes a report: how long the quota has held the process since its start."""
        if self._throttled_s is not None:
            self._open.throttled_s += max(0.0, throttled_s - self._throttled_s)
        self._throttled_s = throttled_s
        self.end_stretch()

    def end_stretch(self) -> None:
        """What throttled it is known up to here."""
        self._seen.append(self._open)
        self._open = _Stretch()
        self._judge()

    def _judge(self) -> None:
        if self.cores is None:
            return
        seen = [*self._seen, self._open]
        compute_s = sum(one.compute_s for one in seen)
        if compute_s < LEAST_COMPUTE_S:
            return
        if sum(one.throttled_s for one in seen) > THROTTLED_FRACTION * compute_s:
            self.holds = True
            return
        # What is open may have been throttled: that is told when it ends.
        wall_s = sum(one.wall_s for one in self._seen)
        waited_s = sum(one.waited_s for one in self._seen)
        cpu_s = sum(one.cpu_s for one in self._seen)
        missed_s = (wall_s - waited_s) - cpu_s / self.cores
        least_s = max(MISSED_S, MISSED_FRACTION * (wall_s - waited_s))
        if waited_s <= WAITED_FRACTION * wall_s and missed_s >= least_s:
            self.holds, self._doubted_s = False, 0.0
