"""Test in which folder a program is looked up.

It is the manifest's folder, whatever the working directory. With a run's own job.yaml, or to resume
with a manifest without its program, it is the folder of the manifest that started the run.

Left out: real runs (tests/local/test_own_program).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from dlion_api.exit_codes import ExitCode
from dlion_api.spec import Job, load_job
from dlion_cli.__main__ import main
from dlion_cli.inputs.manifests import read_document
from dlion_cli.inputs.required_files import find_program_root
from dlion_results.run_folder.storage import PROGRAM_ROOT, stored_program_root


@dataclass
class Project:
    """A manifest with its program, outside the working directory."""

    path: Path
    elsewhere: Path
    job: Job

    def root(self, file: str | Path, resume: Path | None = None) -> Path:
        return find_program_root(self.job, Path(file), resume)

    def run_folder(self, name: str = "run") -> Path:
        """Return the result folder of a run that started with this manifest."""
        folder = self.elsewhere / name
        (folder / PROGRAM_ROOT).parent.mkdir(parents=True)
        (folder / PROGRAM_ROOT).write_text(str(self.path))
        return folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    path, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["init", str(path)]) == 0
    document, _ = read_document(path / "job.yaml")
    return Project(path, elsewhere, load_job(document))


def test_a_program_is_looked_up_beside_the_manifest(project: Project) -> None:
    assert project.root("../project/job.yaml") == project.path
    assert project.root("-") == project.elsewhere


def test_the_manifest_of_a_run_uses_the_folder_of_the_first_manifest(project: Project) -> None:
    run = project.run_folder()
    assert project.root(run / "job.yaml") == project.path
    assert project.root(run / "job.yaml", resume=run) == project.path
    assert project.root("-", resume=run) == project.path


def test_a_manifest_without_its_program_resumes_with_the_first_ones(project: Project) -> None:
    run = project.run_folder()
    copy = project.elsewhere / "copy.yaml"
    assert project.root(copy, resume=run) == project.path
    assert project.root(copy) == project.elsewhere
    (project.elsewhere / "program.py").touch()
    assert project.root(copy, resume=run) == project.elsewhere


def test_a_folder_without_a_run_has_no_program_root(tmp_path: Path) -> None:
    assert stored_program_root(tmp_path) is None
    assert stored_program_root(tmp_path / "none") is None


def test_a_missing_program_is_reported_before_anything_starts(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    (project.path / "program.py").unlink()
    out = project.elsewhere / "out"
    code = main(["run", str(project.path / "job.yaml"), "--out", str(out)])
    assert code == ExitCode.PROGRAM
    assert "spec.trainer.program.file: no such file" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("from .net import x", "relative import"),
        ("import net\n", "net.py:2: is not Python"),
        ("import (", "program.py:1: is not Python"),
        ("\0", "program.py: is not Python"),
    ],
)
def test_a_file_that_is_not_python_is_refused_before_anything_starts(
    project: Project, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    (project.path / "program.py").write_text(text)
    (project.path / "net.py").write_text("import os\nimport (\n")
    out = project.elsewhere / "out"
    code = main(["run", str(project.path / "job.yaml"), "--out", str(out)])
    assert code == ExitCode.PROGRAM
    assert words in capsys.readouterr().err
    assert not out.exists()
