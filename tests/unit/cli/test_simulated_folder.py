"""Proves: a simulation that ends before anything was trained, by a full disk or a signal at its
first file, leaves no folder, so that the same command may be given again. Leaves out: what comes
after (tests/simulated/test_ends.py)."""

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
    ("happens", "code", "said"),
    [
        (FULL, ExitCode.STORAGE, "cannot write environment.yaml"),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, "before the first step: nothing is kept"),
    ],
)
def test_what_ends_at_the_environment_leaves_no_folder(
    happens: BaseException,
    code: ExitCode,
    said: str,
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
        assert said in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
