"""Test when two runs of a comparison are the same.

A change of its own program, of a module or data file that belongs to it, of the code of its
policy's package or of the calibration makes another run. A change of another column's program or
policy does not. Files are read once for all runs. Every simulation needs costs of steps. The number
of earlier runs is reported.

Left out: that an identical run is not repeated (tests/simulated).
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dlion_cli.comparison.comparison_folder import begin_run, end_run
from dlion_cli.comparison.comparison_matrix import Matrix, PlannedRun, Variant
from dlion_cli.comparison.comparison_runner import ComparisonRunner
from dlion_cli.comparison.run_identity import _job, identity, program_files

ROOT = Path(__file__).resolve().parents[3]
OWN = PlannedRun(Variant("own", ()), "quickstart", 0.1, 1)
OTHER = PlannedRun(
    Variant("other", ("trainer.program={file: sub/other.py}",)), "quickstart", 0.1, 1
)
BUILT_IN = PlannedRun(
    Variant("built in", ("trainer.program={builtin: digits}",)), "quickstart", 0.1, 1
)


@pytest.fixture
def matrix(tmp_path: Path) -> Matrix:
    for path in ("own.py", "helper.py", "sub/other.py", "sub/beside.py", "costs.json", "sub/a.txt"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("first = 1\n")
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "layers.py").write_text("first = 1\n")
    (tmp_path / "own.py").write_text("import helper, net.layers\n")
    (tmp_path / "sub" / "other.py").write_text("import beside\nx = __file__, 'a.txt'\n")
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
        ("net/layers.py", {"own"}),
        ("sub/other.py", {"other"}),
        ("sub/beside.py", {"other"}),
        ("sub/a.txt", {"other"}),
        ("costs.json", {"own", "other", "built in"}),
    ],
)
def test_a_changed_file_of_a_run_makes_another_run(
    matrix: Matrix, file: str, concerns: set[str]
) -> None:
    planned = (OWN, OTHER, BUILT_IN)
    before = {one.variant.name: identity(["dlion"], one, matrix) for one in planned}
    assert before == {one.variant.name: identity(["dlion"], one, matrix) for one in planned}
    path = matrix.file.parent / file
    path.write_text(f"{path.read_text()}second = 2\n")
    after = {one.variant.name: identity(["dlion"], one, matrix) for one in planned}
    assert {name for name in before if before[name] != after[name]} == concerns


def test_a_new_module_counts_and_other_files_do_not(matrix: Matrix) -> None:
    folder = matrix.file.parent
    before = identity(["dlion"], OWN, matrix)
    (folder / "data.npz").write_bytes(b"0")
    (folder / "unused.py").touch()
    (folder / "net" / "unused.py").touch()
    assert identity(["dlion"], OWN, matrix) == before
    (folder / "net" / "__init__.py").touch()
    assert identity(["dlion"], OWN, matrix) != before


def test_a_large_data_file_of_a_program_takes_no_memory(matrix: Matrix) -> None:
    with (matrix.file.parent / "sub" / "a.txt").open("r+b") as file:
        file.truncate(64 * 2**20)
    tracemalloc.start()
    try:
        identity(["dlion"], OTHER, matrix)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16 * 2**20


def test_a_data_file_is_read_once_for_all_runs(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def count(path: Path, *args: Any, **options: Any) -> Any:
        opened.append(path.name)
        return open_path(path, *args, **options)

    open_path = Path.open
    monkeypatch.setattr(Path, "open", count)
    each = [identity(["dlion"], replace(OTHER, seed=seed), matrix) for seed in range(3)]
    assert opened.count("a.txt") == 1
    assert each[0]["program"] == each[2]["program"]


def test_each_column_has_its_own_program(matrix: Matrix) -> None:
    jobs = [_job(one, matrix) for one in (OWN, OTHER, BUILT_IN)]
    assert [list(program_files(job, matrix.file)) for job in jobs] == [
        ["own.py", "helper.py", "net.layers.py"], ["other.py", "beside.py", "a.txt"], []
    ]  # fmt: skip


def test_every_simulation_needs_costs_of_steps(matrix: Matrix, tmp_path: Path) -> None:
    runs = ComparisonRunner(
        tmp_path / "out", data_root=tmp_path, jobs=1, console=Console(quiet=True)
    )
    for overhead_s, words in ((None, []), (0.25, ["--step-overhead", "0.25"])):
        asked = replace(matrix, step_overhead_s=overhead_s)
        command = runs.command(OWN, asked, tmp_path / "out")
        wanted = ["--calibration", str(matrix.calibration), *words]
        place = command.index("--calibration")
        assert command[place : place + len(wanted)] == wanted
        assert ("--step-overhead" in command) == (overhead_s is not None)
    without = replace(matrix, calibration=None)
    assert "--calibration" not in runs.command(OWN, without, tmp_path / "out")


POLICY = """
from dlion_core.policies.catalogue import Policy

