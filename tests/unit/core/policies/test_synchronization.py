"""Tests of each synchronization mode, as numbered timelines of one worker and its peers 1, 2, 3.

Left out: the use of gradients meanwhile (test_gradient_exchange.py); random schedules
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


def test_synchronous_mode_waits_for_all_peers() -> None:
    worker = at_start("synchronous")
    worker.step_done(1)  # 1. own step; no peer has reported
    assert worker.waiting_for() == {1, 2, 3}
    worker.heard(TWO, 1)  # 2.
    assert worker.waiting_for()
    worker.heard(ONE, 1)  # 3.
    assert worker.waiting_for() == {3}
    worker.heard(THREE, 1)  # 4. released, once
    assert worker.waiting_for() == frozenset()
    worker.heard(ONE, 2)  # 5. ahead: no step to release
    assert not worker.waiting_for()


def test_a_peer_that_is_ahead_is_not_awaited() -> None:
    worker = at_start("synchronous")
    for rank in (ONE, TWO, THREE):
        worker.heard(rank, 1)
    worker.step_done(1)
    assert not worker.waiting_for()


def test_bounded_mode_lets_no_peer_fall_behind_the_bound() -> None:
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


def test_backup_mode_continues_without_the_slowest() -> None:
    worker = at_start("backup", backup=1)
    worker.step_done(1)
    assert worker.waiting_for()
    worker.heard(ONE, 1)
    assert worker.waiting_for() == {2, 3}
    worker.heard(THREE, 1)  # n - 1 have arrived
    assert worker.waiting_for() == frozenset()


def test_asynchronous_mode_waits_for_no_peer() -> None:
    worker = at_start("asynchronous")
    for iteration in range(1, 50):
        worker.step_done(iteration)
        assert not worker.waiting_for()


def test_the_loss_of_an_awaited_peer_releases_the_step() -> None:
    worker = at_start("synchronous")
    worker.step_done(1)
    worker.heard(ONE, 1)
    worker.heard(TWO, 1)
    worker.left(THREE)
    assert worker.waiting_for() == frozenset()


def test_a_released_step_stays_released_when_a_peer_joins() -> None:
    worker = at_start("synchronous")
    for rank in (ONE, TWO):
        worker.heard(rank, 1)
    worker.left(THREE)
    worker.step_done(1)  # 1. released
    assert not worker.waiting_for()
    worker.joined(THREE, 0)  # 2. back, as a new incarnation
    assert worker.waiting_for() == frozenset()


def test_a_newcomer_delays_no_peer_until_it_has_caught_up() -> None:
    worker = Synchronizer(sync_rule(settings("synchronous")), iteration=9)
    worker.step_done(10)
    worker.joined(ONE, 3)  # 1. back from a checkpoint of iteration 3
    worker.step_done(11)  # 2. it has sent nothing
    assert not worker.waiting_for()
    worker.heard(ONE, 4)  # 3. far behind
    worker.step_done(12)
    assert not worker.waiting_for()
    worker.heard(ONE, 11)  # 4. one behind: it counts from now on
    worker.step_done(13)
    assert worker.waiting_for() == {1}


def test_a_newcomer_that_names_a_later_iteration_is_awaited_there() -> None:
    worker = Synchronizer(sync_rule(settings("synchronous")), iteration=9)
    worker.step_done(10)
    worker.joined(ONE, 11)
    worker.heard(ONE, 11)  # "I join at iteration 12"
    worker.step_done(11)
    assert not worker.waiting_for()
    worker.step_done(12)
    assert worker.waiting_for()
    worker.heard(ONE, 12)
    assert not worker.waiting_for()


def test_a_worker_left_behind_jumps_to_the_iteration_of_the_others() -> None:
    worker = Synchronizer(sync_rule(settings("bounded", staleness=2)), iteration=3)
    worker.joined(ONE, 3)
    worker.joined(TWO, 3)
    assert worker.next_iteration() == 4
    worker.heard(ONE, 30)
    assert worker.next_iteration() == 4  # a single peer cannot move this worker
    worker.heard(TWO, 28)
    assert worker.next_iteration() == 29
    worker.step_done(29)
    assert worker.next_iteration() == 30


def test_a_driver_that_steps_while_held_gets_an_error() -> None:
    worker = at_start("synchronous")
    worker.step_done(1)
    with pytest.raises(ValueError, match="waiting_for"):
        worker.step_done(2)
