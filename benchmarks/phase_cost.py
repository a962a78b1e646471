"""Measure the cost of the phase clock: a worker's exchange with and without it.

    python benchmarks/phase_cost.py [--repeat 40]

One worker of four selects, encodes, queues, decodes and applies gradients of 1.1 M entries by the
policy `dlion`; peers' messages are its own. Steps with and without the clock alternate in one
process. The script prints the medians, their ratio, the marks of a step, and the cost of a mark.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from local_runs import commit

from dlion_api.names import Rank
from dlion_api.spec import load_job
from dlion_core.lifecycle.instruction_executor import InstructionExecutor
from dlion_core.lifecycle.reporting import Reporter
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.phase_clock import Phase, PhaseClock, in_phase, measured_by
from dlion_core.policies.factory import build
from dlion_core.policies.interface import (
    BudgetsChanged,
    Layout,
    LocalStepDone,
    MemberJoined,
    Message,
    MessageArrived,
)

ENTRIES, PEERS, BUDGET_BYTES = 1_100_000, (1, 2, 3), 250_000
JOB = {
    "apiVersion": "dlion.dev/v1alpha1",
    "kind": "DLionJob",
    "metadata": {"name": "phases"},
    "spec": {
        "sites": [{"name": "a", "groups": [{"name": "g", "workers": 4}]}],
        "trainer": {
            "program": {"builtin": "digits"},
            "dataset": {"name": "digits"},
            "stop": {"maxSteps": 1},
        },
        "exchange": {"policy": "dlion"},
        "synchronization": {"mode": "asynchronous"},
        "knowledgeTransfer": {"policy": "none"},
    },
}


class Weights:
    """A replica with the cheapest optimizer."""

    learning_rate = 0.1

    def __init__(self) -> None:
        self.weights_D = np.zeros(ENTRIES, np.float32)

    def apply_gradient(self, gradient_D: Any, *, on_updated: Any, **_: Any) -> None:
        self.weights_D -= np.float32(0.1) * gradient_D
        on_updated()


class Parts:
    """A worker without links."""

    def __init__(self) -> None:
        self.job, self.rank, self.replica = load_job(JOB), Rank(0), Weights()
        ranks = [Rank(0), *map(Rank, PEERS)]
        layout = Layout(("w",), (ENTRIES,))
        self.machine: Any = build(self.job.spec, Rank(0), layout, ranks)
        self.reporter = Reporter(
            rank=Rank(0), incarnation=1, start_monotonic_s=0.0, send=lambda _: None,
            clock_s=time.monotonic,
        )  # fmt: skip


class CountedClock:
    """A clock that counts its readings."""

    count = 0

    def __call__(self) -> float:
        self.count += 1
        return time.monotonic()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=40, help="pairs of steps")
    arguments = parser.parse_args()
    sent: list[Message] = []
    parts: Any = Parts()
    executor = InstructionExecutor(
        parts, JobProgress(), send=lambda _, message: sent.append(message), refuse=lambda *_: None
    )
    for peer in PEERS:
        executor.handle(MemberJoined(Rank(peer), 0))
    rng = np.random.default_rng(1)
    gradient_D = rng.normal(0, 1, ENTRIES).astype(np.float32)
    times_s: dict[bool, list[float]] = {True: [], False: []}
    counted = CountedClock()
    clock = PhaseClock(counted)

    def step(iteration: int) -> None:
        sent.clear()
        executor.handle(BudgetsChanged(dict.fromkeys(map(Rank, PEERS), BUDGET_BYTES)))
        executor.handle(LocalStepDone(iteration, gradient_D, 48, 1.0, 192))
        for peer, message in zip(PEERS, sent[: len(PEERS)], strict=True):
            executor.handle(MessageArrived(Rank(peer), message))

    for iteration in range(1, 2 * arguments.repeat + 1):
        is_measured = iteration % 2 == 0
        began_s = time.perf_counter()
        if is_measured:
            with measured_by(clock):
                step(iteration)
        else:
            step(iteration)
        times_s[is_measured].append(time.perf_counter() - began_s)
    spent = clock.read()
    marks = counted.count / arguments.repeat / 2
    began_s, rounds = time.perf_counter(), 100_000
    with measured_by(clock):
        for _ in range(rounds):
            with in_phase(Phase.SELECT):
                pass
    mark_s = (time.perf_counter() - began_s) / rounds
    without, with_clock = (statistics.median(times_s[each]) for each in (False, True))
    print(f"commit {commit()}: {arguments.repeat} pairs of steps, {ENTRIES:,} entries\n")
    print("| exchange of a step without | with the clock | ratio | marks | a mark | all marks |")
    print("|---|---|---|---|---|---|")
    print(
        f"| {without * 1e3:.2f} ms | {with_clock * 1e3:.2f} ms | {with_clock / without:.3f} "
        f"| {marks:.0f} | {mark_s * 1e6:.2f} µs | {marks * mark_s / without:.3%} of it |"
    )
    names = ("select", "encode", "send", "decode", "apply")
    shares = (f"{name} {getattr(spent, f'{name}_s') / spent.main_s:.1%}" for name in names)
    print(f"\nThe phases: {', '.join(shares)}")


if __name__ == "__main__":
    main()
