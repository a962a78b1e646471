"""Tests of curves.

Curves stay within their limit for a run of any length, and keep their ends and their means.
Interpolation agrees with arithmetic by hand.
"""

from __future__ import annotations

import numpy as np
import pytest

from dlion_results.summary.curves import (
    Curve,
    at_times,
    first_crossing_s,
    mean_over_replicas,
    time_to_accuracy,
)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 1000, 100_003])
@pytest.mark.parametrize("averaged", [False, True])
def test_a_curve_never_exceeds_its_limit(count, averaged):
    curve = Curve(1, limit=16, averaged=averaged)
    for i in range(count):
        curve.append(i, i)
    points = curve.points()
    assert len(points) <= 17
    assert (np.diff(points[:, 0]) > 0).all()
    assert len(points) >= min(count, 8)


def test_a_subsampled_curve_keeps_its_first_and_its_newest_sample():
    curve = Curve(1, limit=16)
    for i in range(777):
        curve.append(i, 10 * i)
    points = curve.points()
    assert points[0].tolist() == [0, 0]
    assert points[-1].tolist() == [776, 7760]
    assert (points[:, 1] == 10 * points[:, 0]).all()


def test_a_short_curve_is_kept_unchanged():
    curve = Curve(2)
    for i in range(100):
        curve.append(i, i, -i)
    assert curve.points().tolist() == [[i, i, -i] for i in range(100)]


def test_an_averaged_curve_keeps_the_mean():
    values = np.random.default_rng(3).normal(size=1024)
    curve = Curve(1, limit=64, averaged=True)
    for i, value in enumerate(values):
        curve.append(i, value)
    assert curve.points()[:, 1].mean() == pytest.approx(values.mean(), abs=1e-12)


def test_the_mean_begins_when_all_replicas_are_known_and_includes_ended_ones():
    early = np.array([[0.0, 0.1], [10.0, 0.3]])
    late = np.array([[5.0, 0.5], [15.0, 0.7]])
    mean = mean_over_replicas([early, late, np.empty((0, 2))])
    assert mean.tolist() == [[5, (0.2 + 0.5) / 2], [10, (0.3 + 0.6) / 2], [15, (0.3 + 0.7) / 2]]


@pytest.mark.parametrize("end_s", [12.0, 10.0], ids=["later", "at once, in virtual time"])
def test_a_target_that_ended_the_run_is_reached_for_any_final_evaluations(end_s):
    replicas = []
    for time_s, final in ((9.0, 0.4), (10.0, 0.45)):
        curve = Curve(1)
        curve.append(0, 0)
        curve.append(time_s, 0.5)
        curve.hold(end_s)
        curve.append(end_s, final)
        replicas.append(curve.points())
    assert first_crossing_s(mean_over_replicas(replicas), 0.5) == pytest.approx(10)
    assert time_to_accuracy(replicas, 0.5) == pytest.approx(10)
    assert at_times(mean_over_replicas(replicas), [end_s]) == pytest.approx([0.425])


@pytest.mark.parametrize("end_after_s", [3.0, 0.0], ids=["later", "at once, in virtual time"])
@pytest.mark.parametrize("count", range(12, 60))
def test_a_long_curve_keeps_the_evaluation_that_ended_the_run(count, end_after_s):
    curve = Curve(1, limit=16)
    for i in range(count):
        curve.append(i, 0.1)
    curve.append(count, 0.5)
    curve.hold(count + end_after_s)
    curve.append(count + end_after_s, 0.4)
    points = curve.points()
    assert time_to_accuracy([points], 0.5) == pytest.approx(count)
    assert points[-1].tolist() == [count + end_after_s, 0.4]
    assert (np.diff(points[:, 0]) > 0).all()
    assert len(points) <= 17


def test_no_value_is_used_before_the_first_one_or_into_the_past():
    curve = Curve(1)
    curve.hold(5.0)
    assert len(curve) == 0
    curve.append(5.0, 1.0)
    curve.hold(5.0)
    assert len(curve) == 1


def test_the_time_to_a_level_lies_between_two_evaluations():
    curve = np.array([[0.0, 0.1], [10.0, 0.3], [20.0, 0.2], [30.0, 0.6]])
    assert first_crossing_s(curve, 0.2) == pytest.approx(5)
    assert first_crossing_s(curve, 0.4) == pytest.approx(25)
    assert first_crossing_s(curve, 0.05) == 0
    assert first_crossing_s(curve, 0.61) is None
    assert first_crossing_s(np.empty((0, 2)), 0.1) is None


def test_values_between_rows_are_linear_and_unknown_without_rows():
    curve = np.array([[10.0, 1.0], [0.0, 0.0]])  # rows may be out of order
    assert at_times(curve, [-5, 5, 50]).tolist() == [0, 0.5, 1]
    assert np.isnan(at_times(np.empty((0, 2)), [1.0])).all()


def test_a_target_counts_as_the_run_judged_it() -> None:
    """At 8 s the last accuracies are 0.52 and 0.49, with a mean over 0.5; at 9 s it is less."""
    one = np.array([(0.0, 0.1), (5.0, 0.52), (9.0, 0.48)])
    other = np.array([(0.0, 0.1), (4.0, 0.3), (8.0, 0.49)])
    assert first_crossing_s(mean_over_replicas([one, other]), 0.5) is None
    assert time_to_accuracy([one, other], 0.5) == 8.0
    assert time_to_accuracy([one, other], 0.4) == first_crossing_s(
        mean_over_replicas([one, other]), 0.4
    )
    assert time_to_accuracy([one, other], 0.51) is None
    assert time_to_accuracy([np.empty((0, 2))], 0.1) is None
