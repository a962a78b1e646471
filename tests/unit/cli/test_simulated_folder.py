"""Test that a simulation which ends before any training leaves no folder.

A full disk or a signal at its first file ends it. The same command may then be given again.

Left out: later ends (tests/simulated/test_ends.py).
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from dlion_results.run_folder import folder

DIGITS = Path(__file__).resolve().parents[3] / "examples" / "digits.yaml"
FULL = folder.StorageError(errno.ENOSPC, "cannot write environment.yaml", "environment.yaml")


@pytest.mark.parametrize(
    ("happens", "code", "message"),
    [
        (FULL, ExitCode.STORAGE, "cannot write environment.yaml"),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, "before the first step: nothing is kept"),
    ],
)
def test_a_simulation_that_ends_at_the_environment_leaves_no_folder(
    happens: BaseException,
    code: ExitCode,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write = folder.write_whole

    def write_some(path: Path, content: bytes) -> None:
        if path.name == folder.ENVIRONMENT:
            raise happens
        write(path, content)

    monkeypatch.setattr(folder, "write_whole", write_some)
    words = ["simulate", str(DIGITS), "-e", "quickstart", "--out", str(tmp_path / "new" / "run")]
    for _ in range(2):
        assert main(words) == code
        assert message in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
