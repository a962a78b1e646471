"""Tests by hand of two figures of the detector: sums over rounds, and the balance of signs.

A sum counts the excess above the allowance and is never below zero. A forgotten worker starts again
at zero. A balance is the difference of positive and negative entries by their number, whatever
their size and however many are zero. For a large vector it uses evenly spaced blocks of each layer,
and the first block selects them. Few signs have no balance.

Left out: the workers named by these figures (test_deviations.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from dlion_api.names import Rank
from dlion_core.codecs import GradientPart
from dlion_core.policies.claims.cumulative_sums import CumulativeSums
from dlion_core.policies.claims.sent_entries import SentEntries
from dlion_core.policies.claims.sign_balance import BLOCK, MAX_ENTRIES, MIN_SIGNS, sign_balance

if TYPE_CHECKING:
    from numpy.typing import NDArray

ONE, TWO = Rank(1), Rank(2)


def balance_of(value_D: NDArray[np.float32], first_block: int = 0) -> float | None:
    return sign_balance(SentEntries.of(GradientPart(value_D)), first_block)


def test_a_sum_counts_the_excess_above_the_allowance() -> None:
    sums, values = CumulativeSums(0.25), []
    for figure in (0.75, 0.0, -9.0, 0.5, 1.25):
        sums.add(ONE, figure)
        values.append(sums.of(ONE))
    assert values == [0.5, 0.25, 0.0, 0.25, 1.25]
    assert sums.of(TWO) == 0.0
    sums.forget(ONE)
    sums.forget(TWO)
    assert sums.of(ONE) == 0.0


def test_with_a_negative_allowance_values_above_it_add_up() -> None:
    sums = CumulativeSums(-0.5)
    for _ in range(3):
        sums.add(ONE, -0.25)
    assert sums.of(ONE) == 0.75


@pytest.mark.parametrize(
    ("positive", "negative", "zero", "balance"),
    [(300, 100, 0, 0.5), (100, 300, 5000, -0.5), (400, 0, 1, 1.0), (200, 200, 0, 0.0)],
)
def test_a_balance_counts_signs(positive: int, negative: int, zero: int, balance: float) -> None:
    values = np.repeat(np.array([1e-30, -1e30, 0.0], np.float32), [positive, negative, zero])
    assert balance_of(values) == balance
    assert balance_of(-values) == -balance


def test_few_signs_have_no_balance() -> None:
    values = np.zeros(10_000, np.float32)
    values[: MIN_SIGNS - 1] = 1
    assert balance_of(values) is None
    values[-1] = 1
    assert balance_of(values) == 1.0
    assert balance_of(np.zeros(0, np.float32)) is None


def test_for_a_large_vector_blocks_of_each_layer_count() -> None:
    layers = 8
    values = np.repeat(np.array([1, -1] * (layers // 2), np.float32), MAX_ENTRIES)
    assert balance_of(values) == 0.0
    values[: values.size // layers] = -1
    assert balance_of(values) == pytest.approx(-2 / layers, abs=BLOCK / MAX_ENTRIES)


def test_another_first_block_selects_other_blocks() -> None:
    every = 8
    values = np.ones(every * MAX_ENTRIES, np.float32)
    blocks_KB = values.reshape(-1, BLOCK)
    blocks_KB[3::every] = -1
    assert [balance_of(values, first) for first in (2, 3, 3 + every, 4)] == [1.0, -1.0, -1.0, 1.0]
