"""Compare a real job with its simulation.

    python benchmarks/simulator_against_reality.py --data ../shared/data/cifar10 [--out DIR]
    python benchmarks/simulator_against_reality.py ... --set exchange.policy=full

Run as root, on a quiet machine. `cipher` trains on CIFAR-10 to 50 % (mean over replicas;
`--target`), on four workers with hard quotas in network namespaces, with steps of 0.3 s and more.
Then `dlion replay` of that run trains the job with real gradients under the measured capacities and
link rates. Knowledge transfer is off: the best worker is random, and one pull equals many
gradients.

The script prints the time to the target, step, batches, and bytes of an iteration on each link, for
both. Bars: time within 20 %, bytes within 5 % on each link. Exit code 1 if one is missed. A run in
`--out` is replayed, not repeated. With `--runs N` there are N pairs; medians are compared, and
`apart` is the ratio of the largest to the smallest real run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import local_runs

from dlion_api.names import Rank
from dlion_cli.inputs.manifests import apply_set
from dlion_results.replay_comparison import RunFigures, replay_figures
from dlion_results.run_folder.events import read_events
from dlion_results.run_folder.folder import EVENTS

QUOTAS = (0.6, 0.45, 0.25, 0.2)
MBIT_PER_S = (50, 35, 20, 20)
GLOBAL_BATCH = 960
BAR_TIME, BAR_BYTES = 0.20, 0.05
MIN_STEP_S = 0.3

ENVIRONMENT: local_runs.Document = {
    "name": "reality",
    "workers": [
        {"cores": cores, "mbitPerS": rate} for cores, rate in zip(QUOTAS, MBIT_PER_S, strict=True)
    ],
    "coreScale": 1.0,
}


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    figures: RunFigures
    step_s: float
    """Median over all steps of all workers."""
    target_s: float | None
    """Seconds from the first step until the mean over replicas reached the target."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of train/test.tfrecord")
    parser.add_argument("--target", type=float, default=0.5, help="accuracy to reach")
    parser.add_argument("--seconds", type=float, default=420.0, help="longest time of a run")
    parser.add_argument("--set", dest="assignments", action="append", default=[])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/reality"))
    arguments = parser.parse_args()
    pairs = [_pair(arguments, arguments.out / str(k + 1)) for k in range(arguments.runs)]
    load = os.getloadavg()[0]
    settings = ", ".join(arguments.assignments) or "as in the script"
    print(
        f"\ncommit {local_runs.commit()}, {len(pairs)} runs, settings {settings}, load average "
        f"{load:.1f}\n"
    )
    reals, virtuals = ([pair[k] for pair in pairs] for k in range(2))
    sys.exit(0 if _print(reals, virtuals, arguments.target) else 1)


def _pair(arguments: argparse.Namespace, folder: Path) -> tuple[Side, Side]:
    """Run a real run and its replay."""
    real, virtual = folder / "real", folder / "virtual"
    if not (real / "summary.json").exists():
        with local_runs.started(_job(arguments), ENVIRONMENT, real) as run:
            run.finish()
    if not (virtual / "summary.json").exists():
        command = [sys.executable, "-m", "dlion_cli", "replay", str(real), "--out", str(virtual)]
        subprocess.run([*command, "--no-report"], check=True)
    return _side(real), _side(virtual)


def _job(arguments: argparse.Namespace) -> local_runs.Document:
    document = local_runs.job(
        name="reality",
        workers=len(QUOTAS),
        data=(arguments.data / "train.tfrecord").resolve(),
        global_batch=GLOBAL_BATCH,
        trainer={
            "dataset": {
                "format": "tfrecord",
                "evaluationPath": str((arguments.data / "test.tfrecord").resolve()),
            },
            "optimizer": {"learningRate": 0.06, "momentum": 0.9},
            "evaluation": {"everySamples": 10_000, "maxSamples": 1000},
            "stop": {"targetAccuracy": arguments.target, "maxSeconds": arguments.seconds},
        },
        synchronization={"mode": "synchronous"},
        exchange={"policy": "dlion"},
    )
    changed: local_runs.Document = apply_set(document, tuple(arguments.assignments))
    return changed


def _side(folder: Path) -> Side:
    ranks = [Rank(rank) for rank in range(len(QUOTAS))]
    lines = [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]
    began_s = min(line["time_s"] for line in lines if line.get("reason") == "TrainingStarted")
    reached_s = json.loads((folder / "summary.json").read_text())["target"]["time_s"]
    return Side(
        replay_figures(read_events(folder / EVENTS), ranks),
        statistics.median(line["wall_s"] for line in lines if line["kind"] == "step"),
        None if reached_s is None else reached_s - began_s,
    )


def _print(reals: Sequence[Side], virtuals: Sequence[Side], target: float) -> bool:
    """Print the figures of both; report whether the bars were met."""

    def row(name: str, of: Callable[[Side], float | None]) -> float | None:
        return _row(name, [of(side) for side in reals], [of(side) for side in virtuals])

    print("| figure | real | apart | simulated | simulated / real |\n|---|---|---|---|---|")
    ratio = row(f"time to {target:.0%}, s", lambda side: side.target_s)
    row("step (median), s", lambda side: side.step_s)
    row("iterations/s", lambda side: side.figures.steps_per_s)
    for rank in reals[0].figures.batch:
        row(f"batch of worker {rank}", partial(_batch, rank))
    ratios = {
        link: row(f"kB an iteration, {link[0]} to {link[1]}", partial(_kilobytes, link))
        for link in sorted(reals[0].figures.bytes_per_step)
    }
    is_in_time = ratio is not None and abs(ratio - 1) <= BAR_TIME
    off = [link for link, one in ratios.items() if one is None or abs(one - 1) > BAR_BYTES]
    print(f"\nbar: time to {target:.0%} within {BAR_TIME:.0%}: {'met' if is_in_time else 'MISSED'}")
    print(
        f"bar: bytes of {len(ratios)} links within {BAR_BYTES:.0%}: "
        f"{'met' if not off else f'MISSED on {len(off)}'}"
    )
    step_s = min(side.step_s for side in reals)
    long_enough = step_s >= MIN_STEP_S
    if not long_enough:
        print(f"not judged: steps of {step_s:.2f} s; the bars are for {MIN_STEP_S} and more")
    return is_in_time and not off and long_enough


def _batch(rank: int, side: Side) -> float | None:
    return side.figures.batch.get(rank)


def _kilobytes(link: tuple[int, int], side: Side) -> float:
    return side.figures.bytes_per_step.get(link, 0.0) / 1000


def _row(name: str, reals: list[float | None], virtuals: list[float | None]) -> float | None:
    """Print the medians; return their ratio, or None if a run lacks the figure."""
    real, virtual = _median(reals), _median(virtuals)
    known = [value for value in reals if value]
    apart = max(known) / min(known) if len(known) == len(reals) else None
    ratio = virtual / real if real and virtual is not None else None
    cells = [
        "-" if value is None else f"{value:{form}}"
        for value, form in ((real, ".3g"), (apart, ".3f"), (virtual, ".3g"), (ratio, ".3f"))
    ]
    print(f"| {name} | {' | '.join(cells)} |")
    return ratio


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


if __name__ == "__main__":
    main()
