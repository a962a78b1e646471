"""Logs how long a trainer's start takes: imports and first trace.

Owns the two lines in `kubectl logs`. Called by `__main__` and `worker`.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOG = logging.getLogger(__name__)
_STAT = Path("/proc/self/stat")
_START_TIME = 19
"""Index of the start time after the process name, in clock ticks since boot (proc(5), field 22)."""


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
