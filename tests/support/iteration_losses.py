"""The cost of a fault for the other workers, from a run's records.

The project's definition: a worker *loses at most one iteration* if none of its iterations is longer
than twice its median, and none of its local steps was discarded. Used by the fault tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from dlion_api.names import Rank
from dlion_api.protocol.progress import ProgressRecord, StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

SLOW_FACTOR = 2.0
"""An iteration longer than this many medians counts as lost. Source: the project's definition."""


@dataclass(frozen=True)
class IterationLoss:
    """The loss of one surviving worker.

    `slow` are iterations longer than twice the median. `repeated` were done twice, so the first
    gradient was discarded; `skipped` were never done. In mode `backup` a worker that others have
    overtaken continues at their iteration, so it may skip iterations without a fault.
    """

    rank: Rank
    iterations: int
    median_s: float
    longest_s: float
    slow: tuple[int, ...]
    repeated: tuple[int, ...]
    skipped: tuple[int, ...]

    @property
    def discarded(self) -> tuple[int, ...]:
        """Iterations whose gradient is missing, in ascending order."""
        return tuple(sorted({*self.repeated, *self.skipped}))

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

    Only iterations that end within `since_s`..`until_s` (around the fault) are judged. The median
    is over all of the worker's iterations. The first one of an incarnation is left out, because it
    compiles.
    """
    steps: dict[Rank, list[StepRecord]] = {}
    for record in records:
        if isinstance(record, StepRecord) and record.rank not in killed:
            steps.setdefault(record.rank, []).append(record)
    return {rank: _loss(rank, own, since_s, until_s) for rank, own in sorted(steps.items())}


def lost_by_waiting(
    records: Iterable[ProgressRecord], *, staying: Collection[Rank]
) -> dict[int, float]:
    """Iterations in which waiting alone exceeded the limit for a lost iteration.

    Maps iteration to seconds of waiting: the minimum over all `staying` workers, as a worker that
    waited less delayed the others by its own computing. Use it where computing times vary, as on a
    busy machine or under a quota. There an iteration of usual length can exceed twice the median
    without a fault. First iterations of an incarnation are left out.
    """
    walls_s: dict[Rank, list[float]] = {}
    waits_s: dict[int, list[float]] = {}
    begun = set()
    for record in records:
        if not isinstance(record, StepRecord) or record.rank not in staying:
            continue
        walls_s.setdefault(record.rank, []).append(record.wall_s)
        if (record.rank, record.incarnation) in begun:
            waits_s.setdefault(record.iteration, []).append(record.waited_s)
        begun.add((record.rank, record.incarnation))
    allowed_s = (SLOW_FACTOR - 1) * min(map(median, walls_s.values()), default=0.0)
    held_s = {each: min(those) for each, those in waits_s.items() if len(those) == len(staying)}
    return {each: by_s for each, by_s in sorted(held_s.items()) if by_s > allowed_s}


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
        repeated=_between(steps, lambda before, after: range(after, before + 1)),
        skipped=_between(steps, lambda before, after: range(before + 1, after)),
    )


def _between(steps: list[StepRecord], missing: Callable[[int, int], range]) -> tuple[int, ...]:
    """Iterations that `missing` returns for each pair of consecutive iterations."""
    numbers = pairwise(step.iteration for step in steps)
    return tuple(sorted({each for before, after in numbers for each in missing(before, after)}))
