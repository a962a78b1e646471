"""Measure one saturated shaped link whose rate drops during the run.

    python benchmarks/link.py [--runs 5] [--short] [--step-s 0.6]

Run as root. First the script finds how many samples make steps of about the given time on this
machine. In longer steps a whole gradient fits in the budget; in shorter ones the exchange costs
more than allowed. Two workers train `cipher` (float32, policy `dlion`) over links of 20 Mbit/s,
later 5. Use and overshoot compare the bytes that left the interface, headers included, with the
rate of htb. Backlog compares the bytes that a link holds (queued and unacknowledged) with the
budget at the time of the oldest of them. The job may fill its links (`bandwidthFraction` 1), also
while it computes (mode `bounded`). All other settings are the defaults, also `cpuFraction`: for
these workers a full link costs less than that. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import bisect
import json
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import local_runs
import numpy as np
from local_runs import LocalRun, Record

from dlion_local.emulation.network.enter import enter_network

BYTES_PER_MBIT = 125_000
FIRST_MBIT, LATER_MBIT = 20, 5
WORKERS, CORES = 2, 0.8
STEP_S = 0.6
PROBED_WITH = 256
"""Samples of a worker in the run that determines their number."""
SETTLE_S = 5.0
SAMPLE_S = 0.05
WINDOW_S = 1.0
USE_BAR, OVERSHOOT_BAR, ITERATIONS_BAR, BACKLOG_BAR = 0.90, 0.05, 3, 2.0
INSIDE_FRACTION = 1.05
"""Tolerance of a rate: directives are only sent again when budgets differ by 5 %."""
ITERATION_NOISE = 1.2
"""Tolerance of a budget: it depends on an estimate of the slowest worker's iteration, and
iterations differ by a third."""


@dataclass
class InterfaceMeter(threading.Thread):
    """Samples of the bytes that left one worker's interface."""

    namespace: str
    times_s: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        """Read until `over`; the thread belongs to the namespace."""
        enter_network(self.namespace)
        with Path("/proc/thread-self/net/dev").open() as file:
            while not self.over.wait(SAMPLE_S):
                file.seek(0)
                line = next((line for line in file if line.lstrip().startswith("eth0:")), None)
                if line is None:  # the run has ended, and the interface is removed
                    return
                self.times_s.append(time.monotonic())
                self.sent_bytes.append(int(line.partition(":")[2].split()[8]))

    def use(self, began_s: float, ended_s: float, mbit: float) -> float:
        """Return the used share of the rate in that time."""
        sent = np.interp([began_s, ended_s], self.times_s, self.sent_bytes)
        return float((sent[1] - sent[0]) / (ended_s - began_s) / (mbit * BYTES_PER_MBIT))

    def fell_s(self, from_s: float) -> float:
        """Return when the rate was changed: then a third of a window of 0.3 s still had the old
        one.

        The time in the plan is when the change was due; a busy machine applies it slightly later.
        """
        window_s, third = 0.3, FIRST_MBIT / 3 + LATER_MBIT * 2 / 3
        starts = np.arange(from_s, from_s + SETTLE_S, SAMPLE_S / 5)
        fell_s = next(s for s in starts if self.use(s, s + window_s, third) < 1.0)
        return float(fell_s + window_s / 3)

    def overshoot(self, began_s: float, ended_s: float, mbit: float) -> float:
        """Return the 99th percentile, over all windows of a second, of the excess over the rate."""
        starts = np.arange(began_s, ended_s - WINDOW_S, SAMPLE_S)
        sent = np.interp(starts + WINDOW_S, self.times_s, self.sent_bytes) - np.interp(
            starts, self.times_s, self.sent_bytes
        )
        return float(np.percentile(sent / (WINDOW_S * mbit * BYTES_PER_MBIT) - 1, 99))


