"""How many samples per second this worker computes, from its trainer's step times.

Owns the estimate of one worker's own capacity. Called by the director with what the trainer
reports. Pure; knows nothing of peers or batch sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlion_api.measurements import CapacitySource, CpuAllowance, SpeedProbe, StepTiming
from dlion_worker.sidecar.costs import TypicalCost
from dlion_worker.sidecar.quota_belief import QuotaBelief
from dlion_worker.sidecar.rates import ChangingRate

LEAST_WINDOW_S = 1.0
"""Ten CFS periods: shorter, and where in its period a step falls decides what it takes."""

LEAST_SPAN_S, LEAST_STEPS = 3.0, 10
"""Who computes for little of the time is measured by so many steps within so long all the same:
what a disturbed probe, or a disturbed while, made too small a batch would else stay small for long,
as the smaller it is the longer a second of computing takes to come together."""

MOST_WINDOW_S = 6.0
CHANGE_FRACTION = 0.15

QUOTA_SLACK = 1.25
"""A process that uses more than this times its quota is not held by it."""

TOUCHING_STEPS, MOST_PASSED_OVER = 2, 3
"""Steps of a batch larger than any before that do not count, and the most in a row."""


@dataclass(frozen=True)
class CapacityEstimate:
    """`samples_per_s` over `window_s` of computing, and how it was found."""

    samples_per_s: float
    window_s: float
    source: CapacitySource


class CapacityEstimator:
    """Samples per second that this worker's CPU carries when it does nothing but compute.

    *Rate*: samples divided by the wall time of computing (throttling included, waiting for peers
    not) over at least a second of it, or ten steps in three seconds. *Quota*: CPU quota divided by
    CPU seconds per sample, which is right after a few steps and, as the quota is known, at once
    when that changes. *Quota* counts as long as the quota is believed to set the pace
    (`quota_belief`): a part of it goes to the exchange, which a worker on its own would not pay.
    Otherwise the smaller one counts: a trainer that mostly waits computes in bursts, faster than it
    could sustain.

    Source: ours, after policies.md section 1, relative compute power.
    """

    def __init__(self) -> None:
        self._rate = _rate()
        self._cost = TypicalCost()
        self._use = _rate()
        self._quota = QuotaBelief()
        self._warm = False
        self._largest = 0
        self._touching = self._passed_over = 0

    def trainer_started(self) -> None:
        """A new trainer process: its first step also traces and touches memory, so it is no
        measure; its sums of CPU time begin again."""
        self._warm = False
        self._largest = 0
        self._touching = self._passed_over = 0
        self._quota.trainer_started()

    def add_probe(self, probe: SpeedProbe) -> None:
        """Takes what the trainer measured before its first step."""
        self._take_quota(probe.quota_cores)
        self._quota.add(
            compute_s=probe.compute_s,
            wall_s=probe.compute_s,
            waited_s=0.0,
            cpu_s=probe.cpu_s,
            throttled_s=probe.throttled_s,
        )
        self._quota.end_stretch()
        self._largest = max(self._largest, probe.largest_batch)
        self._rate.add(probe.samples, probe.compute_s)
        self._use.add(probe.cpu_s, probe.compute_s)
        self._cost.add_measured(probe.samples, probe.cpu_s)

    def add_step(self, step: StepTiming) -> None:
        """Takes one local step."""
        if not self._warm:
            self._warm = True
            self._largest = max(self._largest, step.samples)
            return
        if step.quota_changed:
            return
        waited_s = step.wall_s - step.compute_s if step.waited_s is None else step.waited_s
        self._quota.add(
            compute_s=step.compute_s, wall_s=step.wall_s, waited_s=waited_s, cpu_s=step.cpu_s
        )
        if self._touches_memory(step.samples):
            return
        cpu_s = step.cpu_s if step.compute_cpu_s is None else step.compute_cpu_s
        self._rate.add(step.samples, step.compute_s, max(step.wall_s, step.compute_s))
        self._cost.add(step.samples, cpu_s)
        self._use.add(step.cpu_s, step.wall_s)

    def set_allowance(self, allowance: CpuAllowance) -> None:
        """Takes the trainer's quota, and how long the quota has held it."""
        self._take_quota(allowance.quota_cores)
        self._quota.told(allowance.throttled_s)

    def estimate(self) -> CapacityEstimate | None:
        """The capacity as known now; None until there is a measure of it."""
        rate = self._rate.rate()
        by_quota = self._by_quota()
        if by_quota is not None and (rate is None or by_quota < rate or self._quota.holds):
            return CapacityEstimate(by_quota, self._cost.window_s, CapacitySource.QUOTA)
        if rate is not None:
            return CapacityEstimate(rate, self._rate.window_s, CapacitySource.RATE)
        return None

    def _take_quota(self, quota_cores: float | None) -> None:
        """Under another quota a sample costs a little more CPU the more often that interrupts it;
        until that is measured, what it cost before is the best guess."""
        if self._quota.change(quota_cores):
            self._rate.clear()
            self._use.clear()
            self._cost.begin_anew()

    def _touches_memory(self, samples: int) -> bool:
        """Whether this step still gets memory for a batch larger than any before, which costs CPU
        once: it and the next do. Of many such in a row some count: batches may go on growing.
        """
        if samples > self._largest:
            self._largest = samples
            self._touching = TOUCHING_STEPS
        if not self._touching or self._passed_over == MOST_PASSED_OVER:
            self._passed_over = 0
            return False
        self._touching -= 1
        self._passed_over += 1
        return True

    def _by_quota(self) -> float | None:
        cost_s, quota_cores = self._cost.cost_s(), self._quota.cores
        if quota_cores is None or cost_s is None:
            return None
        used_cores = self._use.rate()
        if used_cores is not None and used_cores > QUOTA_SLACK * quota_cores:
            return None  # the quota said is not the quota held
        return quota_cores / cost_s


def _rate() -> ChangingRate:
    return ChangingRate(
        least_s=LEAST_WINDOW_S,
        least_span_s=LEAST_SPAN_S,
        least_count=LEAST_STEPS,
        most_s=MOST_WINDOW_S,
        change_fraction=CHANGE_FRACTION,
    )
