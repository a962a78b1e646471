"""Compare the bytes and accuracy of `adaptive` with those of a ring all-reduce.

    python benchmarks/paper/bytes_sent.py --data ../shared/data [--seeds 10] [--epochs 3]

The job is that of the reduced edition in `hetero-sys-a`, each column at its own learning rate,
chosen with other seeds. All columns train on the same number of samples. `ideal` computes the exact
mean of all gradients, as a ring all-reduce does, on one machine. A ring over n workers sends 2 (n -
1) times the gradient's bytes (32-bit values) in each iteration, all workers together (Patarasuk and
Yuan, 2009).

The script prints how many times fewer bytes each column sends, over the whole run and until the
target. It also prints the difference in accuracy of the averaged model, paired by seed, with its 95
% interval (Student's t). The bars: 100 times fewer with the interval above -0.5 points, 1,000 times
above -1.0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from comparison import CIFAR10, Comparison
from published import ADAPTIVE, RATES, comparisons
from reduced_edition import NETWORKS, Reduction
from run import decoded
from scipy.stats import t

from dlion_cli.commands.local.compare import COMPARISON

sys.path.append(str(Path(__file__).resolve().parents[1]))
from local_runs import commit

PLACE = "hetero-sys-a"
IDEAL = "ideal"
TRAINING_SAMPLES = 50_000
SAMPLES_PER_S = 800
"""Approximate time of `ideal` in that environment; runs last four times as long."""
PLANS: dict[str, str] = {
    "as planned": "",
    "2 steps, 1 %": "{localSteps: 2, density: 0.01}",
    "4 steps, 0.5 %": "{localSteps: 4, density: 0.005}",
    "8 steps, 0.5 %": "{localSteps: 8, density: 0.005}",
}
"""Rounds of `adaptive`: local steps, and the share of the entries that each round sends."""


def comparison(folder: Path, arguments: argparse.Namespace) -> Comparison:
    """Return all columns in the one environment."""
    systems = next(one for one in comparisons() if one.part == "systems")
    own = systems.columns[ADAPTIVE]
    columns = {
        name: f"{own};exchange.parameters={plan}" if plan else own for name, plan in PLANS.items()
    }
    reduced = Reduction(folder / "environments").of(replace(systems, environments=(PLACE,)))
    return replace(
        reduced,
        columns=columns,
        grids=dict.fromkeys((IDEAL, *columns), RATES),
        held="as planned",
        target=arguments.target,
        seconds=round(4 * arguments.epochs * TRAINING_SAMPLES / SAMPLES_PER_S),
        settings=(
            *reduced.settings,
            f"trainer.stop.maxEpochs={arguments.epochs}",
            "trainer.evaluation.maxSamples=5000",
        ),
    )


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean. Needs two values."""
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    half = float(t.ppf(0.975, len(differences) - 1)) * error
    return mean - half, mean + half


def ring_bytes(samples: float, job: Comparison) -> float:
    """Return the bytes that a ring sends for this many samples, all workers together."""
    gradient_bytes = 4 * NETWORKS[CIFAR10].parameters
    iterations: float = samples / job.batch
    return 2 * (job.workers - 1) * gradient_bytes * iterations


def table(document: Any, job: Comparison) -> list[str]:
    """Return the rows of the table in Markdown."""
    rows = {row["variant"]: row for row in document["rows"]}
    exact = {run["seed"]: run for run in rows[IDEAL]["runs"]}
    rate = rows[IDEAL]["learningRate"]
    lines = [
        "| column | rate | times fewer bytes | to the target | accuracy, % | points (95 %) |",
        "|---|---|---|---|---|---|",
        f"| exact mean, by a ring | {rate} | 1 | 1 | {_percent(exact.values())} | |",
    ]
    for name in job.columns:
        runs = rows[name]["runs"]
        fewer = [ring_bytes(run["samples"], job) / run["sent_bytes"] for run in runs]
        sooner = [
            ring_bytes(exact[run["seed"]]["samples_to_target"], job) / run["bytes_to_target"]
            for run in runs
            if run["bytes_to_target"] and exact[run["seed"]]["samples_to_target"]
        ]
        points = [
            100 * (run["averaged_model"] - exact[run["seed"]]["averaged_model"]) for run in runs
        ]
        low, high = interval(points)
        lines.append(
            f"| `adaptive`, {name} | {rows[name]['learningRate']} | {_range(fewer)} |"
            f" {_range(sooner)}{_never(len(runs) - len(sooner))} | {_percent(runs)} |"
            f" {statistics.fmean(points):+.1f} ({low:+.1f} to {high:+.1f}) |"
        )
    return lines


def _percent(runs: Any) -> str:
    return _range([100 * run["averaged_model"] for run in runs], "{:.1f}")


def _range(values: Sequence[float], form: str = "{:.0f}") -> str:
    if not values:
        return "-"
    shown = (statistics.median(values), min(values), max(values))
    return "{} ({} to {})".format(*map(form.format, shown))


def _never(count: int) -> str:
    return f", {count} never" if count else ""


def main() -> None:
    """Run the missing runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, required=True, help="holds cifar10/")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training data")
    parser.add_argument("--target", type=float, default=0.45, help="accuracy that ends a count")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path("runs/bytes-sent"))
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds is at least 2: an interval needs two values")
    data = decoded(arguments.data, arguments.out / "data", ["cifar10"])
    job = comparison(arguments.out, arguments)
    out = arguments.out / f"{arguments.epochs}-epochs"
    words = job.arguments(seeds=arguments.seeds, scale=1.0, out=out, data=data)
    command = [sys.executable, "-m", "dlion_cli", "compare", *words, "--jobs", str(arguments.jobs)]
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(code)
    document = json.loads((out / COMPARISON).read_text())
    print(f"\ncommit {commit()}, {arguments.seeds} seeds, {arguments.epochs} epochs, {PLACE}\n")
    print("\n".join(table(document, job)))


if __name__ == "__main__":
    main()
