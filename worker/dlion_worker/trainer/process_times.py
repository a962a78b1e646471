"""What a trainer's process spends its time on beside its steps.

Owns the phases of start and end, for the records, and the two lines on imports and first trace in
`kubectl logs`. Called by `__main__`, `worker` and `shutdown`.
"""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

_LOG = logging.getLogger(__name__)
_STAT = Path("/proc/self/stat")
_START_TIME = 19
"""Index of the start time after the process name, in clock ticks since boot (proc(5), field 22)."""


class ProcessPhase(StrEnum):
    """What the process does; the values are fields of `ProcessRecord`, which have the meanings."""

    IMPORT = "import_s"
    DATA = "data_s"
    MODEL = "model_s"
    JOIN = "join_s"
    SPEED = "speed_s"
    TRAIN = "train_s"
    FINAL_WAIT = "final_wait_s"
    GATHER = "gather_s"
    EVALUATE = "evaluate_s"
    SAVE = "save_s"
    CLOSE = "close_s"


class ProcessTimes:
    """Seconds of this process by phase. It begins with the imports, at the start of the process.

    Not thread-safe: the main thread's.
    """

    def __init__(self) -> None:
        self._phase, self._since_s = ProcessPhase.IMPORT, time.monotonic() - process_age_s()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def enter(self, phase: ProcessPhase) -> None:
        """End the present phase and begin that one, for the first time or again."""
        now_s = time.monotonic()
        self._seconds[self._phase.value] += now_s - self._since_s
        self._phase, self._since_s = phase, now_s

    @contextmanager
    def during(self, phase: ProcessPhase) -> Iterator[None]:
        """Be in that phase within the block, and then in the present one again."""
        before = self._phase
        self.enter(phase)
        yield
        self.enter(before)

    def seconds(self) -> dict[str, float]:
        """Seconds by field of `ProcessRecord`; they add up to the age of the process."""
        self.enter(self._phase)
        return {phase: round(seconds, 6) for phase, seconds in self._seconds.items()}


def process_age_s() -> float:
    """Seconds since this process began, to a hundredth."""
    fields = _STAT.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    began_s = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s


def log_import_time() -> None:
    """Log the process's age: the duration of the imports, if called directly after them."""
    _LOG.info("imports took %.1f s", process_age_s())


@contextmanager
def logged_first_trace() -> Iterator[None]:
    """Log the duration of the block, in which step and evaluation are compiled."""
    began_s = time.monotonic()
    yield
    _LOG.info("first trace took %.1f s", time.monotonic() - began_s)
