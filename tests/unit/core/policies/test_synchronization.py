"""Who is waited for in each mode, as numbered timelines of one worker and its peers 1, 2, 3.

Left out: what is done with gradients meanwhile (test_gradient_exchange.py), random schedules
(tests/property).
"""

from __future__ import annotations

import pytest

from dlion_api.document import parse
from dlion_api.names import Rank
from dlion_api.spec.policies import Synchronization
from dlion_core.policies.synchronization import Synchronizer, sync_rule

ONE, TWO, THREE = Rank(1), Rank(2), Rank(3)


def settings(mode: str, *, staleness: int = 0, backup: int = 0) -> Synchronization:
    document = {"mode": mode, "maxStaleness": staleness, "backupWorkers": backup}
    return parse(Synchronization, document)


def at_start(mode: str, *, staleness: int = 0, backup: int = 0) -> Synchronizer:
    worker = Synchronizer(sync_rule(settings(mode, staleness=staleness, backup=backup)))
    for rank in (ONE, TWO, THREE):
        worker.joined(rank, 0)
    return worker


def test_synchronous_waits_for_everybody() -> None:
    worker = at_start("synchronous")
    worker.step_done(1)  # 1. own step; nobody heard yet
    assert worker.waiting_for() == {1, 2, 3}
    worker.heard(TWO, 1)  # 2.
    assert worker.waiting_for()
    worker.heard(ONE, 1)  # 3.
    assert worker.waiting_for() == {3}
    worker.heard(THREE, 1)  # 4. released, once
    assert worker.waiting_for() == frozenset()
    worker.heard(ONE, 2)  # 5. ahead: nothing to release
    assert not worker.waiting_for()


def test_a_peer_that_was_first_is_not_waited_for() -> None:
    worker = at_start("synchronous")
    for rank in (ONE, TWO, THREE):
        worker.heard(rank, 1)
    worker.step_done(1)
    assert not worker.waiting_for()


def test_bounded_lets_nobody_fall_behind_further_than_the_bound() -> None:
    worker = at_start("bounded", staleness=2)
    worker.heard(ONE, 5)
    worker.heard(TWO, 5)
    worker.step_done(1)  # 1. peer 3 is at 0: one behind
    assert not worker.waiting_for()
    worker.step_done(2)  # 2. two behind: 3 may begin
    assert not worker.waiting_for()
    worker.step_done(3)  # 3. three behind: 4 may not begin
    assert worker.waiting_for() == {3}
    worker.heard(THREE, 1)  # 4.
    assert not worker.waiting_for()


def test_backup_goes_on_without_the_slowest() -> None:
    worker = at_start("backup", backup=1)
    worker.step_done(1)
    assert worker.waiting_for()
    worker.heard(ONE, 1)
    assert worker.waiting_for() == {2, 3}
    worker.heard(THREE, 1)  # n - 1 are in
    assert worker.waiting_for() == frozenset()


def test_asynchronous_waits_for_nobody() -> None:
    worker = at_start("asynchronous")
    for iteration in range(1, 50):
        worker.step_done(iteration)
        assert not worker.waiting_for()


def test_a_peer_that_leaves_while_waited_for_releases() -> None:
    worker = at_start("synchronous")
    worker.step_done(1)
    worker.heard(ONE, 1)
    worker.heard(TWO, 1)
    worker.left(THREE)
    assert worker.waiting_for() == frozenset()


def test_a_step_that_may_begin_stays_allowed_when_a_peer_comes() -> None:
    worker = at_start("synchronous")
    for rank in (ONE, TWO):
        worker.heard(rank, 1)
    worker.left(THREE)
    worker.step_done(1)  # 1. released
    assert not worker.waiting_for()
    worker.joined(THREE, 0)  # 2. back, as a new incarnation
    assert worker.waiting_for() == frozenset()


def test_a_newcomer_holds_nobody_until_it_has_caught_up() -> None:
    worker = Synchronizer(sync_rule(settings("synchronous")), iteration=9)
    worker.step_done(10)
    worker.joined(ONE, 3)  # 1. back from a checkpoint of iteration 3
    worker.step_done(11)  # 2. it has not been heard
    assert not worker.waiting_for()
    worker.heard(ONE, 4)  # 3. far behind
    worker.step_done(12)
    assert not worker.waiting_for()
    worker.heard(ONE, 11)  # 4. one behind: from now on it counts
    worker.step_done(13)
    assert worker.waiting_for() == {1}


def test_a_newcomer_that_names_a_later_iteration_is_waited_for_there() -> None:
    worker = Synchronizer(sync_rule(settings("synchronous")), iteration=9)
    worker.step_done(10)
    worker.joined(ONE, 11)
    worker.heard(ONE, 11)  # "I shall be with you at 12"
    worker.step_done(11)
    assert not worker.waiting_for()
    worker.step_done(12)
    assert worker.waiting_for()
    worker.heard(ONE, 12)
    assert not worker.waiting_for()


def test_a_worker_left_behind_goes_to_where_the_others_are() -> None:
    worker = Synchronizer(sync_rule(settings("bounded", staleness=2)), iteration=3)
    worker.joined(ONE, 3)
    worker.joined(TWO, 3)
    assert worker.next_iteration() == 4
    worker.heard(ONE, 30)
    assert worker.next_iteration() == 4  # one alone may say what it likes
    worker.heard(TWO, 28)
    assert worker.next_iteration() == 29
    worker.step_done(29)
    assert worker.next_iteration() == 30


def test_a_driver_that_steps_while_held_is_told_so() -> None:
    worker = at_start("synchronous")
    worker.step_done(1)
    with pytest.raises(ValueError, match="waiting_for"):
        worker.step_done(2)
