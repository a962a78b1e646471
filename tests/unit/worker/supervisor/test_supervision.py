"""Tests of supervision.

Restarts wait 1, 2, 4, 8, 10, 10 s, and 1 s again after a healthy minute. All restarts count. Fatal
codes and a stop end supervision. Failure rules add restarts, remove them, or do not count them. A
child that does not stop within the grace period is killed. A trainer shows an orderly end by its
own exit code. One that ends with 0 was ended by its program, and has failed.

Left out: processes and signals (tests/local/test_supervisor.py).
"""

from __future__ import annotations

import signal

import pytest

from dlion_api.exit_codes import TRAINING_ENDED, ExitCode
from dlion_api.spec.failures import FailureAction, FailureRule
from dlion_worker.supervisor.supervision import (
    ExitSupervisor,
    Instruction,
    LogError,
    LogEvent,
    SendSignal,
    StartChild,
    Supervision,
)

CRASH = ExitCode.FAILED


def acts(instructions: tuple[Instruction, ...]) -> list[Instruction]:
    """Return the actions without log entries."""
    return [instruction for instruction in instructions if not isinstance(instruction, LogEvent)]


def running(max_restarts: int = 10, grace_s: float = 4.0) -> Supervision:
    supervision = Supervision(max_restarts=max_restarts, grace_s=grace_s)
    assert acts(supervision.start(0.0)) == [StartChild()]
    supervision.child_started(42)
    return supervision


def test_waits_double_up_to_ten_seconds() -> None:
    supervision, now_s, waits_s = running(), 0.0, []
    for _ in range(6):
        now_s += 0.5
        assert acts(supervision.child_exited(CRASH, now_s)) == []
        assert supervision.due_s is not None
        waits_s.append(supervision.due_s - now_s)
        now_s = supervision.due_s
        assert acts(supervision.timer_expired(now_s)) == [StartChild()]
        assert supervision.due_s is None
    assert waits_s == [1, 2, 4, 8, 10, 10]


def test_a_healthy_minute_resets_the_wait() -> None:
    supervision = running()
    supervision.child_exited(CRASH, 1.0)
    supervision.timer_expired(2.0)
    supervision.child_exited(CRASH, 61.9)  # lived 59.9 s
    assert supervision.due_s == pytest.approx(63.9)
    supervision.timer_expired(63.9)
    supervision.child_exited(CRASH, 123.9)  # lived 60 s
    assert supervision.due_s == pytest.approx(124.9)


@pytest.mark.parametrize(("last", "code"), [(69, 69), (-signal.SIGSEGV, 139)])
def test_after_the_last_restart_it_ends_with_the_last_exit_code(last: int, code: int) -> None:
    supervision = running(max_restarts=2)
    for now_s in (100.0, 200.0):
        assert acts(supervision.child_exited(CRASH, now_s)) == []
        supervision.timer_expired(now_s + 1)
    assert acts(supervision.child_exited(last, 300.0)) == [ExitSupervisor(code)]


def test_exactly_the_documented_codes_are_fatal() -> None:
    fatal = {code for code in range(256) if acts(running().child_exited(code, 5.0))}
    assert fatal == {0, 2, 65, 66, 67, 73, 74, 75, 76, 77, 79, 80, 124, 130}
    assert fatal == {int(code) for code in ExitCode if code.fatal}


@pytest.mark.parametrize("code", [0, 65, 130])
def test_a_fatal_code_ends_supervision(code: int) -> None:
    assert acts(running().child_exited(code, 5.0)) == [ExitSupervisor(code)]


def under(*rules: FailureRule, group: str = "small") -> Supervision:
    supervision = Supervision(
        max_restarts=1,
        grace_s=4.0,
        ended_code=TRAINING_ENDED,
        given_up_code=ExitCode.RESTARTS,
        failure_rules=rules,
        group=group,
    )
    supervision.start(0.0)
    return supervision


def restarts(supervision: Supervision, code: int, most: int = 20) -> tuple[int, int | None]:
    """Return the number of restarts of a child that always ends this way, and the final exit code,
    if any.
    """
    for count in range(most):
        for each in supervision.child_exited(code, 100.0 * count):
            if isinstance(each, ExitSupervisor):
                return count, each.code
        supervision.timer_expired(100.0 * count + 1)
    return most, None


def test_a_rule_restarts_a_program_within_max_restarts() -> None:
    rule = FailureRule(on_ends=("ProgramFailed",), action="Restart")
    assert restarts(under(rule), ExitCode.PROGRAM) == (1, ExitCode.RESTARTS)
    assert restarts(under(rule), ExitCode.DATA) == (0, ExitCode.DATA)
    assert restarts(under(rule), ExitCode.OK) == (1, ExitCode.RESTARTS), (
        "the program ended the trainer"
    )


def test_an_ignored_end_is_not_counted() -> None:
    rule = FailureRule(on_ends=("Killed",), action="Ignore")
    supervision = under(rule)
    assert restarts(supervision, -signal.SIGKILL) == (20, None)
    assert restarts(supervision, CRASH) == (1, ExitCode.RESTARTS)


