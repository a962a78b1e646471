"""Facts: what `dlion init DIR` writes runs with `dlion run DIR/job.yaml` from another working
directory; the run is resumed with a manifest that has no program beside it, and the result
folder's own job.yaml starts another run. Python files of the working directory are not imported.

Left out: which folder is taken in each case (tests/unit/cli/test_program_root), the protocol of
programs (tests/unit/worker/training/test_programs).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dlion_cli.__main__ import main
from local_run import LocalRun

pytestmark = pytest.mark.patient

SHORT = ("trainer.stop={maxSteps: 8}", "sites=[{name: a, groups: [{name: g, workers: 1}]}]")


@pytest.mark.timeout(300)
def test_what_init_writes_runs_from_anywhere(
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
