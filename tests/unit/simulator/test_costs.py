"""What a step costs in virtual time: its batch, and what its exchange takes beside."""

from __future__ import annotations

import pytest

from dlion_simulator.costs import StepCosts


def test_what_the_exchange_takes_is_of_the_step_and_no_computing() -> None:
    costs = StepCosts(0.001, 0.02, exchange_core_s=0.01, exchange_core_s_per_byte=1e-8)
    assert costs.core_s(80) == pytest.approx(0.1)
    assert costs.step_core_s(80, 0) == pytest.approx(0.11)
    assert costs.step_core_s(80, 4_000_000) == pytest.approx(0.15)
    assert costs.computing_fraction(80, 4_000_000) == pytest.approx(0.1 / 0.15)


def test_bytes_cost_nothing_where_nothing_is_known_of_them() -> None:
    assert StepCosts(0.001).step_core_s(80, 10**9) == StepCosts(0.001).core_s(80)