@pytest.mark.parametrize("action", ["FailWorker", "FailRun"])
def test_a_rule_removes_restarts(action: FailureAction) -> None:
    """The exit code stays, because the operator finds the rule by it."""
    rule = FailureRule(on_ends=("Crashed", "Unavailable"), action=action)
    assert restarts(under(rule), CRASH) == (0, CRASH)
    assert restarts(under(rule), -signal.SIGSEGV) == (0, 139)
    assert restarts(under(rule), 42) == (0, 42)
    assert restarts(under(rule), ExitCode.UNAVAILABLE) == (0, ExitCode.UNAVAILABLE)
    assert restarts(under(rule), -signal.SIGKILL) == (1, ExitCode.RESTARTS)


def test_the_first_rule_of_the_workers_group_counts() -> None:
    rules = (
        FailureRule(on_ends=("Killed",), groups=("large",), action="FailWorker"),
        FailureRule(on_ends=("Killed",), action="Ignore"),
        FailureRule(on_ends=("Killed",), groups=("small",), action="FailRun"),
    )
    assert restarts(under(*rules, group="large"), -signal.SIGKILL) == (0, 137)
    assert restarts(under(*rules, group="small"), -signal.SIGKILL) == (20, None)


def test_a_stop_has_priority_over_every_rule() -> None:
    """An end of the pod on request allows no restart in it, however its trainer ends."""
    supervision = under(FailureRule(on_ends=("Crashed",), action="Ignore"))
    supervision.stop_requested(signal.SIGTERM, 1.0)
    assert acts(supervision.child_exited(CRASH, 2.0)) == [ExitSupervisor(CRASH)]


def trainer() -> Supervision:
    supervision = Supervision(max_restarts=3, grace_s=4.0, ended_code=TRAINING_ENDED)
    supervision.start(0.0)
    return supervision


def test_an_orderly_end_of_a_trainer_is_exit_code_zero() -> None:
    assert acts(trainer().child_exited(TRAINING_ENDED, 5.0)) == [ExitSupervisor(ExitCode.OK)]


def test_a_trainer_that_its_program_ends_with_zero_has_failed() -> None:
    error, ended = acts(trainer().child_exited(0, 5.0))
    assert ended == ExitSupervisor(ExitCode.PROGRAM)
    assert isinstance(error, LogError)
    assert "ended the trainer's process with exit code 0" in error.message


def test_a_trainer_ended_by_its_program_on_a_stop_signal_was_interrupted() -> None:
    supervision = trainer()
    supervision.stop_requested(signal.SIGTERM, 1.0)
    assert acts(supervision.child_exited(0, 1.1)) == [ExitSupervisor(ExitCode.INTERRUPTED)]


def test_the_code_of_an_orderly_end_is_not_a_documented_one() -> None:
    assert TRAINING_ENDED not in set(ExitCode)
    assert 0 < TRAINING_ENDED < 128, "higher codes mean signals in shells"


def test_a_signal_is_passed_on_and_the_childs_end_ends_supervision() -> None:
    supervision = running()
    assert acts(supervision.stop_requested(signal.SIGINT, 1.0)) == [SendSignal(signal.SIGINT)]
    # This holds also for a code that would be restarted, because the end was requested.
    assert acts(supervision.child_exited(CRASH, 2.0)) == [ExitSupervisor(1)]


def test_a_child_that_dies_of_the_signal_passed_on_was_interrupted() -> None:
    supervision = running()
    supervision.stop_requested(signal.SIGTERM, 1.0)
    ended = -signal.SIGTERM
    assert acts(supervision.child_exited(ended, 1.1)) == [ExitSupervisor(ExitCode.INTERRUPTED)]


def test_a_child_that_does_not_stop_within_the_grace_period_is_killed_once() -> None:
    supervision = running(grace_s=4.0)
    supervision.stop_requested(signal.SIGTERM, 1.0)
    assert supervision.due_s == 5.0
    # A second request is passed on, but the time of the kill does not change.
    assert acts(supervision.stop_requested(signal.SIGTERM, 3.0)) == [SendSignal(signal.SIGTERM)]
    assert supervision.due_s == 5.0
    assert acts(supervision.timer_expired(5.0)) == [SendSignal(signal.SIGKILL)]
    assert supervision.due_s is None
    killed = -signal.SIGKILL
    assert acts(supervision.child_exited(killed, 5.1)) == [ExitSupervisor(137)]


def test_a_signal_between_two_starts_ends_supervision_at_once() -> None:
    supervision = running()
    supervision.child_exited(CRASH, 1.0)
    assert acts(supervision.stop_requested(signal.SIGTERM, 1.5)) == [
        ExitSupervisor(ExitCode.INTERRUPTED)
    ]


def test_in_a_pod_exhausted_restarts_have_their_own_code() -> None:
    supervision = Supervision(max_restarts=0, grace_s=4.0, given_up_code=ExitCode.RESTARTS)
    supervision.start(0.0)
    killed = -signal.SIGKILL
    assert acts(supervision.child_exited(killed, 1.0)) == [ExitSupervisor(ExitCode.RESTARTS)]
