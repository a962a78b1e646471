"""Test that user programs train in a real run, with a package beside them.

One has several inputs and outputs, one has two classes of one output, and one is a script with
compile(), tf.data, augmentation and callbacks. The model of each site predicts as the program's
own, from its inputs. The run is resumed and replayed from its result folder, with the package where
it was. A package or a callback that fails ends the run with the user's line. Callbacks write into a
folder of their worker, and compiled metrics are in the records.

Left out: errors (tests/unit/worker/training/test_scoring and test_programs), and the other shapes
(tests/cluster/test_own_programs trains them on this machine, in virtual time and in pods).
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from dlion_api.exit_codes import ExitCode
from dlion_api.protocol.progress import EvaluationRecord, StepRecord
from local_run import LONG_S, LocalRun, run_command
from own_programs import BINARY, FROZEN, KERAS_SCRIPT, SITES, TWO_INPUTS, OwnProgram

pytestmark = pytest.mark.patient


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "own",
    [
        pytest.param(TWO_INPUTS, id=TWO_INPUTS.name),
        *(pytest.param(own, id=own.name, marks=pytest.mark.slow) for own in (BINARY, KERAS_SCRIPT)),
    ],
)
def test_a_program_trains_and_its_model_predicts(tmp_path: Path, own: OwnProgram) -> None:
    own.project(tmp_path)
    with LocalRun(tmp_path, None) as run:
        assert run.finish(within_s=2 * LONG_S) == ExitCode.OK
        assert run.summary()["accuracy"]["min"] > own.min_accuracy
        model = next(iter(sorted(run.folder.glob("models/*/model.keras"))))
    own.judge(tmp_path, model)


def max_samples(steps: list[StepRecord]) -> dict[int, int]:
    """Return each worker's own samples at the end."""
    return {rank: max(s.samples for s in steps if s.rank == rank) for rank in (0, 1)}


def log_of_failed(run: LocalRun) -> str:
    """Return the log of the worker that failed first; the other may have been stopped before."""
    return run.worker_log(run.events("WorkerFailed")[0].rank)


@pytest.mark.timeout(300)
def test_a_script_for_keras_trains_as_written(tmp_path: Path) -> None:
    """It trains with its optimizer, metrics and callbacks; a resumed run continues with all of
    them.
    """
    KERAS_SCRIPT.project(tmp_path)
    often = ("--set", "checkpoint.everySeconds=5", "--set", "trainer.evaluation.everySamples=400")
    with LocalRun(tmp_path, None, *often, "--set", "trainer.stop.maxSteps=60") as run:
        assert run.finish(within_s=2 * LONG_S) == ExitCode.OK, run.terminal()
        steps = run.steps()
        evaluations = [each for each in run.records() if isinstance(each, EvaluationRecord)]
    assert {round(step.learning_rate, 6) for step in steps} == {0.02}
    assert len(evaluations) > 2
    for each in evaluations:
        assert each.metrics.keys() == {"top2"}
        assert each.metrics["top2"] >= each.accuracy
        assert len(each.class_accuracy) == 3
    more = ("--resume", str(run.folder), *often, "--set", "trainer.stop.maxSteps=90")
    with LocalRun(tmp_path, None, *more) as again:
        assert again.finish(within_s=2 * LONG_S) == ExitCode.OK, again.terminal()
    before, after = max_samples(steps), max_samples(again.steps())
    epochs_total = 0
    for rank, site in enumerate(SITES):
        folder = run.folder / "callbacks" / f"{site}.small-0"
        with (folder / "log.csv").open() as file:
            epochs = [int(row["epoch"]) for row in csv.DictReader(file)]
        assert epochs == [*range(after[rank] // 400)]
        epochs_total += len(epochs)
        norms = [line.split()[1] for line in (folder / "kernels.txt").read_text().splitlines()]
        assert len(norms) == len(set(norms)) == len(epochs)
    # A slow worker has few samples, and may end no epoch before the break.
    assert epochs_total > sum(samples // 400 for samples in before.values()) > 0


def test_a_callback_that_fails_ends_the_run_with_its_line(tmp_path: Path) -> None:
    KERAS_SCRIPT.project(tmp_path)
    program = tmp_path / "program.py"
    text = program.read_text().replace('"kernels.txt", "a"', '"no/such/folder", "a"')
    program.write_text(text)
    line = next(n for n, each in enumerate(text.splitlines(), start=1) if "no/such" in each)
    with LocalRun(tmp_path, None) as failing:
        assert failing.finish() == ExitCode.PROGRAM
        log = log_of_failed(failing)
    wanted = f"Kernels.on_epoch_end() failed at {program}:{line}: FileNotFoundError"
    assert wanted in failing.terminal().replace("\n", " ")
    assert wanted in log


@pytest.mark.timeout(300)
def test_a_run_is_resumed_and_replayed_with_the_package_beside_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is neither the program's nor the run's."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    FROZEN.project(tmp_path)
    often = ("--set", "checkpoint.everySeconds=5")
    with LocalRun(tmp_path, None, *often, "--set", "trainer.stop.maxSteps=40") as run:
        assert run.finish(within_s=2 * LONG_S) == ExitCode.OK
    more = ("--resume", str(run.folder), *often)
    with LocalRun(tmp_path, None, *more, "--set", "trainer.stop.maxSteps=60") as again:
        assert again.finish(within_s=2 * LONG_S) == ExitCode.OK, again.terminal()
        assert max(step.iteration for step in again.steps()) == 60
    replay = ["replay", str(run.folder), "--no-report", "--out", str(elsewhere / "replayed")]
    ended = run_command(elsewhere, *replay)
    assert ended.returncode == 0, ended.stderr


def test_a_package_that_fails_ends_the_run_with_its_line(tmp_path: Path) -> None:
    FROZEN.project(tmp_path)
    (tmp_path / "parts" / "sampling.py").write_text("\nraise OSError('no samples today')\n")
    with LocalRun(tmp_path, None) as failing:
        assert failing.finish() == ExitCode.PROGRAM
        log = log_of_failed(failing)
    line = "parts/sampling.py:2: OSError: no samples today"
    assert line in failing.terminal()
    assert line in log
    assert "in <module>\n    from parts import LEARNED, samples" in log
