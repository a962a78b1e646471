"""Why a process ended, in its own words: the last error of its log.

Called by the local runner when a worker has ended for good. Knows the logs' form (a line per
record, `<date> <time> <LEVEL> <logger>: <message>`), Python's tracebacks, and the supervisor's
JSON lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_TAIL_BYTES = 65_536
_LONGEST = 1000
_RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\S* (?P<level>[A-Z]+) [\w.]+: (?P<words>.*)")


def last_words(log: Path, *, any_line: bool = False) -> str:
    """The last error in that log on one line, or else (`any_line`) its last line; empty where it
    says nothing."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    lines = [line for line in lines if not line.startswith('{"time"')]
    return last_error(lines) or (last_line(lines) if any_line else "")


def last_error(lines: Sequence[str]) -> str:
    """The last error in those lines of a log, as one line; empty where there is none."""
    error = _last_error([line for line in lines if line.strip()])
    return " ".join(" ".join(error).split())[:_LONGEST]


def last_line(lines: Sequence[str]) -> str:
    """The last of those lines of a log that says anything, without date, level and logger."""
    said = next((line for line in reversed(lines) if line.strip()), "")
    record = _RECORD.match(said)
    return " ".join((said if record is None else record["words"]).split())[:_LONGEST]


def _last_error(lines: list[str]) -> list[str]:
    """The last record of level ERROR with the lines that belong to it, or a traceback's end."""
    for number in range(len(lines) - 1, -1, -1):
        line = lines[number]
        record = _RECORD.match(line)
        if record is not None and record["level"] in {"ERROR", "CRITICAL"}:
            return [record["words"], *_continuation(lines[number + 1 :])]
        if line.startswith("Traceback (most recent call last)"):
            return [rest for rest in lines[number + 1 :] if not rest.startswith((" ", "\t"))][:1]
    return []


def _continuation(lines: list[str]) -> list[str]:
    """Up to the next record, or the traceback that follows the message."""
    belonging: list[str] = []
    for line in lines:
        if _RECORD.match(line) or line.startswith("Traceback"):
            break
        belonging.append(line)
    return belonging