POLICY = Policy("A trial.", "nowhere:build")
"""
TRIAL = PlannedRun(Variant("trial", ("exchange={policy: trial}",)), "quickstart", 0.1, 1)


@pytest.fixture(params=["trial_policy.py", "trial_policy/__init__.py"])
def package(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Path]:
    """Install a package with the policy `trial`, as one module or as a package."""
    site = tmp_path / "site"
    module = site / str(request.param)
    module.parent.mkdir(parents=True)
    module.write_text(POLICY)
    about = site / "trial-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: trial\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[dlion.policies]\ntrial = trial_policy:POLICY\n")
    (about / "top_level.txt").write_text("trial_policy\n")
    monkeypatch.syspath_prepend(site)
    yield site
    sys.modules.pop("trial_policy", None)


def test_changed_code_of_its_policy_makes_another_run(matrix: Matrix, package: Path) -> None:
    before = [identity(["dlion"], one, matrix) for one in (TRIAL, OWN)]
    assert before == [identity(["dlion"], one, matrix) for one in (TRIAL, OWN)]
    assert "policy" not in before[1]
    (module,) = package.rglob("*.py")
    module.write_text(f"{POLICY}changed = 1\n")
    changed = identity(["dlion"], TRIAL, matrix)
    assert changed != before[0]
    assert identity(["dlion"], OWN, matrix) == before[1]
    module.write_text(POLICY)
    assert identity(["dlion"], TRIAL, matrix) == before[0]
    if module.name == "__init__.py":
        module.with_name("beside.py").write_text("")
        assert identity(["dlion"], TRIAL, matrix) != before[0]


def test_a_changed_version_of_its_policy_makes_another_run(matrix: Matrix, package: Path) -> None:
    before = identity(["dlion"], TRIAL, matrix)
    (metadata,) = package.rglob("METADATA")
    metadata.write_text(metadata.read_text().replace("1.0", "1.1"))
    assert identity(["dlion"], TRIAL, matrix) != before


def test_other_modules_of_the_policys_distribution_count(matrix: Matrix, package: Path) -> None:
    (package / "trial_parts.py").write_text("")
    (package / "foreign.py").write_text("")
    (package / "trial-1.0.dist-info" / "top_level.txt").write_text("trial_policy\ntrial_parts\n")
    before = identity(["dlion"], TRIAL, matrix)
    (package / "foreign.py").write_text("changed = 1\n")
    assert identity(["dlion"], TRIAL, matrix) == before
    (package / "trial_parts.py").write_text("changed = 1\n")
    assert identity(["dlion"], TRIAL, matrix) != before


@pytest.mark.parametrize("editable", [False, True])
def test_a_module_of_the_working_directory_does_not_count(
    matrix: Matrix,
    package: Path,
    editable: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """It has a name that the policy's distribution lists."""
    about = package / "trial-1.0.dist-info"
    (about / "top_level.txt").write_text("trial_policy\ntrial_checks\n")
    if editable:  # the code is in another folder than the metadata
        elsewhere = tmp_path / "installed"
        elsewhere.mkdir()
        about.rename(elsewhere / about.name)
        monkeypatch.syspath_prepend(elsewhere)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.syspath_prepend(here)
    (package / "trial_checks.py").write_text("")
    before = identity(["dlion"], TRIAL, matrix)
    (here / "trial_checks.py").write_text("mine = 1\n")
    assert identity(["dlion"], TRIAL, matrix) == before
    (package / "trial_checks.py").write_text("changed = 1\n")
    changed = identity(["dlion"], TRIAL, matrix)
    assert changed != before
    (package / "trial_checks.py").unlink()
    assert identity(["dlion"], TRIAL, matrix) not in (before, changed)
    gone = identity(["dlion"], TRIAL, matrix)
    (here / "trial_checks.py").write_text("mine = 2\n")
    assert identity(["dlion"], TRIAL, matrix) == gone


def test_the_number_of_earlier_runs_is_reported(matrix: Matrix, tmp_path: Path) -> None:
    console = Console(file=StringIO())
    out = tmp_path / "out"
    runs = ComparisonRunner(out, data_root=tmp_path, jobs=1, console=console)
    begin_run(out / OWN.folder, runs._request_document(OWN, matrix))
    (out / OWN.folder / "summary.json").write_text('{"ending": {"succeeded": true}}')
    end_run(out / OWN.folder)
    runs._print_reused([OWN, BUILT_IN], matrix)
    (tmp_path / "own.py").write_text("second = 2\n")
    runs._print_reused([OWN, BUILT_IN], matrix)
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue().splitlines() == [
        "1 of 2 runs already exist",
        "0 of 2 runs already exist",
    ]
