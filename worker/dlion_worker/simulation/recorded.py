"""What a recorded run had: each worker's speed and each link's rate over time, as a plan.

Owns the step from a result folder's records to virtual conditions. Called by `dlion replay`. Reads
no file and simulates nothing.

A worker without a quota: its speed is samples over the time of computing, from steps; what else of
its own a step took (neither computing nor waiting) is the exchange's, a fixed cost of every step.
Under a quota the exchange eats of it also while the worker waits, and computing comes in bursts
faster than it could go on: the speed is then what the sidecar held possible (capacities, from
directives), and computing and exchange cost what they took of the CPU, the exchange by the bytes
that each worker sent and got. Rates are what the sidecars
measured of each link beside the others, from directives; what their probes found before the first
step stays that, and no link's rate. All are piecewise constant.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from dlion_api.errors import DataError
from dlion_api.progress import DirectiveRecord, EventRecord, LinkRecord, StepRecord
from dlion_api.reasons import EventReason
from dlion_worker.environments.plan import Change, Conditions, Pipe, Plan, WorkerConditions
from dlion_worker.simulation.calibration import law
from dlion_worker.simulation.network import WIRE_EFFICIENCY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dlion_api.names import Rank, WorkerIdentity
    from dlion_api.progress import ProgressRecord

WINDOW_S = 2.0
"""Of averaging: some steps, and less than what a change of environment lasts."""

CHANGE_FRACTION = 0.02
"""Smaller changes of a speed or a rate are none, so that a steady run has few conditions."""

SETTLED_S = 10.0
"""Of training, until estimates of links have forgotten probes, which went beside other workers'."""

_Value = TypeVar("_Value")

Link = tuple["Rank", "Rank"]

Latencies: TypeAlias = "Sequence[tuple[float, Mapping[Link, float]]]"
"""(seconds of the environment's clock, what each link has from then on), in order; from 0 s on.
That clock starts when a worker says that it begins to train; in a real run it then probes, before
its first step."""


@dataclass(frozen=True)
class Recorded:
    """Conditions of a run from its first step on, and what it did under them."""

    plan: Plan
    fixed_core_s: float
    """What a step takes beside its samples, in core seconds of the plan."""
    exchange_core_s: float
    """What it takes beside computing."""
    exchange_core_s_per_byte: Mapping[Rank, float]
    """What each byte sent or received takes of a worker beside that; empty: bytes do not count."""
    began_s: float
    """When the first step began, on the records' clock: the plan's time 0."""
    unknown_links: tuple[Link, ...]
    """Links whose rate nobody measured: the plan does not limit them."""


@dataclass
class _Seen:
    """What the records say, by worker and by link."""

    starts: list[float] = field(default_factory=list)
    """When workers said that they begin to train."""
    first_step_s: float = math.inf
    steps: dict[Rank, list[StepRecord]] = field(default_factory=lambda: defaultdict(list))
    directives: dict[Rank, list[DirectiveRecord]] = field(default_factory=lambda: defaultdict(list))
    exchanged_bytes: dict[Rank, int] = field(default_factory=lambda: defaultdict(int))
    """Sent and received."""

    def take(self, record: ProgressRecord) -> None:
        """Takes one record."""
        if isinstance(record, EventRecord) and record.reason == EventReason.TRAINING_STARTED:
            self.starts.append(record.time_s)
        elif isinstance(record, StepRecord):
            self.first_step_s = min(self.first_step_s, record.began_s)
            if record.compute_s > 0 < record.local_batch_size:
                self.steps[record.rank].append(record)
        elif isinstance(record, DirectiveRecord):
            self.directives[record.rank].append(record)
        elif isinstance(record, LinkRecord):
            self.exchanged_bytes[record.rank] += record.sent_bytes
            self.exchanged_bytes[record.peer] += record.sent_bytes


@dataclass(frozen=True)
class _Speeds:
    """Every worker's cores over time, and what they are spent on."""

    cores: Mapping[Rank, Sequence[tuple[float, float]]]
    per_sample_core_s: float
    fixed_core_s: float
    exchange_core_s: float
    exchange_core_s_per_byte: Mapping[Rank, float] = field(default_factory=dict)


