"""Test `dlion calibrate` with real steps, and a simulation that uses the measured costs.

Left out: the fit itself (tests/unit/simulator/test_calibration.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.simulations import one_process, run_command

from dlion_api.exit_codes import ExitCode

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits.yaml"


@pytest.fixture(scope="module", autouse=True)
def _process_of_commands() -> Iterator[None]:
    """Load TensorFlow once for all commands of this file, whatever ran in the test's process."""
    with one_process():
        yield


def test_a_job_is_simulated_with_its_measured_costs(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    measuring = ("--batches", "16,512", "--rounds", "3")
    done = run_command("calibrate", str(DIGITS), *measuring, "--out", str(costs), "-o", "json")
    assert done.exit_code == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured == json.loads(costs.read_text())
    fixed, sample = measured["fixedCoreS"], measured["perSampleCoreS"]
    assert 0 < sample["low"] <= sample["value"] <= sample["high"] < 0.01
    assert 0 <= fixed["value"] < 0.5
    assert len(measured["observations"]) == 6
    assert all(one["wallS"] > 0 and one["cpuS"] > 0 for one in measured["observations"])

    flags = (
        "simulate", str(DIGITS), "-e", "quickstart", "--no-report", "-o", "json",
        "--set", "trainer.stop={maxSteps: 3}", "--set", "exchange.policy=none",
        "--set", "batching.policy=even",
    )  # fmt: skip
    done = run_command(*flags, "--calibration", str(costs), "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.stderr
    summary = json.loads(done.stdout)
    simulation = summary["simulation"]
    assert simulation == json.loads((tmp_path / "out" / "simulation.json").read_text())
    assert simulation["samplesPerSPerCore"] == pytest.approx(1 / sample["value"])
    assert (simulation["fixedCoreS"], simulation["exchangeCoreS"]) == (fixed["value"], 0.0)
    digest = hashlib.sha256(costs.read_bytes()).hexdigest()
    assert simulation["calibration"] == {"path": str(costs), "sha256": digest}
    # Each worker has 60 samples a step; the fastest has 4 cores.
    expected_s = 3 * (fixed["value"] + 60 * sample["value"]) / 4
    assert summary["simulation"]["virtualSeconds"] >= expected_s * 0.999
    lines = (tmp_path / "out" / "events.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    largest = [s for s in steps if s["kind"] == "step" and s["rank"] == 3]
    assert largest[-1]["time_s"] == pytest.approx(expected_s, rel=1e-3)


def test_wrong_arguments_are_reported(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"version": 7}')
    flags = ("simulate", str(DIGITS), "-e", "quickstart", "--out", str(tmp_path / "out"))
    done = run_command(*flags, "--calibration", str(wrong))
    assert done.exit_code == ExitCode.DATA
    assert "version 7; allowed: 1" in done.stderr
    assert not (tmp_path / "out").exists()
    for words, message in (
        (("calibrate", "--batches", "8"), "give two or more sizes"),
        (("calibrate", "--batches", "a,b"), "not integers"),
        (("calibrate", "--set", "seed=1"), "give FILE"),
        (("calibrate", str(DIGITS), "--builtin", "cipher"), "exclude each other"),
        (("calibrate", "--out", str(tmp_path / "absent" / "costs.json")), "there is no folder"),
        (("calibrate", "--builtin", "nonsense"), "'nonsense' is not one of 'cipher', 'cnn17'"),
        ((*flags, "--step-overhead", "nan"), "not a finite number"),
    ):
        done = run_command(*words)
        assert done.exit_code == ExitCode.USAGE, words
        assert message in " ".join(done.stderr.split())
