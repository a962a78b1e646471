r"""Measure the cost of a simulation beside its gradients: wall time, its parts, and memory.

    python benchmarks/simulator.py --data ../shared/data/cifar10 [--rounds 40] [--runs 3]
    python benchmarks/simulator.py --data ../shared/data/cifar10 --workers 200 --rounds 20 \
        --runs 1 --threads 2 --set exchange.topology=randomRegular --set exchange.degree=8
    python benchmarks/simulator.py --data ../shared/data/cifar10 --against HEAD~1 \
        --set trainer.program='{file: benchmarks/paper/reduced/cifar10.py}'

The job is `cipher` on CIFAR-10. Each run is a separate process, limited to as many cores as it
computes gradients at a time (`--threads`). It runs the simulation first, then only the same
gradients (models, batches, threads). Parts are exclusive wall times of the simulating thread. Bars
apply to the median of the runs: for six workers 2.5 times the gradients alone. For 200 workers and
20 rounds or more they are 15 minutes with set-up and end, and 12 GB. Other numbers of workers have
no bar. Exit code 1 if one is missed.

With `--against` runs of another commit alternate with those of this tree. The script then prints
CPU seconds of the process, as median (range), and the ratios of pairs, without bars. It omits wall
time, which depends on other load of the machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from local_runs import commit
from run_start import PACKAGES
from start_up import checked_out, print_rounds

from dlion_cli.inputs.manifests import apply_set, load_manifest
from dlion_environments.model import Environment, EnvironmentMachine
from dlion_results.run_folder.folder import ResultFolder
from dlion_worker.training import threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlion_environments.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
BAR_RATIO, BAR_RATIO_WORKERS = 2.5, 6
BAR_S, BAR_BYTES = 15 * 60.0, 12e9
BAR_WORKERS, BAR_ROUNDS = 200, 20
REST = "rest: clock, order of events"
CPU_PARTS = ("simulation, CPU s", "set-up and end, CPU s", "gradients alone, CPU s", "all / alone")


class Stopwatch:
    """Exclusive wall seconds of named parts on one thread."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._thread = threading.get_ident()
        self._names = [REST]
        self._since_s = time.perf_counter()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time counted as `name` when the watched thread calls it."""

        @functools.wraps(function)
        def measured(*arguments: Any, **keywords: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*arguments, **keywords)
            self._enter(name)
            try:
                return function(*arguments, **keywords)
            finally:
                self._leave()

        return measured

    def watch(self, owner: Any, methods: str, name: str) -> None:
        """Watch methods of a class or module; `names` are separated by blanks."""
        for method in methods.split():
            setattr(owner, method, self.timed(name, getattr(owner, method)))

    def _enter(self, name: str) -> None:
        self._count()
        self.calls[name] += 1
        self._names.append(name)

    def _leave(self) -> None:
        self._count()
        self._names.pop()

    def _count(self) -> None:
        now_s = time.perf_counter()
        self.seconds[self._names[-1]] += now_s - self._since_s
        self._since_s = now_s


def main() -> None:
    arguments = _parsed()
    if arguments.one:
        print(json.dumps(_run(arguments)))
        return
    if arguments.against:
        _compare(arguments)
        return
    runs = []
    for number in range(1, arguments.runs + 1):
        runs.append(_one_run(ROOT))
        load = os.getloadavg()[0]
        print(f"run {number}: {_line(runs[-1])}, load average {load:.1f}", flush=True)
    _print(runs, arguments)
    is_met = True
    for words, held in _judged(runs, arguments.workers, arguments.rounds):
        print(f"bar: {words}: {'not judged' if held is None else 'met' if held else 'MISSED'}")
        is_met &= held is not False
    sys.exit(0 if is_met else 1)


def _one_run(tree: Path) -> dict[str, Any]:
    """Run in a separate process with the sources of that tree."""
    path = os.pathsep.join(str(tree / package) for package in PACKAGES)
    command = [sys.executable, __file__, *sys.argv[1:], "--one"]
    variables = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    run: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return run


def _compare(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="dlion-simulator-") as folder:
        other = checked_out(arguments.against, Path(folder), PACKAGES)
        trees = {commit(): ROOT, arguments.against: other}
        rounds = [
            {name: _one_run(tree) for name, tree in trees.items()} for _ in range(arguments.runs)
        ]
    first = rounds[0][arguments.against]
    print(
        f"{arguments.workers} workers, {arguments.policy}, {first['steps']} steps of "
        f"{first['samples'] / first['steps']:.0f} samples, {arguments.runs} pairs of runs"
    )
    is_same = len({run["trace"] for each in rounds for run in each.values()}) == 1
    print(f"traces of both commits {'equal' if is_same else 'DIFFERENT'}\n")
    print_rounds(
        list(trees), CPU_PARTS, [{n: _cpu_parts(run) for n, run in each.items()} for each in rounds]
    )


def _cpu_parts(run: dict[str, Any]) -> dict[str, float]:
    whole_s = run["simulated_cpu_s"] + run["outside_cpu_s"]
    alone_s = run["alone_cpu_s"]
    values = (run["simulated_cpu_s"], run["outside_cpu_s"], alone_s, whole_s / alone_s)
    return dict(zip(CPU_PARTS, values, strict=True))


def _judged(runs: list[dict[str, Any]], workers: int, rounds: int) -> list[tuple[str, bool | None]]:
    """Return the bars for that number of workers, and whether each is met; None: not judged."""
    if workers == BAR_RATIO_WORKERS:
        ratio = statistics.median(run["simulated_s"] / run["alone_s"] for run in runs)
        return [(f"{ratio:.2f} times the gradients alone, at most {BAR_RATIO}", ratio <= BAR_RATIO)]
    if workers != BAR_WORKERS:
        return [(f"none for {workers} workers", None)]
    whole_s = statistics.median(run["simulated_s"] + run["outside_s"] for run in runs)
    peak = statistics.median(run["peak_bytes"] for run in runs)
    is_long = rounds >= BAR_ROUNDS
    return [
        (
            f"{rounds} rounds in {whole_s:.0f} s, at most {BAR_S:.0f} s for {BAR_ROUNDS}",
            whole_s <= BAR_S if is_long or whole_s > BAR_S else None,
        ),
        (f"{peak / 1e9:.1f} GB at the peak, at most {BAR_BYTES / 1e9:g} GB", peak <= BAR_BYTES),
    ]


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of train/test.tfrecord")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=40, help="steps of each worker")
    parser.add_argument("--batch", type=int, default=32, help="samples of each worker's step")
    parser.add_argument("--policy", default="dlion")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="P=V")
    parser.add_argument("--threads", type=int, default=1, help="gradients, and cores, at a time")
    parser.add_argument("--held-out", type=int, default=1000, help="samples to evaluate on")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--against", metavar="REV", help="another commit to compare with")
    parser.add_argument("--profile", type=Path, help="write a profile (pstats) of a run there")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name in ("train.tfrecord", "test.tfrecord"):
        if not (arguments.data / name).is_file():
            parser.error(f"--data {arguments.data} holds no {name}")
    return arguments


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    for name, value in threads.environment(1.0).items():
        os.environ.setdefault(name, value)
    from dlion_simulator.run import Simulation
    from dlion_worker.training.model import FlatModel

    steps: list[tuple[Any, Any, Any]] = []
    taken = FlatModel.step

    def step(model: Any, x_B: Any, y_B: Any) -> Any:
        steps.append((model, x_B, y_B))
        return taken(model, x_B, y_B)

    FlatModel.step = step  # type: ignore[method-assign, assignment]
    cpu: Counter[str] = Counter()
    name = "_train"
    setattr(Simulation, name, _adding_cpu(cpu, getattr(Simulation, name)))
    watch = Stopwatch()
    _watch_all(watch)
    with tempfile.TemporaryDirectory() as folder:
        held_out = _first_records(arguments.data / "test.tfrecord", arguments.held_out, folder)
        job = load_manifest(_document(arguments, held_out), source="benchmark", lines=None)
        out = Path(folder) / "out"
        with ResultFolder.create(out, job, now=datetime.now().astimezone()) as results:
            simulation = Simulation(
                job=job,
                plan=_plan(job.workers(), arguments.workers),
                results_dir=out,
                data_root=arguments.data.resolve(),
                program_root=ROOT,
                on_record=results.append,
                judge=lambda _record: None,
                thread_count=arguments.threads,
            )
            began_cpu_s = time.process_time()
            outcome = _profiled(simulation.run, arguments.profile)
            whole_cpu_s = time.process_time() - began_cpu_s
    FlatModel.step = taken  # type: ignore[method-assign]
    parts = dict(watch.seconds)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    outside_s = sum(parts.pop(name, 0.0) for name in ("set up", "end"))
    alone_s, alone_cpu_s = _alone(steps, arguments.threads)
    return {
        "simulated_cpu_s": cpu[name],
        "outside_cpu_s": whole_cpu_s - cpu[name],
        "alone_cpu_s": alone_cpu_s,
        "simulated_s": sum(parts.values()),
        "outside_s": outside_s,
        "alone_s": alone_s,
        "steps": len(steps),
        "samples": sum(len(y_B) for _, _, y_B in steps),
        "virtual_s": outcome.virtual_s,
        "trace": outcome.trace_hash,
        "peak_bytes": peak_bytes,
        "parts": parts,
        "calls": dict(watch.calls),
    }


def _adding_cpu(seconds: Counter[str], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the CPU seconds of the whole process during it added by its name."""

    @functools.wraps(function)
    def measured(*arguments: Any) -> Any:
        began_s = time.process_time()
        try:
            return function(*arguments)
        finally:
            seconds[function.__name__] += time.process_time() - began_s

    return measured


