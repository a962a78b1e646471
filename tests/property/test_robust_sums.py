"""The sums of `exchange.robustness` over the contributions to one update.

Each method is that of its paper, compared with a naive implementation in float64, for whole and for
sparse contributions. Clipping changes no bit of a sum whose norms are similar, and bounds the
effect of one contribution. Missing entries of a contribution count as zeros in a trimmed mean. With
fewer contributions than a method needs it is the mean. The order of contributions affects only
rounding. One arbitrary contribution of four cannot move the result beyond the others' size.

Left out: whole jobs (tests/simulated/test_insiders.py), which jobs may have which method
(tests/support/manifest_table.py).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlion_core.codecs import ValueCodec, decode_gradient, encode_whole
from dlion_core.codecs.norms import add_and_measure, squared_distance, squared_norm_of
from dlion_core.policies.aggregation import Contribution, sample_mean
from dlion_core.policies.gradient.entries import encode_nonzero
from dlion_core.policies.robust.clipping import RADIUS_RATIO, clipping_factors
from dlion_core.policies.robust.krum import nearest
from dlion_core.policies.robust.robust_sum import ROBUST_METHODS, max_bad, robust_mean, robust_sum
from dlion_core.policies.robust.trimmed_mean import trimmed_mean
from example_counts import examples

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZE = 37
Rows = NDArray[np.float32]

values = st.floats(-100, 100, width=32).map(lambda x: 0.0 if abs(x) < 1e-3 else x)
rows = st.lists(st.lists(values, min_size=SIZE, max_size=SIZE), min_size=1, max_size=7).map(
    lambda some: np.array(some, np.float32)
)


def contributions(value_PD: Rows, samples: Sequence[int]) -> list[Contribution]:
    """Encoded and decoded as on a link, sparse if entries are zero."""
    parts = [
        encode_nonzero(row_D, ValueCodec.FLOAT32).part if row_D.any() else None
        for row_D in value_PD
    ]
    return [Contribution(count, part) for count, part in zip(samples, parts, strict=True)]


def naive(method: str, value_PD: Rows, samples: Sequence[int]) -> NDArray[np.float64]:
    """The mean by that method, straight from its definition."""
    wide_PD, count = value_PD.astype(np.float64), len(value_PD)
    share_P = np.array(samples, np.float64) / sum(samples)
    if method == "clip":
        norm_P = np.sqrt((wide_PD**2).sum(axis=1))
        known = sorted(norm_P[norm_P > 0])
        radius = 2 * known[len(known) // 2] if known else math.inf
        factor_P = [min(1.0, radius / norm) if norm else 1.0 for norm in norm_P]
        return (share_P * factor_P) @ wide_PD
    if method == "trimmed":
        cut = min(max(1, count // 4), (count - 1) // 2)
        return np.sort(wide_PD, axis=0)[cut : count - cut].mean(axis=0)
    bad = max(1, count // 4)
    kept = list(range(count))
    if count - bad - 2 >= 1:
        scores = []
        for i in range(count):
            others = sorted(((wide_PD[i] - wide_PD[j]) ** 2).sum() for j in range(count) if j != i)
            scores.append(sum(others[: count - bad - 2]))
        kept = sorted(sorted(kept, key=lambda at: scores[at])[: count - bad])
    weight_P = np.array([samples[at] for at in kept], np.float64)
    return weight_P / weight_P.sum() @ wide_PD[kept]


@pytest.mark.parametrize("method", sorted(ROBUST_METHODS))
@given(value_PD=rows, data=st.data())
@settings(max_examples=examples(100), deadline=None)
def test_each_method_is_that_of_its_paper(method: str, value_PD: Rows, data: st.DataObject) -> None:
    counts = st.lists(st.integers(1, 500), min_size=len(value_PD), max_size=len(value_PD))
    samples = data.draw(counts)
    found_D = robust_mean(method, contributions(value_PD, samples), SIZE)
    np.testing.assert_allclose(found_D, naive(method, value_PD, samples), rtol=1e-4, atol=1e-3)


@given(value_PD=rows, data=st.data())
@settings(max_examples=examples(100), deadline=None)
def test_clipping_changes_no_bit_of_contributions_of_similar_norms(
    value_PD: Rows, data: st.DataObject
) -> None:
    signs = data.draw(
        st.lists(st.sampled_from([-1.0, 1.0]), min_size=len(value_PD), max_size=len(value_PD))
    )
    row_D = value_PD[0]
    same = contributions(np.stack([np.float32(sign) * row_D for sign in signs]), [3] * len(signs))
    found_D = robust_mean("clip", same, SIZE)
    assert found_D.tobytes() == sample_mean(same, SIZE).tobytes()


@given(value_PD=rows, scale=st.sampled_from([0.0, -1.0, 3.0, -1e3, 1e6]))
@settings(max_examples=examples(100), deadline=None)
def test_one_of_at_least_four_cannot_move_the_mean_beyond_the_size_of_the_others(
    value_PD: Rows, scale: float
) -> None:
    """`clip` and `trimmed`. Krum may keep one that is as near as honest ones are."""
    honest_PD = np.concatenate([value_PD, value_PD[:1], value_PD[:1]])[:4]
    if len(honest_PD) < 3:
        return
    bad_D = np.float32(scale) * honest_PD[0]
    given_PD = np.concatenate([honest_PD, bad_D[np.newaxis]])
    samples = [5] * len(given_PD)
    largest = float(np.sqrt((honest_PD.astype(np.float64) ** 2).sum(axis=1)).max())
    clipped_D = robust_mean("clip", contributions(given_PD, samples), SIZE)
    bound = largest * (len(honest_PD) + RADIUS_RATIO) / len(given_PD)
    assert float(np.linalg.norm(clipped_D)) <= bound * (1 + 1e-4) + 1e-6
    trimmed_D = robust_mean("trimmed", contributions(given_PD, samples), SIZE)
    assert (trimmed_D <= honest_PD.max(axis=0) + 1e-4).all()
    assert (trimmed_D >= honest_PD.min(axis=0) - 1e-4).all()


def test_an_entry_sent_by_one_of_four_is_lost_in_a_trimmed_mean() -> None:
    value_PD = np.zeros((4, 3), np.float32)
    value_PD[0] = [8, 8, 8]
    value_PD[1, 1:] = [4, -4]
    value_PD[2, 2] = 4
    given_ = contributions(value_PD, [1, 1, 1, 1])
    assert robust_mean("trimmed", given_, 3).tolist() == [0, 2, 2]


def test_krum_leaves_out_a_distant_contribution() -> None:
    near = [[1, 0], [1, 0.1], [0.9, 0], [-1, 0]]
    assert nearest([np.array(one, np.float32) for one in near], 1) == [0, 1, 2]
    assert nearest([np.array(one, np.float32) for one in near[:3]], 1) == [0, 1, 2], "all of three"


def test_contributions_without_entries_give_nothing() -> None:
    for method in ROBUST_METHODS:
        empty = [Contribution(4, None), Contribution(4, None), Contribution(4, None)]
        assert robust_mean(method, empty, SIZE).tolist() == [0.0] * SIZE
    assert clipping_factors([0, 0, 0]) == [1, 1, 1]
    assert clipping_factors([0, 0, 5.0, 1.0]) == [1, 1, 1, 1], "an empty contribution has no norm"


def test_the_weights_of_the_published_form_stay() -> None:
    """Its divisor is not the sum of samples."""
    value_PD = np.array([[2.0], [2.0], [2.0], [2.0]], np.float32)
    for method in ROBUST_METHODS:
        given_ = contributions(value_PD, [10, 10, 10, 10])
        found_D = robust_sum(method, given_, size=1, divisor=20)
        assert found_D.tolist() == pytest.approx([4.0]), method


def test_a_quarter_may_be_bad() -> None:
    assert [max_bad(count) for count in (3, 4, 7, 8, 16)] == [1, 1, 1, 2, 4]


@given(row=st.lists(st.floats(-(2.0**50), 2.0**50, width=32), max_size=100))
@settings(max_examples=examples(100), deadline=None)
def test_sums_of_squares_are_exact_to_a_rounding(row: list[float]) -> None:
    value_D = np.array(row, np.float32)
    exact = math.fsum(float(one) ** 2 for one in value_D)
    assert squared_norm_of(value_D) == pytest.approx(exact, rel=1e-12)
    assert squared_distance(value_D, np.zeros_like(value_D)) == pytest.approx(exact, rel=1e-12)
    assert squared_distance(value_D, value_D) == 0
    total_D = np.ones_like(value_D)
    assert add_and_measure(value_D, np.float32(0.7), total_D) == squared_norm_of(value_D)
    assert total_D.tobytes() == (1 + np.float32(0.7) * value_D).tobytes()


def test_received_values_are_never_summed_to_infinity() -> None:
    huge_D = np.full(2, 3e38, np.float32)
    assert np.isfinite(trimmed_mean([huge_D, huge_D, huge_D, huge_D], 2, 1)).all()
    part = decode_gradient(encode_whole(np.full(2, 1e15, np.float32), ValueCodec.FLOAT32), 2)
    clipped_D = robust_mean("clip", [Contribution(1, part)] * 4, 2)
    assert np.isfinite(clipped_D).all()
