"""Simulate whole jobs on moving fleets by `dlion simulate`; `clustering.py --jobs` prints them.

Each worker's gradients are real. A site is a group of the fleet's start.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from clustering_fleets import Fleet, make_fleet

STEPS = 200
CORES = 2.0
BATCH = 8
GROUPINGS = ("links", "learned")
GROUPS = re.compile(r"made groups \((\d+)\)")


def print_jobs(workers: int, seeds: Sequence[int], kinds: Sequence[str]) -> None:
    """Print a row for each fleet: virtual seconds to `STEPS` steps, and changes of groups."""
    print(f"| fleet, seed | {' | '.join(GROUPINGS)} | sooner |\n|---|---|---|---|")
    for kind in kinds:
        ratios = []
        for seed in seeds[:1] if kind == "static" else seeds:
            fleet = make_fleet(kind, workers, seed, 600)
            with ThreadPoolExecutor(2) as pool:
                found = list(pool.map(partial(_simulated, fleet), GROUPINGS))
            ratios.append(found[0][0] / found[1][0])
            texts = [f"{at_s:.0f} s, {changes} changes" for at_s, changes in found]
            print(f"| {kind}, {seed} | {' | '.join(texts)} | {ratios[-1]:.2f} |", flush=True)
        print(f"| {kind}, mean | | | {statistics.geometric_mean(ratios):.2f} |", flush=True)


def manifest(fleet: Fleet, grouping: str) -> dict[str, Any]:
    """Return the job: digits, averaged weights, the same samples for each step."""
    return {
        "apiVersion": "dlion.dev/v1alpha1",
        "kind": "DLionJob",
        "metadata": {"name": "fleet"},
        "spec": {
            "sites": [
                {"name": f"s{at}", "groups": [{"name": "vehicles", "workers": size}]}
                for at, size in enumerate(fleet.sites)
            ],
            "trainer": {
                "program": {"builtin": "digits"},
                "dataset": {"name": "digits", "evaluationFraction": 0.2, "partition": "iid"},
                "optimizer": {"name": "sgd", "learningRate": 0.2},
                "seed": fleet.seed % 2**31,
                "evaluation": {"everySamples": 10 * BATCH * fleet.count, "maxSamples": 200},
                "stop": {"maxSteps": STEPS},
            },
            "batching": {
                "policy": "even",
                "globalBatchSize": {"initial": BATCH * fleet.count, "growth": False},
            },
            "knowledgeTransfer": {"policy": "none"},
            "exchange": {
                "policy": "hop", "topology": "clustered", "grouping": grouping, "codec": "float16",
            },
        },
    }  # fmt: skip


def _simulated(fleet: Fleet, grouping: str) -> tuple[float, int]:
    """Return virtual seconds to the end, and changes of groups."""
    with tempfile.TemporaryDirectory() as folder:
        job, environment = Path(folder) / "job.yaml", Path(folder) / "fleet.yaml"
        job.write_text(yaml.safe_dump(manifest(fleet, grouping)))
        environment.write_text(yaml.safe_dump(fleet.environment(CORES), default_flow_style=None))
        out = Path(folder) / "out"
        subprocess.run(
            [
                sys.executable, "-m", "dlion_cli", "simulate", str(job), "-e", str(environment),
                "--no-report", "--out", str(out), "--threads", "1", "-o", "json",
            ],
            check=True, capture_output=True,
        )  # fmt: skip
        seconds = json.loads((out / "simulation.json").read_text())["virtualSeconds"]
        records = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    made = {
        found[1]
        for record in records
        if record["kind"] == "directive" and (found := GROUPS.search(record["reason"]))
    }
    return seconds, len(made)
