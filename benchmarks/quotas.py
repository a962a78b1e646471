"""Compare batch shares under hard CPU quotas with the speed of each worker alone.

    python benchmarks/quotas.py [--runs 5] [--short] [--step-s 1]

Run as root. First the script finds how many samples make steps of about the given time on this
machine. Then each worker runs alone at its quota: samples per second of wall time, before and after
the job, since the machine varies. Between them the job of all four runs; its quotas are permuted in
the middle. The script prints each worker's share of the batch beside its share of the samples per
second alone. It also prints after how many of its iterations all shares stayed within the bar. Exit
code 1 if the bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import local_runs
from local_runs import SETTLE_S, Record

QUOTAS = (0.8, 0.4, 0.2, 0.2)
PERMUTATION = (3, 2, 1, 0)
"""Worker k gets the quota of worker PERMUTATION[k]."""

PROBED_WITH = 600
"""Samples in an iteration of all workers, in the run that determines their number."""
STEP_S = 1.0
MIN_STEP_S = 0.3
PHASE_STEPS = 30
"""Minimum before and after the change of quotas."""
MBIT_PER_S = 50
BAR_FRACTION, BAR_ITERATIONS = 0.10, 10


@dataclass(frozen=True)
class Phase:
    """One assignment of quotas to workers, and its results."""

    name: str
    quotas: tuple[float, ...]
    wanted: tuple[float, ...]
    """Share of each in the sum of the speeds alone."""
    got: tuple[float, ...]
    """Mean share of each in the batch, once converged (otherwise in the last iteration)."""
    iterations: int | None
    """Own iterations, maximum over the workers, until all shares stayed inside."""
    worst: float
    """Maximum relative deviation after that."""
    step_s: float
    """Median step over the workers."""

    @property
    def held(self) -> bool:
        """Report whether the bar was met."""
        return self.iterations is not None and self.iterations <= BAR_ITERATIONS


def environment(quotas: tuple[float, ...], change_s: float | None) -> local_runs.Document:
    """Return hard quotas, and links that limit the CPU of the exchange."""
    document: local_runs.Document = {
        "name": "quotas",
        "workers": [{"cores": quota, "mbitPerS": MBIT_PER_S} for quota in quotas],
        "coreScale": 1.0,
    }
    if change_s is not None:
        document["changes"] = [{"at": {"seconds": change_s}, "permutation": list(PERMUTATION)}]
    return document


def alone_samples_per_s(
    out: Path, data: Path, quota: float, seconds: float, global_batch: int
) -> float:
    """Return samples per second of wall time of one worker at that quota, without any exchange.

    Its batch is its part of that batch of all.
    """
    samples = max(8, round(global_batch * quota / sum(QUOTAS)))
    return local_runs.alone_samples_per_s(out, data, environment((quota,), None), seconds, samples)


def batch_for(step_s: float) -> int:
    """Return the samples of all workers that take about this time on this machine, each at its
    quota.
    """
    most = max(QUOTAS)
    probed_with = round(PROBED_WITH * most / sum(QUOTAS))
    rate = local_runs.probed_samples_per_s(environment((most,), None), probed_with)
    return round(rate / most * sum(QUOTAS) * step_s)


def job_steps(
    folder: Path, data: Path, seconds: float, global_batch: int
) -> tuple[list[Record], float]:
    """Return the steps of the job of all four, and when the quotas were permuted."""
    document = local_runs.job(
        name="quotas",
        workers=len(QUOTAS),
        data=data,
        global_batch=global_batch,
        exchange={"policy": "dlion"},
        trainer={"stop": {"maxSeconds": seconds}},
    )
    out = folder / "job"
    with local_runs.started(document, environment(QUOTAS, seconds / 2), out) as run:
        run.finish()
    return run.of_kind("step"), run.began_s() + seconds / 2


def judge(name: str, quotas: tuple[float, ...], alone: dict[float, float],
          steps: list[Record]) -> Phase:  # fmt: skip
    """Judge the shares of these steps; each worker's own iterations count from 1."""
    total = sum(alone[quota] for quota in quotas)
    wanted = tuple(alone[quota] / total for quota in quotas)
    of_rank = [[s for s in steps if s["rank"] == rank] for rank in range(len(quotas))]
    got, deviations = [], []
    for own, share in zip(of_rank, wanted, strict=True):
        shares = [s["local_batch_size"] / s["global_batch_size"] for s in own]
        deviations.append([abs(value / share - 1) for value in shares])
        got.append(shares)
    # The first iteration (from 1) after which a worker's share stays inside.
    firsts = [
        max((i + 2 for i, value in enumerate(one) if value > BAR_FRACTION), default=1)
        for one in deviations
    ]
    settled = all(first <= len(one) for first, one in zip(firsts, deviations, strict=True))
    starts = [min(f, len(one)) - 1 for f, one in zip(firsts, deviations, strict=True)]
    return Phase(
        name=name,
        quotas=quotas,
        wanted=wanted,
        got=tuple(statistics.mean(g[start:]) for g, start in zip(got, starts, strict=True)),
        iterations=max(firsts) if settled else None,
        worst=max(max(one[start:]) for one, start in zip(deviations, starts, strict=True)),
        step_s=statistics.median(s["wall_s"] for s in steps),
    )


