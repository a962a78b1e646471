"""Tests of the prediction of demand on a tree of files in Linux' format.

The machine's counters are read, also with steal time, and without pressure in the kernel. A
missing, truncated or invalid counter gives no reading and is logged once. Steps and files together
give the demand of other processes. A sidecar follows a cycle of it.

Left out: the predictor (tests/unit/core/demand); a whole run (tests/local/test_demand.py).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from dlion_api.protocol.measurements import CpuAllowance, StepTiming
from dlion_core.demand.demand_predictor import DemandState
from dlion_worker.sidecar.demand_prediction import DemandPrediction, read_machine_cpu

TICKS = os.sysconf("SC_CLK_TCK")
CORES = 4


def write_stat(root: Path, busy_s: float, *, cores: int = CORES, steal_s: float = 0.0) -> None:
    (root / "proc").mkdir(parents=True, exist_ok=True)
    user, steal = round(busy_s * TICKS), round(steal_s * TICKS)
    lines = [f"cpu  {user} 0 0 12345 678 0 0 {steal} 9 0"]
    lines += [f"cpu{k} {user // cores} 0 0 3000 100 0 0 0 0 0" for k in range(cores)]
    lines += ["intr 1 2 3", "ctxt 99", "btime 1700000000"]
    (root / "proc/stat").write_text("\n".join(lines) + "\n")


def write_pressure(root: Path, text: str) -> None:
    (root / "proc/pressure").mkdir(parents=True, exist_ok=True)
    (root / "proc/pressure/cpu").write_text(text)


def test_busy_time_includes_the_time_stolen_by_a_hypervisor(tmp_path: Path) -> None:
    write_stat(tmp_path, 100.0, steal_s=7.0)
    machine = read_machine_cpu(tmp_path)
    assert machine is not None
    assert machine.cores == CORES
    assert machine.busy_s == pytest.approx(107.0)
    assert machine.own_s > 0
    assert machine.pressure_s is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("some avg10=1.00 avg60=0.00 avg300=0.00 total=2500000\nfull avg10=0.0 total=0\n", 2.5),
        ("full avg10=0.00 avg60=0.00 avg300=0.00 total=5\n", None),
        ("some avg10=1.00 total=lots\n", None),
        ("some total=99999999999999999999999999\n", None),
        ("", None),
    ],
)
def test_pressure_is_the_time_in_which_some_task_waits(
    tmp_path: Path, text: str, expected: float | None
) -> None:
    write_stat(tmp_path, 1.0)
    write_pressure(tmp_path, text)
    machine = read_machine_cpu(tmp_path)
    assert machine is not None
    assert machine.pressure_s == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "cpu\n", "cpu 1 2 3\n", "cpu  1 2 3 4 5 6 7 8 9 10\n",
        "cpu  1 2 3 4 5 6 7 -8 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n",
        "cpu  nan 2 3 4 5 6 7 8 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n",
        "cpu  " + "9" * 40 + " 2 3 4 5 6 7 8 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n",
        "intr 1 2 3\nctxt 9\n",
    ],
)  # fmt: skip
def test_content_that_linux_does_not_write_gives_no_reading(tmp_path: Path, text: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(text)
    assert read_machine_cpu(tmp_path) is None


def test_bytes_that_are_not_text_give_no_reading(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_bytes(b"\xff\xfe\x00cpu 1")
    assert read_machine_cpu(tmp_path) is None


def step(cores: float) -> StepTiming:
    return StepTiming(1, round(50 * cores), 1.0, 1.0, cores, cores, 0.0)


def test_an_unreadable_file_is_logged_once_and_steps_still_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    demand = DemandPrediction(tmp_path)
    demand.set_allowance(CpuAllowance(None, 0.0, 0.0))
    for second in range(1, 20):
        cores = 4.0 if second < 15 else 2.0
        demand.add_step(step(cores), float(second), 50 * cores)
    assert demand.is_blind
    assert caplog.text.count("proc/stat cannot be read") == 1
    assert demand.decision.taken_cores == pytest.approx(2.0, abs=0.1)


def test_a_kernel_without_pressure_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    demand = DemandPrediction(tmp_path)
    for second in range(1, 5):
        write_stat(tmp_path, float(second))
        demand.add_step(step(1.0), float(second), 50.0)
    assert not demand.is_blind
    assert caplog.text.count("pressure/cpu cannot be read; it is not needed") == 1


def test_a_cycle_of_other_work_is_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    demand, busy_s, before = DemandPrediction(tmp_path), 0.0, 4.0
    for second in range(1, 601):
        others = 2.0 if second % 20 >= 14 else 0.0
        cores = CORES - others
        busy_s += CORES if others else cores
        write_stat(tmp_path, busy_s)
        demand.add_step(step(cores), float(second), 50.0 * before)
        before = cores
    assert demand.decision.state is DemandState.PREDICTED
    assert caplog.text.count("forecasts of other work have been better") == 1
    assert 599 % 20 >= 14  # the other work ends with the next step
    assert 600 % 20 < 14
