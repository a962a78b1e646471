"""Tests of capacity estimates from the step times of a simulated CPU with a CFS quota.

Throttled short steps give the sustained rate; a median is five times too high. Estimates from long
steps are within 10 %. They follow a changed quota within ten iterations, whether the quota is
readable or not. Waiting for peers changes nothing. The exchange's CPU time under a quota is not
charged. A probe gives the capacity before the first step; a disturbed probe is soon forgotten.
Three steps do not count: the first of a trainer, the step of a quota change, and the first of the
largest batch.

Left out: real quotas (tests/local).
"""

from __future__ import annotations

import statistics

import pytest

from dlion_api.protocol.measurements import CapacitySource, CpuAllowance, SpeedProbe, StepTiming
from dlion_core.resource_control.capacity import CapacityEstimator
from quota_cpu import QuotaCpu

CPU_S_PER_SAMPLE = 0.005


class Worker:
    """A trainer on that CPU, with its estimator."""

    def __init__(self, cpu: QuotaCpu, *, quota_known: bool = True) -> None:
        self.cpu, self.quota_known = cpu, quota_known
        self.estimator = CapacityEstimator()
        self.compute_s: list[float] = []
        self.iteration = 0

    def step(self, samples: int, *, waited_s: float = 0.0, exchange_cpu_s: float = 0.0) -> None:
        began_s, began_cpu_s = self.cpu.now_s, self.cpu.cpu_s
        self.cpu.burn(samples * CPU_S_PER_SAMPLE + exchange_cpu_s / 2)
        compute_s = self.cpu.now_s - began_s
        self.cpu.burn(exchange_cpu_s / 2)
        self.cpu.wait(waited_s)
        self.iteration += 1
        self.compute_s.append(compute_s)
        quota = self.cpu.quota_cores if self.quota_known else None
        self.estimator.set_allowance(
            CpuAllowance(quota, self.cpu.cpu_s, self.cpu.throttled_s if self.quota_known else 0.0)
        )
        self.estimator.add_step(
            StepTiming(
                iteration=self.iteration,
                samples=samples,
                compute_s=compute_s,
                wall_s=self.cpu.now_s - began_s,
                cpu_s=self.cpu.cpu_s - began_cpu_s,
                compute_cpu_s=samples * CPU_S_PER_SAMPLE,
            )
        )

    def capacity(self) -> float:
        estimate = self.estimator.estimate()
        assert estimate is not None
        return estimate.samples_per_s


def test_throttled_short_steps_give_the_sustained_rate_and_a_median_does_not() -> None:
    cpu = QuotaCpu(0.2)
    worker = Worker(cpu, quota_known=False)
    for _ in range(2000):
        began_s = cpu.now_s
        cpu.burn(0.0007)
        step_s = cpu.now_s - began_s
        worker.compute_s.append(step_s)
        worker.estimator.add_step(StepTiming(1, 1, step_s, step_s, 0.0007))
    assert statistics.median(worker.compute_s) == pytest.approx(0.0007, rel=0.01)
    assert statistics.mean(worker.compute_s) == pytest.approx(0.0036, rel=0.05)
    assert worker.capacity() == pytest.approx(0.2 / 0.0007, rel=0.05)
    estimate = worker.estimator.estimate()
    assert estimate is not None
    assert estimate.source is CapacitySource.RATE
    assert estimate.window_s >= 1.0


@pytest.mark.parametrize("quota_known", [True, False])
@pytest.mark.parametrize("quota_cores", [0.8, 0.4, 0.2])
def test_after_ten_steps_capacity_is_the_undisturbed_rate_within_a_tenth(
    quota_cores: float, quota_known: bool
) -> None:
    worker = Worker(QuotaCpu(quota_cores), quota_known=quota_known)
    for _ in range(10):
        worker.step(samples=int(0.5 * quota_cores / CPU_S_PER_SAMPLE))
    assert worker.capacity() == pytest.approx(quota_cores / CPU_S_PER_SAMPLE, rel=0.1)


