"""Merge the records of a run over several sites on one clock. Pure.

Each site's keeper has the records of its own workers, in seconds since the start of the run there.
With the zero of each site they form one run again, whose figures are computed as for any other run.
The parts of `three_sites` call it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from dlion_api.drift import DriftMeter
from dlion_api.names import Rank
from dlion_api.protocol.progress import EvaluationRecord, EventRecord, ProgressRecord, StepRecord


def on_one_clock(
    by_site: Mapping[str, Iterable[ProgressRecord]], zero_s: Mapping[str, float]
) -> list[ProgressRecord]:
    """Return the records of all sites in order of their times on `zero_s`'s clock."""
    found = [
        replace(record, time_s=record.time_s + zero_s[site])
        for site, records in by_site.items()
        for record in records
    ]
    return sorted(found, key=lambda record: record.time_s)


def steps_of(records: Iterable[ProgressRecord], rank: int | None = None) -> list[StepRecord]:
    """Return the iterations of one worker or of all."""
    return [each for each in records
            if isinstance(each, StepRecord) and rank in (None, each.rank)]  # fmt: skip


def samples_per_s(records: Sequence[ProgressRecord]) -> float:
    """Return the samples of all workers over the time from the first step's start to the last one's
    end.
    """
    steps = steps_of(records)
    began_s = min(step.time_s - step.wall_s for step in steps)
    ended_s = max(step.time_s for step in steps)
    return sum(step.local_batch_size for step in steps) / (ended_s - began_s)


def final_accuracies(records: Iterable[ProgressRecord]) -> dict[Rank, EvaluationRecord]:
    """Return the last evaluation of each replica, if it was made at the end of training."""
    return {
        each.rank: each for each in records if isinstance(each, EvaluationRecord) and each.final
    }


@dataclass(frozen=True)
class Pace:
    """The iterations of one worker in a period."""

    iterations: int
    longest_gap_s: float
    """Between the ends of successive iterations, including the ends of the period."""


def pace(records: Iterable[ProgressRecord], rank: int, since_s: float, until_s: float) -> Pace:
    """Return the pace of that worker between these times."""
    ends_s = [step.time_s for step in steps_of(records, rank)]
    within_s = [end_s for end_s in ends_s if since_s <= end_s <= until_s]
    gaps_s = [later - earlier for earlier, later in pairwise([since_s, *within_s, until_s])]
    return Pace(len(within_s), max(gaps_s))


def iteration_at(records: Iterable[ProgressRecord], at_s: float) -> int:
    """Return the iteration of the foremost worker by that time; 0 before the first."""
    return max((step.iteration for step in steps_of(records) if step.time_s <= at_s), default=0)


def time_of(records: Iterable[ProgressRecord], iteration: int) -> float:
    """Return when the first worker reached that iteration; 0 if none did."""
    return min(
        (step.time_s for step in steps_of(records) if step.iteration >= iteration), default=0.0
    )


def drift_curve(records: Iterable[ProgressRecord]) -> list[tuple[float, float]]:
    """Return (time, drift) at the times that all evaluating replicas have in common."""
    meter = DriftMeter()
    points = (meter.add(each) for each in records if isinstance(each, EvaluationRecord))
    return [point for point in points if point is not None]


def max_drift(curve: Iterable[tuple[float, float]], since_s: float, until_s: float) -> float:
    """Return the maximum between these times; 0 without comparisons."""
    return max((value for at_s, value in curve if since_s <= at_s <= until_s), default=0.0)


def back_at(curve: Iterable[tuple[float, float]], level: float, since_s: float) -> float | None:
    """Return when, from that time on, drift was first at most the level; None: never."""
    return next((at_s for at_s, value in curve if at_s >= since_s and value <= level), None)


def first_step(
    records: Iterable[ProgressRecord], rank: int, *, known: Collection[int]
) -> StepRecord | None:
    """Return the first iteration of that worker by an unknown incarnation."""
    return next((s for s in steps_of(records, rank) if s.incarnation not in known), None)


def incarnations(records: Iterable[ProgressRecord], rank: int, until_s: float) -> set[int]:
    """Return the incarnations of that worker that had made a step by that time."""
    return {step.incarnation for step in steps_of(records, rank) if step.time_s <= until_s}


def counted_events(
    records: Iterable[ProgressRecord], since_s: float, until_s: float
) -> dict[str, int]:
    """Return how often workers reported each reason between these times."""
    found: dict[str, int] = {}
    for each in records:
        if isinstance(each, EventRecord) and since_s <= each.time_s <= until_s:
            found[each.reason] = found.get(each.reason, 0) + 1
    return dict(sorted(found.items()))