def _profiled(run: Callable[[], Any], path: Path | None) -> Any:
    if path is None:
        return run()
    import cProfile

    profile = cProfile.Profile()
    try:
        return profile.runcall(run)
    finally:
        profile.dump_stats(path)


def _watch_all(watch: Stopwatch) -> None:
    from dlion_core.lifecycle.reporting import Reporter
    from dlion_core.policies import factory
    from dlion_core.resource_control.resource_controller import ResourceController
    from dlion_simulator import links, network, run, trace
    from dlion_worker.training.datasets import BatchStream
    from dlion_worker.training.evaluation import Evaluator
    from dlion_worker.training.replica import LocalReplica

    built = factory.build_for

    def build_for(*arguments: Any) -> Any:
        machine = built(*arguments)
        machine.handle = watch.timed("policies: select, encode, decode, add", machine.handle)
        return machine

    factory.build_for = build_for
    watch.watch(Future, "result", "waiting for gradients")
    watch.watch(LocalReplica, "apply_gradient add replace blend", "weights: optimizer, mixing")
    rates = "_settle _replan _complete_transfers begin"
    watch.watch(network.VirtualNetwork, rates, "network: rates")
    watch.watch(links.VirtualLink, "sendable_bytes push take_delivery state", "links")
    watch.watch(ResourceController, "handle handle_capacity", "sidecars: directives")
    watch.watch(trace.Trace, "take", "records: written and hashed")
    watch.watch(Reporter, "links", "records: made")
    watch.watch(BatchStream, "next", "batches")
    watch.watch(Evaluator, "evaluate_subset", "evaluation between steps")
    watch.watch(run.Simulation, "_build _worker", "set up")
    watch.watch(run, "save_final_models", "end")


