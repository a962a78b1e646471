"""Measure the cost of a killed trainer for the others, over many cycles in one run.

    python benchmarks/kill_restart.py --cycles 20 --mode bounded
    python benchmarks/kill_restart.py --cycles 20 --mode synchronous

One `dlion run` has four workers. One of them gets SIGKILL, and the next cycle begins when it
contributes again. Per cycle the script prints the longest iteration of another worker in its own
medians. No worker lost more than one iteration if none is longer than twice its worker's median and
no gradient was discarded. It also prints seconds from the kill until the worker is back, and from
its TensorFlow import until its first step.

Exit code 1 if a bar is missed; `make measure` runs three cycles of either mode.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from dlion_api.names import Rank  # noqa: E402
from dlion_api.protocol.progress import ProgressRecord, StepRecord  # noqa: E402
from iteration_losses import IterationLoss, iteration_losses  # noqa: E402
from local_run import LocalRun, blobs, hashes, job_document  # noqa: E402

WORKERS = 4
BACK_WITHIN_S = 15.0
BEFORE_S = 1.0
"""Seconds before a kill that give each worker's usual iteration."""
SETTLED = 20
"""Iterations between a return and the next kill."""


@dataclass
class Cycle:
    """One kill and its results; times by the run's clock."""

    rank: int
    killed_s: float
    back_s: float = 0.0
    after_import_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """The figures that are compared with the bars."""

    mode: str
    cycles: int
    within: int
    """Cycles in which no other worker lost more than one iteration."""
    longest: float
    """Iteration of another worker around a kill, in its own medians."""
    discarded: int
    """Discarded gradients of other workers."""
    slowest_s: float
    """Seconds from the TensorFlow import of a killed worker until its first step."""
    compared: int
    """Iterations whose weights were compared between workers; 0 except in lock step."""
    differing: int
    """Compared iterations after which replicas differed."""

    @property
    def held(self) -> bool:
        """Report whether the bars were met."""
        in_time = self.slowest_s <= BACK_WITHIN_S
        is_compared = bool(self.compared) == (self.mode == "synchronous")
        return in_time and self.within == self.cycles and is_compared and not self.differing


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="dlion-kill-") as folder:
        with LocalRun(Path(folder), _document(arguments, Path(folder))) as run:
            run.wait_for_step(SETTLED)
            rng = random.Random(arguments.seed)
            cycles = [_cycle(run, rng.randrange(WORKERS)) for _ in range(arguments.cycles)]
            run.process.send_signal(signal.SIGTERM)
            code = run.finish()
        outcome = _print(run, cycles, code, arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(outcome)]))
    sys.exit(0 if outcome.held else 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--mode", default="bounded", help="spec.synchronization.mode")
    parser.add_argument("--nap-s", type=float, default=0.2, help="idle time of a step")
    parser.add_argument("--seed", type=int, default=1, help="selects the killed workers")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    return parser.parse_args()


def _document(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    trainer = {"program": blobs(folder, nap_s=arguments.nap_s), "stop": {"maxSeconds": 86_400}}
    sites = {"plant-a": WORKERS - 1, "plant-b": 1}
    mode = {"mode": arguments.mode}
    restarts = 10 * arguments.cycles
    return job_document(sites, trainer=trainer, synchronization=mode, maxRestarts=restarts)


def _cycle(run: LocalRun, rank: int) -> Cycle:
    steps = run.steps()
    last = max(steps, key=lambda step: step.time_s)
    before = max(step.incarnation for step in steps if step.rank == rank)
    cycle = Cycle(rank, killed_s=last.time_s)
    run.kill_trainer(rank)
    run.wait_until(lambda: _first(run, rank, before), f"worker {rank} is back", 120)
    first = _first(run, rank, before)
    assert first is not None
    imported = run.events("TrainerImported", rank)[-1]
    cycle.back_s = first.time_s
    cycle.after_import_s = first.time_s - imported.time_s
    run.wait_until(
        lambda: min(run.steps(r)[-1].iteration for r in range(WORKERS)) > first.iteration + SETTLED,
        "they continue together",
        120,
    )
    time.sleep(BEFORE_S)
    return cycle


def _first(run: LocalRun, rank: int, before: int) -> Any:
    return next((step for step in run.steps(rank) if step.incarnation > before), None)


def _print(run: LocalRun, cycles: list[Cycle], code: int, arguments: argparse.Namespace) -> Outcome:
    """Print the table and the lines below it."""
    records = run.records()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    print(f"commit {commit}, {WORKERS} workers, mode {arguments.mode}, exit code {code}")
    print(
        "| cycle | killed | longest of the others / median | discarded | median s "
        "| back s | after import s |"
    )
    print("|---|---|---|---|---|---|---|")
    every: list[list[IterationLoss]] = []
    for number, cycle in enumerate(cycles, start=1):
        until_s = cycle.back_s + 5 * arguments.nap_s
        losses = iteration_losses(
            _around(records, cycle.killed_s, until_s),
            killed={Rank(cycle.rank)},
            since_s=cycle.killed_s,
            until_s=until_s,
        )
        every.append([*losses.values()])
        print(
            f"| {number} | {cycle.rank} "
            f"| {_longest(every[-1]):.2f} | {_discarded(every[-1])} "
            f"| {statistics.median(loss.median_s for loss in losses.values()):.3f} "
            f"| {cycle.back_s - cycle.killed_s:.1f} | {cycle.after_import_s:.1f} |"
        )
    within = sum(all(loss.at_most_one for loss in losses) for losses in every)
    slowest = max(cycle.after_import_s for cycle in cycles)
    print(
        f"cycles in which no other worker lost more than one iteration: {within} of {len(cycles)}; "
        f"slowest return {slowest:.1f} s"
    )
    known = hashes(run.steps()).values() if arguments.mode == "synchronous" else ()
    differing = sum(len(set(of_iteration.values())) > 1 for of_iteration in known)
    if known:
        print(f"iterations after which replicas differed: {differing} of {len(known)}")
    outcome = Outcome(
        mode=arguments.mode,
        cycles=len(cycles),
        within=within,
        longest=max(map(_longest, every)),
        discarded=sum(map(_discarded, every)),
        slowest_s=slowest,
        compared=len(known),
        differing=differing,
    )
    print(f"bars met: {outcome.held}")
    return outcome


def _around(records: list[ProgressRecord], since_s: float, until_s: float) -> list[StepRecord]:
    """Return the steps around that fault: an earlier return of another worker does not count."""
    steps = [record for record in records if isinstance(record, StepRecord)]
    return [step for step in steps if since_s - BEFORE_S <= step.time_s <= until_s]


def _longest(losses: Iterable[IterationLoss]) -> float:
    return max(loss.longest_s / loss.median_s for loss in losses)


def _discarded(losses: Iterable[IterationLoss]) -> int:
    return sum(len(loss.discarded) for loss in losses)


if __name__ == "__main__":
    main()
