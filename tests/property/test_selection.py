"""Max N against a naive reference: per-variable thresholds, a full sort, a count of each bucket.

The budget is never exceeded. Sent entries are those of the largest N that fits, and histogram
counts are naive counts. Selections among candidates are those of the histogram of all entries, to
the last byte of a payload, also if the sample misleads. Values that are not finite are refused
there too.

Left out: time (benchmarks/selection.py).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlion_api.names import Rank
from dlion_core.codecs import (
    Coding,
    IndexCodec,
    ValueCodec,
    coded_bytes,
    decode_gradient,
    encode_selected,
)
from dlion_core.policies.gradient.gradient_selectors import MaxN
from dlion_core.policies.gradient.magnitudes import Magnitudes
from dlion_core.policies.interface import Layout
from example_counts import examples

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
    """The lowest ratio in the gradient that at most `count` entries reach; inf if there is none."""
    fitting = [ratio for ratio in set(ratio_D.tolist()) if (ratio_D >= ratio).sum() <= count]
    return min(fitting, default=float("inf"))


@given(gradients(), st.floats(0.01, 100))
def test_kept_entries_of_n_follow_the_definition(
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


def large(kind: str, rng: np.random.Generator, size: int) -> Gradient:
    """Entries of one variable."""
    part = rng.standard_normal(size)
    match kind:
        case "heavy":
            part *= np.exp(2 * rng.standard_normal(size))
        case "ties":
            part = np.round(part)
        case "sparse":
            part[rng.random(size) < 0.99] = 0
        case "spikes":  # in runs, which a sample of runs may miss
            part *= 1e-6
            at = int(rng.integers(size))
            part[at : at + size // 20] = 1 + rng.random(size)[: part[at : at + size // 20].size]
        case "rows":  # that repeat with the chunks of a sample
            part = np.where(np.arange(size) % 4096 < 64, part, 1e-3 * part)
        case "sampled":  # only the sample has the large entries
            at = np.arange(size)
            is_run = at % 4096 // 64 == at // 4096 * 37 % 64
            part = np.where(is_run, 0.4 * rng.random(size), 1e-6 * part)
            part[-1] = 1
        case "tiny":  # subnormal ratios
            part *= 1e-38
            part[0] = 1
    return part.astype(np.float32)


KINDS = ("normal", "heavy", "ties", "sparse", "spikes", "rows", "sampled", "tiny")


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    codec=st.sampled_from(list(ValueCodec)),
    indices=st.sampled_from(list(IndexCodec)),
    data=st.data(),
)
@settings(max_examples=examples(150), deadline=None)
def test_a_selection_among_candidates_is_that_of_all(
    kinds: list[str], seed: int, codec: ValueCodec, indices: IndexCodec, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    sizes = [int(rng.choice([1, 30, 5_000, 70_000])) for _ in kinds]
    scaled = [large(k, rng, n) * np.float32(10.0) ** rng.integers(-9, 9)
              for k, n in zip(kinds, sizes, strict=True)]  # fmt: skip
    gradient_D = np.concatenate(scaled).astype(np.float32)
    layout = Layout(tuple(map(str, range(len(sizes)))), tuple(sizes))
    assume(layout.size > 40)
    counts = data.draw(st.sets(st.integers(1, layout.size // 4), min_size=1, max_size=4))
    of_all, among = Magnitudes(layout), Magnitudes(layout)
    of_all.measure(gradient_D)
    among.measure(gradient_D, most=max(counts))
    assert among.count_at_most(0.9915) == of_all.count_at_most(0.9915)
    coding = Coding(codec, indices, decimals=3, seed=7)
    for count in sorted(counts):
        expected, found = of_all.largest(count), among.largest(count)
        assert (found.kept, found.peak) == (expected.kept, expected.peak)
        np.testing.assert_array_equal(found.index_K(), expected.index_K())
        if found.kept:
            assert encode_selected(found, coding) == encode_selected(expected, coding)


@pytest.mark.parametrize(("kind", "share", "expected"), [
    ("normal", 0.01, True), ("heavy", 0.1, True), ("normal", 0.3, False), ("spikes", 0.02, False),
    ("sparse", 0.1, False), ("sampled", 0.1, False),
])  # fmt: skip
def test_candidates_are_used_if_the_sample_does_not_mislead(
    kind: str, share: float, expected: bool
) -> None:
    """Otherwise the histogram of all entries is used; both give the same."""
    gradient_D = large(kind, np.random.default_rng(3), 200_000)
    magnitudes = Magnitudes(Layout(("w",), (gradient_D.size,)))
    magnitudes.measure(gradient_D, most=int(share * gradient_D.size))
    assert (magnitudes._candidates.count > 0) == expected
    magnitudes.measure(-gradient_D)
    assert magnitudes._candidates.count == 0


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 4000, 69_999, 70_000])
def test_an_entry_that_is_not_finite_is_refused_among_candidates_too(wrong: float, at: int) -> None:
    gradient_D = large("normal", np.random.default_rng(1), 70_001)
    gradient_D[at] = wrong
    magnitudes = Magnitudes(Layout(("a", "b"), (70_000, 1)))
    with pytest.raises(ValueError, match="NaN or infinite"):
        magnitudes.measure(gradient_D, most=500)
