"""Compare predicted, reactive and static shares: waits, and time to the same number of samples.

    python benchmarks/demand.py                   the held-out traces: a table, and each bar
    python benchmarks/demand.py --traces tuning   the traces that parameters were chosen with
    python benchmarks/demand.py --plot FILE.svg   a part of one held-out trace, drawn
    python benchmarks/demand.py --cost            CPU time and memory of the forecasts

Four workers with four cores each train in lock step, beside other work by a recipe of
`demand_traces.py`. The real controllers and predictors drive them, in virtual time and without
gradients. A step costs 0.02 core seconds a sample, 0.05 fixed, and 3 % noise; an exchange takes
0.05 s. Seeds 1 to 3 have steps of about 0.5, 1 and 2 seconds.

- `static`: equal shares, as measured on idle machines
- `reactive`: shares follow the measured speeds (`nodePolicies.demand.prediction: none`)
- `predicted`: `auto`
- `oracle`: shares of the speeds in the next step, a bound for every rule
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from demand_traces import CORES, HELD_OUT, SECONDS, TUNING, phases
from local_runs import commit

from dlion_api.names import Rank
from dlion_api.protocol.measurements import Peers, SpeedProbe, StepTiming
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.spec import Job, load_job
from dlion_core.demand.demand_predictor import DemandPredictor, DemandState
from dlion_core.resource_control.batching import shares
from dlion_core.resource_control.resource_controller import ResourceController
from dlion_environments.plan import CoLocatedDemand
from dlion_simulator.machines.shared_machine import SharedMachine
from dlion_worker.sidecar.demand_prediction import read_machine_cpu

WORKERS = 4
SAMPLE_CORE_S, FIXED_CORE_S, EXCHANGE_S, NOISE = 0.02, 0.05, 0.05, 0.03
BATCHES = {1: 400, 2: 800, 3: 1600}
"""Global batch by seed."""
RULES = ("static", "reactive", "predicted", "oracle")
PLOTTED, PLOTTED_S = "cron 25 s", 1500.0


def job_of(batch: int) -> Job:
    """Return the job of the controllers."""
    return load_job(
        {
            "apiVersion": "dlion.dev/v1alpha1",
            "kind": "DLionJob",
            "metadata": {"name": "demand"},
            "spec": {
                "sites": [{"name": "s", "groups": [{"name": "g", "workers": WORKERS}]}],
                "trainer": {
                    "program": {"builtin": "cipher"},
                    "dataset": {"name": "digits"},
                    "stop": {"maxSteps": 10},
                },
                "batching": {"globalBatchSize": {"initial": batch, "growth": False}},
            },
        }
    )


@dataclass
class Outcome:
    """The result of one trace under one rule."""

    seconds: float = 0.0
    waited_s: float = 0.0
    predicted_fraction: float = 0.0
    """Share of all steps of workers whose share followed a forecast."""
    times: list[float] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    """Cores of worker 0."""
    batches: list[int] = field(default_factory=list)


class _Worker:
    """One worker with its controller and its machine."""

    def __init__(self, job: Job, rank: int, machine: SharedMachine, *, predicts: bool) -> None:
        self.rank, self.machine = rank, machine
        self.director = ResourceController(job, Rank(rank), receiver_delay_s=0.0)
        self.predictor = DemandPredictor() if predicts else None

    def compute_s(self, core_s: float, now_s: float) -> float:
        """Return the time of that work from now on."""
        left, at_s = core_s, now_s
        while True:
            cores = self.machine.left(at_s, CORES)
            until_s = self.machine.next_change_s(at_s)
            if (until_s - at_s) * cores >= left:
                return at_s + left / cores - now_s
            left -= (until_s - at_s) * cores
            at_s = until_s

    def end_step(self, step: StepTiming, now_s: float) -> None:
        """Report a step in the same order as the sidecar."""
        self.director.handle(step, now_s)
        if (predictor := self.predictor) is None:
            return
        measured = self.director.measured_samples_per_s()
        predictor.add_step(step, now_s, measured)
        if predictor.is_due(now_s):
            decision = predictor.sample(now_s, self.machine.counters(CORES), measured)
            self.director.set_expected_speed(decision.samples_per_s, decision.reason(), now_s)


def run(name: str, rule: str, seed: int) -> Outcome:
    """Run once to the same number of samples."""
    recipes = {**TUNING, **HELD_OUT}[name]
    batch = BATCHES[seed]
    job = job_of(batch)
    idle = CoLocatedDemand(((1e9, 0.0),))
    machines = [
        SharedMachine(
            idle if recipe is None else CoLocatedDemand(phases(recipe, 100 * seed + rank))
        )
        for rank, recipe in enumerate(recipes)
    ]
    workers = [_Worker(job, k, m, predicts=rule == "predicted") for k, m in enumerate(machines)]
    members = tuple(Member(w, 1, MemberState.READY, "a:1", "a:2") for w in job.workers())
    for worker in workers:
        worker.director.handle(Peers(Membership(1, job.key, WORKERS, members), 50_000), 0.0)
        worker.director.handle(SpeedProbe(200, 1.0, 4.0, 0.0, None, 400), 0.0)
    _publish(workers)
    random = np.random.default_rng(seed)
    outcome, now_s, iteration, samples = Outcome(), 0.0, 0, 0
    steps = followed = 0
    target = 0.6 * SECONDS * WORKERS * CORES / SAMPLE_CORE_S
    while samples < target:
        iteration += 1
        noise = np.exp(random.normal(0.0, NOISE, WORKERS))
        sizes = _sizes(workers, rule, batch, now_s)
        costs = [
            float(noise[k]) * (FIXED_CORE_S + size * SAMPLE_CORE_S) for k, size in enumerate(sizes)
        ]
        took = [w.compute_s(cost, now_s) for w, cost in zip(workers, costs, strict=True)]
        end_s = now_s + max(took) + EXCHANGE_S
        outcome.times.append(now_s)
        outcome.left.append(machines[0].left(now_s, CORES))
        outcome.batches.append(sizes[0])
        for worker, size, cost, compute_s in zip(workers, sizes, costs, took, strict=True):
            worker.machine.advance(now_s + compute_s, CORES, is_busy=True)
            worker.machine.advance(end_s, CORES, is_busy=False)
            waited_s = max(took) - compute_s
            outcome.waited_s += waited_s
            if rule in ("reactive", "predicted"):
                step = StepTiming(iteration, size, compute_s, end_s - now_s, cost, cost, waited_s)
                worker.end_step(step, end_s)
            steps += 1
            if worker.predictor is not None:
                followed += worker.predictor.decision.state is DemandState.PREDICTED
        _publish(workers)
        samples += sum(sizes)
        now_s = end_s
    outcome.seconds, outcome.predicted_fraction = now_s, followed / steps
    return outcome


def _sizes(workers: list[_Worker], rule: str, batch: int, now_s: float) -> list[int]:
    """Return the local batch sizes of the next step."""
    if rule == "static":
        return [batch // WORKERS] * WORKERS
    if rule == "oracle":
        speeds = {Rank(w.rank): w.machine.left(now_s, CORES) for w in workers}
        for _ in range(3):  # a larger share extends into later demand
            sizes = shares(batch, speeds)
            for worker in workers:
                core_s = FIXED_CORE_S + sizes[Rank(worker.rank)] * SAMPLE_CORE_S
                speeds[Rank(worker.rank)] = core_s / worker.compute_s(core_s, now_s)
        return list(shares(batch, speeds).values())
    directives = [worker.director.directive for worker in workers]
    return [batch // WORKERS if d is None else d.local_batch_size for d in directives]


def _publish(workers: list[_Worker]) -> None:
    for worker in workers:
        own = worker.director.own()
        for other in workers:
            if other is not worker and own.samples_per_s > 0:
                other.director.handle_capacity(own, 1)


def _run(arguments: tuple[str, str, int]) -> tuple[tuple[str, str, int], Outcome]:
    return arguments, run(*arguments)


def print_table(names: list[str], processes: int) -> None:
    """Print a row for each trace, and each bar."""
    work = [(name, rule, seed) for name in names for rule in RULES for seed in BATCHES]
    with ProcessPoolExecutor(processes) as pool:
        found = dict(pool.map(_run, work, chunksize=1))
    heads = f"{' | '.join(RULES)} | over reactive | seeds | over static | followed"
    print(f"| other work | {heads} |\n|---|{'---:|' * 8}")
    changes: dict[str, dict[str, list[float]]] = {
        kind: {rule: [] for rule in ("reactive", "static")} for kind in ("waiting", "time")
    }
    for name in names:
        by_rule = {rule: [found[name, rule, seed] for seed in BATCHES] for rule in RULES}
        cells = [
            f"{statistics.fmean(o.waited_s for o in each):.0f} s, "
            f"{statistics.fmean(o.seconds for o in each):.0f} s"
            for each in by_rule.values()
        ]
        waits = {
            rule: _changes(by_rule["predicted"], by_rule[rule], lambda o: o.waited_s)
            for rule in ("reactive", "static")
        }
        spread = f"{min(waits['reactive']):+.1%} to {max(waits['reactive']):+.1%}"
        followed = statistics.fmean(o.predicted_fraction for o in by_rule["predicted"])
        cells += [
            f"{_mean(waits['reactive']):+.1%}", spread, f"{_mean(waits['static']):+.1%}",
            f"{followed:.0%}",
        ]  # fmt: skip
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        for rule, each in waits.items():
            changes["waiting"][rule].append(_mean(each))
            times = _changes(by_rule["predicted"], by_rule[rule], lambda o: o.seconds)
            changes["time"][rule].append(_mean(times))
    print()
    for kind, by_rule_changes in changes.items():
        for rule, each in by_rule_changes.items():
            median, worst = statistics.median(each), max(each)
            text = f"{kind} over {rule}: median {median:+.1%}, worst {worst:+.1%}"
            text += f", best {min(each):+.1%}"
            if kind == "waiting":
                text += f"; median at most -10 %: {_yes(median <= -0.1)}"
            if rule == "reactive":
                text += f"; worst at most +3 %: {_yes(worst <= 0.03)}"
            print(text)


def _changes(
    new: list[Outcome], old: list[Outcome], value: Callable[[Outcome], float]
) -> list[float]:
    return [value(a) / value(b) - 1.0 for a, b in zip(new, old, strict=True)]


def _mean(changes: list[float]) -> float:
    return math.exp(statistics.fmean(math.log1p(each) for each in changes)) - 1.0


def _yes(is_met: bool) -> str:
    return "yes" if is_met else "NO"


def print_cost() -> None:
    """Print CPU time of a predictor with a full history, at one and at ten steps a second, and its
    memory.

    Also print CPU time of reading the kernel's files, once a second.
    """
    tracemalloc.start()
    _cost(1, 1200)
    print(f"memory of its objects: {tracemalloc.get_traced_memory()[1] / 1e6:.2f} MB")
    tracemalloc.stop()
    for steps_per_s in (1, 10):
        print(f"{steps_per_s} steps/s: {_cost(steps_per_s, 2000):.3%} of a core")
    began_s = time.process_time()
    for _ in range(1000):
        read_machine_cpu()
    print(f"files: {(time.process_time() - began_s) / 1000:.3%} of a core")


def _cost(steps_per_s: int, seconds: int) -> float:
    """Return the share of a core that a predictor uses in the second half of that time."""
    predictor, machine = DemandPredictor(), SharedMachine(CoLocatedDemand(((20, 0), (10, 2))))
    used_s = 0.0
    for tick in range(seconds * steps_per_s):
        now_s = tick / steps_per_s
        machine.advance(now_s, CORES, is_busy=True)
        step_s = 1.0 / steps_per_s
        cores = machine.left(now_s, CORES)
        step = StepTiming(tick, 100, step_s, step_s, cores * step_s, cores * step_s, 0.0)
        before_s = time.process_time()
        predictor.add_step(step, now_s, 50.0 * cores)
        if predictor.is_due(now_s):
            predictor.sample(now_s, machine.counters(CORES), 50.0 * cores)
        if now_s >= seconds / 2:
            used_s += time.process_time() - before_s
    return used_s / (seconds / 2)


def plot(path: Path) -> None:
    """Draw the available cores and the batches of worker 0, late in a held-out trace."""
    mpl.rcParams.update({"svg.hashsalt": "demand", "svg.fonttype": "none", "font.size": 9})
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 4.2), height_ratios=(1, 2))
    for rule, colour in (("oracle", "#999999"), ("reactive", "#d98200"), ("predicted", "#0b6fb8")):
        found = run(PLOTTED, rule, 1)
        shown = [k for k, now_s in enumerate(found.times) if 0 <= now_s - PLOTTED_S < 80]
        times = [found.times[k] - PLOTTED_S for k in shown]
        batches = [found.batches[k] for k in shown]
        below.step(times, batches, where="post", color=colour, linewidth=1.2, label=rule)
        if rule == "predicted":
            left = [found.left[k] for k in shown]
            above.step(times, left, where="post", color="#555555", linewidth=1)
    above.set_ylabel("cores left")
    above.set_ylim(0, CORES + 0.3)
    below.set_ylim(40, 110)
    below.set_ylabel("samples of worker 0")
    below.set_xlabel(f"seconds, from {PLOTTED_S:g} s of the run on")
    below.legend(frameon=False, ncols=3, loc="lower left")
    figure.suptitle(PLOTTED, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", choices=["tuning", "held-out"], default="held-out")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    if options.plot:
        plot(options.plot)
        return
    if options.cost:
        print_cost()
        return
    names = list(TUNING if options.traces == "tuning" else HELD_OUT)
    print(f"commit {commit()}: {len(names)} {options.traces} traces, {len(BATCHES)} seeds\n")
    print_table(names, options.processes)


if __name__ == "__main__":
    main()
