"""Estimates the samples per second that this worker computes. Pure."""

import math
from dataclasses import dataclass, replace

from dlion_api.protocol.measurements import CapacitySource, CpuAllowance, SpeedProbe, StepTiming
from dlion_core.resource_control.quota_estimator import QuotaEstimator
from dlion_core.resource_control.rates import ChangingRate
from dlion_core.resource_control.sample_cost import SampleCost

MIN_WINDOW_S = 1.0
"""Ten CFS periods: in a shorter window the result depends on where in its period a step falls."""

MIN_SPAN_S, MIN_STEPS = 3.0, 10
"""A worker that mostly waits is measured by this many steps within this time as well.

Otherwise a batch that a disturbed measurement made too small would stay small for long: the smaller
it is, the longer it takes to compute for a second.
"""

MAX_WINDOW_S = 6.0
CHANGE_FRACTION = 0.15

QUOTA_SLACK = 1.25
"""A process that uses more than this times its quota is not limited by it."""

WARM_UP_STEPS, MAX_SKIPPED_STEPS = 2, 3
"""Steps to skip after the batch has reached a new maximum, and the maximum skipped in a row."""


@dataclass(frozen=True)
class CapacityEstimate:
    """`samples_per_s` over `window_s` of computing, and how it was determined."""

    samples_per_s: float
    window_s: float
    source: CapacitySource


class CapacityEstimator:
    """Samples per second that this worker's CPU sustains when it only computes.

    *Rate*: samples divided by the wall time of computing (with throttling, without waits for
    peers). *Quota*: CPU quota divided by CPU seconds per sample; correct after a few steps, and at
    once when the quota changes.

    *Quota* is used while the quota limits the worker (`quota_estimator`), because part of it goes
    to the exchange, which a worker on its own would not need. Otherwise the smaller of the two is
    used: a trainer that mostly waits computes in bursts, faster than it could sustain.

    Source: this project, after DLion's relative compute power.
    """

    def __init__(self) -> None:
        self._rate = _rate()
        self._cost = SampleCost()
        self._used_cores = _rate()
        self._quota = QuotaEstimator()
        self._has_stepped = False
        self._largest = 0
        self._warm_up_left = self._skipped = 0
        self._expected_samples_per_s: float | None = None
        self.why_expected = ""
        """Reason of the forecast; empty without one."""

    def trainer_started(self) -> None:
        """Reset for a new trainer process. Its first step also traces and allocates memory, so it
        is not measured; its CPU counters restart. A forecast was for the next steps of the last
        one."""
        self.expect(None, "")
        self._has_stepped = False
        self._largest = 0
        self._warm_up_left = self._skipped = 0
        self._quota.trainer_started()

    def add_probe(self, probe: SpeedProbe) -> None:
        """Add the trainer's measurement before its first step."""
        self._take_quota(probe.quota_cores)
        self._quota.add(
            compute_s=probe.compute_s,
            wall_s=probe.compute_s,
            waited_s=0.0,
            cpu_s=probe.cpu_s,
            throttled_s=probe.throttled_s,
        )
        self._quota.end_interval()
        self._largest = max(self._largest, probe.largest_batch)
        self._rate.add(probe.samples, probe.compute_s)
        self._used_cores.add(probe.cpu_s, probe.compute_s)
        self._cost.add_measured(probe.samples, probe.cpu_s)

    def add_step(self, step: StepTiming) -> None:
        if not self._has_stepped:
            self._has_stepped = True
            self._largest = max(self._largest, step.samples)
            return
        if step.quota_changed:
            return
        waited_s = step.wall_s - step.compute_s if step.waited_s is None else step.waited_s
        self._quota.add(
            compute_s=step.compute_s, wall_s=step.wall_s, waited_s=waited_s, cpu_s=step.cpu_s
        )
        if self._is_warming_up(step.samples):
            return
        cpu_s = step.cpu_s if step.compute_cpu_s is None else step.compute_cpu_s
        self._rate.add(step.samples, step.compute_s, max(step.wall_s, step.compute_s))
        self._cost.add(step.samples, cpu_s)
        self._used_cores.add(step.cpu_s, step.wall_s)

    def set_allowance(self, allowance: CpuAllowance) -> None:
        """Set the trainer's quota, and how long it has throttled the trainer."""
        self._take_quota(allowance.quota_cores)
        self._quota.add_throttling(allowance.throttled_s)

    def expect(self, samples_per_s: float | None, why: str) -> None:
        """Use a forecast instead of the measured speed; None: no longer. Raises ValueError for one
        that is not positive and finite."""
        if samples_per_s is not None and not 0 < samples_per_s < math.inf:
            raise ValueError(f"speed {samples_per_s}; allowed: positive, finite")
        self._expected_samples_per_s, self.why_expected = samples_per_s, why

    def estimate(self) -> CapacityEstimate | None:
        """The current estimate, or the forecast if there is one; None until there is either."""
        measured, expected = self.measured(), self._expected_samples_per_s
        if measured is None or expected is None:
            return measured
        return replace(measured, samples_per_s=expected)

    def measured(self) -> CapacityEstimate | None:
        """The estimate from measurements alone; None until there is one."""
        rate = self._rate.rate()
        by_quota = self._by_quota()
        if by_quota is not None and (rate is None or by_quota < rate or self._quota.is_limiting):
            return CapacityEstimate(by_quota, self._cost.window_s, CapacitySource.QUOTA)
        if rate is not None:
            return CapacityEstimate(rate, self._rate.window_s, CapacitySource.RATE)
        return None

    def _take_quota(self, quota_cores: float | None) -> None:
        """Another quota changes the CPU time per sample a little, because it interrupts more or
        less often. Until that is measured, the earlier cost is the best estimate."""
        if self._quota.change(quota_cores):
            self._rate.clear()
            self._used_cores.clear()
            self._cost.reset()

    def _is_warming_up(self, samples: int) -> bool:
        """Whether to skip this step: a batch of a new maximum size allocates memory, which costs
        CPU time once.

        That step and the next are skipped, but only so many in a row, as batches may keep growing.
        """
        if samples > self._largest:
            self._largest = samples
            self._warm_up_left = WARM_UP_STEPS
        if not self._warm_up_left or self._skipped == MAX_SKIPPED_STEPS:
            self._skipped = 0
            return False
        self._warm_up_left -= 1
        self._skipped += 1
        return True

    def _by_quota(self) -> float | None:
        cost_s, quota_cores = self._cost.cost_s(), self._quota.cores
        if quota_cores is None or cost_s is None:
            return None
        used_cores = self._used_cores.rate()
        if used_cores is not None and used_cores > QUOTA_SLACK * quota_cores:
            return None  # the quota in force is not the reported one
        return quota_cores / cost_s


def _rate() -> ChangingRate:
    return ChangingRate(
        min_s=MIN_WINDOW_S,
        min_span_s=MIN_SPAN_S,
        min_count=MIN_STEPS,
        max_s=MAX_WINDOW_S,
        change_fraction=CHANGE_FRACTION,
    )
