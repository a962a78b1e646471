"""Tests of the phases of a trainer process.

The log has the age of the process when all imports are done, and the time of the first trace. The
phases of a process add up to its age, also if one occurs again. Each phase is a field of the
record.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import time

import pytest

from dlion_api.names import Rank
from dlion_api.protocol.progress import ProcessRecord
from dlion_worker.trainer import process_times
from dlion_worker.trainer.process_times import (
    ProcessPhase,
    ProcessTimes,
    logged_first_trace,
    process_age_s,
)

TICK_S = 0.01
ROUNDING_S = 1e-5
IMPORTS = """
import logging, time
time.sleep(0.3)
logging.basicConfig(level=logging.INFO)
from dlion_worker.trainer.process_times import log_import_time
log_import_time()
"""


def logged_s(text: str, what: str) -> float:
    (found,) = re.findall(rf"{what} took (\d+\.\d) s", text)
    return float(found)


def test_imports_count_from_the_start_of_the_process() -> None:
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, timeout=120
    )
    there_s = time.monotonic() - began_s
    assert 0.3 <= logged_s(done.stderr, "imports") <= there_s + 0.05 + TICK_S


def test_the_first_trace_is_timed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    began_s = time.monotonic()
    with logged_first_trace():
        time.sleep(0.2)
    assert 0.2 <= logged_s(caplog.text, "first trace") <= time.monotonic() - began_s + 0.05


def test_phases_add_up_to_the_age_of_the_process() -> None:
    began_s = time.monotonic()
    times = ProcessTimes()
    reading_s = time.monotonic() - began_s  # it reads two clocks in turn: monotonic, age
    for phase in (ProcessPhase.DATA, ProcessPhase.SAVE, ProcessPhase.DATA, ProcessPhase.CLOSE):
        times.enter(phase)
    before_s = process_age_s()
    found = times.seconds()
    latest_s = process_age_s() + reading_s
    assert before_s - ROUNDING_S <= sum(found.values()) <= latest_s + ROUNDING_S
    assert times.seconds()["close_s"] > found["close_s"]  # the phase continues


def test_each_phase_has_its_own_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes a phase that occurs again, and one within another."""
    now_s = 100.0
    monkeypatch.setattr(process_times, "process_age_s", lambda: 5.0)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    times = ProcessTimes()
    for phase, seconds in ((ProcessPhase.DATA, 1.0), (ProcessPhase.SAVE, 2.0),
                           (ProcessPhase.DATA, 4.0), (ProcessPhase.JOIN, 8.0)):  # fmt: skip
        times.enter(phase)
        now_s += seconds
    with times.during(ProcessPhase.SPEED):
        now_s += 16.0
    now_s += 32.0
    assert times.seconds() == {
        "import_s": 5.0, "data_s": 5.0, "save_s": 2.0, "join_s": 40.0, "speed_s": 16.0,
    }  # fmt: skip


def test_every_phase_is_a_field_of_the_record() -> None:
    seconds = dict.fromkeys(map(str, ProcessPhase), 1.0)
    record = ProcessRecord(0.0, Rank(0), 1, 2, **seconds)
    assert {name for name, value in vars(record).items() if value == 1.0} >= set(seconds)
