"""Tests of user programs in virtual time.

Programs train under the default policy and reach their accuracy. They have targets, several inputs
and outputs, their own optimizer, and all parts of a Keras script, each with a package beside it.
They also run one after the other in one process, where their packages have the same name. Callbacks
are not called, which is reported. `compare` repeats a run whose package has changed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.simulations import run_commands, two_workers

from dlion_cli.__main__ import main
from own_programs import KERAS_SCRIPT, OWN_PROGRAMS, PROBABILITIES, OwnProgram


def reported(folder: Path, reason: str) -> list[str]:
    """Messages of the events with that reason."""
    records = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [each["message"] for each in records if each.get("reason") == reason]


@pytest.fixture(scope="module")
def accuracies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The mean accuracy of each program's replicas at the end."""
    folder = tmp_path_factory.mktemp("own")
    environment = two_workers(folder)
    commands = {}
    for own in OWN_PROGRAMS:
        (folder / own.name).mkdir()
        manifest = own.project(folder / own.name)
        commands[own.name] = [
            "simulate", str(manifest), "-e", environment, "-o", "json", "--no-report",
            "--out", str(folder / own.name / "out"),
        ]  # fmt: skip
    found = {}
    for name, ended in run_commands(folder, commands).items():
        assert ended.exit_code == 0, ended.stderr
        summary = json.loads((folder / name / "out" / "summary.json").read_text())
        notes = reported(folder / name / "out", "ProgramPartUnused")
        assert len(notes) == (name == KERAS_SCRIPT.name), notes
        assert all(note.startswith("callbacks() is not called in virtual time") for note in notes)
        # Its copy of the manifest leads to the program, as a replay requires.
        assert main(["validate", "--no-run", str(folder / name / "out" / "job.yaml")]) == 0
        found[name] = summary["accuracy"]["mean"]
    return found


@pytest.mark.parametrize("own", OWN_PROGRAMS, ids=lambda own: own.name)
def test_a_program_of_each_shape_trains_in_virtual_time(
    accuracies: dict[str, float], own: OwnProgram
) -> None:
    assert accuracies[own.name] > own.min_accuracy


def test_columns_of_a_comparison_have_the_package_beside_the_program(tmp_path: Path) -> None:
    """A changed module makes another run; other files do not count."""
    manifest = PROBABILITIES.project(tmp_path)
    command = [
        "compare", str(manifest), "-e", two_workers(tmp_path), "--policies", "adaptive",
        "--seeds", "1", "--seconds", "5", "--target-accuracy", "0.5",
        "--out", str(tmp_path / "out"),
    ]  # fmt: skip

    def written_ns() -> int:
        (ended,) = run_commands(tmp_path, {"compare": command}).values()
        assert ended.exit_code == 0, ended.stderr
        (events,) = (tmp_path / "out").rglob("events.jsonl")
        return events.stat().st_mtime_ns

    first = written_ns()
    (tmp_path / "parts" / "unused.py").touch()
    assert written_ns() == first
    module = tmp_path / "parts" / "sampling.py"
    module.write_text(f"{module.read_text()}\n# another\n")
    assert written_ns() > first
