"""Test names of folders that are no Unicode text, or that Rich would take for markup.

Left out: names in manifests (test_commands.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from dlion_cli.commands.cluster import fetch, preflight
from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from local_run import job_document


def test_a_replay_prints_a_folder_with_brackets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder has no records, which is found after it is named."""
    folder = tmp_path / "[" / "a]"
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(job_document({"a": 2})))
    assert main(["replay", str(folder)]) == ExitCode.DATA
    assert f"{folder}/events.jsonl" in capsys.readouterr().err


def test_the_paths_of_fetched_files_are_printed_as_they_are(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    fetch._show([Path(os.fsdecode(b"runs/\xff/model.keras"))], [], "text")
    assert capsysbinary.readouterr().out == b"runs/\xff/model.keras\n"


def test_a_preflight_prints_a_context_with_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("context a[/b]", "context [prod]\x1b[2J")
    checks = [Check(name, "api", CheckOutcome.OK, "answers") for name in names]
    preflight._show(checks, "table")
    printed = capsys.readouterr().out
    assert "context a[/b]" in printed
    assert "context [prod]" in printed
    assert "\x1b" not in printed
