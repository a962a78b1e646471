"""Real jobs for the benchmarks: `dlion run` as a separate process, and its records.

`quotas`, `link` and `exchange_cost` use it. It has no bars and prints nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import yaml

Document = dict[str, Any]
Record = dict[str, Any]

LONGEST_START_S = 90.0
"""Maximum seconds from the command to the first local step, on a busy machine."""
SETTLE_S = 3.0
"""The quota is applied a moment after training begins, and the time before it is accumulated."""
PROBE_S = 11.0


def commit() -> str:
    """Return the checked-out commit, with `+` if files differ from it.

    Ends the process if a package is imported from another tree, as in a second worktree that uses
    the virtual environment of the first: the figures would be those of that tree.
    """
    where = Path(__file__).resolve().parent
    for package in ("dlion_api", "dlion_cli", "dlion_core", "dlion_operator"):
        found = find_spec(package)
        if found is None or not Path(str(found.origin)).is_relative_to(where.parent):
            origin = "nowhere" if found is None else found.origin
            sys.exit(f"{package} is imported from {origin}, not from {where.parent}: run `make "
                     "setup` there and use its .venv, or set PYTHONPATH")  # fmt: skip
    head = _stdout("git", "-C", str(where), "rev-parse", "--short=12", "HEAD").strip()
    changed = _stdout("git", "-C", str(where), "status", "--porcelain").strip()
    return f"{head}{'+' if changed else ''}"


def _stdout(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def random_images(folder: Path, samples: int = 2000) -> Path:
    """Write an .npz of random 32x32x3 images in ten classes: only the cost of a step matters."""
    rng = np.random.default_rng(1)
    path = folder / "images.npz"
    np.savez(
        path,
        x=rng.integers(0, 256, (samples, 32, 32, 3), np.uint8),
        y=rng.integers(0, 10, samples, np.int32),
    )
    return path


def job(*, name: str, workers: int, data: Path, global_batch: int, **sections: Any) -> Document:
    """Return a manifest: this many workers of one site train on `data`; `sections` replace its
    spec.
    """
    spec: Document = {
        "sites": [{"name": "plant-a", "groups": [{"name": "all", "workers": workers}]}],
        "trainer": {
            "program": {"builtin": "cipher"},
            "dataset": {"path": str(data), "format": "npz"},
            "optimizer": {"name": "sgd", "learningRate": 0.01},
            "seed": 1,
            "evaluation": {"everySamples": 10_000_000, "maxSamples": 100},
        },
        "batching": {"globalBatchSize": {"initial": global_batch, "growth": False}},
        "knowledgeTransfer": {"policy": "none"},
    }
    _merge(spec, sections)
    return {
        "apiVersion": "dlion.dev/v1alpha1",
        "kind": "DLionJob",
        "metadata": {"name": name},
        "spec": spec,
    }


def _merge(into: Document, other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


@dataclass(frozen=True)
class LocalRun:
    """A `dlion run`, during and after its execution."""

    process: subprocess.Popen[bytes]
    out: Path
    probes: Path

    def records(self) -> list[Record]:
        """Return all complete lines of events.jsonl so far."""
        path = self.out / "events.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def of_kind(self, kind: str, rank: int | None = None) -> list[Record]:
        """Return records of one kind, optionally of one worker."""
        return [r for r in self.records() if r["kind"] == kind and rank in (None, r["rank"])]

    def probed(self) -> dict[int, list[Record]]:
        """Return the lines of the probes by rank; link records have their trainer's rank, too."""
        found = {}
        for path in self.probes.iterdir():
            lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
            ranks = {line["rank"] for line in lines if line["kind"] == "step"}
            if ranks:
                found[int(ranks.pop())] = lines
        return found

    def wait_for_training(self) -> None:
        """Return when training begins. Raises: RuntimeError if that fails."""
        end_s = time.monotonic() + LONGEST_START_S
        while not any(r.get("reason") == "TrainingStarted" for r in self.records()):
            if self.process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"the run in {self.out} did not begin to train: see its logs")
            time.sleep(0.2)

    def namespaces(self) -> dict[int, str]:
        """Return the network namespace of each worker by rank."""
        prefix = f"dlion-{self.process.pid}-"
        names = [p.name for p in Path("/run/netns").iterdir() if p.name.startswith(prefix)]
        return {int(name.rpartition("-w")[2]): name for name in names if "-w" in name}

    def pids(self, module: str) -> dict[int, int]:
        """Return the process ids of the workers' processes with that module, by rank."""
        return {int(config["rank"]): pid for pid, config in self._processes(module)}

    def zero_monotonic_s(self) -> float:
        """Return the monotonic time of the zero of the records; only during the run."""
        return min(config["start_time_monotonic_s"] for _, config in self._processes("supervisor"))

    def _processes(self, module: str) -> Iterator[tuple[int, Record]]:
        """Yield id and configuration of every process of this run of `dlion_worker.<module>`."""
        for folder in Path("/proc").iterdir():
            try:
                words = (folder / "cmdline").read_text().replace("\0", " ").split()
                if f"dlion_worker.{module}" not in words or not folder.name.isdecimal():
                    continue
                place = next(word for word in words if word.endswith("config.json"))
                config = json.loads(Path(place).read_text())
            except (OSError, StopIteration, ValueError):
                continue
            if config["results_dir"] == str(self.out.resolve()):
                yield int(folder.name), config

    def began_s(self) -> float:
        """Return when the first worker began to train, by the records' time."""
        started = [r for r in self.of_kind("event") if r["reason"] == "TrainingStarted"]
        return min(float(r["time_s"]) for r in started)

    def finish(self) -> None:
        """Wait for the end. Raises: RuntimeError if the run failed."""
        if self.process.wait() != 0:
            raise RuntimeError(f"dlion run ended with {self.process.returncode}: see {self.out}")


