"""Runs checks in parallel, each with a time limit, whatever the others do."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.terminal.failures import message_of
from dlion_worker.supervisor.parent_death import bound_to_parent

_MAX_OUTPUT_CHARS: Final = 300


@dataclass(frozen=True)
class TimedCheck:
    """A check that has not run yet."""

    site: str
    name: str
    run: Callable[[], Check]
    late: CheckOutcome = CheckOutcome.FAIL
    """The outcome if it does not end in time."""
    late_advice: str = ""


def run_checks(checks: Sequence[TimedCheck], within_s: float) -> list[Check]:
    """The results in order, within that time. An unexpected error fails only its check.

    Threads of late checks are abandoned, and the processes that they have started are killed.
    Raises: KeyboardInterrupt immediately.
    """
    earlier = _descendants(os.getpid())
    results: queue.SimpleQueue[tuple[int, Check]] = queue.SimpleQueue()

    def one(place: int, timed: TimedCheck) -> None:
        try:
            result = timed.run()
        except Exception as error:  # noqa: BLE001 - the other checks continue
            result = Check(timed.site, timed.name, CheckOutcome.FAIL, message_of(error))
        results.put((place, result))

    end_s = time.monotonic() + within_s
    for place, timed in enumerate(checks):
        threading.Thread(target=one, args=(place, timed), daemon=True, name=timed.name).start()
    found: dict[int, Check] = {}
    while len(found) < len(checks) and (left_s := end_s - time.monotonic()) > 0:
        try:
            place, result = results.get(timeout=left_s)
        except queue.Empty:
            break
        found[place] = result
    if len(found) < len(checks):  # a credential plugin that hangs, for example
        for pid in _descendants(os.getpid()) - earlier:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    return [found.get(place) or _late(timed, within_s) for place, timed in enumerate(checks)]


def _descendants(pid: int) -> set[int]:
    """Processes that this one has started, and those that they have; on Linux alone."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children = set(map(int, task.read_text().split()))
            found |= children.union(*map(_descendants, children))
    return found


def _late(timed: TimedCheck, within_s: float) -> Check:
    observed = f"no result within {within_s:g} s"
    return Check(timed.site, timed.name, timed.late, observed, timed.late_advice)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in another interpreter, which ends with this thread's process."""
    return subprocess.run(
        bound_to_parent([sys.executable, "-c", code]),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of an interpreter's errors, shortened."""
    lines = done.stderr.strip().splitlines()
    return lines[-1][:_MAX_OUTPUT_CHARS] if lines else f"exit code {done.returncode}"
