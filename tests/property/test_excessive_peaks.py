"""Contributions to an update that are refused for their values, against the definition.

For any peaks, also equal ones and zeros, the refused workers are those of the naive definition. It
compares each peak with the lower median of all others, sorted each time.

Left out: the purpose of the bounds (tests/unit/core/policies/test_claimed_magnitudes.py).
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_core.policies.claims.magnitudes import (
    MAX_GRADIENT_RATIO,
    MAX_MAGNITUDE,
    MAX_STEP_RATIO,
    excessive,
)

OWN = Rank(0)
PEAKS = st.sampled_from([0.0, 1e-30, 1.0, 2.0, 1e4, 1e4 + 1, 1e9, 1e16]) | st.floats(0.0, 1e18)


def lower_median(values: list[float]) -> float:
    positive = sorted(value for value in values if value > 0)
    return positive[(len(positive) - 1) // 2] if positive else 0.0


def is_refused(peaks: list[float], at: int) -> bool:
    usual = lower_median([peak for k, peak in enumerate(peaks) if k != at])
    most = MAX_MAGNITUDE
    if usual:
        most = min(max(usual * MAX_GRADIENT_RATIO, MAX_STEP_RATIO), MAX_MAGNITUDE)
    return peaks[at] > usual * MAX_GRADIENT_RATIO and peaks[at] > most


@given(st.lists(PEAKS, min_size=1, max_size=9))
def test_a_peak_is_compared_with_the_median_of_the_others(peaks: list[float]) -> None:
    by_rank = {Rank(k): peak for k, peak in enumerate(peaks)}
    refused = {one.peer for one in excessive(by_rank, OWN, lambda: 1.0)}
    assert refused == {rank for rank in by_rank if rank != OWN and is_refused(peaks, rank)}