def recorded_plan(
    records: Iterable[ProgressRecord],
    workers: Sequence[WorkerIdentity],
    *,
    latencies: Latencies,
    has_quotas: bool,
    source: str,
) -> Recorded:
    """The plan of a run out of its records.

    `latencies`: one way, in seconds. `has_quotas`: a quota held the workers.
    Raises: DataError where workers have no steps, naming `source`.
    """
    seen, ranks = _Seen(), {worker.rank for worker in workers}
    for record in records:
        if record.rank in ranks:
            seen.take(record)
    _refuse_incomplete(workers, seen, source)
    by_quota = _by_quota(seen) if has_quotas else None
    speeds = by_quota or _by_time(seen)
    rates: dict[Link, list[tuple[float, float]]] = defaultdict(list)
    for directive in itertools.chain.from_iterable(seen.directives.values()):
        for peer, rate in directive.bandwidth_bytes_per_s.items():
            if peer in ranks and rate > 0:
                rates[directive.rank, peer].append((directive.time_s, rate))
    began_s = seen.first_step_s
    clock_s = min(seen.starts, default=began_s)
    links = [(a.rank, b.rank) for a in workers for b in workers if a.rank != b.rank]
    settled = {link: _settled(found, began_s) for link, found in rates.items()}
    moved = [(clock_s + time_s if time_s else 0.0, found) for time_s, found in latencies]
    initial, changes = _from(_timeline(workers, speeds.cores, settled, moved), began_s)
    return Recorded(
        plan=Plan(
            environment="recorded",
            workers=tuple(workers),
            core_scale=1.0,
            samples_per_s_per_core=1.0 / speeds.per_sample_core_s,
            initial=initial,
            changes=changes,
            probed_bytes_per_s={link: _at(found, began_s) for link, found in rates.items()},
        ),
        fixed_core_s=speeds.fixed_core_s,
        exchange_core_s=speeds.exchange_core_s,
        exchange_core_s_per_byte=speeds.exchange_core_s_per_byte,
        began_s=began_s,
        unknown_links=tuple(link for link in links if link not in rates),
    )


def _by_time(seen: _Seen) -> _Speeds:
    """One core is a sample per second of computing."""
    cores = {rank: _coarse(_rates_of(steps)) for rank, steps in seen.steps.items()}
    beside = [
        max(0.0, step.wall_s - step.waited_s - step.compute_s) * _at(cores[rank], step.time_s)
        for rank, steps in seen.steps.items()
        for step in steps
    ]
    return _Speeds(cores, 1.0, 0.0, statistics.median(beside))


def _by_quota(seen: _Seen) -> _Speeds | None:
    """Cores as CPU time was spent; None where that was not measured, or capacities not told."""
    steps = [s for each in seen.steps.values() for s in each if s.cpu_s > s.exchange_cpu_s >= 0]
    told = {
        rank: [d for d in each if d.capacities.get(rank, 0.0) > 0 and d.local_batch_size > 0]
        for rank, each in seen.directives.items()
    }
    if not steps or any(not told.get(rank) for rank in seen.steps):
        return None
    fixed_s, sample_s = law(
        np.array([step.local_batch_size for step in steps], np.float64),
        np.array([step.cpu_s - step.exchange_cpu_s for step in steps]),
    )
    cores = {
        rank: _coarse(
            [
                (d.time_s, d.capacities[rank] * (fixed_s / d.local_batch_size + sample_s))
                for d in told[rank]
            ]
        )
        for rank in seen.steps
    }
    exchange_s = {r: sum(step.exchange_cpu_s for step in each) for r, each in seen.steps.items()}
    moved = {rank: seen.exchanged_bytes[rank] for rank in exchange_s}
    if not all(moved.values()):
        each_s = statistics.fmean(step.exchange_cpu_s for step in steps)
        return _Speeds(cores, sample_s, fixed_s, each_s)
    by_byte = {rank: seconds / moved[rank] for rank, seconds in exchange_s.items()}
    return _Speeds(cores, sample_s, fixed_s, 0.0, by_byte)