@pytest.mark.parametrize("quota_known", [True, False])
@pytest.mark.parametrize(("before", "after"), [(0.8, 0.2), (0.2, 0.8), (0.4, 0.2), (0.2, 0.4)])
def test_a_changed_quota_is_followed_within_ten_steps(
    before: float, after: float, quota_known: bool
) -> None:
    worker = Worker(QuotaCpu(before), quota_known=quota_known)
    for _ in range(30):
        worker.step(samples=int(0.4 * before / CPU_S_PER_SAMPLE))
    worker.cpu.quota_cores = after
    for _ in range(10):
        worker.step(samples=int(0.4 * before / CPU_S_PER_SAMPLE))
    assert worker.capacity() == pytest.approx(after / CPU_S_PER_SAMPLE, rel=0.1)


def test_a_known_quota_is_followed_at_once() -> None:
    worker = Worker(QuotaCpu(0.8))
    for _ in range(10):
        worker.step(samples=64)
    worker.cpu.quota_cores = 0.2
    worker.step(samples=64)
    assert worker.capacity() == pytest.approx(0.2 / CPU_S_PER_SAMPLE, rel=0.1)


def test_bursts_after_waiting_do_not_count_as_capacity() -> None:
    worker = Worker(QuotaCpu(0.2))
    for _ in range(200):
        worker.step(samples=3, waited_s=0.2)  # 15 ms of CPU fit a period's 20 ms: never throttled
    assert statistics.mean(worker.compute_s) == pytest.approx(0.015, rel=0.05)
    assert worker.capacity() == pytest.approx(0.2 / CPU_S_PER_SAMPLE, rel=0.1)


def test_the_cpu_of_the_exchange_is_not_charged_under_a_quota() -> None:
    worker = Worker(QuotaCpu(0.2))
    for _ in range(20):
        worker.step(samples=20, exchange_cpu_s=0.05)
    assert worker.capacity() == pytest.approx(0.2 / CPU_S_PER_SAMPLE, rel=0.1)


def test_a_quota_above_the_use_of_the_program_is_not_believed() -> None:
    worker = Worker(QuotaCpu(1.0))
    worker.cpu.quota_cores = 4.0  # one thread cannot use four cores
    for _ in range(20):
        worker.step(samples=40)
    assert worker.capacity() == pytest.approx(1.0 / CPU_S_PER_SAMPLE, rel=0.05)


def test_a_quota_that_is_not_enforced_is_not_believed() -> None:
    estimator = CapacityEstimator()
    estimator.set_allowance(CpuAllowance(0.2, 0.0, 0.0))
    for iteration in range(10):
        estimator.add_step(StepTiming(iteration, 100, 0.5, 0.5, 0.5))
    estimate = estimator.estimate()
    assert estimate is not None
    assert estimate.samples_per_s == pytest.approx(200)


def test_the_first_step_of_a_trainer_does_not_count() -> None:
    estimator = CapacityEstimator()
    estimator.add_step(StepTiming(1, 10, 9.0, 9.0, 9.0))
    assert estimator.estimate() is None
    estimator.add_step(StepTiming(2, 10, 1.0, 1.0, 1.0))
    estimator.trainer_started()
    estimator.add_step(StepTiming(3, 10, 9.0, 9.0, 9.0))
    estimator.add_step(StepTiming(4, 10, 1.0, 1.0, 1.0))
    estimate = estimator.estimate()
    assert estimate is not None
    assert estimate.samples_per_s == pytest.approx(10)


def test_less_than_a_second_of_steps_gives_no_estimate() -> None:
    estimator = CapacityEstimator()
    for iteration in range(4):
        estimator.add_step(StepTiming(iteration, 10, 0.3, 0.3, 0.3))
    assert estimator.estimate() is None


def test_a_quota_that_throttles_only_computing_still_sets_the_rate() -> None:
    """It waits half of the time for peers, and the exchange takes a part of the quota."""
    worker = Worker(QuotaCpu(0.8))
    capacities = []
    for number in range(40):
        worker.step(64, waited_s=0.7 * (number % 2), exchange_cpu_s=0.1)
        if number > 10:
            capacities.append(worker.capacity())
    alone = 0.8 / CPU_S_PER_SAMPLE
    assert capacities == pytest.approx([alone] * len(capacities), rel=0.1)


