"""Tests of the bytes that a worker may send for a part of its gradient's CPU time."""

from __future__ import annotations

import pytest

from dlion_api.protocol.measurements import StepTiming
from dlion_core.resource_control.exchange_cost import ITERATIONS, SHORT_BYTES, ExchangeCost


def step(compute_cpu_s: float | None, exchange_cpu_s: float, exchanged: int | None) -> StepTiming:
    return StepTiming(
        iteration=1,
        samples=64,
        compute_s=0.3,
        wall_s=0.4,
        cpu_s=(compute_cpu_s or 0.0) + exchange_cpu_s,
        compute_cpu_s=compute_cpu_s,
        exchanged_bytes=exchanged,
    )


def test_half_of_the_part_is_for_sent_bytes() -> None:
    cost = ExchangeCost(0.2)
    cost.add(step(0.150, 0.045, 5_000_000))
    # At 9 ns a byte, 0.2 x 0.15 s allow 3.33 MB, sent and received.
    assert cost.max_bytes() == pytest.approx(0.1 * 0.150 / 9e-9)


def test_two_workers_at_their_limit_spend_that_part_of_their_cpu() -> None:
    """As in a run, bytes sent by one cost the other the same."""
    fraction, compute_s, cost_s = 0.2, 0.15, 9e-9
    cost, sent = ExchangeCost(fraction), 4_000_000.0
    for _ in range(3 * ITERATIONS):
        cost.add(step(compute_s, cost_s * 2 * sent, round(2 * sent)))
        most = cost.max_bytes()
        assert most is not None
        sent = min(4_000_000.0, most)
    assert cost_s * 2 * sent == pytest.approx(fraction * compute_s, rel=1e-3)


def test_single_iterations_at_several_times_the_cost_do_not_count() -> None:
    cost = ExchangeCost(0.2)
    for number in range(ITERATIONS):
        cost.add(step(0.150, 0.450 if number in (1, 4, 6) else 0.045, 5_000_000))
    assert cost.max_bytes() == pytest.approx(0.1 * 0.150 / 9e-9)


@pytest.mark.parametrize(
    "unknown",
    [step(None, 0.05, 5_000_000), step(0.15, 0.05, None), step(0.15, 0.0, 5_000_000),
     step(0.15, 0.05, SHORT_BYTES - 1)],
)  # fmt: skip
def test_an_unknown_cost_limits_nothing(unknown: StepTiming) -> None:
    cost = ExchangeCost(0.2)
    cost.add(unknown)
    assert cost.max_bytes() is None


def test_old_iterations_are_forgotten() -> None:
    cost = ExchangeCost(0.2)
    for _ in range(ITERATIONS):
        cost.add(step(0.15, 0.45, 5_000_000))
    for _ in range(ITERATIONS):
        cost.add(step(0.15, 0.045, 5_000_000))
    assert cost.max_bytes() == pytest.approx(0.1 * 0.150 / 9e-9)
