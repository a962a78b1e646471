"""Tests of downloads in simulated runs.

A run of a downloaded data set and model equals, bit for bit, the run of the same files by path.
Existing files are not downloaded again. A failed download ends the command with its exit code
before a result folder is made.

Left out: the downloads (tests/unit/worker/initializers); pods (tests/cluster/test_initializers.py).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits
from tests.support.simulations import Case, four_workers, one_process, run_commands, simulate_all

from dlion_api.exit_codes import ExitCode
from file_server import ServedFile, served


def download(file: ServedFile) -> dict[str, str]:
    return {"url": file.url, "sha256": hashlib.sha256(file.content).hexdigest()}


def case(path: str, **trainer: Any) -> Case:
    given: dict[str, Any] = {"dataset": {"path": path, "format": "npz"}, **trainer}
    settings = {f"trainer.{name}": value for name, value in given.items()}
    return Case(four_workers(), {**settings, "trainer.stop": {"maxSteps": 10}})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    images, labels = load_digits(return_X_y=True)
    path = tmp_path / "digits.npz"
    np.savez(path, x=images.reshape(-1, 8, 8, 1).astype(np.uint8), y=labels)
    return path


def test_downloaded_files_give_the_run_of_the_same_files(tmp_path: Path, data: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with one_process(environment):
        simulate_all(tmp_path, {"first": case(str(data))})
        model = next((tmp_path / "first/out/models").glob("*/model.keras"))
        with served(data.read_bytes()) as samples, served(model.read_bytes(), "m.keras") as start:
            initializer = {"dataset": download(samples), "model": download(start)}
            downloaded = case("data.npz", startFrom="m.keras", initializer=initializer)
            by_path = case(str(data), startFrom=str(model))
            runs = simulate_all(
                tmp_path, {"by path": by_path, "once": downloaded, "again": downloaded}
            )
            assert len(samples.requests) == len(start.requests) == 1
    assert {run.exit_code for run in runs.values()} == {0}
    assert len({run.trace_hash for run in runs.values()}) == 1


def test_a_download_that_fails_ends_the_command(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with one_process(environment), served(b"other") as file:
        wrong = f'{{"dataset": {{"url": "{file.url}", "sha256": "{"0" * 64}"}}}}'
        out = tmp_path / "out"
        words = ["examples/digits.yaml", "--out", str(out), "--set", f"trainer.initializer={wrong}"]
        words += ["--set", 'trainer.dataset={"path": "data.npz", "format": "npz"}']
        commands = {"run": ["run", *words], "simulate": ["simulate", "-e", "quickstart", *words]}
        for ended in run_commands(tmp_path, commands).values():
            assert ended.exit_code == ExitCode.DATA, ended.stderr
            assert "data.npz: another SHA-256 than the manifest's" in ended.stderr
    assert not out.exists()