@dataclass(frozen=True)
class Span:
    """The time of a run: training began at `began_s` in its records, whose zero is `zero_s`."""

    zero_s: float
    began_s: float
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """The result of one worker's link in one run."""

    rank: int
    use: float
    use_later: float
    overshoot: float
    overshoot_later: float
    iterations: int | None
    """Iterations until three successive budgets were within the new rate; None: never."""
    backlog: float
    """Maximum, in budgets at the time when the bytes were queued."""
    backlog_now: float
    """Maximum, in present budgets: after a drop bytes of the old budget remain."""
    above_now_s: float
    """Time above two of those."""
    step_s: float

    @property
    def held(self) -> bool:
        """Report whether every bar was met."""
        return (
            self.use >= USE_BAR
            and max(self.overshoot, self.overshoot_later) <= OVERSHOOT_BAR
            and self.iterations is not None
            and self.iterations <= ITERATIONS_BAR
            and self.backlog <= BACKLOG_BAR
        )


def iterations_until_inside(
    steps: list[Record], directives: list[Record], peer: int, changed_s: float
) -> int | None:
    """Return the iterations after the change until the first of three in a row with a budget
    inside.

    The first to count begins after the change, and the bytes sent at its end count. Inside means
    the rate of the budget, which is the receiver's, and the budget itself. The latter is compared
    for an iteration as long as the mean of the last ten (single ones vary by a third).
    """
    first = next(i for i, s in enumerate(steps) if s["time_s"] - s["wall_s"] >= changed_s)
    rate = LATER_MBIT * BYTES_PER_MBIT
    inside = []
    for number in range(first, len(steps)):
        step, known = steps[number], steps[max(0, number - 10) : number]
        took_s = statistics.mean(s["wall_s"] for s in known)
        directive = [d for d in directives if d["time_s"] <= step["time_s"] - step["waited_s"]][-1]
        estimate = directive["bandwidth_bytes_per_s"][str(peer)]
        budget = directive["budget_bytes"][str(peer)]
        inside.append(
            estimate <= INSIDE_FRACTION * rate and budget <= ITERATION_NOISE * rate * took_s
        )
    return _settled(inside)


def _settled(inside: list[bool]) -> int | None:
    """Return the first one (from 1) that two more inside follow."""
    for index in range(len(inside) - 2):
        if all(inside[index : index + 3]):
            return index + 1
    return None


def backlogs(samples: list[Record]) -> tuple[float, float, float]:
    """Return the maximum backlog in budgets of then, in budgets of now, and the time above two of
    now.
    """
    handed = np.maximum.accumulate([s["sent_total"] + s["queued_bytes"] for s in samples])
    worst = worst_now = above_s = 0.0
    for number, sample in enumerate(samples):
        held = sample["queued_bytes"] + sample["unacknowledged_bytes"]
        if not held:
            continue
        oldest = min(bisect.bisect_right(handed, sample["acknowledged_total"]), number)
        then = max(s["window_bytes"] for s in samples[max(0, oldest - 1) : oldest + 1]) / 2
        worst = max(worst, held / then)
        now = held / (sample["window_bytes"] / 2)
        worst_now = max(worst_now, now)
        if number and now > BACKLOG_BAR:
            above_s += sample["time_s"] - samples[number - 1]["time_s"]
    return worst, worst_now, above_s


def environment(workers: int) -> local_runs.Document:
    """Return the links of two workers, or one worker alone with the same quota."""
    changes = [{"at": {"fraction": 0.5}, "mbitPerS": [LATER_MBIT] * workers}]
    return {
        "name": "link",
        "coreScale": 1.0,
        "workers": [{"count": workers, "cores": CORES, "mbitPerS": FIRST_MBIT}],
        "changes": changes if workers > 1 else [],
    }


