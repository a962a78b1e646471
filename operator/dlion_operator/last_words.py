"""How a trainer ended, in one line: its exit code, what it and its supervisor said last. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from dlion_api.exit_codes import ExitCode

LAST_WORDS_LENGTH = 500
KILLED = 137
KILLED_HINT = ", most often for want of memory (resources.limits.memory)"


def last_words(code: int, lines: Sequence[str]) -> str:
    """That code, what it means, and the last of these lines that is not the supervisor's (JSON)."""
    often = ""
    if code == ExitCode.RESTARTS and (given_up := _given_up(lines)) is not None:
        code, restarts = given_up
        often = f" after {restarts} restarts (maxRestarts)"
    hint = KILLED_HINT if code == KILLED else ""
    own = [line for line in lines if not line.startswith("{")]
    last = f": {own[-1][:LAST_WORDS_LENGTH]}" if own else ""
    return f"{exit_words(code)}{often}{hint}{last}"


def _given_up(lines: Sequence[str]) -> tuple[int, int] | None:
    """The trainer's last exit code and its restarts, as the supervisor gave up on it."""
    for line in reversed(lines):
        try:
            said = json.loads(line)
            if said["supervisor"] == "giving up":
                return int(said["code"]), int(said["restarts"])
        except (ValueError, TypeError, LookupError):
            continue
    return None


def exit_words(code: int) -> str:
    """An exit code as docs/errors-and-exit-codes.md names it.

    >>> exit_words(67), exit_words(137)
    ('67 (PROGRAM)', '137 (signal 9)')
    """
    if code in {int(each) for each in ExitCode}:
        return f"{code} ({ExitCode(code).name})"
    return f"{code} (signal {code - 128})" if 128 < code < 193 else str(code)
