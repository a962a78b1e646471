"""Test the folder of a comparison.

One comparison runs in a folder at a time. Files of others below it stay and are named. The
comparison's own runs are replaced, whether they have ended or not.

Left out: the runs (tests/simulated).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dlion_api.errors import SpecError, UnavailableError
from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from dlion_cli.comparison.comparison_folder import (
    begin_run,
    end_run,
    is_done,
    lock_folder,
    reject_foreign_files,
)
from dlion_results.run_folder.lock import FolderLock

DIGITS = Path(__file__).resolve().parents[3] / "examples" / "digits.yaml"
SEED = Path("quickstart/full/lr-0.05/seed-1")


def compare(out: Path, *flags: str) -> int:
    words = ["compare", str(DIGITS), "-e", "quickstart", "--policies", "full", "--seeds", "1"]
    return main([*words, "--target-accuracy", "0.5", "--out", str(out), *flags])


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def refused(out: Path) -> str:
    with pytest.raises(SpecError) as raised:
        reject_foreign_files(out, [SEED], ["quickstart"])
    return str(raised.value)


def test_a_second_comparison_in_the_folder_is_refused_and_the_first_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lock_folder(tmp_path):
        begin_run(tmp_path / SEED, "first")
        (tmp_path / SEED / "events.jsonl").write_text("under way")
        before = content(tmp_path)
        assert compare(tmp_path) == ExitCode.UNAVAILABLE
        assert content(tmp_path) == before
    message = capsys.readouterr().err
    assert f"{tmp_path}: a run still uses this folder" in message
    assert "choose another folder with --out" in message


def test_the_lock_ends_with_the_comparison(tmp_path: Path) -> None:
    for _ in range(2):
        with lock_folder(tmp_path / "new"):
            pass


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_foreign_file_in_the_place_of_a_run_stays_and_is_named(
    dry: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / SEED).mkdir(parents=True)
    (tmp_path / SEED / "mine.txt").write_text("precious")
    assert compare(tmp_path, *dry) == ExitCode.SPEC
    assert (tmp_path / SEED / "mine.txt").read_text() == "precious"
    message = capsys.readouterr().err
    assert f"{tmp_path / SEED}: was not made by a comparison" in message
    assert "Choose another folder with --out, or move this" in message
    assert not list(tmp_path.rglob("compar*"))


def test_a_finished_run_in_the_place_of_another_stays(tmp_path: Path) -> None:
    (tmp_path / SEED).mkdir(parents=True)
    for name in ("job.yaml", "events.jsonl", "summary.json", "run.lock"):
        (tmp_path / SEED / name).write_text("{}")
    assert str(tmp_path / SEED) in refused(tmp_path)
    with pytest.raises(SpecError, match="was not made by a comparison"):
        begin_run(tmp_path / SEED, "asked")
    assert (tmp_path / SEED / "summary.json").exists()


@pytest.mark.parametrize("name", ["job.yaml", "events.jsonl", "summary.json"])
def test_no_comparison_runs_in_the_folder_of_a_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("{}")
    assert compare(tmp_path) == ExitCode.SPEC
    assert "--out: is the result folder of a run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_foreign_file_in_the_path_of_a_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart" / "events.jsonl").write_text("")
    (tmp_path / "quickstart" / "full").write_text("a file")
    message = refused(tmp_path)
    assert f"{tmp_path / 'quickstart'}: was not made" in message
    assert f"{tmp_path / 'quickstart' / 'full'}: was not made" in message


@pytest.mark.parametrize(
    "name", ["comparison.json", "comparison.svg", "report.html", "quickstart-as-one.yaml"]
)
def test_a_foreign_file_with_a_comparisons_name_is_not_overwritten(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text("[mine]")
    assert f"{tmp_path / name}: was not made" in refused(tmp_path)


def test_a_comparisons_own_files_are_not_foreign(tmp_path: Path) -> None:
    (tmp_path / "comparison.json").write_text(json.dumps({"rows": [], "targetAccuracy": 0.5}))
    (tmp_path / "comparison.svg").write_text("<svg/>")
    (tmp_path / "quickstart-as-one.yaml").write_text(yaml.safe_dump({"name": "x-as-one"}))
    (tmp_path / "notes.txt").write_text("beside it")
    (tmp_path / SEED).mkdir(parents=True)
    reject_foreign_files(tmp_path, [SEED], ["quickstart"])


@pytest.mark.parametrize("folder", [Path(), SEED])
@pytest.mark.parametrize("begun", [False, True])
def test_an_invalid_lock_is_named_and_stays(
    folder: Path, begun: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock, victim = tmp_path / "out" / folder / "run.lock", tmp_path / "victim"
    lock.parent.mkdir(parents=True)
    victim.write_text("precious")
    lock.symlink_to(victim)
    if begun:
        (lock.parent / "comparing.json").write_text("")
    for flags in ((), ("--dry-run",)):
        assert compare(tmp_path / "out", *flags) == ExitCode.SPEC
        assert f"{lock}: was not made by a comparison" in capsys.readouterr().err
    with pytest.raises(SpecError, match=r"was not made by|is not the lock of a run"):
        begin_run(lock.parent, "asked")
    with pytest.raises(SpecError, match="is not the lock of a run"), lock_folder(lock.parent):
        pass
    assert lock.is_symlink()
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("where", ["homo-b", "quickstart"])
def test_a_foreign_file_of_one_machine_stays_beside_ideal_runs(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Learning rates may be tried in an environment that is not compared."""
    mine = tmp_path / f"{where}-as-one.yaml"
    mine.write_text("mine: precious\n")
    words = ["compare", str(DIGITS), "-e", "homo-b", "--tuned-in", "quickstart", "--seeds", "1"]
    words += ["--target-accuracy", "0.5", "--out", str(tmp_path), "--policies"]
    tried = ["--learning-rates", "0.1,0.2"]
    assert main([*words, "ideal", *tried, "--dry-run"]) == ExitCode.SPEC
    assert f"{mine}: was not made" in capsys.readouterr().err
    assert main([*words, "ideal", *tried]) == ExitCode.SPEC
    assert mine.read_text() == "mine: precious\n"


