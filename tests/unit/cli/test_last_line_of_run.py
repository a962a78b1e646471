"""Test the last line of a run without a checkpoint: it matches the given options."""

from pathlib import Path

import pytest

from dlion_api.exit_codes import ExitCode
from dlion_cli.commands.local.run import print_resume_command
from dlion_cli.local_runs.local_training import RunResult
from dlion_results.summary.judgement import EndReason
from dlion_results.summary.summary import Ending


@pytest.mark.parametrize(
    ("out", "end"), [(None, "start again\n"), (Path("x"), "start again with another --out\n")]
)
def test_another_folder_is_advised_only_if_one_was_named(
    capsys: pytest.CaptureFixture[str], out: Path | None, end: str
) -> None:
    ended = RunResult(ExitCode.PROGRAM, Ending("", reason=EndReason.of(ExitCode.PROGRAM)))
    print_resume_command(ended, "", Path("runs"), out)
    assert capsys.readouterr().err.endswith(end)
