"""How many samples per second this worker computes, from its trainer's step times.

Owns the estimate of one worker's own capacity. Called by the director with what the trainer
reports. Pure; knows nothing of peers or batch sizes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dlion_api.measurements import CapacitySource, CpuAllowance, StepTiming
from dlion_worker.sidecar.rates import ChangingRate

LEAST_WINDOW_S = 1.0
"""Ten CFS periods: shorter, and where in its period a step falls decides what it takes."""

MOST_WINDOW_S = 6.0
CHANGE_FRACTION = 0.15
LEAST_CPU_WINDOW_S = 0.2

THROTTLED_FRACTION = 0.1
"""Share of the computing time held by the quota, above which the quota sets the pace."""

ALLOWANCES = 8
"""So many of the last reports on the quota are looked at together: some seconds, as for rates. In
one alone the worker may have waited for peers all along, and the quota held nobody."""

QUOTA_SLACK = 1.25
"""A process that uses more than this times its quota is not held by it."""


@dataclass(frozen=True)
class CapacityEstimate:
    """`samples_per_s` over `window_s` of computing, and how it was found."""

    samples_per_s: float
    window_s: float
    source: CapacitySource


class CapacityEstimator:
    """Samples per second that this worker's CPU carries when it does nothing but compute.

    *Rate*: samples divided by the wall time of computing (throttling included, waiting for peers
    not) over at least a second. *Quota*: CPU quota divided by CPU seconds per sample. The smaller
    one holds: a trainer that mostly waits saves up quota and then computes in bursts, faster than
    it could sustain. Where the quota did throttle, *quota* alone holds: part of it went to the
    exchange, which a worker on its own would not pay.

    Source: ours, after policies.md section 1, relative compute power.
    """

    def __init__(self) -> None:
        self._rate = _rate(LEAST_WINDOW_S, MOST_WINDOW_S)
        self._per_cpu = _rate(LEAST_CPU_WINDOW_S, MOST_WINDOW_S)
        self._use = _rate(LEAST_WINDOW_S, MOST_WINDOW_S)
        self._quota_cores: float | None = None
        self._held: deque[tuple[float, float]] = deque(maxlen=ALLOWANCES)
        self._throttled_s: float | None = None
        self._compute_s = 0.0
        self._warm = False

    def trainer_started(self) -> None:
        """A new trainer process: its first step also traces and touches memory, so it is no
        measure; its sums of CPU time begin again."""
        self._warm = False
        self._throttled_s = None
        self._held.clear()

    def add_step(self, step: StepTiming) -> None:
        """Takes one local step."""
        self._compute_s += step.compute_s
        if not self._warm:
            self._warm = True
            return
        cpu_s = step.cpu_s if step.compute_cpu_s is None else step.compute_cpu_s
        self._rate.add(step.samples, step.compute_s)
        self._per_cpu.add(step.samples, cpu_s)
        self._use.add(step.cpu_s, step.wall_s)

    def set_allowance(self, allowance: CpuAllowance) -> None:
        """Takes the trainer's quota, and how long the quota has held it."""
        if allowance.quota_cores != self._quota_cores:
            self._quota_cores = allowance.quota_cores
            self._rate.clear()
            self._use.clear()
            self._held.clear()
        elif self._throttled_s is not None:
            self._held.append((allowance.throttled_s - self._throttled_s, self._compute_s))
        self._throttled_s = allowance.throttled_s
        self._compute_s = 0.0

    def estimate(self) -> CapacityEstimate | None:
        """The capacity as known now; None until there is a second's worth of steps."""
        rate = self._rate.rate()
        by_quota = self._by_quota()
        if by_quota is not None and (self._throttled() or rate is None or by_quota < rate):
            return CapacityEstimate(by_quota, self._per_cpu.window_s, CapacitySource.QUOTA)
        if rate is not None:
            return CapacityEstimate(rate, self._rate.window_s, CapacitySource.RATE)
        return None

    def _throttled(self) -> bool:
        held_s = sum(held for held, _ in self._held)
        return held_s > THROTTLED_FRACTION * sum(compute for _, compute in self._held)

    def _by_quota(self) -> float | None:
        per_cpu_s = self._per_cpu.rate()
        if self._quota_cores is None or per_cpu_s is None:
            return None
        used_cores = self._use.rate()
        if used_cores is not None and used_cores > QUOTA_SLACK * self._quota_cores:
            return None  # the quota said is not the quota held
        return self._quota_cores * per_cpu_s


def _rate(least_s: float, most_s: float) -> ChangingRate:
    return ChangingRate(least_s=least_s, most_s=most_s, change_fraction=CHANGE_FRACTION)
