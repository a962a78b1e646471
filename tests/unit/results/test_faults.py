"""Tests of the rule "loses at most one iteration".

As defined by the project, no iteration is longer than twice the worker's median, and no local step
is discarded. The tests also cover which iterations are long because of waiting, with workers of any
speed.
"""

from __future__ import annotations

from dataclasses import replace

from dlion_api.names import Rank
from dlion_api.protocol.progress import StepRecord
from iteration_losses import iteration_losses, lost_by_waiting


def steps(rank, walls, *, iterations=None, incarnation=1, start_s=0.0):
    time_s, result = start_s, []
    for index, wall_s in enumerate(walls):
        time_s += wall_s
        iteration = iterations[index] if iterations else index + 1
        result.append(
            StepRecord(
                time_s,
                Rank(rank),
                incarnation,
                iteration,
                1.0,
                8,
                32,
                0.1,
                wall_s,
                wall_s,
                wall_s,
                0.0,
                0.0,
                8 * (index + 1),
            )
        )
    return result


def test_iterations_of_equal_length_lose_nothing():
    loss = iteration_losses(steps(0, [1.0] * 10))[Rank(0)]
    assert loss.at_most_one
    assert loss.median_s == 1.0
    assert loss.longest_s == 1.0


def test_an_iteration_of_exactly_twice_the_median_is_allowed():
    assert iteration_losses(steps(0, [1.0] * 5 + [2.0] + [1.0] * 5))[Rank(0)].at_most_one


def test_a_longer_iteration_is_named():
    loss = iteration_losses(steps(0, [1.0] * 5 + [2.1] + [1.0] * 5))[Rank(0)]
    assert not loss.at_most_one
    assert loss.slow == (6,)


def test_the_first_step_of_an_incarnation_may_be_long():
    records = steps(0, [9.0] + [1.0] * 5)
    records += steps(0, [9.0, 1.0], iterations=[7, 8], incarnation=2, start_s=20)
    assert iteration_losses(records)[Rank(0)].at_most_one


def test_only_iterations_around_the_fault_are_judged():
    records = steps(0, [1.0] * 5 + [5.0] + [1.0] * 5)  # the slow iteration ends at 10 s
    assert iteration_losses(records, since_s=11)[Rank(0)].at_most_one
    assert not iteration_losses(records, since_s=9, until_s=11)[Rank(0)].at_most_one


def test_a_repeated_or_skipped_step_was_discarded():
    again = iteration_losses(steps(0, [1.0] * 6, iterations=[1, 2, 3, 2, 3, 4]))[Rank(0)]
    assert (again.repeated, again.skipped) == ((2, 3), ())
    assert again.discarded == (2, 3)
    left_out = iteration_losses(steps(0, [1.0] * 4, iterations=[1, 2, 5, 6]))[Rank(0)]
    assert (left_out.repeated, left_out.skipped) == ((), (3, 4))
    assert left_out.discarded == (3, 4)
    assert not again.at_most_one
    assert not left_out.at_most_one


def test_the_killed_worker_is_not_judged():
    records = steps(0, [1.0] * 5) + steps(1, [1.0, 50.0, 1.0])
    assert set(iteration_losses(records, killed=[Rank(1)])) == {Rank(0)}


def waiting(rank, *waits_s):
    """Iterations of 1 s, and the waiting time in each beside that."""
    made = steps(rank, [1.0 + wait_s for wait_s in waits_s])
    return [replace(step, waited_s=wait_s) for step, wait_s in zip(made, waits_s, strict=True)]


def test_time_in_which_all_remaining_workers_wait_is_lost():
    together = waiting(0, 0, 0, 1.2, 0.3, 0.0) + waiting(1, 0, 0, 1.1, 0.2, 0.0)
    leaving = waiting(2, 0, 0.0)
    assert lost_by_waiting(together + leaving, staying=[Rank(0), Rank(1)]) == {3: 1.1}


def test_waiting_for_a_worker_that_computes_longer_is_not_lost():
    records = waiting(0, 0, 0, 3.0, 0.0) + steps(1, [1.0, 1.0, 4.0, 1.0])
    assert lost_by_waiting(records, staying=[Rank(0), Rank(1)]) == {}


def test_waiting_is_ignored_in_first_iterations_and_in_incomplete_ones():
    records = waiting(0, 5.0, 0, 0, 5.0) + waiting(1, 5.0, 0, 0)
    assert lost_by_waiting(records, staying=[Rank(0), Rank(1)]) == {}
    assert lost_by_waiting([], staying=[Rank(0)]) == {}