def _alone(steps: list[tuple[Any, Any, Any]], thread_count: int) -> tuple[float, float]:
    """Return wall and CPU seconds of the same gradients, this many at a time."""

    def compute(step: tuple[Any, Any, Any]) -> None:
        model, x_B, y_B = step
        model.step(x_B, y_B)  # discarded: those of 200 workers would fill the memory

    with ThreadPoolExecutor(thread_count) as executor:
        list(executor.map(compute, steps[: 2 * thread_count]))
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        list(executor.map(compute, steps))
        return time.perf_counter() - began_s, time.process_time() - began_cpu_s


def _first_records(path: Path, count: int, folder: str) -> str:
    """Copy this many records (length, its checksum, data, checksum).

    Final evaluations use all held-out samples for each worker, and are not part of the measurement.
    """
    content, end = path.read_bytes(), 0
    for _ in range(count):
        end += 16 + struct.unpack_from("<Q", content, end)[0]
    copied = Path(folder) / "held-out.tfrecord"
    copied.write_bytes(content[:end])
    return str(copied)


def _document(arguments: argparse.Namespace, held_out: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "cifar10.yaml").read_text())
    spec, count = document["spec"], arguments.workers
    spec["sites"] = [{"name": "plant", "groups": [{"name": "all", "workers": count}]}]
    dataset = spec["trainer"]["dataset"]
    dataset |= {"path": "train.tfrecord", "evaluationPath": held_out}
    spec["trainer"]["stop"] = {"maxSteps": arguments.rounds}
    total = arguments.batch * count
    spec["batching"]["globalBatchSize"] = {"initial": total, "max": total, "growth": False}
    spec["exchange"] = {"policy": arguments.policy}
    return apply_set(document, tuple(arguments.settings))


def _plan(workers: Any, count: int) -> Plan:
    """Return cores and rates of hetero-sys-a, repeated."""
    kinds = [(24.0, 50.0), (24.0, 50.0), (12.0, 35.0), (12.0, 35.0), (4.0, 20.0), (4.0, 20.0)]
    chosen = [kinds[k % len(kinds)] for k in range(count)]
    machines = tuple(EnvironmentMachine(cores=cores, mbit_per_s=rate) for cores, rate in chosen)
    return Environment(name="benchmark", workers=machines).plan(workers, machine_cores=None)


def _line(run: dict[str, Any]) -> str:
    ratio = run["simulated_s"] / run["alone_s"]
    return (
        f"simulated {run['simulated_s']:.1f} s, gradients alone {run['alone_s']:.1f} s: "
        f"{ratio:.2f}; set-up and end {run['outside_s']:.1f} s, peak {run['peak_bytes'] / 1e9:.2f} "
        f"GB, trace {run['trace']}"
    )


def _print(runs: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    first = runs[0]
    ratios = sorted(run["simulated_s"] / run["alone_s"] for run in runs)
    print(
        f"\ncommit {commit()}: {arguments.workers} workers, {arguments.policy}, "
        f"{first['steps']} steps of {first['samples'] / first['steps']:.0f} samples, "
        f"{arguments.threads} threads, {len(runs)} runs\n"
        f"simulated / gradients alone: median {statistics.median(ratios):.2f}, "
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}\n"
        f"traces {'equal' if len({run['trace'] for run in runs}) == 1 else 'DIFFERENT'}\n"
    )
    print("| part | s (median) | / gradients alone | calls |\n|---|---|---|---|")
    for name in sorted(first["parts"], key=lambda name: -first["parts"][name]):
        seconds = statistics.median(run["parts"].get(name, 0.0) for run in runs)
        share = statistics.median(run["parts"].get(name, 0.0) / run["alone_s"] for run in runs)
        print(f"| {name} | {seconds:.2f} | {share:.2f} | {first['calls'].get(name, '')} |")


if __name__ == "__main__":
    main()
