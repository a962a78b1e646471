"""Test `dlion run` with a heat budget, which keeps a machine near its threshold.

The sensor is a file that the test heats and cools with the load of the workers. The workers compute
less while it is hot, and as much as before once the air is cool. Sidecars log their actions. A
machine without a sensor trains at full speed, and its sidecars warn once.

The machine is the exact solution of a first-order equation with a time constant of 15 s; it is warm
at first. Left out: the controller itself (tests/unit/core/heat), real sensors.
"""

from __future__ import annotations

import math
import signal
import time
from statistics import fmean
from typing import TYPE_CHECKING

import pytest

from attempts import first_that_holds
from local_run import LocalRun, blobs, job_document

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


THRESHOLD, RISE_K, TIME_CONSTANT_S = 60.0, 100.0, 15.0
TICK_S = 0.5
HEAT = {"heat": {"thresholdCelsius": THRESHOLD}}
NO_SENSOR = "heat budget: no temperature in"


class FakeMachine:
    """A thermal zone in a folder, heated by the steps of a run."""

    def __init__(self, root: Path, run: Callable[[], LocalRun]) -> None:
        self._file = root / "sys/class/thermal/thermal_zone0/temp"
        self._file.parent.mkdir(parents=True)
        self._run = run
        self.ambient, self.celsius = 30.0, 50.0
        self._write()

    def _write(self) -> None:
        part = self._file.with_suffix(".part")
        part.write_text(f"{round(self.celsius * 1000)}\n")
        part.replace(self._file)

    def live(self, seconds: float) -> list[tuple[float, float]]:
        """Advance time; return temperatures and the workers' mean busy share at each tick."""
        samples, end_s = [], time.monotonic() + seconds
        counted, last_s = len(self._run().steps()), time.monotonic()
        while time.monotonic() < end_s:
            time.sleep(TICK_S)
            steps, now_s = self._run().steps(), time.monotonic()
            busy_s = sum(step.wall_s - step.waited_s for step in steps[counted:])
            passed_s, counted, last_s = now_s - last_s, len(steps), now_s
            share = min(1.0, busy_s / 2 / passed_s)
            steady = self.ambient + RISE_K * share
            kept = math.exp(-passed_s / TIME_CONSTANT_S)
            self.celsius = steady + (self.celsius - steady) * kept
            self._write()
            samples.append((self.celsius, share))
        return samples


def sidecar_log(run: LocalRun, rank: int) -> str:
    path = run.folder / "logs" / f"sidecar-{rank}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def document(folder: Path) -> dict[str, object]:
    trainer = {"program": blobs(folder, nap_s=0.05), "stop": {"maxSteps": 1_000_000}}
    return job_document(2, trainer=trainer, nodePolicies=HEAT)


def test_a_run_keeps_to_the_threshold_and_recovers_in_cool_air(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "machine"
    monkeypatch.setenv("DLION_MACHINE_ROOT", str(root))
    machine = FakeMachine(root, lambda: run)
    with LocalRun(tmp_path, document(tmp_path)) as run:
        run.wait_for_step(5)
        machine.live(14.0)

        def hot() -> tuple[float, float]:
            temperatures, shares = zip(*machine.live(8.0), strict=True)
            assert fmean(temperatures) < THRESHOLD + 1.0
            assert max(temperatures) < THRESHOLD + 5.0
            # A duty cycle of 30 % keeps 60 degrees in air of 30.
            assert fmean(shares) < 0.4
            return fmean(temperatures), fmean(shares)

        # A run without enough CPU heats less and uses less of its share.
        _, hot_share = first_that_holds(
            hot, lambda found: found[0] > THRESHOLD - 6.0 and found[1] > 0.15
        )
        machine.ambient = -45.0  # not limited even on a busy machine
        first_that_holds(
            lambda: fmean(share for _, share in machine.live(4.0)),
            lambda share: share > max(0.7, 2 * hot_share),
            attempts=10,
        )
        run.end(signal.SIGINT)
        logs = [sidecar_log(run, rank) for rank in (0, 1)]
    for log in logs:
        assert "heat budget: limits compute to stay below 60 °C" in log
        assert "the heat budget fell from" in log


def test_a_machine_without_a_sensor_is_not_limited_and_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLION_MACHINE_ROOT", str(tmp_path / "no-such-machine"))
    with LocalRun(tmp_path, document(tmp_path)) as run:
        run.wait_for_step(60)
        for rank in (0, 1):
            run.wait_until(lambda rank=rank: NO_SENSOR in sidecar_log(run, rank), "a sample")
        run.end(signal.SIGINT)
        logs = [sidecar_log(run, rank) for rank in (0, 1)]
    for log in logs:
        assert log.count(NO_SENSOR) == 1
        assert "the heat budget fell" not in log
