"""Tests of batch sizes: the global batch grows by DLion's rules, and shares follow capacities, not
their noise.

Left out: the source of capacities (sidecar); properties over many inputs (tests/property).
"""

from __future__ import annotations

import pytest

from dlion_api.names import Rank
from dlion_api.spec import GlobalBatchSize
from dlion_core.resource_control.batching import BatchShares, GlobalBatchController, shares


def sizes(growth: GlobalBatchSize, samples: int, iterations: range) -> list[int]:
    control = GlobalBatchController(growth)
    return [control.at(iteration, samples) for iteration in iterations]


def test_the_batch_grows_by_addition_then_by_multiplication_then_stays() -> None:
    growth = GlobalBatchSize(initial=100, every_steps=10, increment=150, max=10_000, growth=True)
    assert sizes(growth, 50_000, range(0, 110, 10)) == [
        *(100, 250, 400, 500),  # adds 150 until 1 % of the training set
        *(750, 1125, 1688, 2532, 3798),  # times 1.5
        *(5000, 5000),  # 10 % of the training set
    ]


def test_the_global_batch_stays_between_initial_and_max() -> None:
    growth = GlobalBatchSize(initial=100, every_steps=1, max=600, growth=True)
    assert max(sizes(growth, 50_000, range(100))) == 600
    assert set(sizes(growth, 50, range(100))) == {100}  # above a tenth of the set from the start


def test_growth_can_be_switched_off() -> None:
    growth = GlobalBatchSize(initial=100, every_steps=1, growth=False)
    assert set(sizes(growth, 50_000, range(100))) == {100}


def test_a_late_controller_reaches_the_batch_of_the_others() -> None:
    growth = GlobalBatchSize(initial=64, every_steps=7, growth=True)
    assert GlobalBatchController(growth).at(100, 20_000) == sizes(growth, 20_000, range(101))[-1]


def test_a_resumed_worker_keeps_its_batch_although_the_data_have_grown() -> None:
    growth = GlobalBatchSize(initial=100, every_steps=10, max=10**6, growth=True)
    control = GlobalBatchController(growth)
    assert control.at(65, 20_000) == 1520
    late = GlobalBatchController(growth)
    late.resume(1520)
    assert late.at(1, 200_000) == 1520  # the first step gives the iteration of the run
    for iteration in (67, 70, 75, 80):
        assert late.at(iteration, 200_000) == control.at(iteration, 200_000)


@pytest.mark.parametrize("resumed_at", [95, 101], ids=["at once", "an adjustment later"])
def test_a_resumed_worker_makes_an_adjustment_that_became_due(resumed_at: int) -> None:
    growth = GlobalBatchSize(initial=100, every_steps=10, max=10**6, growth=True)
    control, late = GlobalBatchController(growth), GlobalBatchController(growth)
    late.resume(control.at(94, 50_000))
    for iteration in range(resumed_at, 200):
        assert late.at(iteration, 50_000) == control.at(iteration, 50_000)


def test_growing_data_let_the_batch_grow_further() -> None:
    control = GlobalBatchController(
        GlobalBatchSize(initial=100, every_steps=1, max=10**6, growth=True)
    )
    assert control.at(1000, 10_000) == 1000
    assert control.at(2000, 20_000) == 2000
    assert control.at(3000, 10_000) == 2000  # it never shrinks


def test_a_slow_peer_gets_a_smaller_batch() -> None:
    capacity = {Rank(0): 24.0, Rank(1): 12.0, Rank(2): 4.0}
    assert shares(200, capacity) == {0: 120, 1: 60, 2: 20}


def test_the_slowest_worker_gets_at_least_one_sample() -> None:
    assert shares(10, {Rank(0): 1000.0, Rank(1): 1.0, Rank(2): 1.0}) == {0: 8, 1: 1, 2: 1}
    assert shares(2, {Rank(rank): 1.0 for rank in range(3)}) == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_a_capacity_that_is_not_positive_and_finite_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        shares(10, {Rank(0): 1.0, Rank(1): wrong})
    with pytest.raises(ValueError, match="at least one"):
        shares(10, {})


def test_noise_of_a_few_percent_changes_no_batch() -> None:
    batch = BatchShares()
    first = batch.update(200, {Rank(0): 24.0, Rank(1): 12.0, Rank(2): 4.0})
    assert batch.update(200, {Rank(0): 24.7, Rank(1): 11.7, Rank(2): 4.1}) == first


def test_a_change_of_a_quota_changes_all_shares() -> None:
    batch = BatchShares()
    batch.update(200, {Rank(0): 24.0, Rank(1): 12.0, Rank(2): 4.0})
    after = batch.update(200, {Rank(0): 12.0, Rank(1): 24.0, Rank(2): 4.0})
    assert after == {0: 60, 1: 120, 2: 20}


def test_the_share_of_a_member_that_leaves_is_spread() -> None:
    batch = BatchShares()
    batch.update(200, {Rank(rank): 1.0 for rank in range(4)})
    assert batch.update(200, {Rank(0): 1.0, Rank(2): 1.0}) == {0: 100, 2: 100}


def test_the_even_policy_ignores_capacities() -> None:
    batch = BatchShares(weighted=False)
    assert batch.update(9, {Rank(0): 24.0, Rank(1): 12.0}) == {0: 5, 1: 4}
