"""Shares of the global batch, and its growth.

Shares sum to the global batch, follow capacities, and do not change under noise. The global batch
grows as defined, stays within its bounds, and does not depend on when it is read.

Left out: examples with names (tests/unit/core/resource_control/test_batching.py).
"""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_api.spec import GlobalBatchSize
from dlion_core.resource_control.batching import BatchShares, GlobalBatchController, shares

capacities = st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=12).map(
    lambda values: {Rank(rank): value for rank, value in enumerate(values)}
)

growths = st.builds(
    GlobalBatchSize,
    growth=st.just(True),
    initial=st.integers(1, 500),
    max=st.integers(500, 5000),
    every_steps=st.integers(1, 60),
    increment=st.integers(0, 100),
    factor=st.floats(1.01, 3),
)


@given(st.integers(1, 10_000), capacities)
def test_shares_are_whole_and_sum_to_the_global_batch(
    size: int, capacity: dict[Rank, float]
) -> None:
    got = shares(size, capacity)
    assert got.keys() == capacity.keys()
    assert min(got.values()) >= 1
    assert sum(got.values()) == max(size, len(capacity))


@given(st.integers(1, 10_000), st.lists(st.floats(1, 100), min_size=1, max_size=8))
def test_a_share_is_within_one_sample_of_its_exact_value(size: int, values: list[float]) -> None:
    capacity = {Rank(rank): value for rank, value in enumerate(values)}
    exact = {rank: size * value / math.fsum(values) for rank, value in capacity.items()}
    if min(exact.values()) < 1:
        return  # then a worker's single sample is at the others' expense
    got = shares(size, capacity)
    assert all(abs(got[rank] - exact[rank]) < 1 + 1e-6 for rank in capacity)


@given(st.integers(2, 10_000), capacities)
def test_more_capacity_never_means_fewer_samples(size: int, capacity: dict[Rank, float]) -> None:
    got = shares(size, capacity)
    by_capacity = sorted(capacity, key=lambda rank: capacity[rank])
    for slow, fast in pairwise(by_capacity):
        assert got[slow] <= got[fast] + (capacity[slow] == capacity[fast])


@given(
    st.integers(50, 5000),
    st.lists(st.floats(1, 10), min_size=2, max_size=6),
    st.lists(st.lists(st.floats(-0.015, 0.015), min_size=6, max_size=6), min_size=1, max_size=20),
)
def test_noise_of_a_few_percent_changes_nothing(
    size: int, values: list[float], noise: list[list[float]]
) -> None:
    batch = BatchShares()
    first = batch.update(size, {Rank(rank): value for rank, value in enumerate(values)})
    for row in noise:
        noisy = {Rank(rank): value * (1 + row[rank]) for rank, value in enumerate(values)}
        assert batch.update(size, noisy) == first


@given(
    st.integers(50, 5000),
    st.lists(st.lists(st.floats(1, 10), min_size=4, max_size=4), min_size=1, max_size=10),
)
def test_shares_are_never_far_from_capacities(size: int, history: list[list[float]]) -> None:
    batch = BatchShares()
    for row in history:
        capacity = {Rank(rank): value for rank, value in enumerate(row)}
        got, target = batch.update(size, capacity), shares(size, capacity)
        assert sum(got.values()) == size
        assert all(abs(target[rank] - got[rank]) <= max(1, 0.05 * got[rank]) for rank in got)


@given(growths, st.integers(1, 100_000), st.sets(st.integers(0, 2000), min_size=1, max_size=20))
def test_the_global_batch_keeps_its_bounds_at_any_time(
    growth: GlobalBatchSize, samples: int, iterations: set[int]
) -> None:
    control = GlobalBatchController(growth)
    sizes = []
    for iteration in sorted(iterations):
        sizes.append(control.at(iteration, samples))
        assert GlobalBatchController(growth).at(iteration, samples) == sizes[-1]
    assert sizes == sorted(sizes)
    assert sizes[0] >= growth.initial
    assert sizes[-1] <= max(growth.initial, min(growth.max, 0.1 * samples))


@given(growths, st.integers(1, 100_000), st.integers(0, 2000))
def test_the_global_batch_adds_up_to_one_percent_then_multiplies_up_to_ten(
    growth: GlobalBatchSize, samples: int, last: int
) -> None:
    size = growth.initial
    for _ in range(last // growth.every_steps):
        if size < int(0.01 * samples):
            wanted, bound = size + (growth.increment or growth.initial), int(0.01 * samples)
        else:
            wanted, bound = math.ceil(size * growth.factor), int(0.1 * samples)
        size = max(size, min(wanted, bound, growth.max))
    assert GlobalBatchController(growth).at(last, samples) == size