def _refuse_incomplete(workers: Sequence[WorkerIdentity], seen: _Seen, source: str) -> None:
    without = [str(worker.rank) for worker in workers if worker.rank not in seen.steps]
    if without:
        raise DataError(
            f"{source}: no step of worker {', '.join(without)} is recorded, so nothing is known of "
            "its speed. Replay a run in which every worker has trained (in a cluster each site's "
            "keeper records that site's workers alone: replay jobs of one site)"
        )


def _rates_of(steps: Sequence[StepRecord]) -> list[tuple[float, float]]:
    """Samples per second of computing, by window."""
    samples: dict[int, int] = defaultdict(int)
    compute_s: dict[int, float] = defaultdict(float)
    for step in steps:
        window = int(step.time_s / WINDOW_S)
        samples[window] += step.local_batch_size
        compute_s[window] += step.compute_s
    return [(window * WINDOW_S, samples[window] / compute_s[window]) for window in sorted(samples)]


def _at(steps: Sequence[tuple[float, _Value]], time_s: float) -> _Value:
    """The value at that time; before the first, the first."""
    return steps[max(0, bisect_right(steps, time_s, key=itemgetter(0)) - 1)][1]


def _settled(found: Sequence[tuple[float, float]], began_s: float) -> Sequence[tuple[float, float]]:
    """Rates, the first of which is what was known once estimates had settled."""
    settled_s = began_s + SETTLED_S
    return [(0.0, _at(found, settled_s)), *(one for one in found if one[0] > settled_s)]


def _timeline(
    workers: Sequence[WorkerIdentity],
    speeds: Mapping[Rank, Sequence[tuple[float, float]]],
    rates: Mapping[Link, Sequence[tuple[float, float]]],
    latencies: Latencies,
) -> list[tuple[float, Conditions]]:
    """Conditions at every moment (whole windows) at which a speed, rate or latency changes."""
    coarse = {link: _coarse(found) for link, found in rates.items()}
    own: dict[Rank, list[tuple[Rank, list[tuple[float, float]]]]] = defaultdict(list)
    for (rank, peer), found in sorted(coarse.items()):
        own[rank].append((peer, found))
    times = {time_s for time_s, _ in latencies} | {0.0}
    for steps in itertools.chain(speeds.values(), coarse.values()):
        times |= {time_s for time_s, _ in steps}
    by_sender = [(time_s, _by_sender(latency_s)) for time_s, latency_s in latencies]
    made = []
    for time_s in sorted(times):
        latency_s = _at(by_sender, time_s)
        conditions = [
            WorkerConditions(
                rank=worker.rank,
                quota_cores=_at(speeds[worker.rank], time_s),
                uplink=tuple(
                    Pipe(frozenset({peer}), _at(found, time_s) / WIRE_EFFICIENCY)
                    for peer, found in own[worker.rank]
                ),
                latency_s=latency_s.get(worker.rank, {}),
            )
            for worker in workers
        ]
        made.append((time_s, Conditions(tuple(conditions))))
    return made


def _by_sender(latency_s: Mapping[Link, float]) -> dict[Rank, dict[Rank, float]]:
    made: dict[Rank, dict[Rank, float]] = defaultdict(dict)
    for (rank, peer), seconds in latency_s.items():
        made[rank][peer] = seconds
    return made


def _coarse(found: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The last rate of each window, from its begin on; small changes left out."""
    by_window = {int(time_s / WINDOW_S): rate for time_s, rate in found}
    kept: list[tuple[float, float]] = []
    for window, rate in sorted(by_window.items()):
        if not kept or abs(rate / kept[-1][1] - 1) > CHANGE_FRACTION:
            kept.append((window * WINDOW_S, rate))
    return kept


def _from(
    timeline: Sequence[tuple[float, Conditions]], began_s: float
) -> tuple[Conditions, tuple[Change, ...]]:
    """What held when training began, and what changed later, counted from there."""
    initial = before = timeline[0][1]
    changes = []
    for time_s, conditions in timeline:
        if time_s <= began_s:
            initial = conditions
        elif (
            conditions != before
        ):  # a first window that begins after the first step changes nothing
            changes.append(Change(time_s - began_s, conditions))
        before = conditions
    return initial, tuple(changes)
