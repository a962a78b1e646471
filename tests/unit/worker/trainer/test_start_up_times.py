"""Facts: the log of a trainer says how long its process had been there when all was imported, and
how long the first trace took.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import time

import pytest

from dlion_worker.trainer.start_up_times import logged_first_trace

TICK_S = 0.01
IMPORTS = """
import logging, time
time.sleep(0.3)
logging.basicConfig(level=logging.INFO)
from dlion_worker.trainer.start_up_times import log_import_time
log_import_time()
"""


def told_s(text: str, what: str) -> float:
    (found,) = re.findall(rf"{what} took (\d+\.\d) s", text)
    return float(found)


def test_imports_count_from_the_start_of_the_process() -> None:
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, timeout=120
    )
    there_s = time.monotonic() - began_s
    assert 0.3 <= told_s(done.stderr, "imports") <= there_s + 0.05 + TICK_S


def test_the_first_trace_is_timed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    began_s = time.monotonic()
    with logged_first_trace():
        time.sleep(0.2)
    assert 0.2 <= told_s(caplog.text, "first trace") <= time.monotonic() - began_s + 0.05
