"""Converts a recorded run to a plan: each worker's speed and each link's rate over time.

Called by `dlion replay`. Reads no file and simulates nothing. All values are piecewise constant.

Without a quota, a worker's speed is samples over computing time. The rest of a step, neither
computing nor waiting, is a fixed exchange cost. Under a quota the exchange also uses CPU while the
worker waits, and computing comes in bursts. So the speed is the sidecar's capacity estimate from
directives, and costs follow from CPU times, the exchange's per byte. Link rates are the sidecars'
measurements from directives. Results of their first probes stay probe results.
"""

import itertools
import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TypeAlias, TypeVar

import numpy as np

from dlion_api.errors import DataError
from dlion_api.names import Rank, WorkerIdentity
from dlion_api.protocol.progress import (
    DirectiveRecord,
    EventRecord,
    LinkRecord,
    ProgressRecord,
    StepRecord,
)
from dlion_api.reasons import EventReason
from dlion_environments.plan import Conditions, ConditionsChange, Pipe, Plan, WorkerConditions
from dlion_simulator.calibration.calibration import fit_line
from dlion_simulator.network import WIRE_EFFICIENCY

WINDOW_S = 2.0
"""Averaging window: several steps, but shorter than a change of the environment."""

CHANGE_FRACTION = 0.02
"""Smaller changes of a speed or rate are ignored, so that a steady run has few conditions."""

SETTLED_S = 10.0
"""Training time after which link estimates no longer depend on the first, concurrent probes."""

_Value = TypeVar("_Value")

Link = tuple["Rank", "Rank"]

Latencies: TypeAlias = "Sequence[tuple[float, Mapping[Link, float]]]"
"""(Seconds on the environment's clock, latency of each link from then on), in order, starting at 0
s. That clock starts when a worker reports the start of training. In a real run probes follow,
before the first step."""


@dataclass(frozen=True)
class RecordedConditions:
    """Conditions of a run from its first step on, and the costs of its steps."""

    plan: Plan
    fixed_core_s: float
    """Fixed cost of a step, in core seconds of the plan."""
    exchange_core_s: float
    """Exchange cost of a step."""
    exchange_core_s_per_byte: Mapping[Rank, float]
    """Cost of each byte sent or received, by worker; empty if bytes cost nothing."""
    began_s: float
    """Start of the first step on the records' clock: the plan's time 0."""
    trained_s: float
    """Seconds from the first to the last step."""
    unknown_links: tuple[Link, ...]
    """Links without a measured rate: the plan does not limit them."""


@dataclass
class _Observations:
    """The relevant records, by worker and by link."""

    starts: list[float] = field(default_factory=list)
    """When workers reported the start of training."""
    first_step_s: float = math.inf
    steps: dict[Rank, list[StepRecord]] = field(default_factory=lambda: defaultdict(list))
    directives: dict[Rank, list[DirectiveRecord]] = field(default_factory=lambda: defaultdict(list))
    exchanged_bytes: dict[Rank, int] = field(default_factory=lambda: defaultdict(int))
    """Sent and received."""

    def take(self, record: ProgressRecord) -> None:
        """Add one record."""
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
    """Every worker's cores over time, and the costs of its steps."""

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
) -> RecordedConditions:
    """Derive the plan of a run from its records.

    `latencies` are one-way, in seconds. `has_quotas`: workers ran under CPU quotas. Raises
    DataError, naming `source`, if a worker has no steps.
    """
    observations, ranks = _Observations(), {worker.rank for worker in workers}
    for record in records:
        if record.rank in ranks:
            observations.take(record)
    _check_complete(workers, observations, source)
    by_quota = _by_quota(observations) if has_quotas else None
    speeds = by_quota or _by_time(observations)
    rates: dict[Link, list[tuple[float, float]]] = defaultdict(list)
    for directive in itertools.chain.from_iterable(observations.directives.values()):
        for peer, rate in directive.bandwidth_bytes_per_s.items():
            if peer in ranks and rate > 0:
                rates[directive.rank, peer].append((directive.time_s, rate))
    began_s = observations.first_step_s
    clock_s = min(observations.starts, default=began_s)
    links = [(a.rank, b.rank) for a in workers for b in workers if a.rank != b.rank]
    settled = {link: _settled(values, began_s) for link, values in rates.items()}
    moved = [(clock_s + time_s if time_s else 0.0, values) for time_s, values in latencies]
    initial, changes = _split_at_start(_timeline(workers, speeds.cores, settled, moved), began_s)
    return RecordedConditions(
        plan=Plan(
            environment="recorded",
            workers=tuple(workers),
            core_scale=1.0,
            samples_per_s_per_core=1.0 / speeds.per_sample_core_s,
            initial=initial,
            changes=changes,
            probed_bytes_per_s={link: _at(values, began_s) for link, values in rates.items()},
        ),
        fixed_core_s=speeds.fixed_core_s,
        exchange_core_s=speeds.exchange_core_s,
        exchange_core_s_per_byte=speeds.exchange_core_s_per_byte,
        began_s=began_s,
        trained_s=max(step.time_s for steps in observations.steps.values() for step in steps)
        - began_s,
        unknown_links=tuple(link for link in links if link not in rates),
    )