def probe(quota_cores: float | None, **changes: float) -> SpeedProbe:
    """A second of computing at 10 ms a sample; a quota below 1 throttles it."""
    cores = 1.0 if quota_cores is None else min(1.0, quota_cores)
    values = {
        "samples": round(100 * cores),
        "compute_s": 1.0,
        "cpu_s": cores,
        "throttled_s": 1.0 - cores,
        "largest_batch": 50,
    }
    return SpeedProbe(**{"quota_cores": quota_cores, **values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("quota_cores", [0.02, 0.2, 0.8, None])
def test_a_probe_gives_the_capacity_before_the_first_step(quota_cores: float | None) -> None:
    estimator = CapacityEstimator()
    estimator.add_probe(probe(quota_cores))
    estimate = estimator.estimate()
    assert estimate is not None
    assert estimate.samples_per_s == pytest.approx(100 * (quota_cores or 1.0))
    known = CapacitySource.RATE if quota_cores is None else CapacitySource.QUOTA
    assert estimate.source is known


@pytest.mark.parametrize("samples", [7, 17, 48])
@pytest.mark.parametrize("probe_s", [1.5, 3.0])
def test_a_disturbed_probe_of_any_batch_is_corrected_within_some_seconds(
    samples: int, probe_s: float
) -> None:
    """The machine does 4,000 samples a second. Beside imports of other workers the
    probe found 320.
    """
    estimator = CapacityEstimator()
    estimator.trainer_started()
    estimator.add_probe(
        SpeedProbe(
            samples=int(320 * probe_s), compute_s=probe_s, cpu_s=0.1 * probe_s,
            quota_cores=None, throttled_s=0.0, largest_batch=64,
        )
    )  # fmt: skip
    compute_s, waited_s = samples / 4000, 0.015
    passed_s = 0.0
    while passed_s < 4.0:
        passed_s += compute_s + waited_s
        estimator.add_step(
            StepTiming(
                iteration=1, samples=samples, compute_s=compute_s, wall_s=compute_s + waited_s,
                cpu_s=compute_s, waited_s=waited_s, compute_cpu_s=compute_s,
            )
        )  # fmt: skip
    estimate = estimator.estimate()
    assert estimate is not None
    assert estimate.samples_per_s == pytest.approx(4000, rel=0.1)


def test_an_unthrottled_probe_gives_the_rate() -> None:
    estimator = CapacityEstimator()
    estimator.add_probe(probe(4.0))  # one thread cannot use four cores
    estimate = estimator.estimate()
    assert estimate is not None
    assert estimate.samples_per_s == pytest.approx(100)


@pytest.mark.parametrize(("before", "after"), [(0.8, 0.2), (0.2, 0.8)])
def test_the_step_of_a_quota_change_does_not_count(before: float, after: float) -> None:
    """Most of it ran at the old rate. The quota itself gives the next rate."""
    estimator = CapacityEstimator()
    estimator.add_probe(probe(before))
    estimator.add_step(StepTiming(1, 10, 1.0, 1.0, 0.1))  # the first never counts
    estimator.set_allowance(CpuAllowance(after, 10.0, 0.0))
    estimator.add_step(StepTiming(2, 50, 9.0, 9.0, 3.0, quota_changed=True))
    estimate = estimator.estimate()
    assert estimate is not None
    assert estimate.samples_per_s == pytest.approx(100 * after)
    assert estimate.source is CapacitySource.QUOTA


def test_the_first_step_of_a_larger_batch_allocates_memory_and_does_not_count() -> None:
    estimator = CapacityEstimator()
    estimator.add_probe(probe(0.5))
    for iteration, samples in enumerate([10, 50, 50]):
        estimator.add_step(StepTiming(iteration, samples, samples / 50, 1.0, samples / 100))
    known = estimator.estimate()
    for _ in range(3):
        estimator.trainer_started()
        estimator.add_step(StepTiming(1, 50, 1.0, 1.0, 0.5))
        estimator.add_step(StepTiming(2, 80, 8.0, 8.0, 4.0))  # five times the cost
        estimator.add_step(StepTiming(3, 80, 4.0, 4.0, 2.0))
    assert estimator.estimate() == known


def test_batches_that_grow_with_each_step_are_measured() -> None:
    estimator = CapacityEstimator()
    for samples in range(10, 40):
        estimator.add_step(StepTiming(samples, samples, samples / 50, 1.0, samples / 100))
    estimate = estimator.estimate()
    assert estimate is not None
    assert estimate.samples_per_s == pytest.approx(50)
