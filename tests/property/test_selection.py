"""Max N against a naive reference: per-variable thresholds, a full sort, a count of each bucket.

The budget is never exceeded, what is sent is what the largest N that fits keeps, and histogram
counts are naive counts. Left out: time (benchmarks/selection.py).
"""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlion_api.names import Rank
from dlion_core.codecs import ValueCodec, coded_bytes, decode_gradient
from dlion_core.policies.gradient.gradient_selectors import MaxN
from dlion_core.policies.gradient.magnitudes import Magnitudes
from dlion_core.policies.interface import Layout

Gradient = NDArray[np.float32]


@st.composite
def gradients(draw: st.DrawFn) -> tuple[Gradient, Layout]:
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    parts = []
    for size in sizes:
        part = rng.standard_normal(size) * 10.0 ** rng.integers(-20, 20)
        kind = draw(st.sampled_from(["dense", "ties", "zeros", "mixed"]))
        if kind == "ties":
            part = np.sign(part)
        elif kind == "zeros":
            part = np.zeros(size)
        elif kind == "mixed":
            part[rng.random(size) < 0.5] = 0
        parts.append(part)
    layout = Layout(tuple(f"v{number}" for number in range(len(sizes))), tuple(sizes))
    return np.concatenate(parts).astype(np.float32), layout


def naive_ratios(gradient_D: Gradient, layout: Layout) -> Gradient:
    """|g| / max|g| per variable, one variable at a time."""
    ratio_D = np.zeros_like(gradient_D)
    for where in layout.slices():
        magnitude = np.abs(gradient_D[where])
        if magnitude.max() > 0:
            ratio_D[where] = magnitude / magnitude.max()
    return ratio_D


def naive_threshold(ratio_D: Gradient, count: int) -> float:
    """The lowest ratio in the gradient that at most `count` entries reach; inf: none."""
    fitting = [ratio for ratio in set(ratio_D.tolist()) if (ratio_D >= ratio).sum() <= count]
    return min(fitting, default=float("inf"))


@given(gradients(), st.floats(0.01, 100))
def test_what_n_keeps_is_what_the_definition_says(
    case: tuple[Gradient, Layout], n_percent: float
) -> None:
    gradient_D, layout = case
    magnitudes = Magnitudes(layout)
    magnitudes.measure(gradient_D)
    threshold = np.float32(1 - n_percent / 100)
    sure = never = 0
    for where in layout.slices():
        magnitude = np.abs(gradient_D[where].astype(np.float64))
        exact = float(threshold) * magnitude.max()
        rounding = magnitude.max() * 2.0**-24
        if magnitude.max() == 0:
            continue
        sure += int(np.count_nonzero(magnitude > exact + rounding))
        never += int(np.count_nonzero(magnitude < exact - rounding))
    counted = magnitudes.count(float(threshold))
    assert sure <= counted <= layout.size - never
    assert counted <= magnitudes.count_at_most(float(threshold)) <= layout.size


@given(gradients())
def test_the_histogram_gives_the_size_of_every_threshold(case: tuple[Gradient, Layout]) -> None:
    gradient_D, layout = case
    magnitudes = Magnitudes(layout)
    magnitudes.measure(gradient_D)
    ratio_D = naive_ratios(gradient_D, layout)
    for bucket in [*range(0x3F00, 0x3F82), 0, 1, 0x3C00]:
        lowest = np.uint32(bucket << 16).view(np.float32)
        assert magnitudes.count_from_bucket(bucket) == int((ratio_D >= lowest).sum())


@given(gradients(), st.data())
def test_the_threshold_is_the_lowest_that_fits(
    case: tuple[Gradient, Layout], data: st.DataObject
) -> None:
    gradient_D, layout = case
    assume(layout.size > 1)
    magnitudes = Magnitudes(layout)
    magnitudes.measure(gradient_D)
    ratio_D = naive_ratios(gradient_D, layout)
    for count in sorted(data.draw(st.sets(st.integers(1, layout.size - 1), max_size=4)))[::-1]:
        selected = magnitudes.largest(count)
        expected_K = np.flatnonzero(ratio_D >= naive_threshold(ratio_D, count))
        np.testing.assert_array_equal(selected.index_K(), expected_K)
        assert selected.kept == expected_K.size


@given(
    gradients(),
    st.lists(st.integers(0, 4000), min_size=1, max_size=4),
    st.sampled_from(list(ValueCodec)),
)
def test_a_budget_is_never_exceeded_and_never_left_unused(
    case: tuple[Gradient, Layout], budgets: list[int], codec: ValueCodec
) -> None:
    gradient_D, layout = case
    policy = MaxN(layout, codec)
    peers = [Rank(1 + place) for place in range(len(budgets))]
    sent = policy.prepare(gradient_D, peers, dict(zip(peers, budgets, strict=True))).payloads
    ratio_D = naive_ratios(gradient_D, layout)
    floor = int((ratio_D >= np.float32(1 - 0.0085)).sum())
    steps = sorted({int((ratio_D >= ratio).sum()) for ratio in set(ratio_D[ratio_D > 0].tolist())})
    for peer, budget in zip(peers, budgets, strict=True):
        fitting = [
            kept
            for kept in [*steps, layout.size]
            if kept >= floor and coded_bytes(kept, layout.size, codec) <= budget
        ]
        if peer not in sent:
            assert not fitting
            continue
        assert len(sent[peer]) <= budget
        part = decode_gradient(sent[peer], layout.size)
        count = layout.size if part.index_K is None else part.index_K.size
        assert count == max(fitting)
