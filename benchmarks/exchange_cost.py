"""Measure the cost of the exchange beside the gradient in a real run: CPU, memory, the sidecar.

    python benchmarks/exchange_cost.py [--runs 5] [--seconds 60]

Run as root. Four workers train `cipher` with policy `dlion`, 192 samples each, on uplinks of 50
Mbit/s that all links of a worker share. Thread clocks in the trainers measure CPU (`probe/`); that
of sidecars is from /proc. Memory is what a process does not share with the one that it is forked
from, as trainers of a local run are; so is the plain training that they are compared with. Exit
code 1 if a bar is missed. Left out: a sidecar's memory (tests/local/test_sidecar.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import local_runs
from local_runs import LocalRun, Record

WORKERS, SAMPLES_EACH, MBIT_PER_S = 4, 192, 50
MACHINE_SHARE = 0.96
"""Share of the machine's cores for the workers; the rest is for their sidecars."""
MODEL_BYTES = 4 * 1_147_466
CPU_BAR, SIDECAR_BAR_CORES = 0.25, 0.02
MEMORY_FIXED_BYTES = 64e6
MODELS_PER_PEER = 6
SKIPPED_STEPS = 3
"""The first steps also set up links and touch memory."""

STEP, OPTIMIZER, REPORTS, PROBE = (
    "gradient (its Python thread)",
    "optimizer",
    "reports to sidecar and coordinator",
    "probe",
)
NOT_EXCHANGE = (STEP, OPTIMIZER, REPORTS, PROBE)
OUTSIDE = ("gradient", "optimizer", "reports", "all else in the trainer")
TENSORFLOW_THREADS = ("tf_", "Eigen")
ON_EXCHANGE_THREAD = ("cut into frames, checksum", "parse frames", "put together, checksum")
GRPC_THREADS = ("event_engine", "grpc_", "resolver-execut", "lifeguard", "timer_manager")

PLAIN = """
import gc, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import dlion_worker.trainer.__main__  # what trainers are forked with
import numpy as np
import tensorflow as tf
import keras
from dlion_worker.training.programs.builtin import cipher
gc.freeze()
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
tf.config.threading.set_intra_op_parallelism_threads(1)
model = cipher((32, 32, 3), 10)
model.compile(keras.optimizers.SGD(0.01, momentum=0.9),
              keras.losses.SparseCategoricalCrossentropy(from_logits=True))
with np.load(sys.argv[1]) as data:
    x, y = data["x"].astype(np.float32) / 255, data["y"]
model.fit(x, y, batch_size=int(sys.argv[2]), epochs=2, verbose=0)
lines = open("/proc/self/smaps_rollup").read().splitlines()
print(sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_")))
"""


@dataclass
class Sidecars:
    """CPU of the sidecars, measured from outside."""

    began: dict[int, tuple[float, float]] = field(default_factory=dict)
    cores: dict[int, float] = field(default_factory=dict)

    def look(self, run: LocalRun) -> None:
        """Take one reading of each."""
        now_s = time.monotonic()
        for rank, pid in run.pids("sidecar").items():
            if (cpu_s := _cpu_s(pid)) is None:
                continue
            before_s, before_cpu_s = self.began.setdefault(rank, (now_s, cpu_s))
            if now_s > before_s:
                self.cores[rank] = (cpu_s - before_cpu_s) / (now_s - before_s)


