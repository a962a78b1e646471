"""Compare a heat budget with other rules: time above a temperature, and work done.

    python benchmarks/heat.py                   the held-out traces: a table, and each goal
    python benchmarks/heat.py --traces tuning   the traces that parameters were chosen with
    python benchmarks/heat.py --plot FILE.svg   one held-out trace, drawn
    python benchmarks/heat.py --jobs            whole jobs, by `dlion simulate`: ten minutes

A trace is a machine, a workload and the air temperature, over 1.5 hours. Rules get a sensor of
whole degrees with noise, every two seconds; shares of time are of the true temperature. Machines
are first-order, or a die on a case: a second-order machine, unlike the budget's model. All figures
of machines are invented.

- `hardware`: its throttle trips at the threshold; with all other rules at 90 degrees
- `on/off`: the worker is stopped at the threshold, and continued five kelvins below
- `steps`: as Linux's step-wise governor, a tenth less while hot, a tenth more otherwise
- `no prediction`: the budget, with an integral of the present error in place of the prediction
- `budget`: `dlion_core.heat`
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from heat_jobs import print_jobs
from heat_traces import AMBIENTS, HELD_OUT, MACHINES, TUNING, WORKLOADS, Trace, truth
from local_runs import commit

from dlion_core.heat.duty_cycle import BusyTime, rest_s
from dlion_core.heat.heat_controller import ALLOWED_FRACTION, SAMPLE_S, HeatController

TICK_S = 0.5
THRESHOLD = 75.0
MIN_SHARE = 0.1
VENDOR_TRIP = 90.0
"""Temperature of the hardware throttle; with the rule `hardware` it is the threshold."""
SENSOR_NOISE_K = 0.4


HOURS = 1.5
SEEDS = range(1, 6)
PLOTTED = ("bare", "waits", "day")


class Rule(Protocol):
    """Returns the share of compute from now on; 0 stops the worker at once."""

    def __call__(self, now_s: float, celsius: float, used: float, /) -> float: ...


def hardware() -> Rule:
    """Use only the hardware throttle."""
    return lambda _now, _celsius, _used: 1.0


@dataclass
class OnOff:
    """Stops at the threshold and continues below it."""

    below_k: float = 5.0
    off: bool = False

    def __call__(self, _now_s: float, celsius: float, _used: float, /) -> float:
        if celsius >= THRESHOLD:
            self.off = True
        elif celsius <= THRESHOLD - self.below_k:
            self.off = False
        return 0.0 if self.off else 1.0


@dataclass
class Steps:
    """Linux's step-wise governor over ten cooling states."""

    share: float = 1.0
    last: float = math.inf

    def __call__(self, _now_s: float, celsius: float, _used: float, /) -> float:
        if celsius >= THRESHOLD and celsius >= self.last:
            self.share = max(MIN_SHARE, self.share - 0.1)
        elif celsius < THRESHOLD and celsius <= self.last:
            self.share = min(1.0, self.share + 0.1)
        self.last = celsius
        return self.share


@dataclass
class NoPrediction:
    """The budget with its adaptive margin, but an integral of the present error for a share."""

    share: float = 1.0
    margin: float = 1.5

    def __call__(self, _now_s: float, celsius: float, _used: float, /) -> float:
        if celsius > THRESHOLD:
            self.margin = min(8.0, self.margin + 0.1)
        elif celsius > THRESHOLD - self.margin - 1:
            self.margin = max(0.5, self.margin - 0.002)
        self.share += 0.01 * (THRESHOLD - self.margin - celsius)
        self.share = min(1.0, max(MIN_SHARE, self.share))
        return self.share


def budget() -> Rule:
    """Return the heat budget."""
    controller = HeatController(THRESHOLD, MIN_SHARE)
    return lambda now_s, celsius, used: controller.sample(now_s, celsius, used).share


RULES: dict[str, Callable[[], Rule]] = {
    "hardware": hardware,
    "on/off": OnOff,
    "steps": Steps,
    "no prediction": NoPrediction,
    "budget": budget,
}


@dataclass
class Outcome:
    """The result of one trace under one rule."""

    above_fraction: float
    work_s: float
    max_celsius: float
    times: list[float] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)


