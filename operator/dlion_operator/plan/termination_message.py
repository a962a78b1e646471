"""Describe how a trainer ended, in one line: its exit code and its last output. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from dlion_api.exit_codes import ExitCode

MAX_LINE_CHARACTERS = 500
SIGKILL_EXIT_CODE = 137
KILLED_HINT = ", most often for want of memory (resources.limits.memory)"


def describe_exit(code: int, lines: Sequence[str]) -> str:
    """Describe that exit code, with the last of these lines that is not the supervisor's JSON."""
    often = ""
    if code == ExitCode.RESTARTS and (given_up := _given_up(lines)) is not None:
        code, restarts = given_up
        often = f" after {restarts} restarts (maxRestarts)"
    hint = KILLED_HINT if code == SIGKILL_EXIT_CODE else ""
    own = [line for line in lines if not line.startswith("{")]
    last = f": {own[-1][:MAX_LINE_CHARACTERS]}" if own else ""
    return f"{describe_exit_code(code)}{often}{hint}{last}"


def _given_up(lines: Sequence[str]) -> tuple[int, int] | None:
    """Exit code and restarts of a trainer on which the supervisor gave up, or None."""
    for line in reversed(lines):
        try:
            record = json.loads(line)
            if record["supervisor"] == "giving up":
                return int(record["code"]), int(record["restarts"])
        except (ValueError, TypeError, LookupError):
            continue
    return None


def describe_exit_code(code: int) -> str:
    """Return an exit code with its name from docs/errors-and-exit-codes.md.

    >>> describe_exit_code(67), describe_exit_code(137)
    ('67 (PROGRAM)', '137 (signal 9)')
    """
    if code in {int(each) for each in ExitCode}:
        return f"{code} ({ExitCode(code).name})"
    return f"{code} (signal {code - 128})" if 128 < code < 193 else str(code)
