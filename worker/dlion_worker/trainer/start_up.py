"""What a trainer's start takes, told in its log: its imports, and the first trace.

Owns the two lines that `kubectl logs` shows of it. Called by `__main__` and `worker`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOG = logging.getLogger(__name__)
_STAT = Path("/proc/self/stat")
_START_TIME = 19
"""Place of a process's start, in ticks since the machine's, behind its name (proc(5), field 22)."""


def process_age_s() -> float:
    """Seconds since this process began, to a hundredth."""
    fields = _STAT.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    began_s = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s


def tell_imports() -> None:
    """Says how long this process has been there: until its imports were through, if called then."""
    _LOG.info("imports took %.1f s", process_age_s())


@contextmanager
def first_trace() -> Iterator[None]:
    """Says how long what is inside takes: step and evaluation are compiled there."""
    began_s = time.monotonic()
    yield
    _LOG.info("first trace took %.1f s", time.monotonic() - began_s)