def once(
    folder: Path, *, alone_s: float, job_s: float, global_batch: int
) -> tuple[dict[float, float], list[Phase]]:
    """Run one whole comparison; the speed alone is the mean of before and after the job."""
    data = local_runs.random_images(folder)

    def all_alone(when: str) -> dict[float, float]:
        return {
            quota: alone_samples_per_s(
                folder / f"alone-{quota:g}-{when}", data, quota, alone_s, global_batch
            )
            for quota in sorted(set(QUOTAS))
        }

    before = all_alone("before")
    steps, changed_s = job_steps(folder, data, job_s, global_batch)
    after = all_alone("after")
    moved = max(abs(after[quota] / before[quota] - 1) for quota in before)
    print(f"    between before and after the job, alone: at most {moved:.1%} apart")
    alone = {quota: (before[quota] + after[quota]) / 2 for quota in before}
    permuted = tuple(QUOTAS[k] for k in PERMUTATION)
    first = [s for s in steps if s["time_s"] <= changed_s]
    # A step during the change of quotas belongs to neither phase.
    second = [s for s in steps if s["time_s"] - s["wall_s"] >= changed_s]
    return alone, [judge("start", QUOTAS, alone, first), judge("permuted", permuted, alone, second)]


def show(number: int, alone: dict[float, float], phases: list[Phase]) -> None:
    """Print the rows of one run."""
    for phase in phases:
        rates = " ".join(f"{alone[q]:6.1f}" for q in phase.quotas)
        wanted = " ".join(f"{share:5.3f}" for share in phase.wanted)
        got = " ".join(f"{share:5.3f}" for share in phase.got)
        ratio = " ".join(f"{g / w:5.3f}" for g, w in zip(phase.got, phase.wanted, strict=True))
        after = "never" if phase.iterations is None else str(phase.iterations)
        print(f"{number:>3} | {phase.name:8} | {rates} | {wanted} | {got} | {ratio} | {after:>5} "
              f"| {phase.worst:5.1%} | {phase.step_s:4.2f}")  # fmt: skip


def main() -> int:
    """Return the exit code: 0 if every run met the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="three minutes instead of six")
    parser.add_argument("--step-s", type=float, default=STEP_S, help="approximate time of a step")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--keep", type=Path, help="keep the result folders there")
    arguments = parser.parse_args()
    if arguments.step_s < MIN_STEP_S:
        parser.error(f"--step-s: the bar is for steps of {MIN_STEP_S:g} s and more")
    lengths = (
        {"alone_s": 11.0, "job_s": 50.0} if arguments.short else {"alone_s": 18.0, "job_s": 80.0}
    )
    lengths["job_s"] = max(lengths["job_s"], 2 * PHASE_STEPS * arguments.step_s + 2 * SETTLE_S)
    batch = batch_for(arguments.step_s)
    print(
        f"commit {local_runs.commit()}; quotas {QUOTAS}, then permuted {PERMUTATION}; "
        f"{batch} samples a step of about {arguments.step_s:g} s"
    )
    print("run | phase    | samples/s alone | share alone | batch share | ratio | iterations "
          "| worst after | step s")  # fmt: skip
    every: list[Phase] = []
    for number in range(1, arguments.runs + 1):
        with tempfile.TemporaryDirectory(prefix="dlion-bench-") as temporary:
            folder = Path(temporary)
            if arguments.keep is not None:
                folder = arguments.keep / str(number)
                folder.mkdir(parents=True)
            alone, phases = once(folder, **lengths, global_batch=batch)
        show(number, alone, phases)
        every += phases
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(phase) for phase in every]))
    held = all(phase.held for phase in every)
    print(f"all shares within {BAR_FRACTION:.0%} in {BAR_ITERATIONS} iterations: {held}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
