"""Tests of stop conditions and of the times of evaluations.

Each stop condition ends a run when it is met and not before; only time also if the next step would
take too long. Iterations that the job makes without this worker count for the job, not for the
worker. Evaluations occur once an interval, if possible at the end of a round.
"""

from __future__ import annotations

import pytest

from dlion_api.endings import met_rule
from dlion_api.spec import Stop
from dlion_core.lifecycle.stopping import EvaluationSchedule, JobProgress, stop_reason


def progress(**values: float) -> JobProgress:
    return JobProgress(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stop", "before", "met"),
    [
        (Stop(max_steps=10), progress(iteration=9), progress(iteration=10)),
        (Stop(max_seconds=5), progress(trained_s=4.9), progress(trained_s=5.0)),
        (Stop(max_epochs=2), progress(job_samples=1999), progress(job_samples=2000)),
    ],
)
def test_a_condition_is_met_at_its_value(stop: Stop, before: JobProgress, met: JobProgress) -> None:
    assert stop_reason(stop, before, training_set_samples=1000) is None
    assert stop_reason(stop, met, training_set_samples=1000) is not None


@pytest.mark.parametrize(
    ("next_step_s", "begins"), [(0.0, True), (2.9, True), (3.0, False), (120.0, False)]
)
def test_no_step_begins_that_would_end_long_after_the_end(
    next_step_s: float, *, begins: bool
) -> None:
    """Two seconds are allowed: most steps are shorter."""
    known, stop = progress(trained_s=99.0), Stop(max_seconds=100)
    reason = stop_reason(stop, known, training_set_samples=0, next_step_s=next_step_s)
    why = f"maxSeconds 100 reached: after 99.0 s, as a step takes {next_step_s} s"
    assert reason == (None if begins else why)
    assert begins or met_rule(str(reason)) == ("maxSeconds", 100)
    without = Stop(max_steps=10)
    assert stop_reason(without, known, training_set_samples=0, next_step_s=next_step_s) is None


def test_iterations_made_without_this_worker_count_only_for_the_job() -> None:
    known = progress(iteration=3, own_samples=30, job_samples=90)
    known.advance(7, local_batch_size=10, global_batch_size=30)
    assert known == progress(
        iteration=7, own_samples=40, job_samples=90 + 4 * 30, global_batch_size=30
    )


def test_an_epoch_is_a_pass_of_all_workers_over_the_jobs_data() -> None:
    known = progress(iteration=3, job_samples=90)
    known.advance(4, local_batch_size=10, global_batch_size=30)
    assert known.epochs(60) == 2.0
    assert known.epochs(0) is None
    assert stop_reason(Stop(max_epochs=1), known, training_set_samples=0) is None


def test_an_evaluation_is_due_once_an_interval() -> None:
    schedule = EvaluationSchedule(100, done_samples=200)
    due = [schedule.due(n) for n in (250, 299, 301, 399, 650, 660)]
    assert due == [False, False, True, False, True, False]


def test_an_evaluation_waits_for_the_end_of_a_round_and_no_longer_than_an_interval() -> None:
    schedule = EvaluationSchedule(100)
    found = [schedule.due(n, is_mid_round=True) for n in (90, 110, 190)]
    assert found == [False, False, False]
    assert schedule.due(195)
    assert not schedule.due(198)
    found = [schedule.due(n, is_mid_round=True) for n in (210, 290, 310, 390, 410)]
    assert found == [False, False, True, False, True]
