"""Measure the time until a local run trains, and its CPU cost until then.

    python benchmarks/run_start.py [--workers 4] [--runs 5] [--against REV]

`dlion run` trains the digits with the given number of workers for one step. The script measures
seconds from the command to TrainingStarted and to the first step of every worker. It also measures
memory of all processes when training starts (shared pages count once), and CPU seconds of all
processes to the end. It prints median (range). With `--against` it also prints the same of another
commit, whose runs alternate with those of this tree, and the ratios of pairs.
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

import yaml
from local_runs import commit
from start_up import ROOT, checked_out, print_rounds

PARTS = ("training started, s", "first step, s", "memory, MB", "CPU, s")
TRAINING_STARTED, FIRST_STEP = b'"reason":"TrainingStarted"', b'"kind":"step"'
PACKAGES = ("api", "operator", "worker", "cli")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4, help="workers of the run (4)")
    parser.add_argument("--runs", type=int, default=5, help="runs of each tree (5)")
    parser.add_argument("--against", metavar="REV", help="another commit to compare with")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dlion-run-start-") as folder:
        trees = {commit(): ROOT}
        if options.against:
            trees[options.against] = checked_out(options.against, Path(folder), PACKAGES)
        for tree in trees.values():
            _measured(tree, options.workers)  # it leaves compiled files
        rounds = [
            {name: _measured(tree, options.workers) for name, tree in trees.items()}
            for _ in range(options.runs)
        ]
    print(f"{options.workers} workers, {options.runs} runs each\n")
    print_rounds(list(trees), PARTS, rounds)


def _measured(tree: Path, workers: int) -> dict[str, float]:
    job = yaml.safe_load((ROOT / "examples" / "digits.yaml").read_text())
    job["spec"]["sites"] = [{"name": "a", "groups": [{"name": "g", "workers": workers}]}]
    job["spec"]["trainer"] |= {"stop": {"maxSteps": 1}, "dataset": {"name": "digits"}}
    with tempfile.TemporaryDirectory(prefix="dlion-run-start-") as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        command = [sys.executable, "-m", "dlion_cli", "run", "job.yaml", "--out", "out"]
        path = os.pathsep.join(str(tree / package) for package in PACKAGES)
        mark = f"DLION_RUN_START={uuid.uuid4().hex}"
        variables = {**os.environ, "PYTHONPATH": path, **dict([mark.split("=")])}
        began_s, cpu_before_s = time.monotonic(), _children_cpu_s()
        with (folder / "log").open("wb") as log:
            run = subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log)
        events = folder / "out" / "events.jsonl"
        started_s = _seconds_until(run, began_s, lambda: _count(events, TRAINING_STARTED), workers)
        memory_mb = _memory_mb(mark)
        first_s = _seconds_until(run, began_s, lambda: _count(events, FIRST_STEP), workers)
        if run.wait():
            sys.exit((folder / "log").read_text())
        values = (started_s, first_s, memory_mb, _children_cpu_s() - cpu_before_s)
        return dict(zip(PARTS, values, strict=True))


def _seconds_until(
    run: subprocess.Popen[bytes], began_s: float, count: Callable[[], int], wanted: int
) -> float:
    while count() < wanted and run.poll() is None:
        time.sleep(0.02)
    return time.monotonic() - began_s


def _count(events: Path, text: bytes) -> int:
    return events.read_bytes().count(text) if events.exists() else 0


def _memory_mb(mark: str) -> float:
    """Return proportional set sizes of all processes with that variable in their environment."""
    sum_kb = 0
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # not a process, or it has ended
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                rollup = (folder / "smaps_rollup").read_text().splitlines()
                sum_kb += next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    return sum_kb / 1024


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