def _by_time(observations: _Observations) -> _Speeds:
    """Speeds from computing times. One core is one sample per second."""
    cores = {rank: _quantized(_rates_of(steps)) for rank, steps in observations.steps.items()}
    exchange_s = [
        max(0.0, step.wall_s - step.waited_s - step.compute_s) * _at(cores[rank], step.time_s)
        for rank, steps in observations.steps.items()
        for step in steps
    ]
    return _Speeds(cores, 1.0, 0.0, statistics.median(exchange_s))


def _by_quota(observations: _Observations) -> _Speeds | None:
    """Speeds and costs from CPU times; None if CPU time or capacities are missing."""
    steps = [
        s for each in observations.steps.values() for s in each if s.cpu_s > s.exchange_cpu_s >= 0
    ]
    usable = {
        rank: [d for d in each if d.capacities.get(rank, 0.0) > 0 and d.local_batch_size > 0]
        for rank, each in observations.directives.items()
    }
    if not steps or any(not usable.get(rank) for rank in observations.steps):
        return None
    fixed_s, sample_s = fit_line(
        np.array([step.local_batch_size for step in steps], np.float64),
        np.array([step.cpu_s - step.exchange_cpu_s for step in steps]),
    )
    cores = {
        rank: _quantized(
            [
                (d.time_s, d.capacities[rank] * (fixed_s / d.local_batch_size + sample_s))
                for d in usable[rank]
            ]
        )
        for rank in observations.steps
    }
    exchange_s = {
        r: sum(step.exchange_cpu_s for step in each) for r, each in observations.steps.items()
    }
    moved = {rank: observations.exchanged_bytes[rank] for rank in exchange_s}
    if not all(moved.values()):
        each_s = statistics.fmean(step.exchange_cpu_s for step in steps)
        return _Speeds(cores, sample_s, fixed_s, each_s)
    by_byte = {rank: seconds / moved[rank] for rank, seconds in exchange_s.items()}
    return _Speeds(cores, sample_s, fixed_s, 0.0, by_byte)


def _check_complete(
    workers: Sequence[WorkerIdentity], observations: _Observations, source: str
) -> None:
    without = [str(worker.rank) for worker in workers if worker.rank not in observations.steps]
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


def _settled(
    values: Sequence[tuple[float, float]], began_s: float
) -> Sequence[tuple[float, float]]:
    """Rates, starting with the one known after estimates have settled."""
    settled_s = began_s + SETTLED_S
    return [(0.0, _at(values, settled_s)), *(one for one in values if one[0] > settled_s)]


def _timeline(
    workers: Sequence[WorkerIdentity],
    speeds: Mapping[Rank, Sequence[tuple[float, float]]],
    rates: Mapping[Link, Sequence[tuple[float, float]]],
    latencies: Latencies,
) -> list[tuple[float, Conditions]]:
    """Conditions at every time (in whole windows) at which a speed, rate or latency changes."""
    coarse = {link: _quantized(values) for link, values in rates.items()}
    own: dict[Rank, list[tuple[Rank, list[tuple[float, float]]]]] = defaultdict(list)
    for (rank, peer), values in sorted(coarse.items()):
        own[rank].append((peer, values))
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
                    Pipe(frozenset({peer}), _at(values, time_s) / WIRE_EFFICIENCY)
                    for peer, values in own[worker.rank]
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


def _quantized(values: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The last rate of each window; small changes are left out."""
    by_window = {int(time_s / WINDOW_S): rate for time_s, rate in values}
    kept: list[tuple[float, float]] = []
    for window, rate in sorted(by_window.items()):
        if not kept or abs(rate / kept[-1][1] - 1) > CHANGE_FRACTION:
            kept.append((window * WINDOW_S, rate))
    return kept


def _split_at_start(
    timeline: Sequence[tuple[float, Conditions]], began_s: float
) -> tuple[Conditions, tuple[ConditionsChange, ...]]:
    """Conditions when training began, and later changes relative to that time."""
    initial = before = timeline[0][1]
    changes = []
    for time_s, conditions in timeline:
        if time_s <= began_s:
            initial = conditions
        elif conditions != before:  # the first window may begin after the first step
            changes.append(ConditionsChange(time_s - began_s, conditions))
        before = conditions
    return initial, tuple(changes)
