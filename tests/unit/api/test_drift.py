"""Test the drift of replicas, computed from sketches.

It is close to the drift of the weights themselves, is 0 for equal replicas, and compares replicas
at equal times. A replica that stops reporting is omitted.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dlion_api.drift import DriftMeter, drift
from dlion_api.names import Rank
from dlion_api.protocol.progress import EvaluationRecord


def naive_drift(weights):
    norm = np.mean([np.linalg.norm(w) for w in weights])
    return max(np.linalg.norm(a - b) for a, b in itertools.combinations(weights, 2)) / norm


def evaluation(rank, time_s, sketch, norm=1.0):
    return EvaluationRecord(time_s, Rank(rank), 1, 1, 0.5, 1.0, 10, (), tuple(sketch), norm)


def test_drift_from_sketches_is_close_to_that_of_the_weights():
    """The reference is a dense Gaussian projection with a known error: about 1/sqrt(2 * 256)."""
    rng = np.random.default_rng(5)
    projection = rng.normal(size=(256, 3000)) / np.sqrt(256)
    estimates, true_drifts = [], []
    for _ in range(20):
        base = rng.normal(size=3000)
        weights = [base + 0.1 * rng.normal(size=3000) for _ in range(4)]
        norms = [float(np.linalg.norm(w)) for w in weights]
        estimates.append(drift([projection @ w for w in weights], norms))
        true_drifts.append(naive_drift(weights))
    assert np.mean(estimates) == pytest.approx(np.mean(true_drifts), rel=0.1)


def test_equal_replicas_do_not_drift():
    assert drift([(3.0, -1.0, 2.0)] * 3, [1.0] * 3) == 0


def test_non_finite_replicas_have_no_figure():
    assert math.isnan(drift([(1.0,), (math.nan,), (2.0,)], [1.0] * 3))
    assert math.isnan(drift([(1.0,), (2.0,)], [math.inf, -math.inf]))


def test_one_replica_or_no_weights_have_no_drift():
    assert drift([(1.0, 2.0)], [1.0]) == 0
    assert drift([(1.0,), (2.0,)], [0.0, 0.0]) == 0


def test_equal_motion_evaluated_at_different_times_is_not_drift():
    meter = DriftMeter()
    points = []
    for step in range(20):
        for rank, shift in ((0, 0.0), (1, 0.4), (2, 0.7)):
            time_s = step + shift
            point = meter.add(evaluation(rank, time_s, [time_s, 2 * time_s]))
            points.append(point)
    known = [point for point in points if point is not None]
    assert len(known) >= 19
    assert max(value for _, value in known) == pytest.approx(0, abs=1e-9)


def test_a_constant_distance_appears_in_every_comparison():
    meter = DriftMeter()
    known = []
    for step in range(10):
        known += [
            meter.add(evaluation(0, step, [0.0, 1.0])),
            meter.add(evaluation(1, step, [0.3, 1.0])),
        ]
    values = [point[1] for point in known if point is not None]
    assert len(values) == 10
    assert values == pytest.approx([0.3] * 10)


def test_a_silent_replica_does_not_delay_the_others():
    meter = DriftMeter()
    meter.add(evaluation(2, 0.0, [9.0, 9.0]))
    last = None
    for step in range(60):
        meter.add(evaluation(0, step, [0.0, 1.0]))
        last = meter.add(evaluation(1, step, [0.1, 1.0])) or last
    assert last == (59, pytest.approx(0.1))


def test_records_without_sketches_and_of_another_model_are_harmless():
    meter = DriftMeter()
    assert meter.add(evaluation(0, 1.0, [])) is None
    meter.add(evaluation(0, 1.0, [1.0, 2.0]))
    assert meter.add(evaluation(1, 1.0, [1.0, 2.0, 3.0])) is None
