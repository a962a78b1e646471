"""Test the command that continues a run: it equals the given one, quoted for a shell."""

from __future__ import annotations

import os
import shlex
import tempfile
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest

from dlion_cli.commands.local.run import resume_command
from dlion_cli.inputs.manifests import apply_set, load_manifest, read_job
from dlion_results.run_folder.folder import ResultFolder
from local_run import job_document
from unprivileged import without_rights


def with_a_checkpoint(folder: Path) -> Path:
    (folder / "state" / "w0").mkdir(parents=True)
    (folder / "state" / "w0" / "checkpoint.npz").touch()
    return folder


def test_the_command_equals_the_given_one(tmp_path: Path) -> None:
    folder, file = with_a_checkpoint(tmp_path / "my runs"), tmp_path / "my job.yaml"
    file.touch()
    command = resume_command(
        folder, file, "quickstart", ("trainer.seed=3",), Path("data"), unprivileged=True
    )
    assert shlex.split(command) == [
        "dlion", "run", str(file), "--resume", str(folder), "--environment", "quickstart",
        "--set", "trainer.seed=3", "--data-root", "data", "--unprivileged",
    ]  # fmt: skip


@pytest.mark.parametrize("given", ["-", "pipe", "removed.yaml"])
def test_a_manifest_that_cannot_be_read_again_is_in_the_folder(tmp_path: Path, given: str) -> None:
    """Process substitution of a shell makes a pipe: `dlion run <(envsubst < job.yaml)`."""
    os.mkfifo(tmp_path / "pipe")
    file = Path(given) if given == "-" else tmp_path / given
    words = resume_command(with_a_checkpoint(tmp_path), file)
    assert words == f"dlion run {tmp_path}/job.yaml --resume {tmp_path}"


def test_a_manifest_of_a_redirected_standard_input_is_in_the_folder(tmp_path: Path) -> None:
    """`dlion run /dev/stdin < job.yaml`: the file of standard input is a regular one."""
    with (tmp_path / "given.yaml").open("w+") as given:
        file = Path(f"/dev/fd/{given.fileno()}")
        assert file.is_file()
        words = resume_command(with_a_checkpoint(tmp_path), file)
    assert words == f"dlion run {tmp_path}/job.yaml --resume {tmp_path}"


def test_a_manifest_whose_folder_is_closed_meanwhile_is_in_the_folder() -> None:
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        folder, closed = with_a_checkpoint(Path(place, "run")), Path(place, "closed")
        closed.mkdir(mode=0)
        with without_rights():
            words = resume_command(folder, closed / "job.yaml")
    assert words == f"dlion run {folder}/job.yaml --resume {folder}"


def test_settings_for_a_manifest_from_standard_input_are_in_the_folder(tmp_path: Path) -> None:
    """Setting them again would remove the next site."""
    settings = ("sites[0]=",)
    document = job_document({"plant-a": 1, "plant-b": 1, "plant-c": 1})
    job = load_manifest(apply_set(document, settings), source="-", lines=None)
    with ResultFolder.create(tmp_path / "run", job, now=datetime.now(UTC)) as folder:
        command = resume_command(with_a_checkpoint(folder.path), Path("-"), assignments=settings)
    _, _, manifest, *options = shlex.split(command)
    given = [value for name, value in pairwise(options) if name == "--set"]
    assert read_job(manifest, given) == job


def test_without_a_checkpoint_there_is_no_command(tmp_path: Path) -> None:
    assert resume_command(tmp_path, Path("job.yaml")) == ""
