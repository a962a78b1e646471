"""Tests of the cost of a step in virtual time: its batch and its exchange."""

from __future__ import annotations

import pytest

from dlion_simulator.costs import StepCosts


def test_the_time_of_the_exchange_belongs_to_the_step_but_not_to_computing() -> None:
    costs = StepCosts(0.001, 0.02, exchange_core_s=0.01, exchange_core_s_per_byte=1e-8)
    assert costs.core_s(80) == pytest.approx(0.1)
    assert costs.step_core_s(80, 0) == pytest.approx(0.11)
    assert costs.step_core_s(80, 4_000_000) == pytest.approx(0.15)
    assert costs.computing_fraction(80, 4_000_000) == pytest.approx(0.1 / 0.15)


def test_bytes_of_unknown_cost_are_free() -> None:
    assert StepCosts(0.001).step_core_s(80, 10**9) == StepCosts(0.001).core_s(80)
