"""Reports restarts of trainers, from the logs of their supervisors.

A supervisor logs a JSON line when its trainer has ended and will be restarted. The trainer's last
output precedes it. Logs that are too long are cut here, where it is known how far they were read.
"""

import json
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlion_api.endings import cause_of_signal
from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_api.plain_text import without_escapes
from dlion_api.reasons import EventReason
from dlion_local.runner.log_limit import cut_log
from dlion_local.runner.log_tail import last_error, last_line

_MAX_READ_BYTES = 1_048_576
"""Maximum read of a log at a time: a program may print a lot."""
_KEPT_LINES = 200


@dataclass
class _Log:
    """Position in a worker's log, and the last lines of its current trainer."""

    path: Path
    offset: int
    rest: bytes = b""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))


class RestartWatcher:
    """Watches the logs of all workers of one run. Not thread-safe."""

    def __init__(self, warn: Callable[[Rank, EventReason, str], None]) -> None:
        """`warn` records a warning: a worker, a reason and a message."""
        self._warn = warn
        self._logs: dict[Rank, _Log] = {}

    def watch(self, rank: Rank, log: Path) -> None:
        """Watch a worker's log from its current end on: a resumed run appends to the earlier
        log."""
        self._logs[rank] = _Log(log, log.stat().st_size if log.exists() else 0)

    def poll(self) -> None:
        """Report each restart since the last call, and cut logs that are too long."""
        for rank, log in self._logs.items():
            for line in _new_lines(log):
                if (record := _supervisor_record(line)) is None:
                    log.lines.append(line)
                elif record.get("supervisor") == "restarting":
                    self._warn(rank, EventReason.TRAINER_ENDED, _restart_message(record, log.lines))
                elif record.get("supervisor") == "started":
                    log.lines.clear()
            _cut(log)


def _new_lines(log: _Log) -> list[str]:
    """Complete lines added since the last call; none if the log is missing."""
    try:
        if log.path.stat().st_size <= log.offset:
            return []
        with log.path.open("rb") as file:
            file.seek(log.offset)
            chunk = file.read(_MAX_READ_BYTES)
    except OSError:
        return []
    log.offset += len(chunk)
    *lines, log.rest = (log.rest + chunk).split(b"\n")
    log.rest = log.rest[-_MAX_READ_BYTES:]
    return [without_escapes(line.decode("utf-8", "replace")) for line in lines]


def _cut(log: _Log) -> None:
    with suppress(OSError):  # a full disk, or a folder that is gone, ends the run elsewhere
        dropped = cut_log(log.path)
        if dropped > log.offset:
            log.rest = b""
        log.offset = max(0, log.offset - dropped)


def _supervisor_record(line: str) -> dict[str, Any] | None:
    if not line.startswith('{"time"'):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and "supervisor" in record else None


def _restart_message(record: dict[str, Any], lines: deque[str]) -> str:
    tail = [*lines]
    name = str(record.get("signal", ""))
    number = getattr(signal, name, 0) if name.startswith("SIG") else 0
    # An error that it logged before is not why a signal came.
    last = cause_of_signal(tail, number) if name else last_error(tail) or last_line(tail)
    how = f"its trainer ended with {_exit_text(record)}{': ' if last else ''}{last}"
    count, wait_s = f"{record.get('restart')} of {record.get('most')}", record.get("wait_s")
    return f"{how}; restart {count} in {wait_s} s"


def _exit_text(record: dict[str, Any]) -> str:
    """
    >>> _exit_text({"signal": "SIGABRT"}), _exit_text({"code": 69}), _exit_text({"code": 3})
    ('signal SIGABRT', 'exit code 69 (UNAVAILABLE)', 'exit code 3')
    """
    if "signal" in record:
        return f"signal {record['signal']}"
    code = record.get("code")
    name = f" ({ExitCode(code).name})" if code in set(ExitCode) else ""
    return f"exit code {code}{name}"
