"""Proves: a compared run is another one where its own program, a Python file beside that, or the
calibration is another, and not where another column's program is; costs of steps are asked of
every simulation. Leaves out: that what is the same is not run again (tests/local).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dlion_cli.comparing import Runs
from dlion_cli.comparison_matrix import Matrix, Planned, Variant
from dlion_cli.run_identity import identity, program_files

ROOT = Path(__file__).resolve().parents[3]
OWN = Planned(Variant("own", ()), "quickstart", 0.1, 1)
OTHER = Planned(Variant("other", ("trainer.program={file: sub/other.py}",)), "quickstart", 0.1, 1)
BUILT_IN = Planned(
    Variant("built in", ("trainer.program={builtin: digits}",)), "quickstart", 0.1, 1
)


@pytest.fixture
def matrix(tmp_path: Path) -> Matrix:
    for path in ("own.py", "helper.py", "sub/other.py", "sub/beside.py", "costs.json"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("first = 1\n")
    manifest = tmp_path / "job.yaml"
    manifest.write_text((ROOT / "examples" / "digits.yaml").read_text())
    return Matrix(
        file=manifest,
        variants=(OWN.variant, OTHER.variant, BUILT_IN.variant),
        environments=("quickstart",),
        assignments=("trainer.program={file: own.py}",),
        seeds=(1,),
        learning_rates=(0.1,),
        target_accuracy=0.9,
        seconds=10,
        calibration=tmp_path / "costs.json",
    )


@pytest.mark.parametrize(
    ("file", "concerns"),
    [
        ("own.py", {"own"}),
        ("helper.py", {"own"}),
        ("sub/other.py", {"other"}),
        ("sub/beside.py", {"other"}),
        ("costs.json", {"own", "other", "built in"}),
    ],
)
def test_a_run_is_another_where_a_file_of_its_own_is(
    matrix: Matrix, file: str, concerns: set[str]
) -> None:
    planned = (OWN, OTHER, BUILT_IN)
    before = {one.variant.name: identity(["dlion"], one, matrix) for one in planned}
    assert before == {one.variant.name: identity(["dlion"], one, matrix) for one in planned}
    (matrix.file.parent / file).write_text("second = 2\n")
    after = {one.variant.name: identity(["dlion"], one, matrix) for one in planned}
    assert {name for name in before if before[name] != after[name]} == concerns


def test_a_file_that_comes_beside_the_program_counts_and_data_do_not(matrix: Matrix) -> None:
    before = identity(["dlion"], OWN, matrix)
    (matrix.file.parent / "data.npz").write_bytes(b"0")
    assert identity(["dlion"], OWN, matrix) == before
    (matrix.file.parent / "more.py").write_text("")
    assert identity(["dlion"], OWN, matrix) != before


def test_programs_are_those_of_each_column(matrix: Matrix) -> None:
    names = [[path.name for path in program_files(one, matrix)] for one in (OWN, OTHER, BUILT_IN)]
    assert names == [["own.py", "helper.py"], ["other.py", "beside.py"], []]


def test_costs_of_steps_are_asked_of_every_simulation(matrix: Matrix, tmp_path: Path) -> None:
    from rich.console import Console

    runs = Runs(tmp_path / "out", data_root=tmp_path, jobs=1, console=Console(quiet=True))
    for overhead_s, words in ((None, []), (0.25, ["--step-overhead", "0.25"])):
        asked = replace(matrix, step_overhead_s=overhead_s)
        command = runs.command(OWN, asked, tmp_path / "out")
        wanted = ["--calibration", str(matrix.calibration), *words]
        place = command.index("--calibration")
        assert command[place : place + len(wanted)] == wanted
        assert ("--step-overhead" in command) == (overhead_s is not None)
    without = replace(matrix, calibration=None)
    assert "--calibration" not in runs.command(OWN, without, tmp_path / "out")
