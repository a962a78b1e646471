"""Tests of the bound on samples that a peer may claim: the largest possible global batch of an
iteration.

The oracle is the controller of the global batch, with training sets of any size.

Left out: the checks in policies (tests/property/test_adaptive.py, test_partition_merge.py,
test_gradient_exchange.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.spec import GlobalBatchSize, Spec
from dlion_core.policies.claims.samples import max_batch_at
from dlion_core.resource_control.batching import GlobalBatchController
from example_counts import examples
from policy_cluster import spec


def growing(policy: str = "weighted", **sizes: object) -> Spec:
    found = spec()
    size = GlobalBatchSize(**sizes)  # type: ignore[arg-type]
    return replace(found, batching=replace(found.batching, policy=policy, global_batch_size=size))


def test_without_growth_the_batch_is_the_initial_one() -> None:
    found = growing(initial=192, max=5000, growth=False)
    assert [max_batch_at(found, at) for at in (1, 10**6)] == [192, 192]


def test_goodput_may_choose_the_largest_batch_at_once() -> None:
    assert max_batch_at(growing("goodput", initial=192, max=5000, growth=True), 1) == 5000


def test_a_growing_batch_is_bounded_by_its_schedule() -> None:
    found = growing(initial=192, max=5000, growth=True)
    assert [max_batch_at(found, at) for at in (1, 50, 10**6)] == [576, 864, 5000]


@given(
    initial=st.integers(1, 500),
    factor=st.floats(1.01, 10),
    increment=st.integers(0, 500),
    every=st.integers(1, 60),
    samples=st.integers(1, 10**7),
    at=st.integers(0, 2000),
)
@settings(max_examples=examples(60), deadline=None)
def test_no_worker_can_have_a_larger_batch(
    initial: int, factor: float, increment: int, every: int, samples: int, at: int
) -> None:
    sizes = {"factor": factor, "increment": increment, "every_steps": every, "growth": True}
    found = growing(initial=initial, max=max(initial, 9000), **sizes)
    controller = GlobalBatchController(found.batching.global_batch_size)
    assert controller.at(at + 1, samples) <= max_batch_at(found, at)


@pytest.mark.parametrize("at", [0, 10**9])
def test_the_bound_of_a_slow_growth_is_found_at_once(at: int) -> None:
    """The longest schedule adds one sample per iteration, up to a million."""
    sizes = {"factor": 1.000001, "increment": 1, "every_steps": 1, "growth": True}
    assert max_batch_at(growing(initial=1, max=10**6, **sizes), at) <= 10**6
