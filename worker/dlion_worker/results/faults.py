"""What a fault cost the other workers, read from a run's events.

Owns the project's definition: a worker *loses at most one iteration* when none of its iterations
is longer than twice its median and none of its local steps was thrown away. Called by the fault
tests and by whoever judges a run; takes records, reads no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from dlion_api.names import Rank
from dlion_api.progress import ProgressRecord, StepRecord

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

SLOW_FACTOR = 2.0
"""An iteration longer than this many medians counts as lost. Source: the project's definition."""


@dataclass(frozen=True)
class IterationLoss:
    """What one surviving worker lost.

    `slow` are iterations longer than twice the median, `discarded` those that were done and then
    done again or skipped over, so that their gradient went nowhere.
    """

    rank: Rank
    iterations: int
    median_s: float
    longest_s: float
    slow: tuple[int, ...]
    discarded: tuple[int, ...]

    @property
    def at_most_one(self) -> bool:
        """Whether this worker lost at most one iteration, by the definition above."""
        return not self.slow and not self.discarded


def iteration_losses(
    records: Iterable[ProgressRecord],
    *,
    killed: Collection[Rank] = (),
    since_s: float = 0.0,
    until_s: float = float("inf"),
) -> dict[Rank, IterationLoss]:
    """The loss of every worker that was not killed.

    Iterations are judged when they end within `since_s`..`until_s` (around the fault); the median
    is over all of the worker's iterations. The first one of an incarnation is left out: it
    compiles.
    """
    steps: dict[Rank, list[StepRecord]] = {}
    for record in records:
        if isinstance(record, StepRecord) and record.rank not in killed:
            steps.setdefault(record.rank, []).append(record)
    return {rank: _loss(rank, own, since_s, until_s) for rank, own in sorted(steps.items())}


def _loss(rank: Rank, steps: list[StepRecord], since_s: float, until_s: float) -> IterationLoss:
    usual_s = median([step.wall_s for step in steps])
    first: dict[int, StepRecord] = {}
    for step in steps:
        first.setdefault(step.incarnation, step)
    judged = [
        step
        for step in steps
        if since_s <= step.time_s <= until_s and first[step.incarnation] is not step
    ]
    return IterationLoss(
        rank=rank,
        iterations=len(judged),
        median_s=usual_s,
        longest_s=max((step.wall_s for step in judged), default=0.0),
        slow=tuple(step.iteration for step in judged if step.wall_s > SLOW_FACTOR * usual_s),
        discarded=_discarded(steps),
    )


def _discarded(steps: list[StepRecord]) -> tuple[int, ...]:
    """Iterations that come twice, or are missing between two that follow each other."""
    wrong: list[int] = []
    for before, after in pairwise(steps):
        if after.iteration <= before.iteration:
            wrong.extend(range(after.iteration, before.iteration + 1))
        else:
            wrong.extend(range(before.iteration + 1, after.iteration))
    return tuple(sorted(set(wrong)))
