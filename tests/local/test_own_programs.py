"""Facts: a program of each shape (probabilities, two classes of one output, float targets, several
inputs and outputs, a loss of its own, a part with weights that does not train), with a package
beside it, trains in a real run, and the model that its site keeps predicts as well as the summary
says, from what the program itself calls inputs. The run is resumed and replayed from its result
folder, with the package where it was. A package that fails ends the run with the user's line.

Left out: what goes wrong (tests/unit/worker/training/test_scoring and test_programs), virtual time
(tests/simulated/test_own_programs), pods (tests/cluster/test_own_programs).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.simulations import run_commands

from dlion_api.exit_codes import ExitCode
from local_run import LocalRun
from own_programs import FROZEN, OWN_PROGRAMS, TWO_INPUTS, OwnProgram

pytestmark = pytest.mark.patient

USUAL = [TWO_INPUTS]
"""It has what the others lack; `make slow` trains these too."""


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
    own.project(tmp_path)
    with LocalRun(tmp_path, None) as run:
        assert run.finish(within_s=200) == ExitCode.OK
        assert run.summary()["accuracy"]["min"] > own.min_accuracy
        model = next(iter(sorted(run.folder.glob("models/*/model.keras"))))
    own.judge(tmp_path, model)


@pytest.mark.timeout(300)
def test_a_run_is_resumed_and_replayed_with_the_package_beside_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder that is neither the program's nor the run's."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    FROZEN.project(tmp_path, steps=40)
    with LocalRun(tmp_path, None, "--set", "checkpoint.everySeconds=5") as run:
        assert run.finish(within_s=200) == ExitCode.OK
    more = ("--resume", str(run.folder), "--set", "checkpoint.everySeconds=5")
    with LocalRun(tmp_path, None, *more, "--set", "trainer.stop.maxSteps=60") as again:
        assert again.finish(within_s=200) == ExitCode.OK, again.terminal()
        assert max(step.iteration for step in again.steps()) == 60
    replay = ["replay", str(run.folder), "--no-report", "--out", str(elsewhere / "replayed")]
    (ended,) = run_commands(elsewhere, {"replay": replay}).values()
    assert ended.exit_code == 0, ended.stderr


def test_a_package_that_fails_ends_the_run_with_its_line(tmp_path: Path) -> None:
    FROZEN.project(tmp_path)
    (tmp_path / "parts" / "sampling.py").write_text("\nraise OSError('no samples today')\n")
    with LocalRun(tmp_path, None) as failing:
        assert failing.finish() == ExitCode.PROGRAM
    line = "parts/sampling.py:2: OSError: no samples today"
    assert line in failing.terminal()
    assert line in failing.worker_log(0)
    assert "in <module>\n    from parts import LEARNT, samples" in failing.worker_log(0)
