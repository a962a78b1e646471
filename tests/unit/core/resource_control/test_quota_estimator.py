"""Tests of the quota estimator.

A quota is believed from the start. A worker that is always busy, unthrottled and below its quota
disproves it. The less CPU it uses, the sooner it does. Throttling proves the quota again. Bursts
between waits prove nothing, however slow they are. Another quota starts the estimate again.
"""

from __future__ import annotations

import pytest

from dlion_core.resource_control.quota_estimator import MAX_INTERVALS, QuotaEstimator

QUOTA = 0.8


class Process:
    """Reports of a process in steps of half a second."""

    def __init__(self) -> None:
        self.belief = QuotaEstimator()
        self.belief.change(QUOTA)
        self.throttled_s = 0.0

    def step(self, *, cores: float, waited: float = 0.0, throttled: float = 0.0) -> bool:
        """Half a second, of which so much is waiting or throttled; the CPU use
        while it computes.
        """
        compute_s = 0.5 * (1 - waited)
        self.belief.add(
            compute_s=compute_s, wall_s=0.5, waited_s=0.5 * waited, cpu_s=cores * compute_s
        )
        self.throttled_s += throttled * compute_s
        self.belief.add_throttling(self.throttled_s)
        return self.belief.is_limiting


def steps_until_disproved(**step: float) -> int | None:
    process = Process()
    return next((n for n in range(1, 100) if not process.step(**step)), None)


def test_a_quota_is_believed_until_a_busy_worker_misses_it() -> None:
    assert QuotaEstimator().is_limiting
    assert steps_until_disproved(cores=0.2) == 2
    slower = steps_until_disproved(cores=0.6)
    assert slower is not None
    assert 2 < slower <= MAX_INTERVALS
    assert steps_until_disproved(cores=0.7) is None, "close enough"


def test_a_doubt_ends_without_recent_evidence() -> None:
    process = Process()
    for _ in range(MAX_INTERVALS):
        process.step(cores=0.4)
    believed = [process.step(cores=0.4, waited=0.5) for _ in range(100)]
    assert not believed[30]
    assert believed[-1]


@pytest.mark.parametrize("cores", [0.3, 0.55, 0.9])
def test_bursts_between_waits_prove_nothing(cores: float) -> None:
    """Peers on the same machine burst at the same time, so slow bursts do not show the available
    CPU.
    """
    assert steps_until_disproved(cores=cores, waited=0.4) is None


def test_a_throttled_worker_is_limited_by_its_quota() -> None:
    assert steps_until_disproved(cores=0.7, throttled=0.2) is None


def test_throttling_proves_the_quota_again() -> None:
    process = Process()
    for _ in range(MAX_INTERVALS):
        process.step(cores=0.4)
    assert not process.belief.is_limiting
    assert not process.step(cores=0.4, waited=0.5), "this is not new evidence"
    for _ in range(MAX_INTERVALS):
        process.step(cores=0.75, throttled=0.25)
    assert process.belief.is_limiting


def test_another_quota_starts_the_estimate_again() -> None:
    process = Process()
    for _ in range(MAX_INTERVALS):
        process.step(cores=0.4)
    assert not process.belief.change(QUOTA)
    assert not process.belief.is_limiting
    assert process.belief.change(0.2)
    assert process.belief.is_limiting
    assert process.step(cores=0.19, throttled=0.8)


def test_a_new_process_resets_the_sums() -> None:
    process = Process()
    process.step(cores=0.7, throttled=0.3)
    process.belief.trainer_started()
    process.throttled_s = 0.0
    for _ in range(MAX_INTERVALS):
        process.step(cores=0.4)
    assert not process.belief.is_limiting
