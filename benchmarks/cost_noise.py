"""Measure how well an estimator can know a worker's cost on this machine, from recorded runs.

    python benchmarks/quotas.py --short --runs 2 --keep DIR
    python benchmarks/cost_noise.py DIR

A worker's batch share is its quota over its CPU seconds per sample, so an error of that cost is an
error of the share. For each worker and phase of the kept jobs, the script compares estimates with
the mean of the whole phase; an estimator uses the costs of the last steps. It prints the error that
50 % and 95 % of the estimates stay within, from the eighth step of a phase on. It also prints the
ratio of a sample's costs in the job and alone, which the bar of quotas.py compares.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from local_runs import commit
from quotas import PERMUTATION, QUOTAS, SETTLE_S

WINDOWS = (8, 12, 16, 20, 30, 40)
FIRST, EARLY = 8, 20
MIN_STEPS = 30
CHANGING_S = 2.0
"""Steps around the permutation belong to neither phase."""


def midmean(costs: Sequence[float]) -> float:
    """Return the mean of the middle half."""
    ordered = sorted(costs)
    out = max(len(ordered) // 4, len(ordered) >= 3)
    return statistics.fmean(ordered[out : len(ordered) - out])


ESTIMATORS: dict[str, Callable[[Sequence[float]], float]] = {
    "midmean": midmean,
    "mean": statistics.fmean,
    "median": statistics.median,
}


class Phase(NamedTuple):
    """One worker between two changes of its quota."""

    quota: float
    costs: list[float]
    """CPU seconds per sample of each step, without the exchange."""


def steps_of(folder: Path) -> tuple[float, list[dict[str, float]]]:
    """Return when training began, and all steps; times in seconds of the run."""
    records = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    began_s = min(r["time_s"] for r in records if r.get("reason") == "TrainingStarted")
    return began_s, [record for record in records if record["kind"] == "step"]


def costs_of(steps: Sequence[dict[str, float]]) -> list[float]:
    """Return the CPU seconds per sample of each."""
    return [(s["cpu_s"] - s["exchange_cpu_s"]) / s["local_batch_size"] for s in steps]


def phases(job: Path) -> list[Phase]:
    """Return the phases of each worker before and after the permutation, without short ones."""
    began_s, steps = steps_of(job)
    changed_s = (began_s + max(step["time_s"] for step in steps)) / 2
    found = []
    for rank, quota in enumerate(QUOTAS):
        own = [step for step in steps if step["rank"] == rank]
        before = [s for s in own if s["time_s"] < changed_s - CHANGING_S]
        after = [s for s in own if s["time_s"] > changed_s + CHANGING_S]
        found += [Phase(quota, costs_of(before)), Phase(QUOTAS[PERMUTATION[rank]], costs_of(after))]
    return [phase for phase in found if len(phase.costs) >= MIN_STEPS]


def alone(folder: Path, quota: float) -> float:
    """Return the mean CPU seconds per sample of a worker alone, before and after the job."""
    means = []
    for path in sorted(folder.glob(f"alone-{quota:g}-*/events.jsonl")):
        began_s, steps = steps_of(path.parent)
        late = [s for s in steps if s["time_s"] - s["wall_s"] >= began_s + SETTLE_S]
        means.append(statistics.fmean(costs_of(late)))
    return statistics.fmean(means)


def errors(costs: Sequence[float], window: int, estimate: Callable[[Sequence[float]], float],
           until: int | None) -> list[float]:  # fmt: skip
    """Return relative errors of the estimates before each step; the very first is left out."""
    whole = statistics.fmean(costs)
    steps = range(FIRST, len(costs) if until is None else until)
    return [abs(estimate(costs[max(1, i - window) : i]) / whole - 1) for i in steps]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kept", type=Path, nargs="+", help="folders that quotas.py --keep made")
    arguments = parser.parse_args()
    jobs = [path for kept in arguments.kept for path in sorted(kept.glob("*/job"))]
    of_job = {job: phases(job) for job in jobs}
    series = [phase.costs for found in of_job.values() for phase in found]
    if not series:
        parser.error("no job of at least 30 steps a phase in there: run quotas.py with --keep")
    print(f"commit {commit()}: {len(series)} phases of a worker, from {len(jobs)} jobs\n")
    print("| estimator | steps | half within | 95 % within | 95 % of steps 8 to 20 within |")
    print("|---|---|---|---|---|")
    for name, estimate in ESTIMATORS.items():
        for window in WINDOWS:
            every = sorted(e for c in series for e in errors(c, window, estimate, None))
            early = sorted(e for c in series for e in errors(c, window, estimate, EARLY))
            shown = (every[len(every) // 2], _percentile_95(every), _percentile_95(early))
            print(f"| {name} | {window} | " + " | ".join(f"{e:.1%}" for e in shown) + " |")
    print("\n| quota | cost in the job / alone, mean | least | most |\n|---|---|---|---|")
    for quota in sorted(set(QUOTAS), reverse=True):
        ratios = [
            statistics.fmean(phase.costs) / alone(job.parent, quota)
            for job, found in of_job.items()
            for phase in found
            if phase.quota == quota
        ]
        shown = (statistics.fmean(ratios), min(ratios), max(ratios))
        print(f"| {quota:g} | " + " | ".join(f"{ratio:.3f}" for ratio in shown) + " |")


def _percentile_95(ordered: Sequence[float]) -> float:
    return ordered[int(0.95 * len(ordered))]


if __name__ == "__main__":
    main()
