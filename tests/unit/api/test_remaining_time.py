"""Test the remaining time of a run.

- It is exact for a steady run under each stop rule. It follows a change of the rate within half of
  the time since. Planned growth of the batch lengthens the remaining steps.
- A resumed run counts the remaining part, without the pause.
- A target accuracy has a range that contains the truth for several forms of curves. There is none
  if the curve is flat, too short or too noisy.
- Memory stays bounded. Impossible figures raise no error, and the fraction stays within 0 to 1.

Left out: recorded and simulated runs (benchmarks/eta.py), and the text of views.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dlion_api.names import Rank
from dlion_api.protocol.progress import EvaluationRecord, StepRecord
from dlion_api.remaining_time import MAX_POINTS, BoundedCurve, Remaining, RemainingTime
from dlion_api.spec import load_job
from local_run import job_document

if TYPE_CHECKING:
    from collections.abc import Callable


def estimator(stop: dict[str, Any], **spec: Any) -> RemainingTime:
    return RemainingTime(load_job(job_document(2, trainer={"stop": stop}, **spec)).spec)


def step(
    iteration: int,
    time_s: float,
    *,
    rank: int = 0,
    batch: int = 32,
    epochs: float | None = None,
    trained_s: float | None = None,
    start: int = 1,
) -> StepRecord:
    return StepRecord(
        time_s, Rank(rank), start, iteration, 1.0, 16, batch, 0.1, 0.1, 1.0, 0.1, 0.0, 0.0, 16,
        epochs=epochs, trained_s=trained_s,
    )  # fmt: skip


def evaluation(time_s: float, accuracy: float, *, rank: int = 0) -> EvaluationRecord:
    return EvaluationRecord(time_s, Rank(rank), 1, 1, accuracy, 1.0, 100)


def test_there_is_no_prediction_before_the_first_step() -> None:
    assert estimator({"maxSteps": 10}).predict() == Remaining()
    assert estimator({"targetAccuracy": 0.9}).predict() == Remaining(has_target=True)


@pytest.mark.parametrize(
    ("stop", "fraction", "left_s"),
    [
        ({"maxSteps": 100}, 0.25, 75.0),
        ({"maxSeconds": 50}, 0.5, 25.0),
        ({"maxEpochs": 10}, 0.25, 75.0),
        ({"maxSteps": 100, "maxSeconds": 50}, 0.5, 25.0),
        ({"maxSteps": 20}, 1.0, 0.0),
    ],
    ids=str,
)
def test_the_prediction_for_a_steady_run_is_exact(
    stop: dict[str, Any], fraction: float, left_s: float
) -> None:
    remaining = estimator(stop)
    for number in range(1, 26):
        remaining.take(step(number, 10.0 + number, epochs=number / 10))
    now = remaining.predict()
    assert now.fraction == pytest.approx(fraction)
    assert now.seconds == pytest.approx(left_s)
    later = remaining.predict(40.0)  # five seconds without a record
    assert later.seconds == pytest.approx(max(0.0, left_s - 5.0))


@pytest.mark.parametrize("first", [1, 31], ids=["all records", "those since the resume"])
@pytest.mark.parametrize(
    ("stop", "left_s"),
    [({"maxSteps": 100}, 60.0), ({"maxSeconds": 100}, 60.0), ({"maxEpochs": 10}, 60.0)],
    ids=str,
)
def test_a_resumed_run_counts_the_remaining_part(
    stop: dict[str, Any], left_s: float, first: int
) -> None:
    """30 steps of a second from 10 s on, and 10 more after a pause of 500 s."""
    remaining = estimator(stop)
    for number in range(first, 41):
        pause_s = 500.0 if number > 30 else 0.0
        remaining.take(
            step(number, 10.0 + pause_s + number, epochs=number / 10, trained_s=float(number))
        )
        if number == 31 and "maxSeconds" in stop:
            assert remaining.predict().seconds == pytest.approx(69.0), "from the first step on"
    now = remaining.predict()
    assert now.seconds == pytest.approx(left_s, rel=0.02)
    assert now.fraction == pytest.approx(0.4)


def test_the_pause_before_a_resume_is_not_part_of_the_curve_to_a_target() -> None:
    """The first 60 s of the curve, then a pause of 500 s, then the rest."""
    remaining, curve = estimator({"targetAccuracy": 0.9}), CURVES["saturating"]
    for number in range(1, 91):
        time_s = number + (500.0 if number > 60 else 0.0)
        remaining.take(step(number, time_s, trained_s=float(number)))
        remaining.take(evaluation(time_s, curve(float(number))))
    now = remaining.predict()
    reached_s = next(number for number in range(1, 300) if curve(float(number)) >= 0.9)
    assert now.target_s is not None
    assert now.target_s[0] - 2 <= reached_s - 90 <= now.target_s[1] + 2


@pytest.mark.parametrize("trained_s", [-1.0, 50.0, 1e300])
def test_a_count_of_training_that_no_run_has_is_ignored(trained_s: float) -> None:
    remaining = estimator({"maxSeconds": 50})
    for number in range(1, 26):
        remaining.take(step(number, 10.0 + number, trained_s=trained_s))
    assert remaining.predict().seconds == pytest.approx(25.0)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("too_much_s", [0.0, 20.0])
def test_a_worker_with_a_known_first_step_cannot_have_trained_before(
    workers: int, too_much_s: float
) -> None:
    """It began at 30 s and cannot have trained for longer. Start-up took the time before."""
    remaining = estimator({"maxSeconds": 50})
    for number in range(1, 26):
        counts = {0: number + too_much_s, 1: float(number)}
        for rank in range(workers):
            remaining.take(step(number, 30.0 + number, rank=rank, trained_s=counts[rank]))
    assert remaining.predict().seconds == pytest.approx(25.0)


def test_a_worker_that_rejoins_has_no_pace_from_before() -> None:
    """It was away from 50 to 140 s, and took the iteration of its peer, which trained on. Its count
    of training is that of its checkpoint."""
    remaining = estimator({"maxSteps": 300})
    for number in range(1, 171):
        remaining.take(step(number, float(number), trained_s=float(number)))
        if number <= 50:
            remaining.take(step(number, float(number), rank=1, trained_s=float(number)))
        elif number > 140:
            trained_s = 45.0 + number - 140
            remaining.take(step(number, float(number), rank=1, trained_s=trained_s, start=2))
    assert remaining.predict().seconds == pytest.approx(130.0, rel=0.02)


@pytest.mark.parametrize("stop", [{"maxSeconds": 100}, {"targetAccuracy": 0.9}], ids=str)
def test_no_single_workers_count_of_training_decides(stop: dict[str, Any]) -> None:
    """Four workers: from the 70th second on one takes a pause of 500 s for training, and one
    joins."""
    honest, remaining = estimator(stop), estimator(stop)
    for number in range(1, 91):
        time_s = number + (500.0 if number > 60 else 0.0)
        counts = {0: float(number), 1: float(number)}
        if number >= 70:
            counts |= {2: time_s, 3: number - 70.0}
        for rank, trained_s in counts.items():
            remaining.take(step(number, time_s, rank=rank, trained_s=trained_s))
            if rank < 2:
                honest.take(step(number, time_s, rank=rank, trained_s=trained_s))
        for rank in counts:
            accuracy = CURVES["saturating"](float(number))
            remaining.take(evaluation(time_s, accuracy, rank=rank))
            if rank < 2:
                honest.take(evaluation(time_s, accuracy, rank=rank))
    assert honest.predict().fraction is not None
    assert remaining.predict() == honest.predict()


@pytest.mark.parametrize(
    "stop", [{"maxSteps": 200}, {"maxEpochs": 5}, {"targetAccuracy": 0.9}], ids=str
)
def test_workers_that_do_not_train_are_no_part_of_a_prediction(stop: dict[str, Any]) -> None:
    """A sensor of topology `staged` makes steps of its own, and evaluates nothing."""
    spec = load_job(job_document(2, trainer={"stop": stop})).spec
    spec = replace(spec, exchange=replace(spec.exchange, topology="staged"))
    alone, both = RemainingTime(spec), RemainingTime(spec)
    for number in range(1, 91):
        decoder = step(number, float(number), epochs=number / 100)
        measured = evaluation(float(number), CURVES["saturating"](float(number)))
        for record in (decoder, measured):
            alone.take(record)
            both.take(record)
        both.take(step(10 * number, float(number), rank=1, epochs=number / 10))
    assert alone.predict().fraction not in (None, 1.0)
    assert both.predict() == alone.predict()


def test_a_slow_first_step_does_not_count_and_a_new_rate_does() -> None:
    remaining = estimator({"maxSteps": 100})
    times_s = [30.0, *(30.0 + number for number in range(1, 20))]
    for number, time_s in enumerate(times_s, start=1):
        remaining.take(step(number, time_s))
    assert remaining.predict().seconds == pytest.approx(80.0, rel=0.02)
    for number in range(21, 41):  # three seconds each from now on
        remaining.take(step(number, 49.0 + 3 * (number - 20)))
    assert remaining.predict().seconds == pytest.approx(180.0, rel=0.15)


def test_planned_batch_growth_lengthens_the_remaining_time() -> None:
    """32 samples a second; from step 50 on, each step has twice as many."""
    batching = {
        "globalBatchSize": {
            "initial": 32, "max": 64, "growth": True, "everySteps": 50, "factor": 2.0,
            "warmupFraction": 0.0,
        }
    }  # fmt: skip
    remaining, flat = (
        estimator({"maxSteps": 100}, batching=each)
        for each in (batching, {"globalBatchSize": {"initial": 32, "growth": False}})
    )
    for number in range(1, 26):
        for each in (remaining, flat):
            each.take(step(number, float(number), epochs=32 * number / 10_000))
    assert flat.predict().seconds == pytest.approx(75.0)
    assert remaining.predict().seconds == pytest.approx(25.0 + 2 * 50.0)


def test_the_worker_that_ends_first_counts_and_one_that_left_does_not() -> None:
    remaining = estimator({"maxSteps": 100})
    for number in range(1, 21):
        remaining.take(step(number, float(number)))
        remaining.take(step(2 * number, float(number), rank=1))
    assert remaining.predict().seconds == pytest.approx(30.0)
    remaining.expect({Rank(0)})
    assert remaining.predict().seconds == pytest.approx(80.0)


CURVES: dict[str, Callable[[float], float]] = {
    "power": lambda t: 1 - 0.9 * (1 + t / 10) ** -0.6,
    "saturating": lambda t: 0.95 * (1 - math.exp(-t / 60)),
    "sigmoid": lambda t: 0.1 + 0.85 / (1 + math.exp(-(t - 50) / 15)),
    "line": lambda t: t / 120,
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("share", [0.5, 0.75])
def test_most_ranges_until_a_target_contain_the_truth(name: str, share: float) -> None:
    """The curves have noise, and some have forms that are not fitted."""
    curve, truth_s, outcomes = CURVES[name], 100.0, []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        remaining = estimator({"targetAccuracy": curve(truth_s)})
        remaining.take(step(1, 1.0))
        for number in range(1, int(40 * share) + 1):
            accuracy = curve(2.5 * number) + float(rng.normal(0, 0.01))
            remaining.take(evaluation(2.5 * number, min(1.0, max(0.0, accuracy))))
        now_s = share * truth_s
        now = remaining.predict(now_s)
        assert now.fraction is None or 0.0 < now.fraction < 1.0
        if now.target_s is not None:
            low_s, high_s = (now_s + left_s for left_s in now.target_s)
            assert low_s <= high_s <= 4.01 * low_s
            outcomes.append(low_s <= 1.01 * truth_s and high_s >= 0.99 * truth_s)
    assert len(outcomes) >= 10, "most have a range"
    assert sum(outcomes) >= 0.8 * len(outcomes)


def test_a_range_is_computed_once_for_each_curve() -> None:
    """A view requests it several times a second."""
    remaining = estimator({"targetAccuracy": 0.9})
    remaining.take(step(1, 1.0))
    for number in range(1, 100):
        remaining.take(evaluation(float(number), 0.95 * (1 - math.exp(-number / 60))))
    began_s = time.perf_counter()
    first = remaining.predict(99.0).target_s
    once_s = time.perf_counter() - began_s
    assert first is not None
    began_s = time.perf_counter()
    for _ in range(20):
        assert remaining.predict(99.0).target_s == first
    assert time.perf_counter() - began_s < 10 * once_s


@pytest.mark.parametrize(
    "accuracies",
    [
        [0.1] * 20,
        [0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.04],
        [0.3, 0.4, 0.5],
        [math.nan] * 20,
        [-5.0] * 20,
    ],
    ids=["flat", "falling", "short", "nan", "alien"],
)
def test_a_target_that_cannot_be_predicted_is_unknown(accuracies: list[float]) -> None:
    remaining = estimator({"targetAccuracy": 0.9, "maxSeconds": 500})
    remaining.take(step(1, 1.0))
    for number, accuracy in enumerate(accuracies, start=1):
        remaining.take(evaluation(float(number), accuracy))
    now = remaining.predict()
    assert now.target_s is None
    assert now.has_target
    assert now.seconds is not None, "the other rule is still predicted"


@pytest.mark.parametrize("seed", [4, 6, 9])  # fits to it reach the target, at very different times
def test_noise_alone_gives_no_range(seed: int) -> None:
    rng = np.random.default_rng(seed)
    remaining = estimator({"targetAccuracy": 0.9})
    remaining.take(step(1, 1.0))
    for number in range(1, 30):
        remaining.take(evaluation(float(number), 0.5 + float(rng.normal(0, 0.05))))
    assert remaining.predict().target_s is None


def test_the_mean_over_replicas_is_fitted_once_all_were_evaluated() -> None:
    remaining = estimator({"targetAccuracy": 0.8})
    for rank in (0, 1):
        remaining.take(step(1, 1.0, rank=rank))
    for number in range(1, 21):
        remaining.take(evaluation(number - 0.5, number / 100))
        remaining.take(evaluation(float(number), 3 * number / 100, rank=1))
    now = remaining.predict(20.0)
    assert now.target_s is not None
    assert now.target_s[0] <= 20.5
    assert now.target_s[1] >= 19.5


def test_a_curve_keeps_its_newest_point_and_a_bounded_number() -> None:
    curve = BoundedCurve()
    for number in range(100_000):
        curve.append(float(number), 2.0 * number)
    points = curve.points()
    assert len(points) <= MAX_POINTS
    assert points[-1] == (99_999.0, 199_998.0)
    assert points[0] == (0.0, 0.0)
    assert curve.recent_pace() == pytest.approx(2.0)
    curve.append(5.0, 0.0)  # late
    assert curve.points() == points


@pytest.mark.parametrize("most", [10**12, 1])
def test_huge_and_tiny_ends_stay_within_bounds(most: int) -> None:
    remaining = estimator(
        {"maxSteps": most}, batching={"globalBatchSize": {"initial": 2, "growth": True}}
    )
    for number in range(1, 26):
        remaining.take(step(number, float(number), batch=1, epochs=number / 10**9))
    seconds = remaining.predict().seconds
    assert seconds is not None
    assert 0.0 <= seconds < 2**31


NUMBERS = (-1e300, -1.0, 0.0, 5e-324, 0.5, 50.0, 1e10, 1e300, 1.7e308)


@pytest.mark.parametrize("seed", range(60))
def test_figures_of_a_faulty_worker_raise_no_error_and_stay_in_bounds(seed: int) -> None:
    draw = np.random.default_rng(seed)

    def number() -> float:
        return float(draw.choice(NUMBERS))

    remaining = estimator(
        {"targetAccuracy": 0.9, "maxSeconds": 100, "maxSteps": 1000, "maxEpochs": 3},
        batching={"globalBatchSize": {"initial": 2, "growth": True}},
    )
    for place in range(14):
        iteration = int(draw.choice([1, place + 1, 2**53]))
        size = int(draw.choice([0, 2, 2**53]))
        fine = replace(step(iteration, 10.0 * place, batch=size, epochs=number()), wall_s=number())
        remaining.take(replace(fine, time_s=number()) if draw.random() < 0.3 else fine)
        late = number() if draw.random() < 0.5 else 10.0 * place
        remaining.take(evaluation(late, min(1.0, max(0.0, number() / (place + 1)))))
    predicted = remaining.predict()
    assert predicted.fraction is None or 0.0 <= predicted.fraction <= 1.0
    assert predicted.seconds is None or 0.0 <= predicted.seconds < 2**31
    assert all(0.0 <= end < 2**32 for end in predicted.target_s or ())