def _cpu_s(pid: int) -> float | None:
    """Return CPU seconds of a process; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def parts(steps: list[Record]) -> dict[str, float]:
    """Return CPU seconds per iteration of one worker, by part.

    The gradient is the threads of TensorFlow and the call into it, without the cost of the probe.
    """
    first, last = steps[SKIPPED_STEPS], steps[-1]
    count = last["iteration"] - first["iteration"]
    spent: Counter[str] = Counter(last["parts"])
    spent.subtract(first["parts"])
    threads: Counter[str] = Counter(last["threads"])
    threads.subtract({name: s for name, s in first["threads"].items() if name in threads})
    loop_s = threads["exchange"] + sum(s for n, s in threads.items() if "_poll_wrapper" in n)
    core_s = sum(s for name, s in threads.items() if name.startswith(GRPC_THREADS))
    found = {name: s for name, s in spent.items() if name not in NOT_EXCHANGE}
    found["gRPC, loop and Python"] = loop_s - sum(spent[name] for name in ON_EXCHANGE_THREAD)
    found["gRPC, its threads: TLS and sockets"] = core_s
    tensorflow_s = sum(s for name, s in threads.items() if name.startswith(TENSORFLOW_THREADS))
    found = {
        "gradient": tensorflow_s + spent[STEP],
        "optimizer": spent[OPTIMIZER],
        "reports": spent[REPORTS],
        **found,
    }
    whole_s = last["process_s"] - first["process_s"] - spent[PROBE]
    found["all else in the trainer"] = whole_s - sum(found.values())
    return {name: s / count for name, s in found.items()}


def plain_bytes(data: Path) -> int:
    """Return private bytes of plain Keras training of the same model with the same batch."""
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(data), str(SAMPLES_EACH)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout.split()[-1])


@dataclass(frozen=True)
class Cost:
    """The figures of one run."""

    per_iteration_s: dict[str, float]
    """CPU seconds by part, mean over the workers."""
    ratio: float
    sidecar_cores: float
    trainer_bytes: float
    plain_bytes: float
    step_s: float
    sent_bytes: float
    """Per iteration and link."""

    @property
    def memory_bar_bytes(self) -> float:
        """Return the memory that a trainer may use above plain Keras training."""
        return MODELS_PER_PEER * MODEL_BYTES * (WORKERS - 1) + MEMORY_FIXED_BYTES

    @property
    def held(self) -> bool:
        """Report whether every bar was met."""
        return (
            self.ratio <= CPU_BAR
            and self.sidecar_cores <= SIDECAR_BAR_CORES
            and self.trainer_bytes - self.plain_bytes <= self.memory_bar_bytes
        )


def once(folder: Path, *, seconds: float, codec: str) -> Cost:
    """Return the cost of one run."""
    data = local_runs.random_images(folder)
    plain = plain_bytes(data)
    document = local_runs.job(
        name="cost",
        workers=WORKERS,
        data=data,
        global_batch=WORKERS * SAMPLES_EACH,
        batching={"policy": "even"},
        exchange={"policy": "dlion", "codec": codec},
        trainer={"stop": {"maxSeconds": seconds}},
    )
    environment = {
        "name": "cost",
        "workers": [{"count": WORKERS, "cores": 1, "mbitPerS": MBIT_PER_S}],
        "coreScale": MACHINE_SHARE * len(os.sched_getaffinity(0)) / WORKERS,
    }
    sidecars = Sidecars()
    with local_runs.started(document, environment, folder / "job", probe_links_s=0.0) as run:
        run.wait_for_training()
        local_runs.sampled(run, 2.0, lambda _: sidecars.look(run))
        run.finish()
    return _cost(run, sidecars, plain)


def _cost(run: LocalRun, sidecars: Sidecars, plain: int) -> Cost:
    by_rank = [
        [line for line in lines if line["kind"] == "step"] for lines in run.probed().values()
    ]
    found = [parts(steps) for steps in by_rank]
    names = {name: None for one in found for name in one}
    mean = {name: statistics.mean(one.get(name, 0.0) for one in found) for name in names}
    exchange_s = sum(s for name, s in mean.items() if name not in OUTSIDE)
    links = run.of_kind("link")
    iterations = sum(steps[-1]["iteration"] for steps in by_rank)
    return Cost(
        per_iteration_s=mean,
        ratio=exchange_s / mean["gradient"],
        sidecar_cores=max(sidecars.cores.values()),
        trainer_bytes=max(step["private_bytes"] for steps in by_rank for step in steps),
        plain_bytes=plain,
        step_s=statistics.median(s["wall_s"] for s in run.of_kind("step")),
        sent_bytes=sum(link["sent_bytes"] for link in links) / iterations / (WORKERS - 1),
    )


def show(number: int, cost: Cost) -> None:
    """Print one run."""
    print(
        f"run {number}: step {cost.step_s:.2f} s, {cost.sent_bytes / 1e3:.0f} kB per link and step"
    )
    for name, seconds in sorted(cost.per_iteration_s.items(), key=lambda item: -item[1]):
        share = seconds / cost.per_iteration_s["gradient"]
        print(f"    {name:40} {seconds * 1e3:8.2f} ms {share:7.1%}")
    print(f"    exchange / gradient {cost.ratio:.1%} (bar {CPU_BAR:.0%});"
          f" with everything except the gradient {_wider(cost):.1%}")  # fmt: skip
    print(f"    sidecar {cost.sidecar_cores:.2%} of a core (bar {SIDECAR_BAR_CORES:.0%})")
    trainer, plain = cost.trainer_bytes / 1e6, cost.plain_bytes / 1e6
    print(f"    trainer {trainer:.0f} MB, plain Keras {plain:.0f} MB: {trainer - plain:.0f} MB"
          f" over it (bar {cost.memory_bar_bytes / 1e6:.0f} MB)", flush=True)  # fmt: skip


def _wider(cost: Cost) -> float:
    spent = cost.per_iteration_s
    return (sum(spent.values()) - spent["gradient"]) / spent["gradient"]


def main() -> int:
    """Return the exit code: 0 if every run met the bars."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--codec", default="float16")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--keep", type=Path, help="keep the result folders there")
    arguments = parser.parse_args()
    print(f"commit {local_runs.commit()}; {WORKERS} workers, cipher, {SAMPLES_EACH} samples each,"
          f" shared uplinks of {MBIT_PER_S} Mbit/s, {arguments.codec}")  # fmt: skip
    costs = []
    for number in range(1, arguments.runs + 1):
        with tempfile.TemporaryDirectory(prefix="dlion-bench-") as temporary:
            folder = Path(temporary)
            if arguments.keep is not None:
                folder = arguments.keep / str(number)
                folder.mkdir(parents=True)
            costs.append(once(folder, seconds=arguments.seconds, codec=arguments.codec))
        show(number, costs[-1])
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([vars(cost) for cost in costs]))
    held = all(cost.held for cost in costs)
    print(f"bars met: {held}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
