"""Compare DLion with TensorFlow's ring all-reduce: same network, model, data, batch and target.

    python benchmarks/peers/compare.py --data ../shared/data/cifar10 [--runs 5] [--whole]
    python benchmarks/peers/compare.py --data DIR --policies adaptive dlion --runs 3 --alone

Run as root. Four workers have links of 50, 35, 20 and 20 Mbit/s, in the network namespaces of
`dlion run`; they share the machine's cores without further quotas. `MultiWorkerMirroredStrategy`
runs on these links (`--shaped-steps`, for its seconds per step), then on unlimited links (to the
target, for its number of steps). Then `dlion run` runs to the target `--runs` times, each with its
own seed. The strategy's time to the target is its steps times its seconds per step, unless
`--whole` also runs it to the end on the shaped links (hours). Time counts from the first step.
`--policies` are DLion's and alternate; `--alone` omits the strategy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import local_runs  # noqa: E402 - the benchmarks' shared module is one folder up

from dlion_api.names import Rank  # noqa: E402
from dlion_api.spec import load_job  # noqa: E402
from dlion_environments.loading import load_environment  # noqa: E402
from dlion_local.emulation.network.namespaces import NamespaceNetwork  # noqa: E402
from dlion_results.summary.curves import first_crossing_s  # noqa: E402

MBIT_PER_S = (50, 35, 20, 20)
GLOBAL_BATCH, LEARNING_RATE, MOMENTUM = 192, 0.02, 0.9
TARGET = 0.55
PORT = 29_500
CORES_EACH = 2.0
"""A quota of all cores of a machine with two, so none."""
UNSHAPED_MAX_STEPS, MAX_DLION_S = 6000, 900
FIRST_STEPS = 3
"""Steps that trace, connect and fill caches are not timed."""


@dataclass(frozen=True)
class Mirrored:
    """The result of the strategy."""

    step_s: float
    """Median seconds per step."""
    steps_to_target: float | None
    """Interpolated between two evaluations, as for dlion."""
    seconds_to_target: float | None
    """Seconds by its own clock."""


def document(
    data: Path,
    *,
    seed: int,
    stop: dict[str, float],
    policy: str = "dlion",
    rate: float = LEARNING_RATE,
) -> local_runs.Document:
    """Return the job of both; `exchange` and the sections after it are only for DLion."""
    return local_runs.job(
        name="peers",
        workers=len(MBIT_PER_S),
        data=data / "train.tfrecord",
        global_batch=GLOBAL_BATCH,
        trainer={
            "dataset": {"format": "tfrecord", "evaluationPath": str(data / "test.tfrecord")},
            "optimizer": {"name": "sgd", "learningRate": rate, "momentum": MOMENTUM},
            "seed": seed,
            "evaluation": {"everySamples": 20 * GLOBAL_BATCH, "maxSamples": 2000},
            "stop": stop,
        },
        exchange={"policy": policy},
        synchronization={"mode": "synchronous"},
        knowledgeTransfer={"policy": "best2all", "everySteps": 100},
    )


def environment(shaped: bool) -> local_runs.Document:
    """Return the links, or links that do not limit anything."""
    rates = [{"mbitPerS": rate} if shaped else {} for rate in MBIT_PER_S]
    return {
        "name": "peers" if shaped else "peers-unshaped",
        "workers": [{"cores": CORES_EACH, **rate} for rate in rates],
        "coreScale": 1.0,
    }


@contextmanager
def namespaces(folder: Path, job: Path, *, shaped: bool) -> Iterator[NamespaceNetwork]:
    """Create the network of `dlion run` without `dlion run`."""
    path = folder / "environment.yaml"
    path.write_text(yaml.safe_dump(environment(shaped)))
    workers = load_job(yaml.safe_load(job.read_text()), source=str(job), lines=None).workers()
    network = NamespaceNetwork(load_environment(path).plan(workers, None))
    network.start()
    try:
        yield network
    finally:
        network.close()


def mirrored(folder: Path, data: Path, *, shaped: bool, steps: int, target: float) -> Mirrored:
    """Run the strategy for this many steps, or to the target."""
    folder.mkdir(parents=True)
    job = folder / "job.yaml"
    job.write_text(yaml.safe_dump(document(data, seed=1, stop={"maxSteps": steps})))
    with namespaces(folder, job, shaped=shaped) as network:
        ranks = [Rank(index) for index in range(len(MBIT_PER_S))]
        cluster = ",".join(f"{network.host(rank)}:{PORT}" for rank in ranks)
        processes = [_started(folder, job, network, rank, cluster) for rank in ranks]
        try:
            while any(process.poll() is None for process in processes):
                time.sleep(1.0)
                if any(process.poll() for process in processes):
                    raise RuntimeError(f"a worker of the strategy failed: see {folder}/*.log")
                if _accuracy(folder) >= target:
                    break
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
    return _outcome(folder, target)


def _started(
    folder: Path, job: Path, network: NamespaceNetwork, rank: Rank, cluster: str
) -> subprocess.Popen[bytes]:
    enter = ["-m", "dlion_local.emulation.network.enter", *network.enter_arguments(rank), "--"]
    worker = [str(HERE / "mirrored.py"), str(job), "--rank", str(rank), "--cluster", cluster]
    out = ["--out", str(folder / f"steps-{rank}.jsonl")]
    with (folder / f"worker-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *enter, sys.executable, *worker, *out], stdout=log, stderr=log
        )


def _lines(folder: Path) -> list[local_runs.Record]:
    path = folder / "steps-0.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _accuracy(folder: Path) -> float:
    return max((line["accuracy"] for line in _lines(folder) if "accuracy" in line), default=0.0)


def _outcome(folder: Path, target: float) -> Mirrored:
    lines = _lines(folder)
    time_s = {line["step"]: line["time_s"] for line in lines if "time_s" in line}
    judged = [(float(o["step"]), float(o["accuracy"])) for o in lines if "accuracy" in o]
    steps = first_crossing_s(np.array(judged), target) if judged else None
    timed = [step for step in time_s if step > FIRST_STEPS]
    seconds = None
    if steps is not None:
        seconds = float(np.interp(steps, list(time_s), list(time_s.values()))) - time_s[1]
    return Mirrored(
        step_s=statistics.median(time_s[step] - time_s[step - 1] for step in timed),
        steps_to_target=steps,
        seconds_to_target=seconds,
    )


@dataclass(frozen=True)
class Trained:
    """The result of one run of DLion."""

    samples_per_s: float
    reached_s: float | None
    """Seconds from the first step to the target (mean over replicas)."""
    began_s: float
    """Seconds from the command to the first step."""
    noticed_s: float | None
    """Seconds from the target, interpolated between evaluations, to the stop."""
    evaluated_s: float
    """Seconds from the weights of the last evaluation before the stop to the stop."""
    saved_s: float
    """Seconds from the stop to the saved model."""


def dlion(folder: Path, data: Path, *, seed: int, policy: str, rate: float) -> Trained:
    """Train to the target."""
    stop = {"targetAccuracy": TARGET, "maxSeconds": MAX_DLION_S}
    job = document(data, seed=seed, stop=stop, policy=policy, rate=rate)
    with local_runs.started(job, environment(shaped=True), folder) as run:
        run.finish()
    summary = json.loads((folder / "summary.json").read_text())
    events = run.of_kind("event")
    began_s = min(r["time_s"] for r in events if r["reason"] == "TrainingStarted")
    stopped_s = max(r["time_s"] for r in events if r["reason"] == "TrainingStopped")
    saved_s = max(r["time_s"] for r in events if r["reason"] == "ModelSaved")
    reached_s = summary["target"]["time_s"]
    evaluated = [r["time_s"] for r in run.of_kind("evaluation") if not r["final"]]
    steps = run.of_kind("step", 0)
    passed_s = steps[-1]["time_s"] - steps[FIRST_STEPS]["time_s"]
    samples = sum(step["global_batch_size"] for step in steps[FIRST_STEPS + 1 :])
    return Trained(
        samples / passed_s,
        None if reached_s is None else reached_s - began_s,
        began_s,
        None if reached_s is None else stopped_s - reached_s,
        stopped_s - max(evaluated),
        saved_s - stopped_s,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of train/test.tfrecord")
    parser.add_argument("--runs", type=int, default=5, help="of each policy")
    parser.add_argument("--policies", nargs="+", default=["dlion"])
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help="of DLion")
    parser.add_argument("--shaped-steps", type=int, default=25)
    parser.add_argument("--whole", action="store_true", help="the strategy to the target, shaped")
    parser.add_argument("--alone", action="store_true", help="without the strategy")
    parser.add_argument("--out", type=Path, default=Path("runs/peers"))
    arguments = parser.parse_args()
    print(
        f"commit {local_runs.commit()}; links of {MBIT_PER_S} Mbit/s, {GLOBAL_BATCH} samples a "
        f"step, learning rate {arguments.learning_rate:g} (of the strategy {LEARNING_RATE:g})"
    )
    data = arguments.data.resolve()
    step_s, reference_s = (None, None) if arguments.alone else _strategy(arguments, data)
    outcomes: dict[str, list[Trained]] = {}
    for seed in range(1, arguments.runs + 1):
        for policy in arguments.policies:
            folder = arguments.out / f"{policy}-{seed}"
            rate = arguments.learning_rate
            outcome = dlion(folder, data, seed=seed, policy=policy, rate=rate)
            _say(f"{policy}, seed {seed}", outcome.samples_per_s, outcome.reached_s)
            outcomes.setdefault(policy, []).append(outcome)
    for policy, own in outcomes.items():
        _sum_up(policy, own, step_s, reference_s)


def _strategy(arguments: argparse.Namespace, data: Path) -> tuple[float, float | None]:
    """Run it; return its seconds per step on the shaped links, and to the target."""
    out, whole = arguments.out, arguments.whole
    shaped = mirrored(
        out / "mirrored-shaped",
        data,
        shaped=True,
        steps=UNSHAPED_MAX_STEPS if whole else arguments.shaped_steps,
        target=TARGET if whole else 1.1,
    )
    _say("MultiWorkerMirroredStrategy", GLOBAL_BATCH / shaped.step_s, shaped.seconds_to_target)
    free = mirrored(
        out / "mirrored-unshaped", data, shaped=False, steps=UNSHAPED_MAX_STEPS, target=TARGET
    )
    _say("the same, links without a limit", GLOBAL_BATCH / free.step_s, free.seconds_to_target)
    expected_s = None
    if free.steps_to_target is not None:
        expected_s = free.steps_to_target * shaped.step_s
        print(f"  {free.steps_to_target:.0f} steps to {TARGET:.0%}; at {shaped.step_s:.2f} s each "
              f"on the shaped links: {expected_s:.0f} s")  # fmt: skip
    return shaped.step_s, shaped.seconds_to_target or expected_s


def _sum_up(
    policy: str,
    outcomes: list[Trained],
    step_s: float | None,
    reference_s: float | None,
) -> None:
    rates = [one.samples_per_s for one in outcomes]
    reached = [one.reached_s for one in outcomes if one.reached_s is not None]
    text = (
        f"{policy}: {statistics.median(rates):.0f} samples/s ({min(rates):.0f} to {max(rates):.0f})"
    )
    if step_s is not None:
        ratio = statistics.median(rates) * step_s / GLOBAL_BATCH
        text += f", {ratio:.1f} times MultiWorkerMirroredStrategy's"
    if reached:
        middle = statistics.median(reached)
        text += f"; {TARGET:.0%} after {middle:.0f} s ({min(reached):.0f} to {max(reached):.0f})"
    text += f" in {len(reached)} of {len(outcomes)} runs"
    if reference_s and reached:
        text += (
            f": {reference_s / max(reached):.1f} to {reference_s / min(reached):.1f} times sooner"
        )
    print(text)
    for what, seconds in (
        ("the first step after the command", [one.began_s for one in outcomes]),
        ("the stop after the target", [one.noticed_s for one in outcomes]),
        (
            "the stop after the weights that were found to reach it",
            [one.evaluated_s for one in outcomes],
        ),
        ("the saved model after the stop", [one.saved_s for one in outcomes]),
    ):
        known = [one for one in seconds if one is not None]
        if known:
            middle = statistics.median(known)
            print(f"  {what}: {middle:.1f} s ({min(known):.1f} to {max(known):.1f})")


def _say(what: str, samples_per_s: float, seconds: float | None) -> None:
    reached = "-" if seconds is None else f"{seconds:.0f} s"
    print(f"{what:32} | {samples_per_s:7.0f} samples/s | {TARGET:.0%} after {reached}", flush=True)


if __name__ == "__main__":
    main()
