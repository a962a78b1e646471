"""Measure the time until a local run trains, and its CPU cost until then.

    python benchmarks/run_start.py [--workers 4] [--runs 5] [--against REV]
    python benchmarks/run_start.py --data ../shared/data/cifar10 [--runs 5] [--against REV]

`dlion run` trains the digits with the given number of workers for one step. The script measures
seconds from the command to TrainingStarted and to the first step of every worker. It also measures
memory of all processes when training starts (shared pages count once), their CPU seconds until
then, and those of the whole run. With `--data`, as root, it uses the job, links and quotas of
`peers/compare.py`, which has four workers. It prints median (range). With `--against` it also
prints the same of another commit, whose runs alternate with those of this tree, and the ratios of
pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from local_runs import commit
from start_up import ROOT, checked_out, print_rounds

sys.path.insert(0, str(ROOT / "benchmarks" / "peers"))

import compare

PARTS = (
    "training started, s",
    "first step, s",
    "memory, MB",
    "CPU at the start, s",
    "CPU, s",
)
TRAINING_STARTED, FIRST_STEP = b'"reason":"TrainingStarted"', b'"kind":"step"'
PACKAGES = ("api", "operator", "worker", "cli")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4, help="workers of the run (4)")
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10, for the job of peers")
    parser.add_argument("--runs", type=int, default=5, help="runs of each tree (5)")
    parser.add_argument("--against", metavar="REV", help="another commit to compare with")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dlion-run-start-") as folder:
        trees = {commit(): ROOT}
        if options.against:
            trees[options.against] = checked_out(options.against, Path(folder), PACKAGES)
        for tree in trees.values():
            _measured(tree, options)  # it leaves compiled files
        rounds = [
            {name: _measured(tree, options) for name, tree in trees.items()}
            for _ in range(options.runs)
        ]
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{options.runs} runs each; load averages at the end {load}\n")
    print_rounds(list(trees), PARTS, rounds)


def _job(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The manifest and the environment, if there is one."""
    stop = {"maxSteps": 1}
    if options.data is not None:
        job = compare.document(options.data.resolve(), seed=1, stop=stop, policy="adaptive")
        return job, compare.environment(shaped=True)
    job = yaml.safe_load((ROOT / "examples" / "digits.yaml").read_text())
    job["spec"]["sites"] = [{"name": "a", "groups": [{"name": "g", "workers": options.workers}]}]
    job["spec"]["trainer"] |= {"stop": stop, "dataset": {"name": "digits"}}
    return job, None


def _measured(tree: Path, options: argparse.Namespace) -> dict[str, float]:
    job, environment = _job(options)
    workers = sum(group["workers"] for site in job["spec"]["sites"] for group in site["groups"])
    with tempfile.TemporaryDirectory(prefix="dlion-run-start-") as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        command = [sys.executable, "-m", "dlion_cli", "run", "job.yaml", "--out", "out"]
        if environment is not None:
            (folder / "environment.yaml").write_text(yaml.safe_dump(environment))
            command += ["--environment", "environment.yaml"]
        path = os.pathsep.join(str(tree / package) for package in PACKAGES)
        mark = f"DLION_RUN_START={uuid.uuid4().hex}"
        variables = {**os.environ, "PYTHONPATH": path, **dict([mark.split("=")])}
        began_s, cpu_before_s = time.monotonic(), _children_cpu_s()
        with (folder / "log").open("wb") as log:
            run = subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log)
        events = folder / "out" / "events.jsonl"
        started_s = _seconds_until(run, began_s, lambda: _count(events, TRAINING_STARTED), workers)
        memory_mb, start_cpu_s = _memory_mb_and_cpu_s(mark)
        first_s = _seconds_until(run, began_s, lambda: _count(events, FIRST_STEP), workers)
        if run.wait():
            sys.exit((folder / "log").read_text())
        values = (
            started_s,
            first_s,
            memory_mb,
            start_cpu_s,
            _children_cpu_s() - cpu_before_s,
        )
        return dict(zip(PARTS, values, strict=True))


def _seconds_until(
    run: subprocess.Popen[bytes], began_s: float, count: Callable[[], int], wanted: int
) -> float:
    while count() < wanted and run.poll() is None:
        time.sleep(0.02)
    return time.monotonic() - began_s


def _count(events: Path, text: bytes) -> int:
    return events.read_bytes().count(text) if events.exists() else 0


def _memory_mb_and_cpu_s(mark: str) -> tuple[float, float]:
    """Return proportional set sizes and CPU seconds of all processes with that variable in their
    environment."""
    sum_kb, ticks = 0, 0
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # not a process, or it has ended
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                rollup = (folder / "smaps_rollup").read_text().splitlines()
                sum_kb += next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))  # also of children that have ended
    return sum_kb / 1024, ticks / os.sysconf("SC_CLK_TCK")


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
