"""A decision that writes a status: the events that follow from it, and when to look again. Pure."""

from typing import Any

from dlion_operator.plan.decisions import Action, Decision
from dlion_operator.plan.observed import Observed
from dlion_operator.plan.outcome.event_selection import select_events
from dlion_operator.plan.outcome.job_phases import Diagnosis, JobPhase

REQUEUE_S = 10.0


def with_status(
    diagnosis: Diagnosis, observed: Observed, status: dict[str, Any], actions: tuple[Action, ...]
) -> Decision:
    """A decision with this status, and the events that follow from it."""
    events = select_events(diagnosis, observed, status)
    # A suspended job does not change at this site, but it may at others.
    is_alone = len(status.get("sites") or ()) < 2
    is_held = observed.queue is not None and observed.queue.problem  # its quota, perhaps
    is_idle = diagnosis.phase is JobPhase.NOT_SELECTED or (
        diagnosis.phase is JobPhase.SUSPENDED and is_alone and not is_held
    )
    looks_again = observed.terminating.documents or not is_idle
    return Decision(actions, status, events, REQUEUE_S if looks_again else None)
