"""Simulate the same job with all workers in one cluster, as the reference of the accuracy.

It needs no testbed, so this side of the accuracy pairs can run elsewhere, or later.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from federated_sites import Document
from measured import Measured

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE / "one-cluster.yaml"


def one_cluster(manifest: Document, data: Path, out: Path, threads: int) -> Measured:
    """Run `dlion simulate` of that manifest with all groups at its first site.

    Raises: RuntimeError with its output.
    """
    document = copy.deepcopy(manifest)
    spec = document["spec"]
    groups = [group for site in spec["sites"] for group in site["groups"]]
    spec["sites"] = [{"name": spec["sites"][0]["name"], "groups": groups}]
    del spec["podTemplate"]
    path = out / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    results = out / "results"
    shutil.rmtree(results, ignore_errors=True)  # of an interrupted simulation
    command = [
        sys.executable, "-m", "dlion_cli", "simulate", str(path), "--environment", str(ENVIRONMENT),
        "--data-root", str(data), "--threads", str(threads), "--out", str(results),
    ]  # fmt: skip
    with (out / "simulate.log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=log, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"dlion simulate ended with {done.returncode}: see {log.name}")
    summary = json.loads((results / "summary.json").read_text())
    figures = {
        "seed": spec["trainer"]["seed"],
        "samples": summary["samples"],
        "accuracy": summary["accuracy"]["mean"],
        "accuracies": [worker["accuracy"]["final"] for worker in summary["workers"]],
        "evaluated_samples": min(w["accuracy"]["evaluated_samples"] for w in summary["workers"]),
    }
    return Measured(out.name, figures)
