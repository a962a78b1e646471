"""What an operator that has just started knows of a run's training. Pure."""

from dlion_operator.model.job_view import parse_time
from dlion_operator.plan.observed import ALL_HEARD_AFTER_S
from dlion_operator.plan.runs import Run

CLOCK_TOLERANCE_S = 5.0
"""A Job's creation time is in whole seconds."""


def has_trained(run: Run) -> bool:
    """Whether workers of this site have trained in this run, or in its current attempt.

    An operator that has just started reads it from the status.
    """
    if run.attempt_start is not None:
        began = parse_time(run.status.get("trainingStartTime"))
        return run.view.training or (began is not None and began >= run.attempt_start)
    # Older operators write `trainerStatus` without `trainingStartTime`.
    was_training = run.status.get("trainingStartTime") or run.status.get("trainerStatus")
    return run.view.training or bool(was_training)


def may_miss_workers(run: Run) -> bool:
    """Whether there may be workers that have not reported to this operator yet."""
    if run.observed.run is None:
        return True
    age_s, open_s = run.age.total_seconds(), run.view.open_s
    has_served_all_along = age_s <= open_s + CLOCK_TOLERANCE_S
    return open_s < ALL_HEARD_AFTER_S and not has_served_all_along
