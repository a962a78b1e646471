"""Test user programs that `dlion init DIR` writes.

`dlion run DIR/job.yaml` runs from another working directory. The run is resumed with a manifest
that has no program beside it, and the result folder's own job.yaml starts another run. A killed
`dlion validate` leaves no process behind. Python files of the working directory are not imported.

Left out: which folder is used in each case (tests/unit/cli/test_program_root), the protocol of
programs (tests/unit/worker/training/test_programs).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dlion_cli.__main__ import main
from local_run import LONG_S, LocalRun

pytestmark = pytest.mark.patient

SHORT = ("trainer.stop={maxSteps: 8}", "sites=[{name: a, groups: [{name: g, workers: 1}]}]")


@pytest.mark.timeout(300)
def test_the_files_of_init_run_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "queue.py").write_text("raise SystemExit('not the module of the library')")
    monkeypatch.chdir(elsewhere)
    assert main(["init", str(project)]) == 0
    with LocalRun(project, None, *(f"--set={each}" for each in SHORT)) as run:
        assert run.finish() == 0, run.terminal()
    assert [step.iteration for step in run.steps()] == [*range(1, 9)]

    (elsewhere / "job.yaml").write_text((run.folder / "job.yaml").read_text())
    longer = ("--set=trainer.stop.maxSteps=12", "--resume", str(run.folder))
    with LocalRun(elsewhere, None, *longer) as resumed:
        assert resumed.finish() == 0, resumed.terminal()
    assert [step.iteration for step in run.steps()] == [*range(1, 13)]

    with LocalRun(run.folder, None) as again:
        assert again.finish() == 0, again.terminal()


@pytest.mark.timeout(300)
def test_a_program_check_ends_with_the_command(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / "project")]) == 0
    program = tmp_path / "project" / "program.py"
    mark = tmp_path / "begun"
    waits = f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    program.write_text(program.read_text() + waits)
    command = [sys.executable, "-m", "dlion_cli", "validate", str(program.with_name("job.yaml"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        wait_until(lambda: mark.is_file() and mark.read_text() != "")
        process.kill()
    trial = Path(f"/proc/{mark.read_text()}")
    wait_until(lambda: not trial.exists())


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