@contextmanager
def started(
    document: Document,
    environment: Document | None,
    out: Path,
    *,
    data_root: Path | None = None,
    probe_links_s: float | None = None,
) -> Iterator[LocalRun]:
    """Start that job in that environment; end it if the caller leaves before its end.

    `data_root`: the folder of its data, so that the results have no path of this machine.
    `probe_links_s`: interval of the probes in the trainers (`probe/sitecustomize.py`); 0: without
    links.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    files = {"job": document, "environment": environment}
    paths = {name: out.parent / f"{out.name}-{name}.yaml" for name in files}
    for name, content in files.items():
        paths[name].write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "dlion_cli", "run", str(paths["job"]), "--out", str(out)]
    if environment is not None:
        command += ["--environment", str(paths["environment"])]
    if data_root is not None:
        command += ["--data-root", str(data_root)]
    probes = out.parent / f"{out.name}-probe"
    variables = dict(os.environ)
    if probe_links_s is not None:
        probes.mkdir()
        where = [
            str(Path(__file__).parent / "probe"),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
        variables |= {
            "PYTHONPATH": os.pathsep.join(where),
            "DLION_PROBE_DIR": str(probes),
            "DLION_PROBE_LINKS_S": str(probe_links_s),
        }
    with (out.parent / f"{out.name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=variables
        )
    try:
        yield LocalRun(process, out, probes)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=30)


def alone_samples_per_s(
    out: Path, data: Path, environment: Document, seconds: float, samples: int
) -> float:
    """Return samples per second of wall time of one worker there, without any exchange.

    Its steps have this many samples.
    """
    document = job(
        name="alone",
        workers=1,
        data=data,
        global_batch=samples,
        exchange={"policy": "none"},
        trainer={"stop": {"maxSeconds": seconds}},
    )
    with started(document, environment, out) as run:
        run.finish()
    began_s = run.began_s() + SETTLE_S
    steps = [s for s in run.of_kind("step") if s["time_s"] - s["wall_s"] >= began_s]
    return sum(s["local_batch_size"] for s in steps) / sum(s["wall_s"] for s in steps)


def probed_samples_per_s(environment: Document, samples: int) -> float:
    """Return the same of a short trial run, to choose the time of a step on this machine."""
    with tempfile.TemporaryDirectory(prefix="dlion-bench-") as temporary:
        folder = Path(temporary)
        data = random_images(folder)
        return alone_samples_per_s(folder / "probe", data, environment, PROBE_S, samples)


def sampled(run: LocalRun, every_s: float, look: Callable[[float], None]) -> None:
    """Call `look` with the monotonic time at that interval until the run is over."""
    next_s = time.monotonic()
    while run.process.poll() is None:
        look(time.monotonic())
        next_s = max(next_s + every_s, time.monotonic())
        time.sleep(max(0.0, next_s - time.monotonic()))
