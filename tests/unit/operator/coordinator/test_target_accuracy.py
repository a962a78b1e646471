"""Test when the mean accuracy over replicas reaches the target.

A replica may leave permanently or return.
"""

from __future__ import annotations

from dlion_api.names import Rank
from dlion_api.protocol.progress import EvaluationRecord
from dlion_operator.served_runs.target_accuracy import TargetAccuracyMonitor


def evaluation(rank: int, accuracy: float) -> EvaluationRecord:
    return EvaluationRecord(
        time_s=1.0, rank=Rank(rank), iteration=1, samples=10, accuracy=accuracy, loss=1.0,
        evaluated_samples=10, class_accuracy=(), sketch=(), weights_norm=1.0, final=False,
    )  # fmt: skip


def test_all_replicas_must_have_reported() -> None:
    watch = TargetAccuracyMonitor(0.5, [Rank(0), Rank(1)])
    assert watch.take(evaluation(0, 0.9)) is None
    assert (
        watch.take(evaluation(1, 0.2)) == "targetAccuracy 0.5 reached: mean over 2 replicas 0.5500"
    )


def test_a_replica_that_left_permanently_does_not_count() -> None:
    watch = TargetAccuracyMonitor(0.5, [Rank(0), Rank(1), Rank(2)])
    assert watch.take(evaluation(0, 0.6)) is None
    assert watch.remove(Rank(1)) is None
    assert watch.take(evaluation(2, 0.1)) is None
    assert watch.remove(Rank(2)) == "targetAccuracy 0.5 reached: mean over 1 replicas 0.6000"
    assert watch.remove(Rank(0)) is None


def test_an_invalid_accuracy_does_not_count() -> None:
    watch = TargetAccuracyMonitor(0.5, [Rank(0)])
    for wrong in (float("nan"), float("inf"), 2.0, -1.0):
        assert watch.take(evaluation(0, wrong)) is None
    assert watch.accuracies == {}


def test_without_a_target_nothing_is_reached() -> None:
    watch = TargetAccuracyMonitor(None, [Rank(0), Rank(1)])
    assert watch.take(evaluation(0, 1.0)) is None
    assert watch.remove(Rank(1)) is None


def test_other_counts_take_effect_immediately_and_lost_replicas_stay_lost() -> None:
    watch = TargetAccuracyMonitor(0.5, [Rank(0), Rank(1)])
    assert watch.take(evaluation(0, 0.9)) is None
    assert watch.remove(Rank(1)) is not None
    assert watch.expect([Rank(0), Rank(1), Rank(2)]) is None
    assert watch.take(evaluation(2, 0.0)) is None
    assert (
        watch.expect([Rank(0), Rank(1)])
        == "targetAccuracy 0.5 reached: mean over 1 replicas 0.9000"
    )


def test_a_returning_replica_counts_from_its_next_evaluation() -> None:
    watch = TargetAccuracyMonitor(0.5, [Rank(0), Rank(1)])
    assert watch.take(evaluation(0, 0.1)) is None
    assert watch.expect([Rank(1)]) is None
    assert watch.take(evaluation(1, 0.4)) is None
    assert watch.expect([Rank(0), Rank(1)]) is None
    assert watch.take(evaluation(0, 0.8)) is not None
    assert watch.accuracies == {0: 0.8, 1: 0.4}


def test_a_repeated_evaluation_changes_nothing() -> None:
    watch = TargetAccuracyMonitor(0.5, [Rank(0), Rank(1)])
    assert watch.take(evaluation(0, 0.9)) is None
    assert watch.take(evaluation(0, 0.9)) is None
    assert watch.take(evaluation(1, 0.1)) == watch.take(evaluation(1, 0.1)) is not None