def test_without_an_ideal_column_files_of_one_machine_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "quickstart-as-one.yaml").write_text("mine: precious\n")
    assert compare(tmp_path, "--dry-run") == ExitCode.OK
    assert compare(tmp_path, "--dry-run", "--policies", "full,ideal") == ExitCode.SPEC


def test_an_unfinished_run_is_replaced_and_a_finished_one_is_kept(
    tmp_path: Path,
) -> None:
    folder = tmp_path / SEED
    begin_run(folder, "first")
    (folder / "models").mkdir()
    (folder / "models" / "half").write_text("")
    assert not is_done(folder, "first")
    reject_foreign_files(tmp_path, [SEED], ["quickstart"])
    begin_run(folder, "second")
    assert content(folder).keys() == {"run.lock", "comparing.json"}
    (folder / "summary.json").write_text('{"ending": {"succeeded": true}}')
    end_run(folder)
    assert is_done(folder, "second")
    assert not is_done(folder, "third")
    begin_run(folder, "third")
    assert content(folder).keys() == {"run.lock", "comparing.json"}


def test_a_run_that_another_one_has_begun_to_replace_has_not_ended(tmp_path: Path) -> None:
    begin_run(tmp_path, "first")
    (tmp_path / "summary.json").write_text('{"ending": {"succeeded": true}}')
    end_run(tmp_path)
    assert is_done(tmp_path, "first")
    (tmp_path / "comparing.json").write_text("second")  # and then it was killed
    assert not is_done(tmp_path, "first")


def test_a_run_in_progress_is_not_replaced(tmp_path: Path) -> None:
    begin_run(tmp_path / SEED, "first")
    lock = FolderLock(tmp_path / SEED)
    try:
        with pytest.raises(UnavailableError):
            begin_run(tmp_path / SEED, "second")
    finally:
        lock.release()
    assert (tmp_path / SEED / "comparing.json").read_text() == "first"


def test_a_run_starts_in_its_prepared_folder(tmp_path: Path) -> None:
    from dlion_results.run_folder import folder

    begin_run(tmp_path / SEED, "asked")
    folder._check(tmp_path / SEED, resume=False)
    (tmp_path / SEED / "mine.txt").write_text("")
    with pytest.raises(SpecError, match="is not empty"):
        folder._check(tmp_path / SEED, resume=False)


@pytest.mark.parametrize("name", ["..", ".", "x" * 201])
def test_a_column_with_an_invalid_folder_name_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(tmp_path, "--variant", f"{name}:exchange.policy=none") == ExitCode.SPEC
    message = capsys.readouterr().err
    assert "--variant: is not a valid folder name" in message
    assert "allowed: letters, digits" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("reason", "counts"), [("Partial", True), ("EndedEarly", False)])
def test_a_partial_run_counts_and_an_early_ended_one_is_repeated(
    tmp_path: Path, reason: str, counts: bool
) -> None:
    """The models of every policy lack a worker that the environment removes permanently."""
    (tmp_path / "compared.json").write_text("asked")
    ending = {"ending": {"succeeded": False, "reason": reason}}
    (tmp_path / "summary.json").write_text(json.dumps(ending))
    assert is_done(tmp_path, "asked") is counts
