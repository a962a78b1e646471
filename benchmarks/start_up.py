"""Measure the CPU cost of starting a worker, part by part.

    python benchmarks/start_up.py --data ../shared/data/cifar10 [--runs 5] [--against REV]

A worker of benchmarks/federation/job.yaml starts with `cipher`, one third of CIFAR-10 and all of
its test images, as PNGs in TFRecord files. Each start is a new process on one core, without
Matplotlib, as in the worker's image. The script prints CPU seconds as median (range). With
`--against` it also prints the same of another commit, whose processes alternate with those of this
tree, and the ratios of pairs. It omits wall time, which depends on other load of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from local_runs import commit

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("imports", "data", "model", "trace", "all")
_QUOTA_CORES = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of train/test.tfrecord")
    parser.add_argument("--runs", type=int, default=5, help="processes of each tree (5)")
    parser.add_argument("--against", metavar="REV", help="another commit to compare with")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(_measured_here(options.data)))
        return
    with tempfile.TemporaryDirectory(prefix="dlion-start-up-") as folder:
        trees = {commit(): ROOT}
        if options.against:
            trees[options.against] = checked_out(options.against, Path(folder), ("api", "worker"))
        for tree in trees.values():
            _measured(tree, options.data)  # it leaves compiled files, as in an image
        rounds = [
            {name: _measured(tree, options.data) for name, tree in trees.items()}
            for _ in range(options.runs)
        ]
    print(f"CPU seconds, {options.runs} starts each\n")
    print_rounds(list(trees), PARTS, rounds)


def checked_out(revision: str, folder: Path, parts: Sequence[str]) -> Path:
    """Check out that commit's folders `parts` in `folder`."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", revision, *parts],
        capture_output=True,
        check=True,
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def _measured(tree: Path, data: Path) -> dict[str, float]:
    """Return CPU seconds of each part of one start with the sources of that tree."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree / 'api'}:{tree / 'worker'}",
        "PYTHONDONTWRITEBYTECODE": "",  # else only trees used before have their modules compiled
    }
    command = [sys.executable, str(Path(__file__)), "--once", "--data", str(data)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(done.stderr)
    parts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return parts


def _measured_here(data_root: Path) -> dict[str, float]:
    """Start as `dlion_worker.trainer` does, up to the wait for other workers."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # as if it were not installed
    marks = {}
    import dlion_worker.trainer.__main__  # noqa: F401

    marks["imports"] = time.process_time()
    import yaml

    from dlion_api.names import Rank
    from dlion_api.spec import load_job
    from dlion_worker.training import datasets, programs, threads
    from dlion_worker.training.model import FlatModel

    job = load_job(yaml.safe_load((ROOT / "benchmarks/federation/job.yaml").read_text()))
    threads.configure(_QUOTA_CORES)
    rank = Rank(1)
    began_s = time.process_time()
    program = programs.load(job.spec.trainer.program, directory=None)
    data = datasets.load(job, job.worker(rank), program=program, data_root=data_root)
    marks["data"] = time.process_time() - began_s
    model = FlatModel(
        program,
        input_shape=data.input_shape,
        class_count=data.class_count,
        seed=1,
        rank=rank,
        freeze=(),
        input_dtype=data.input_dtype,
    )
    marks["model"] = time.process_time() - began_s - marks["data"]
    x_B, y_B = datasets.BatchStream(data, seed=1, rank=rank).next(8)
    model.step(x_B, y_B)
    model.evaluate(x_B, y_B)
    marks["trace"] = time.process_time() - began_s - marks["data"] - marks["model"]
    return {**marks, "all": sum(marks.values())}


def print_rounds(
    names: list[str], parts: Sequence[str], rounds: list[dict[str, dict[str, float]]]
) -> None:
    """Print one row for each tree; with two, also the ratios of the first to the second."""
    print(f"| commit | {' | '.join(parts)} |\n|---|{'---|' * len(parts)}")
    for name in names:
        cells = [_spread([r[name][part] for r in rounds]) for part in parts]
        print(f"| {name} | {' | '.join(cells)} |")
    if len(names) > 1:
        new, old = names
        cells = [_spread([r[new][part] / r[old][part] for r in rounds]) for part in parts]
        print(f"| ratio of pairs | {' | '.join(cells)} |")


def _spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
