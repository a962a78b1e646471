"""Test that the program of examples/video trains in a real run of two workers and learns.

It has 3-D convolutions over clips [N, T, C, H, W]. Left out: the protocol's errors
(tests/unit/worker/training/test_programs).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dlion_api.exit_codes import ExitCode
from local_run import LONG_S, LocalRun

pytestmark = [pytest.mark.patient, pytest.mark.slow]

VIDEO = Path(__file__).parents[2] / "examples" / "video"


@pytest.mark.timeout(300)
def test_a_model_of_3d_convolutions_trains(tmp_path: Path) -> None:
    document = yaml.safe_load((VIDEO / "job.yaml").read_text())
    document["spec"]["trainer"]["program"] = {"file": str(VIDEO / "program.py")}
    document["spec"]["trainer"]["stop"] = {"targetAccuracy": 0.8, "maxSteps": 400}
    with LocalRun(tmp_path, document) as run:
        assert run.finish(within_s=2 * LONG_S) == ExitCode.OK
        assert run.summary()["accuracy"]["min"] >= 0.7
        assert len(run.summary()["models"]) == 2
