"""Estimate the maximum time of a comparison: its samples times the cost of a gradient here.

It measures with `dlion calibrate`, once for each program and batch, and stores the result.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from comparison import (
    Comparison,
    decoded_settings,
    environment,
    scaled_evaluation,
    scaled_seconds,
)

from dlion_environments.loading import load_environment

SIMULATED = 1.8
"""Ratio of a simulation to its gradients alone (docs/benchmarks.md, *Cost of a simulation*)."""

MESSAGE_S = 1.5e-3
"""A gradient of a million entries in float16, encoded, decoded and added (docs/exchange.md)."""

EVALUATION = {"everySamples": 5000, "maxSamples": 2000}
"""Default if the manifest has no value."""

TUNING_SEEDS = 3
"""Default of `dlion compare`."""

FINAL_SAMPLES, FORWARD_FRACTION = 10_000, 1 / 3
"""Held-out samples that evaluate each replica at the end; a forward pass each."""

COSTS = "costs.json"


@dataclass(frozen=True)
class Cost:
    """Core seconds on this machine."""

    sample_s: float
    """Seconds for a sample's gradient and update, at the batch of the first step."""
    start_s: float
    """Seconds before the first step: imports, data, compiling."""


def cost(comparison: Comparison, *, data: Path, keep_in: Path) -> Cost:
    """Return the cost of a comparison's runs here."""
    programs = [s for s in comparison.settings if s.startswith("trainer.program")]
    programs += decoded_settings(comparison.file)
    batch = max(1, comparison.batch // comparison.workers)
    key = f"{comparison.file.name} {' '.join(programs)} {batch}"
    path = keep_in / COSTS
    known: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
    if key not in known:
        known[key] = asdict(_measured(comparison, programs, batch, data))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known, indent=2) + "\n")
    return Cost(**known[key])


def _measured(comparison: Comparison, programs: list[str], batch: int, data: Path) -> Cost:
    command = [
        sys.executable, "-m", "dlion_cli", "calibrate", str(comparison.file), "--rounds", "3",
        "--batches", f"{batch},{4 * batch}", "--data-root", str(data), "-o", "json",
        *(word for setting in programs for word in ("--set", setting)),
    ]  # fmt: skip
    began_s = time.monotonic()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    wall_s = time.monotonic() - began_s
    costs = json.loads(done.stdout)
    timed_s = sum(one["wallS"] * one["steps"] for one in costs["observations"])
    sample_s = costs["perSampleCoreS"]["value"] + costs["fixedCoreS"]["value"] / batch
    return Cost(float(sample_s), wall_s - timed_s)


def core_seconds(comparison: Comparison, cost: Cost, *, seeds: int, scale: float) -> float:
    """Return the maximum for all runs, including those that choose learning rates."""
    columns = len(comparison.columns) + comparison.with_ideal
    tuning = sum(len(rates) for rates in comparison.grids.values())
    runs = dict.fromkeys(comparison.environments, columns * seeds)
    for place in [comparison.tuned_in] if comparison.tuned_in else comparison.environments:
        runs[place] = runs.get(place, 0) + TUNING_SEEDS * tuning
    seconds = scaled_seconds(comparison.seconds, scale)
    end_s = comparison.workers * FINAL_SAMPLES * FORWARD_FRACTION * cost.sample_s
    sample_s = _simulated_sample_s(comparison, cost, scale)
    return sum(
        count * (cost.start_s + end_s + sample_s * seconds * _samples_per_s(name))
        for name, count in runs.items()
    )


def _simulated_sample_s(comparison: Comparison, cost: Cost, scale: float) -> float:
    """Return the cost of one sample: its gradient, its part of evaluations and of messages.

    Messages go to all peers, or to a server and back.
    """
    document = yaml.safe_load(comparison.file.read_text())
    evaluation = {**EVALUATION, **document["spec"]["trainer"].get("evaluation", {})}
    every = evaluation["everySamples"] if scale == 1 else scaled_evaluation(scale)
    workers = comparison.workers
    judged = workers * evaluation["maxSamples"] / every * FORWARD_FRACTION
    messages = (2 if comparison.has_server else workers) * (workers - 1) / comparison.batch
    return cost.sample_s * (SIMULATED + judged) + MESSAGE_S * messages


def _samples_per_s(name: str) -> float:
    """Return the samples per second of all workers of an environment without waits."""
    loaded = load_environment(environment(name))
    cores = sum(machine.count * machine.cores for machine in loaded.workers)
    return float(cores * loaded.samples_per_s_per_core)
