"""Tests of privacy in virtual time.

A job with privacy learns, and repeats with the same seed. Summary, table and report have each
worker's ε by the passes of its records. No loss is recorded.

Left out: gradients and noise (tests/unit/worker/training/test_private_model.py); noise that does
not follow the seed.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from tests.support.simulations import run_commands, two_workers

from dlion_api.spec.privacy import Privacy
from dlion_results.summary.privacy import epsilon
from own_programs import PROBABILITIES

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = {
    "trainer.privacy.clipNorm": 1,
    "trainer.privacy.noiseMultiplier": 0.5,
    "knowledgeTransfer.policy": "none",
    "batching.globalBatchSize.initial": 200,
    "trainer.stop.maxSteps": 60,
}


def test_a_private_job_learns_and_reports_its_epsilon(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    manifest = PROBABILITIES.project(tmp_path / "own")
    settings = [f"--set={path}={value}" for path, value in SETTINGS.items()]
    commands = {}
    for name in ("once", "again"):
        (tmp_path / name).mkdir()
        out = str(tmp_path / name / "out")
        commands[name] = [
            "simulate",
            str(manifest),
            "-e",
            two_workers(tmp_path),
            *settings,
            "--out",
            out,
        ]
    ended = run_commands(tmp_path, commands)
    assert [one.exit_code for one in ended.values()] == [0, 0], ended["once"].stderr
    traces = {one.stdout.rpartition("trace ")[2].strip() for one in ended.values()}
    assert len(traces) == 1

    folder = tmp_path / "once" / "out"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy"]["mean"] > 0.5  # of eight classes
    records = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    steps = [each for each in records if each["kind"] == "step"]
    assert {each["loss"] for each in steps} == {"NaN"}
    privacy = Privacy(clip_norm=1, noise_multiplier=0.5)
    for worker in summary["workers"]:
        own = [each for each in steps if each["rank"] == worker["rank"]]
        passes = math.ceil(sum(each["local_batch_size"] for each in own) / 400)
        assert own[-1]["passes"] == passes
        cost = epsilon(privacy, passes + 1)
        spent = {"uses": passes + 1, "epsilon": cost, "delta": 1e-5, "complete": True}
        assert worker["privacy"] == spent
        assert worker["mean_loss"] is worker["last_loss"] is None
    largest = max(worker["privacy"]["epsilon"] for worker in summary["workers"])
    assert f"Privacy: ε ≤ {largest:.3g} at δ = 1e-05" in ended["once"].stdout
    assert "Privacy" in (folder / "report.html").read_text()
