"""Facts: a program of each shape (probabilities, two classes of one output, float targets, several
inputs and outputs, a part that does not train) trains in a real run, and the model that its site
keeps predicts as well as the summary says, from what the program itself calls inputs.

Left out: what goes wrong (tests/unit/worker/training/test_scoring), virtual time
(tests/simulated/test_own_programs).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlion_api.exit_codes import ExitCode
from dlion_worker.training.framework import keras
from local_run import LocalRun, job_document
from own_programs import OWN_PROGRAMS, TWO_INPUTS, OwnProgram

pytestmark = pytest.mark.patient

USUAL = [TWO_INPUTS]
"""It has what the others lack; `make slow` trains these too."""


def imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "own",
    [
        pytest.param(own, id=own.name, marks=() if own in USUAL else pytest.mark.slow)
        for own in OWN_PROGRAMS
    ],
)
def test_a_program_of_each_shape_trains_and_its_model_predicts(
    tmp_path: Path, own: OwnProgram
) -> None:
    program = tmp_path / "mine.py"
    program.write_text(own.text)
    trainer = {
        "program": {"file": str(program)},
        "optimizer": {"name": own.optimizer, "learningRate": 0.1},
        "stop": {"maxSteps": 300},
    }
    with LocalRun(tmp_path, job_document(2, trainer=trainer)) as run:
        assert run.finish(within_s=200) == ExitCode.OK
        assert run.summary()["accuracy"]["min"] > own.min_accuracy
        model = next(iter(sorted(run.folder.glob("models/*/model.keras"))))
    x, y = imported(program).load_data("test", "plant-a", 0)
    if own is TWO_INPUTS:  # trainers scale pixels
        x["image"] = x["image"] / 255
    predicted = keras.models.load_model(model)(x)
    if own is TWO_INPUTS:
        assert np.abs(np.asarray(predicted["sum"])[:, 0] - y["sum"]).mean() < 0.2
    elif own.name == "regression":
        assert np.abs(np.asarray(predicted)[:, 0] - y).mean() < 0.2
    else:
        found = np.asarray(predicted)
        found = (found[:, 0] > 0.5) if own.name == "binary" else found.argmax(axis=1)
        assert (found == y).mean() > own.min_accuracy