def run(trace: Trace, rule: Rule, *, trip: float = VENDOR_TRIP, seed: int = 1) -> Outcome:
    """Simulate one trace under one rule."""
    machine, load, ambient = MACHINES[trace[0]], WORKLOADS[trace[1]], AMBIENTS[trace[2]]
    seconds = HOURS * 3600
    true, noise = truth(machine, ambient, seconds, trip), np.random.default_rng(seed)
    outcome = Outcome(0.0, 0.0, -math.inf)
    share, above, busy = 1.0, 0, BusyTime()
    left_s, idle_s, used_s = load.step_s, 0.0, 0.0
    ticks = int(seconds / TICK_S)
    for tick in range(ticks):
        now_s = tick * TICK_S
        if tick % round(SAMPLE_S / TICK_S) == 0:
            celsius = round(true.celsius + noise.normal(0.0, SENSOR_NOISE_K))
            share = rule(now_s, celsius, busy.share(SAMPLE_S))
            outcome.times.append(now_s)
            outcome.temperatures.append(true.celsius)
            outcome.shares.append(share)
        others = load.other(now_s)
        if share == 0.0:
            true.advance(now_s + TICK_S, others)
        elif idle_s > 0:
            idle_s -= TICK_S
            true.advance(now_s + TICK_S, others)
        else:
            done_s = TICK_S * true.speed * (1 - others)
            true.advance(now_s + TICK_S, 1.0)
            outcome.work_s += done_s
            left_s -= done_s
            used_s += TICK_S
            if left_s <= 0:
                busy.add(used_s)
                waited_s = load.wait_s
                rest = rest_s(share, busy_s=used_s, wall_s=used_s + waited_s)
                idle_s = waited_s + rest
                if (now_s % load.pause_every_s) < used_s and now_s > load.pause_every_s:
                    idle_s = max(idle_s, load.pause_s)
                left_s, used_s = load.step_s, 0.0
        above += true.celsius > THRESHOLD
        outcome.max_celsius = max(outcome.max_celsius, true.celsius)
    outcome.above_fraction = above / ticks
    return outcome


def outcome(trace: Trace, name: str, *, seed: int = 1) -> Outcome:
    """Return the result of one run of a rule."""
    trip = THRESHOLD if name == "hardware" else VENDOR_TRIP
    return run(trace, RULES[name](), trip=trip, seed=seed)


@dataclass(frozen=True)
class Cell:
    """The runs of one rule in one trace."""

    above_fraction: float
    """Maximum over seeds."""
    work_s: float
    """Mean over seeds."""
    max_celsius: float


def cell(trace: Trace, name: str) -> Cell:
    """Run all seeds of a rule in a trace."""
    runs = [outcome(trace, name, seed=seed) for seed in SEEDS]
    return Cell(
        max(each.above_fraction for each in runs),
        statistics.fmean(each.work_s for each in runs),
        max(each.max_celsius for each in runs),
    )


def print_table(traces: Sequence[Trace]) -> None:
    """Print a row for each trace, and the goals of the budget."""
    table = {trace: {name: cell(trace, name) for name in RULES} for trace in traces}
    print(f"| machine, workload, air | {' | '.join(RULES)} |\n|---|{'---|' * len(RULES)}")
    for trace, cells in table.items():
        texts = [
            f"{each.above_fraction:.1%}, {each.max_celsius:.1f}°, {each.work_s:.0f} s"
            for each in cells.values()
        ]
        print(f"| {', '.join(trace)} | {' | '.join(texts)} |")
    print()
    above = [cells["budget"].above_fraction for cells in table.values()]
    kept = sum(each <= ALLOWED_FRACTION for each in above)
    print(f"goal, at most {ALLOWED_FRACTION:.0%} of the time above: {kept} of {len(above)} traces")
    for name, goal in (("hardware", 1.0), ("on/off", 1.1), ("steps", 0.0), ("no prediction", 0.0)):
        ratios = [cells["budget"].work_s / cells[name].work_s for cells in table.values()]
        mean = statistics.geometric_mean(ratios)
        within = sum(cells[name].above_fraction <= ALLOWED_FRACTION for cells in table.values())
        text = f"work over {name}: {mean:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        text += f"; {name} keeps to the budget in {within} of {len(above)}"
        print(f"{text}; goal {goal:.2f}: {'yes' if mean >= goal else 'no'}" if goal else text)


def plot(path: Path) -> None:
    """Draw temperatures and shares of one held-out trace."""
    mpl.rcParams.update({"svg.hashsalt": "heat", "svg.fonttype": "none", "font.size": 9})
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 4.6), height_ratios=(3, 2))
    for name, colour in (("on/off", "#999999"), ("hardware", "#d98200"), ("budget", "#0b6fb8")):
        found = outcome(PLOTTED, name)
        minutes = [time_s / 60 for time_s in found.times[::6]]
        above.plot(minutes, found.temperatures[::6], color=colour, linewidth=1, label=name)
        if name == "budget":
            below.plot(minutes, found.shares[::6], color=colour, linewidth=1)
    above.axhline(THRESHOLD, color="#b00020", linewidth=0.8, linestyle="--")
    above.set_ylabel("temperature, °C")
    above.legend(frameon=False, ncols=3, loc="lower right")
    below.set_ylabel("budget: share\nof compute")
    below.set_ylim(0, 1.05)
    below.set_xlabel("minutes")
    figure.suptitle(", ".join(PLOTTED), fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", choices=["tuning", "held-out"], default="held-out")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--jobs", action="store_true")
    options = parser.parse_args()
    if options.plot:
        plot(options.plot)
        return
    if options.jobs:
        print(f"commit {commit()}\n")
        print_jobs()
        return
    traces = TUNING if options.traces == "tuning" else HELD_OUT
    seeds = f"{len(SEEDS)} seeds"
    print(f"commit {commit()}: {len(traces)} {options.traces} traces of {HOURS:g} h, {seeds}\n")
    print_table(traces)


if __name__ == "__main__":
    main()
