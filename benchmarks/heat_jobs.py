"""Simulate whole jobs on hot machines under three rules; `heat.py --jobs` prints them.

An on/off throttle is a hardware throttle that leaves almost no compute. A budget whose floor is the
whole processor limits nothing and counts the time above the threshold.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
THRESHOLD = 75
SECONDS = 600
VENDOR = {"tripCelsius": 90, "resumeCelsius": 80, "speed": 0.3}
RULES: dict[str, tuple[dict[str, Any], float]] = {
    "hardware": ({"tripCelsius": THRESHOLD, "resumeCelsius": THRESHOLD - 5, "speed": 0.3}, 1.0),
    "on/off": (
        {"tripCelsius": THRESHOLD, "resumeCelsius": THRESHOLD - 5, "speed": 1e-6, "power": 0}, 1.0,
    ),
    "budget": (VENDOR, 0.1),
}  # fmt: skip
"""The hardware's throttle, and the floor of the heat budget."""

BOARD = {"joulesPerKelvin": 20, "kelvinPerWatt": 8, "idleWatts": 2, "busyWatts": 7.5}
BOX = {"joulesPerKelvin": 120, "kelvinPerWatt": 2.2, "idleWatts": 6, "busyWatts": 28}
Machine = tuple[dict[str, Any] | None, float]
"""Its thermals without air, or None, and the air temperature."""
JOBS: dict[str, list[Machine]] = {
    "one hot board of four": [(None, 0), (None, 0), (None, 0), (BOARD, 38)],
    "two hot boards of four": [(None, 0), (BOARD, 34), (BOARD, 42), (None, 0)],
    "four hot boards": [(BOARD, 34), (BOARD, 38), (BOARD, 42), (BOARD, 36)],
    "boards and a box": [(BOARD, 30), (BOARD, 40), (None, 0), (BOX, 40)],
}


def print_jobs() -> None:
    """Print a row for each job: samples per second, and the maximum time above the threshold."""
    print(f"| machines | {' | '.join(RULES)} |\n|---|{'---|' * len(RULES)}")
    ratios: dict[str, list[float]] = {name: [] for name in RULES}
    for name, machines in JOBS.items():
        found = {rule: _simulated(machines, rule) for rule in RULES}
        cells = [f"{speed:.1f} samples/s, {above:.1f} %" for speed, above in found.values()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        for rule, (speed, _) in found.items():
            ratios[rule].append(found["budget"][0] / speed)
    for rule, each in ratios.items():
        mean = statistics.geometric_mean(each)
        print(f"samples over {rule}: {mean:.3f} ({min(each):.3f} to {max(each):.3f})")


def _simulated(machines: list[Machine], rule: str) -> tuple[float, float]:
    throttle, floor = RULES[rule]
    workers = [
        {"cores": 4}
        if thermals is None
        else {"cores": 4, "thermals": {**thermals, "ambientCelsius": air, "throttle": throttle}}
        for thermals, air in machines
    ]
    heat = {"thresholdCelsius": THRESHOLD, "minComputeShare": floor}
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "hot.yaml"
        environment.write_text(yaml.safe_dump({"name": "hot", "workers": workers}))
        out = Path(folder) / "out"
        settings = [
            f"nodePolicies.heat={json.dumps(heat)}",
            f"trainer.stop={json.dumps({'maxSeconds': SECONDS})}",
            "trainer.evaluation.everySamples=100000000",
            "batching.globalBatchSize.initial=480",
        ]
        subprocess.run(
            [
                sys.executable, "-m", "dlion_cli", "simulate", str(ROOT / "examples/digits.yaml"),
                "-e", str(environment), "--no-report", "--out", str(out), "-o", "json",
                *(word for each in settings for word in ("--set", each)),
            ],
            check=True, capture_output=True,
        )  # fmt: skip
        records = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    samples = sum(record["local_batch_size"] for record in records if record["kind"] == "step")
    messages = [r["message"] for r in records if r.get("reason") == "MachineTemperature"]
    above = [re.search(r"°C for ([\d.]+)% of the time", text) for text in messages]
    return samples / SECONDS, max(float(found[1]) for found in above if found)
