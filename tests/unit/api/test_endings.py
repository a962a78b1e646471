"""Test stop reasons, end reports and descriptions of exits.

Stop rules are recognised in a stop reason. An end report is read again from its own text. An exit
is described by its name and the line that belongs to it, without colours.

Left out: writers and readers of reports (tests of the trainer and of the operator).
"""

from __future__ import annotations

import pytest

from dlion_api.endings import (
    KILLED_HINT,
    STOP_RULES,
    EndReport,
    describe_exit,
    is_stop_rule,
    met_rule,
    stop_rule_met,
)
from dlion_api.names import Rank


@pytest.mark.parametrize("rule", STOP_RULES)
@pytest.mark.parametrize("value", [1, 0.5, 1e9, 1234567.0, 0.9123454])
def test_a_stop_rule_is_recognised_in_its_reason(rule: str, value: float) -> None:
    assert met_rule(stop_rule_met(rule, value)) == (rule, value)
    assert is_stop_rule(stop_rule_met(rule, value))
    assert is_stop_rule(f"worker 12: {stop_rule_met(rule, value)}")


@pytest.mark.parametrize(
    "reason",
    [
        "",
        "SIGTERM received",
        "big-1 failed for good, and failurePolicy is Fail",
        "the run took longer than activeDeadlineSeconds (60 s)",
        "a worker has finished",
        "stopped: maxSteps 10 reached",
        "maxSteps",
    ],
)
def test_any_other_reason_ends_a_run_early(reason: str) -> None:
    assert not is_stop_rule(reason)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="maxSteps, maxSeconds"):
        stop_rule_met("maxStep", 1)


def test_a_report_is_read_again_from_its_text() -> None:
    report = EndReport("maxSteps 5 reached", 5, (Rank(0), Rank(2)), (Rank(1),))
    assert EndReport.from_json(report.to_json()) == report


def test_a_report_of_many_workers_fits_a_termination_message() -> None:
    report = EndReport(
        "x" * 10_000, 2**40, tuple(map(Rank, range(500))), tuple(map(Rank, range(99)))
    )
    assert len(report.to_json().encode()) < 4096


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Traceback (most recent call last):",
        "[]",
        "7",
        "{}",
        '{"stop_reason": "x", "iteration": "NaN", "ranks": [], "missing": []}',
        '{"stop_reason": "x", "iteration": Infinity, "ranks": [], "missing": []}',
        '{"stop_reason": "x", "iteration": 1e300, "ranks": [], "missing": []}',
        '{"stop_reason": "x", "iteration": 1, "ranks": [-1], "missing": []}',
        '{"stop_reason": "x", "iteration": 1, "ranks": "0", "missing": []}',
        '{"stop_reason": "x", "iteration": 1, "ranks": [[]], "missing": []}',
        "[" * 100_000,
    ],
)
def test_invalid_text_is_not_a_report(text: str) -> None:
    assert EndReport.from_json(text) is None


@pytest.mark.parametrize(
    ("code", "lines", "description"),
    [
        (
            67,
            ["Traceback", "ValueError: \x1b[1mno layer\x1b[0m"],
            "67 (PROGRAM): ValueError: no layer",
        ),
        (139, ["a line of the program", "Extension modules: numpy"], "139 (SIGSEGV)"),
        (137, ["a line of the program"], f"137 (SIGKILL){KILLED_HINT}"),
        (134, ["bad_alloc", "Fatal Python error: Aborted"], "134 (SIGABRT): bad_alloc"),
        (
            134,
            ["2026-01-01 10:00:00 INFO a.b: step", "Fatal Python error: Aborted"],
            "134 (SIGABRT): Aborted",
        ),
        (135, ["Fatal Python error: Bus error", "Current thread 0x1"], "135 (SIGBUS): Bus error"),
        (170, [], "170 (signal 42)"),
        (193, ["why"], "193: why"),
    ],
)
def test_an_exit_is_described_by_its_name_and_line(
    code: int, lines: list[str], description: str
) -> None:
    assert describe_exit(code, lines) == description