def once(folder: Path, seconds: float, samples_each: int) -> list[Outcome]:
    """Return the outcome of one run for each worker."""
    data = local_runs.random_images(folder)
    document = local_runs.job(
        name="link",
        workers=WORKERS,
        data=data,
        global_batch=WORKERS * samples_each,
        exchange={"policy": "dlion", "codec": "float32"},
        network={"bandwidthFraction": 1},  # the bars are about a full link
        synchronization={"mode": "bounded"},
        trainer={"stop": {"maxSeconds": seconds}},
    )
    out = folder / "job"
    with local_runs.started(document, environment(WORKERS), out, probe_links_s=SAMPLE_S) as run:
        run.wait_for_training()
        meters = {rank: InterfaceMeter(name) for rank, name in run.namespaces().items()}
        for meter in meters.values():
            meter.start()
        zero_s = run.zero_monotonic_s()
        while (
            run.of_kind("event")[-1]["reason"] != "TrainingStopped" and run.process.poll() is None
        ):
            time.sleep(0.3)
        for meter in meters.values():
            meter.over.set()
        run.finish()
    span = Span(zero_s, run.began_s(), seconds)
    return [_outcome(run, rank, meters[rank], span) for rank in meters]


def _outcome(run: LocalRun, rank: int, meter: InterfaceMeter, span: Span) -> Outcome:
    peer, began_s, seconds, zero_s = 1 - rank, span.began_s, span.seconds, span.zero_s
    changed_s = meter.fell_s(zero_s + began_s + seconds / 2 - SAMPLE_S) - zero_s
    first = (zero_s + began_s + SETTLE_S, zero_s + changed_s)
    later = (zero_s + changed_s + SETTLE_S, zero_s + began_s + seconds)
    steps = run.of_kind("step", rank)
    samples = [line for line in run.probed()[rank] if line["kind"] == "link"]
    samples = [s for s in samples if first[0] <= s["time_s"] <= later[1]]
    worst, worst_now, above_s = backlogs(samples)
    return Outcome(
        rank=rank,
        use=meter.use(*first, FIRST_MBIT),
        use_later=meter.use(*later, LATER_MBIT),
        overshoot=meter.overshoot(*first, FIRST_MBIT),
        overshoot_later=meter.overshoot(*later, LATER_MBIT),
        iterations=iterations_until_inside(steps, run.of_kind("directive", rank), peer, changed_s),
        backlog=worst,
        backlog_now=worst_now,
        above_now_s=above_s,
        step_s=statistics.median(s["wall_s"] for s in steps),
    )


def show(number: int, outcome: Outcome) -> None:
    """Print a row."""
    after = "never" if outcome.iterations is None else str(outcome.iterations)
    print(f"{number:>3} | {outcome.rank:>6} | {outcome.use:6.1%} | {outcome.overshoot:6.1%} "
          f"| {outcome.use_later:6.1%} | {outcome.overshoot_later:6.1%} | {after:>10} "
          f"| {outcome.backlog:7.2f} | {outcome.backlog_now:5.2f} {outcome.above_now_s:5.2f} s "
          f"| {outcome.step_s:5.2f}", flush=True)  # fmt: skip


def main() -> int:
    """Return the exit code: 0 if every run met the bars."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="40 s of training instead of 70")
    parser.add_argument("--step-s", type=float, default=STEP_S, help="approximate time of a step")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--keep", type=Path, help="keep the result folders there")
    arguments = parser.parse_args()
    if arguments.step_s <= 0:
        parser.error("--step-s: a step takes more than nothing")
    samples = round(local_runs.probed_samples_per_s(environment(1), PROBED_WITH) * arguments.step_s)
    print(
        f"commit {local_runs.commit()}; {FIRST_MBIT} Mbit/s, then {LATER_MBIT}; "
        f"{samples} samples of each worker a step of about {arguments.step_s:g} s"
    )
    print(f"run | worker | use {FIRST_MBIT} | over {FIRST_MBIT} | use {LATER_MBIT}  "
          f"| over {LATER_MBIT} | iterations | backlog | of now, above 2 | step s")  # fmt: skip
    every: list[Outcome] = []
    for number in range(1, arguments.runs + 1):
        with tempfile.TemporaryDirectory(prefix="dlion-bench-") as temporary:
            folder = Path(temporary)
            if arguments.keep is not None:
                folder = arguments.keep / str(number)
                folder.mkdir(parents=True)
            outcomes = once(folder, 40.0 if arguments.short else 70.0, samples)
        for outcome in outcomes:
            show(number, outcome)
        every += outcomes
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(outcome) for outcome in every]))
    held = all(outcome.held for outcome in every)
    print(f"bars met: {held}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
