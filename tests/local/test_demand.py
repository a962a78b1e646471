"""Test the sidecars' measurement of other work on the machine, with `dlion run`.

The metric rises while other processes compute, and the run continues. If `proc` cannot be read, the
sidecar warns once and the run trains normally. With `prediction: none` nothing is read or exported.

Left out: forecasts (tests/unit/core/demand), batches that follow them (tests/simulated).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from local_run import LocalRun, blobs, job_document

if TYPE_CHECKING:
    from pathlib import Path

BURN = "while True: pass"


def document(folder: Path, prediction: str = "auto") -> dict[str, Any]:
    return job_document(
        2,
        trainer={"program": blobs(folder, nap_s=0.05), "stop": {"maxSteps": 1_000_000}},
        batching={"policy": "weighted", "globalBatchSize": {"initial": 64, "growth": False}},
        nodePolicies={"demand": {"prediction": prediction}},
    )


def sidecar_log(run: LocalRun, rank: int) -> str:
    path = run.folder / "logs" / f"sidecar-{rank}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def metrics(run: LocalRun, rank: int) -> dict[str, float]:
    """Return the demand metrics of one sidecar by name, once it serves them."""
    address = re.compile(r"metrics at (http://\S+)\n")
    run.wait_until(lambda: address.search(sidecar_log(run, rank)), "the sidecar serves metrics")
    match = address.search(sidecar_log(run, rank))
    assert match
    with urllib.request.urlopen(match[1], timeout=30) as answer:
        text = answer.read().decode()
    found = re.findall(r"^(dlion_demand_\w+)\{.*\} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_the_load_of_other_processes_is_measured(tmp_path: Path) -> None:
    with LocalRun(tmp_path, document(tmp_path)) as run, ExitStack() as burning:
        run.wait_for_step(20)
        for _ in range(len(os.sched_getaffinity(0))):
            burner = subprocess.Popen([sys.executable, "-c", BURN])
            burning.callback(burner.wait)
            burning.callback(burner.kill)
        run.wait_until(
            lambda: metrics(run, 0).get("dlion_demand_taken_cores", 0.0) > 0.3, "taken cores"
        )
        exported = metrics(run, 0)
        before = len(run.steps(0))
        run.wait_until(lambda: len(run.steps(0)) > before + 5, "steps beside other work")
        run.end(signal.SIGINT)
        assert exported["dlion_demand_blind_count"] == 0.0
        assert exported["dlion_demand_expected_cores"] >= 0.0
        assert "Traceback" not in sidecar_log(run, 0)


def test_unreadable_proc_files_cause_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLION_MACHINE_ROOT", str(tmp_path / "no-such-machine"))
    with LocalRun(tmp_path, document(tmp_path)) as run:
        run.wait_for_step(30)
        for rank in (0, 1):
            run.wait_until(
                lambda rank=rank: metrics(run, rank).get("dlion_demand_blind_count") == 1.0,
                "blindness",
            )
        run.end(signal.SIGINT)
        for rank in (0, 1):
            assert sidecar_log(run, rank).count("only what holds up the trainer's own steps") == 1


def test_without_prediction_nothing_is_read(tmp_path: Path) -> None:
    with LocalRun(tmp_path, document(tmp_path, "none")) as run:
        run.wait_for_step(30)
        assert metrics(run, 0) == {}
        run.end(signal.SIGINT)
        assert "demand:" not in sidecar_log(run, 0)
