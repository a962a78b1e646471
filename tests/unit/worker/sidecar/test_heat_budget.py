"""Tests of the heat budget on a tree of files in Linux' format.

The hottest plausible sensor counts; without a thermal zone, hardware monitors do. A machine that
warms up is limited, and one without a sensor is not. An unreadable file is logged once. The model
learns from the busy time of steps.

Left out: the controller (tests/unit/core/heat); a whole run (tests/local/test_heat.py).
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from dlion_api.protocol.measurements import StepTiming
from dlion_api.spec.node_policies import Heat
from dlion_core.heat.heat_controller import SAMPLE_S, HeatState
from dlion_worker.sidecar.heat_budget import HeatBudget
from dlion_worker.sidecar.node_facts import read_temperature

POLICY = Heat(threshold_celsius=70.0, min_compute_share=0.2)
STEP = StepTiming(iteration=1, samples=8, compute_s=1.0, wall_s=2.0, cpu_s=1.0, waited_s=0.0)


def write(root: Path, path: str, text: str) -> None:
    file = root / "sys/class" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"thermal/thermal_zone0/temp": "61250\n", "thermal/thermal_zone1/temp": "48000"}, 61.25),
        ({"thermal/thermal_zone0/temp": "55000", "hwmon/hwmon0/temp1_input": "90000"}, 55.0),
        ({"hwmon/hwmon0/temp1_input": "41000", "hwmon/hwmon3/temp12_input": "43500"}, 43.5),
        ({"thermal/thermal_zone0/temp": "-274000", "thermal/thermal_zone1/temp": "40000"}, 40.0),
        ({"thermal/thermal_zone0/temp": "99999999999999999999"}, None),
        ({"thermal/thermal_zone0/temp": "", "hwmon/hwmon0/temp1_input": "hot"}, None),
        ({"thermal/thermal_zone0/temp": "\x00\ufffd"}, None),
        ({"thermal/thermal_zone0/mode": "enabled", "thermal/cooling_device0/temp": "70000"}, None),
    ],
)
def test_the_hottest_plausible_sensor_counts(
    tmp_path: Path, files: dict[str, str], expected: float | None
) -> None:
    for path, text in files.items():
        write(tmp_path, path, text)
    assert read_temperature(tmp_path) == expected


def test_a_machine_that_warms_up_is_limited_before_the_threshold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    budget, celsius, share = HeatBudget(POLICY, tmp_path), 40.0, 1.0
    hottest = celsius
    for sample in range(900):
        steady = 40.0 + 60.0 * share
        celsius = steady + (celsius - steady) * math.exp(-SAMPLE_S / 120.0)
        hottest = max(hottest, celsius)
        write(tmp_path, "thermal/thermal_zone0/temp", str(round(celsius * 1000)))
        budget.add_step(StepTiming(1, 8, SAMPLE_S * share, SAMPLE_S * share, 1.0, waited_s=0.0))
        share = budget.sample(sample * SAMPLE_S).share
    assert hottest < 71.0
    assert share == pytest.approx(0.5, abs=0.05)
    assert budget.decision.state is HeatState.LIMITED
    assert caplog.text.count("limits compute to stay below 70 °C") >= 1


def test_a_machine_without_a_sensor_is_not_limited_and_logs_this_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budget = HeatBudget(POLICY, tmp_path)
    for sample in range(50):
        budget.add_step(STEP)
        assert budget.sample(sample * SAMPLE_S).share == 1.0
    assert budget.decision.state is HeatState.UNKNOWN
    assert caplog.text.count("no temperature in") == 1


def test_a_sensor_that_disappears_leads_to_the_floor_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budget = HeatBudget(POLICY, tmp_path)
    write(tmp_path, "thermal/thermal_zone0/temp", "50000")
    budget.sample(0.0)
    (tmp_path / "sys/class/thermal/thermal_zone0/temp").unlink()
    for sample in range(1, 300):
        budget.sample(sample * SAMPLE_S)
    assert budget.decision.share == pytest.approx(0.2, abs=0.01)
    assert caplog.text.count("missing, frozen or absurd") == 1
