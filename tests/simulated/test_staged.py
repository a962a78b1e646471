"""Tests of a whole simulated job of sensors and a decoder.

The decoder learns from features of classes for which it has no samples. Sensors send features only,
in fewer bits over a slow link. Every site saves the decoder's model.

Left out: the state machines (tests/unit/core/policies/test_staged.py); processes
(tests/local/test_staged.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.simulations import Case, Simulated, SimulatedCases
from tests.support.staged_encoder import save_encoder

from dlion_api.exit_codes import ExitCode


def case(encoder: str, mbit_per_s: float, **settings: Any) -> Case:
    workers = [{"count": 4, "cores": 4, "mbitPerS": mbit_per_s}]
    environment = {"name": "narrow", "workers": workers}
    return Case(
        environment,
        {
            "trainer.program": {"builtin": "digits"},  # it accepts features of any shape
            "trainer.encoder": encoder,
            "trainer.stop": {"maxSteps": 150},
            "exchange": {"topology": "staged", "policy": "staged", **settings},
        },
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> SimulatedCases:
    folder = tmp_path_factory.mktemp("staged")
    encoder = str(save_encoder(folder / "encoder.keras"))
    slow = {"parameters": {"arriveWithin": 1, "startFraction": 1}}
    lost = case(encoder, 50)
    cases = {
        "fast": case(encoder, 50),
        "slow": case(encoder, 0.1, **slow),
        "silent": Case(SILENT, case(encoder, 50, parameters={"startWithin": 30}).settings),
        "lost": replace(lost, environment={**lost.environment, "absences": LOST}),
    }
    return SimulatedCases(folder, cases)


SILENT = {
    "name": "silent",
    "workers": [
        {"count": 3, "cores": 4, "mbitPerS": 50},
        {"count": 1, "cores": 4, "mbitPerS": 0.0001},
    ],
}
LOST = [{"worker": 0, "leaves": {"seconds": 0.5}}]


def collected(run: Simulated) -> int:
    """Bytes of all features."""
    return sum(run.sent_bytes(sensor, 0) for sensor in (1, 2, 3))


def test_the_decoder_learns_the_classes_of_the_sensors(runs: SimulatedCases) -> None:
    run = runs["fast"]
    assert run.exit_code == 0
    (final,) = [r for r in run.records if r["kind"] == "evaluation" and r["final"]]
    assert final["rank"] == 0
    assert final["accuracy"] > 0.8, "plant-a, the decoder's site, has half of the classes"
    assert len(run.events("FeaturesCollected")) == 3
    by_sensors = [r["loss"] for r in run.records if r["kind"] == "step" and r["rank"] != 0]
    assert by_sensors
    assert set(by_sensors) == {"NaN"}, "they compute none"


def test_a_slow_link_gets_fewer_bits(runs: SimulatedCases) -> None:
    assert runs["slow"].exit_code == 0
    assert collected(runs["slow"]) < 0.8 * collected(runs["fast"])


def test_the_loss_of_the_only_worker_that_trains_fails_the_run(runs: SimulatedCases) -> None:
    run = runs["lost"]
    assert run.exit_code == ExitCode.UNAVAILABLE
    (stopped,) = run.events("TrainingStopped")
    assert stopped["message"] == (
        "worker 0 is gone for good, and no other worker trains (topology staged)"
    )
    (untrained,) = run.events("ReplicaMissing")
    assert untrained["message"] == "no model is kept: of workers 1, 2, 3 none trains"


def test_a_silent_sensor_is_named_and_delays_the_start_for_a_bounded_time(
    runs: SimulatedCases,
) -> None:
    run = runs["silent"]
    assert run.exit_code == 0
    (awaited,) = run.events("FeaturesAwaited")
    assert (awaited["rank"], awaited["warning"], awaited["time_s"]) == (0, True, 30)
    assert awaited["message"] == (
        "training starts after 30 s (startWithin): worker 3 has sent 0 of its samples"
    )
    assert run.steps[0][0]["time_s"] > 30
