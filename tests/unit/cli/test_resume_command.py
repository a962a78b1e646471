"""Test the command that continues a run: it equals the given one, quoted for a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

from dlion_cli.commands.local.run import resume_command


def with_a_checkpoint(folder: Path) -> Path:
    (folder / "state" / "w0").mkdir(parents=True)
    (folder / "state" / "w0" / "checkpoint.npz").touch()
    return folder


def test_the_command_equals_the_given_one(tmp_path: Path) -> None:
    folder = with_a_checkpoint(tmp_path / "my runs")
    command = resume_command(
        folder, Path("job.yaml"), "quickstart", ("trainer.seed=3",), Path("data"), unprivileged=True
    )
    assert shlex.split(command) == [
        "dlion", "run", "job.yaml", "--resume", str(folder), "--environment", "quickstart",
        "--set", "trainer.seed=3", "--data-root", "data", "--unprivileged",
    ]  # fmt: skip


def test_a_manifest_from_standard_input_is_in_the_folder(tmp_path: Path) -> None:
    words = resume_command(with_a_checkpoint(tmp_path), Path("-"))
    assert words == f"dlion run {tmp_path}/job.yaml --resume {tmp_path}"


def test_without_a_checkpoint_there_is_no_command(tmp_path: Path) -> None:
    assert resume_command(tmp_path, Path("job.yaml")) == ""
