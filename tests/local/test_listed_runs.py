"""Test `dlion ls` and `dlion logs` beside a run.

During training `dlion ls` lists the run as running, with its progress. `dlion logs -f` shows its
workers' lines and ends with it. After Ctrl-C the last line of the run is the command that resumes
it, and `dlion ls` lists it as interrupted and resumable. After that command the run has succeeded.
A simulated run is listed as such, and its missing logs are explained.

Left out: hostile folders (tests/unit/results/test_listing.py, tests/unit/cli/test_run_logs.py).
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from local_run import LocalRun, blobs, job_document, run_command

pytestmark = pytest.mark.patient

PRINTS = """
_build = build_model


def build_model():
    print("building a model", flush=True)
    return _build()
"""


def listed(where: Path, folder: Path) -> dict[str, Any]:
    """Return the entry of `dlion ls` for the one run in `folder`. `where`: the folder of its
    output.
    """
    (run,) = json.loads(run_command(where, "ls", str(folder), "-o", "json").stdout)["runs"]
    assert isinstance(run, dict)
    return run


@pytest.mark.timeout(300)
def test_a_run_is_listed_followed_interrupted_and_resumed(tmp_path: Path) -> None:
    job = job_document(2, trainer={"program": blobs(tmp_path, more=PRINTS)})
    job["spec"]["trainer"]["stop"] = {"maxSteps": 100_000}
    with LocalRun(tmp_path, job) as run:
        run.wait_for_step(5)
        running = listed(tmp_path, run.folder)
        command = [sys.executable, "-m", "dlion_cli", "logs", "-f", str(run.folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
            run.end(signal.SIGINT)
            shown, _ = follower.communicate(timeout=60)
    assert (running["state"], running["command"], running["job"]) == ("running", "run", "test")
    assert running["iterations"] >= 5
    assert follower.returncode == 0
    built = [line for line in shown.splitlines() if line.endswith("building a model")]
    assert {line.partition(" | ")[0] for line in built} == {"plant-a/g-0", "plant-a/g-1"}
    interrupted = listed(tmp_path, run.folder)
    assert (interrupted["state"], interrupted["resumable"]) == ("interrupted", True)
    assert interrupted["iterations"] >= running["iterations"]
    resume_command = shlex.split(run.terminal().splitlines()[-1])
    assert resume_command[:2] == ["dlion", "run"]
    assert resume_command[-2:] == ["--resume", str(run.folder)]
    end = str(interrupted["iterations"] + 5)
    finished = run_command(
        tmp_path, *resume_command[1:], "--set", f"trainer.stop.maxSteps={end}", "--no-report"
    )
    assert finished.returncode == 0, finished.stderr
    ended = listed(tmp_path, run.folder)
    assert (ended["state"], ended["resumable"]) == ("succeeded", False)


@pytest.mark.timeout(200)
def test_a_simulated_run_is_listed_as_such_and_has_no_logs(tmp_path: Path) -> None:
    job = job_document(
        {"plant-a": 3, "plant-b": 1}, trainer={"program": blobs(tmp_path, nap_s=0.0)}
    )
    job["spec"]["trainer"]["stop"] = {"maxSteps": 3}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    out = tmp_path / "out"
    simulated = run_command(
        tmp_path, "simulate", str(tmp_path / "job.yaml"), "--environment", "quickstart",
        "--out", str(out), "--no-report",
    )  # fmt: skip
    assert simulated.returncode == 0, simulated.stderr
    run = listed(tmp_path, tmp_path)
    assert (run["name"], run["command"], run["state"]) == ("out", "simulate", "succeeded")
    refused = run_command(tmp_path, "logs", str(out))
    assert (refused.returncode, "it was simulated" in refused.stderr) == (66, True)
