"""Restarts of trainers, told as they happen: read from the logs that their supervisors write.

Called by the runner. A supervisor writes a JSON line when its trainer has ended and is to be
started again; what the trainer itself said last stands before it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_worker.local.last_words import last_error, last_line

_MOST_BYTES = 1_048_576
"""Read of a log at a time: a program may print a lot."""
_KEPT_LINES = 200


@dataclass
class _Log:
    """How far a worker's log has been read, and what its present trainer said last."""

    path: Path
    offset: int
    rest: bytes = b""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))


class Restarts:
    """Of all workers of one run. Not for use by two threads at once."""

    def __init__(self, tell: Callable[[Rank, EventReason, str], None]) -> None:
        """`tell` records a warning: about which worker, its reason, and words for people."""
        self._tell = tell
        self._logs: dict[Rank, _Log] = {}

    def watch(self, rank: Rank, log: Path) -> None:
        """That worker's log, from its present end on: a resumed run adds to an earlier one's."""
        self._logs[rank] = _Log(log, log.stat().st_size if log.exists() else 0)

    def poll(self) -> None:
        """Tells of each restart since the last call."""
        for rank, log in self._logs.items():
            for line in _new_lines(log):
                if (told := _of_supervisor(line)) is None:
                    log.lines.append(line)
                elif told.get("supervisor") == "restarting":
                    self._tell(rank, EventReason.TRAINER_ENDED, _words(told, log.lines))
                elif told.get("supervisor") == "started":
                    log.lines.clear()


def _new_lines(log: _Log) -> list[str]:
    """Whole lines that have been added; a log that is gone has none."""
    try:
        if log.path.stat().st_size <= log.offset:
            return []
        with log.path.open("rb") as file:
            file.seek(log.offset)
            chunk = file.read(_MOST_BYTES)
    except OSError:
        return []
    log.offset += len(chunk)
    *lines, log.rest = (log.rest + chunk).split(b"\n")
    log.rest = log.rest[-_MOST_BYTES:]
    return [line.decode("utf-8", "replace") for line in lines]


def _of_supervisor(line: str) -> dict[str, Any] | None:
    if not line.startswith('{"time"'):
        return None
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) and "supervisor" in told else None


def _words(told: dict[str, Any], lines: deque[str]) -> str:
    """How the trainer ended, what it said last, and when it is started again."""
    said = [*lines]
    last = last_error(said) or last_line(said)
    how = f"its trainer ended with {_how(told)}{': ' if last else ''}{last}"
    return f"{how}; restart {told.get('restart')} of {told.get('most')} in {told.get('wait_s')} s"


def _how(told: dict[str, Any]) -> str:
    """
    >>> _how({"signal": "SIGABRT"}), _how({"code": 69}), _how({"code": 3})
    ('signal SIGABRT', 'exit code 69 (UNAVAILABLE)', 'exit code 3')
    """
    if "signal" in told:
        return f"signal {told['signal']}"
    code = told.get("code")
    name = f" ({ExitCode(code).name})" if code in set(ExitCode) else ""
    return f"exit code {code}{name}"
