"""Reads why a process ended from the last error in its log.

Knows the format of log records (`<date> <time> <LEVEL> <logger>: <message>`), Python tracebacks and
the supervisor's JSON lines.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from dlion_api.plain_text import without_escapes

_TAIL_BYTES = 65_536
_MAX_CHARACTERS = 1000
_RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\S* (?P<level>[A-Z]+) [\w.]+: (?P<message>.*)")
_TRACEBACK = "Traceback (most recent call last)"
_MAX_TRACEBACK = 16 * 1024
"""Characters of it that are shown; the log has the rest."""


def last_error_in_log(log: Path, *, any_line: bool = False) -> str:
    """The last error in the log, as one line; empty if there is none.

    With `any_line`, fall back to the last line (`last_line`).
    """
    lines = log_tail(log)
    return last_error(lines) or (last_line(lines) if any_line else "")


def log_tail(log: Path) -> list[str]:
    """The last lines of the log, without the supervisor's; none if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = without_escapes(file.read().decode("utf-8", "replace")).splitlines()
    except OSError:
        return []
    return [line for line in lines if not line.startswith('{"time"')]


def last_traceback(lines: Sequence[str]) -> str:
    """The last traceback in these lines of a log, with those that it follows; empty: none.

    What comes before it up to a line of the log, and after it, is output of the same kind.
    """
    blocks: list[list[str]] = [[]]
    for line in lines:
        if _RECORD.match(line):
            blocks.append([])
        else:
            blocks[-1].append(line)
    for block in reversed(blocks):
        starts = [place for place, line in enumerate(block) if line.startswith(_TRACEBACK)]
        if starts:
            return "\n".join(block[starts[0] :]).strip()[-_MAX_TRACEBACK:]
    return ""


def last_error(lines: Sequence[str]) -> str:
    """The last error in these lines of a log, as one line; empty if there is none."""
    error = _last_error([line for line in lines if line.strip()])
    return " ".join(" ".join(error).split())[:_MAX_CHARACTERS]


def last_line(lines: Sequence[str]) -> str:
    """The last non-empty line that does more than inform, without date, level and logger."""
    for line in reversed(lines):
        record = _RECORD.match(line)
        if line.strip() and not (record and record["level"] in {"INFO", "DEBUG"}):
            return " ".join((record["message"] if record else line).split())[:_MAX_CHARACTERS]
    return ""


def _last_error(lines: list[str]) -> list[str]:
    """The last record of level ERROR with its continuation lines, or a traceback's last line."""
    for number in range(len(lines) - 1, -1, -1):
        line = lines[number]
        record = _RECORD.match(line)
        if record is not None and record["level"] in {"ERROR", "CRITICAL"}:
            return [record["message"], *_continuation(lines[number + 1 :])]
        if line.startswith("Traceback (most recent call last)"):
            return [rest for rest in lines[number + 1 :] if not rest.startswith((" ", "\t"))][:1]
    return []


def _continuation(lines: list[str]) -> list[str]:
    """The lines up to the next record or traceback."""
    belonging: list[str] = []
    for line in lines:
        if _RECORD.match(line) or line.startswith("Traceback"):
            break
        belonging.append(line)
    return belonging
